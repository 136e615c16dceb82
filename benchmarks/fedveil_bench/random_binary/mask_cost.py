"""Measure masking, packing and unpacking a gradient in one process with one thread, compared with copying its bytes.

| row | measured |
|---|---|
| R = <rate> | drawing the mask from its key, packing the surviving values, and putting them back in their places |
| copy | `torch.clone` of the gradient |

`cpu seconds` counts the process's own time, which other load on the machine affects less than wall-clock time.
`copies` is the time divided by the copy's time in the same repeat. With `--device cuda` the gradient is on the GPU,
and its mask is drawn there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedveil.attacks.statistics import confidence_interval
from fedveil.testing.tensor_ops import expand_mask, pack_masked, unpack_masked
from fedveil_bench.common import seeds
from fedveil_bench.runner import BenchOptions, BenchOutcome

_MOST_COPIES = 3.0  # maximum time on a GPU to draw, pack and unpack a mask, in multiples of a copy


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Measure every rate and the copy, interleaved, in one process with one thread."""
    found: dict[str, dict[str, list[float]]] = seeds.run_seeds(__name__, settings | {"seeds": 1}, options)[0]
    rows = [
        {"name": name, "metrics": {m: confidence_interval(v) for m, v in metrics.items()}}
        for name, metrics in found.items()
    ]
    slowest = min((n for n in found if n != "copy"), key=lambda n: statistics.median(found[n]["GB/s"]))
    speed = statistics.median(found[slowest]["GB/s"])
    copy = statistics.median(found["copy"]["GB/s"])
    asked = f"; asked: at least 0.5 on one core): {'held' if speed >= 0.5 else 'NOT HELD'}"
    if options.device == "cuda":
        asked = "; the gradient is on the GPU)"
    said = (
        f"Slowest, {slowest}: {speed:.2f} GB/s of gradient (median of {settings['repeats']}{asked}. A copy of the same "
        f"bytes runs at {copy:.2f} GB/s."
    )
    return BenchOutcome(rows, [said, *(_in_copies(found) if options.device == "cuda" else [])])


def _in_copies(found: dict[str, dict[str, list[float]]]) -> list[str]:
    """Describe the time of each rate's steps as multiples of a copy on the GPU."""
    said = []
    for name, metrics in found.items():
        if name == "copy":
            continue
        parts = {n: statistics.median(metrics[f"{n} copies"]) for n in ("draw", "pack", "unpack")}
        whole = statistics.median(metrics["copies"])
        said.append(
            f"{name}, in copies of the gradient on the GPU: drawn {parts['draw']:.2f}, packed {parts['pack']:.2f}, "
            f"unpacked {parts['unpack']:.2f}, together {whole:.2f} (asked: at most {_MOST_COPIES:g}: "
            f"{'held' if whole <= _MOST_COPIES else 'NOT HELD'})."
        )
    return said


def of_seed(settings: dict[str, Any], seed: int, options: BenchOptions) -> Any:
    """Return one seed's results for `run_benchmark`."""
    torch.set_num_threads(1)
    count, device = settings["entries"], "cuda" if options.device == "cuda" else "cpu"
    gradient = torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(device)
    rows: dict[str, dict[str, list[float]]] = {}
    if device == "cuda":
        for rate in settings["rates"]:  # the first use compiles; R = 0.5, which has no ties, compiles separately
            _masked(gradient, rate, bytes(32))
        gradient.clone()
    for repeat in range(settings["repeats"]):
        _, copied = _timed(gradient.clone)
        for rate in settings["rates"]:
            parts = _masked(gradient, rate, bytes([repeat]) * 32)
            _add(rows.setdefault(f"R = {rate}", {}), parts, gradient.nbytes, copied[0])
        _add(rows.setdefault("copy", {}), {"copy": copied}, gradient.nbytes, copied[0])
        options.say(f"repeat {repeat}: " + "; ".join(f"{n} {m['GB/s'][-1]:.2f} GB/s" for n, m in rows.items()))
    return rows


def _masked(gradient: Tensor, rate: float, key: bytes) -> dict[str, tuple[float, float]]:
    mask, drawn = _timed(lambda: expand_mask(key, 1 - rate, tuple(gradient.shape), device=gradient.device))
    values, packed = _timed(lambda: pack_masked(gradient, mask))
    whole, unpacked = _timed(lambda: unpack_masked("gradient", values, mask))
    if not torch.equal(whole, gradient * mask):
        raise RuntimeError("unpacked gradient: expected the masked one, found a different one")
    return {"draw": drawn, "pack": packed, "unpack": unpacked}


def _timed(work: Callable[[], Tensor]) -> tuple[Tensor, tuple[float, float]]:
    """Return the result of `work`, with wall-clock seconds and CPU seconds."""
    _wait()
    clock, processor = time.perf_counter(), time.process_time()
    found = work()
    _wait()
    return found, (time.perf_counter() - clock, time.process_time() - processor)


def _wait() -> None:
    """Wait until the GPU, if it was used, has finished its work."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _add(row: dict[str, list[float]], parts: dict[str, tuple[float, float]], nbytes: int, copied: float) -> None:
    wall, own = (sum(part[i] for part in parts.values()) for i in (0, 1))
    figures = {
        "GB/s": nbytes / wall / 1e9,
        "cpu seconds": own,
        "copies": wall / copied,
        **{f"{n} seconds": part[0] for n, part in parts.items()},
        **{f"{n} copies": part[0] / copied for n, part in parts.items() if n != "copy"},
    }
    for name, value in figures.items():
        row.setdefault(name, []).append(value)
