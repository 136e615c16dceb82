"""Mask, pack and unpack of a gradient, in one process with one thread, beside a copy of the same bytes.

| row | what |
|---|---|
| R = <rate> | the mask drawn from its key, the surviving values packed, and put back in their places |
| copy | `torch.clone` of the gradient |

`cpu seconds` counts the process's own time, which a busy machine stretches less than the clock. With `--device cuda`
the gradient lies on the GPU: the mask is drawn on the CPU all the same, and pack and unpack take it there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedveil.algebra import masks
from fedveil.benchmarks.common import seeds
from fedveil.benchmarks.run import Options, Outcome, interval
from fedveil.rng import Stream


def run(settings: dict[str, Any], options: Options) -> Outcome:
    """Every rate beside the copy, interleaved, in one process of one thread."""
    found: dict[str, dict[str, list[float]]] = seeds.run(__name__, settings | {"seeds": 1}, options)[0]
    rows = [{"name": name, "metrics": {m: interval(v) for m, v in metrics.items()}} for name, metrics in found.items()]
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
    return Outcome(rows, [said])


def of_seed(settings: dict[str, Any], seed: int, options: Options) -> Any:
    """What `run` asks of each seed."""
    torch.set_num_threads(1)
    count, device = settings["entries"], "cuda" if options.device == "cuda" else "cpu"
    gradient = torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(device)
    rows: dict[str, dict[str, list[float]]] = {}
    for repeat in range(settings["repeats"]):
        for rate in settings["rates"]:
            _add(rows.setdefault(f"R = {rate}", {}), _masked(gradient, rate, bytes([repeat]) * 32), gradient.nbytes)
        _, copied = _timed(gradient.clone)
        _add(rows.setdefault("copy", {}), {"copy": copied}, gradient.nbytes)
        options.say(f"repeat {repeat}: " + "; ".join(f"{n} {m['GB/s'][-1]:.2f} GB/s" for n, m in rows.items()))
    return rows


def _masked(gradient: Tensor, rate: float, key: bytes) -> dict[str, tuple[float, float]]:
    mask, drawn = _timed(lambda: Stream(key).bernoulli(1 - rate, tuple(gradient.shape)))
    values, packed = _timed(lambda: masks.pack(gradient, mask))
    whole, unpacked = _timed(lambda: masks.unpack("gradient", values, mask))
    if not torch.equal(whole, gradient * mask.to(gradient.device)):
        raise RuntimeError("unpacked gradient: expected the masked one, found another")
    return {"draw": drawn, "pack": packed, "unpack": unpacked}


def _timed(work: Callable[[], Tensor]) -> tuple[Tensor, tuple[float, float]]:
    """What it returns, and seconds by the clock and of the processor."""
    _wait()
    clock, processor = time.perf_counter(), time.process_time()
    found = work()
    _wait()
    return found, (time.perf_counter() - clock, time.process_time() - processor)


def _wait() -> None:
    """Until a GPU that was used has done what it was given."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _add(row: dict[str, list[float]], parts: dict[str, tuple[float, float]], nbytes: int) -> None:
    wall, own = (sum(part[i] for part in parts.values()) for i in (0, 1))
    figures = {
        "GB/s": nbytes / wall / 1e9,
        "cpu seconds": own,
        **{f"{n} seconds": part[0] for n, part in parts.items()},
    }
    for name, value in figures.items():
        row.setdefault(name, []).append(value)
