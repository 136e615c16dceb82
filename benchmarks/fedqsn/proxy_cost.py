"""Masking and quantising one proxy, as FedQSN's server does for every client, beside a clone of the same bytes.

| row | what |
|---|---|
| <n> threads | `FedQSN.broadcast` of every tensor: masks drawn, columns packed, scaled and coded |
| <n> threads, clone | `torch.clone` of the same tensors |
| message | the proxy's download beside FedAvg's, in bytes: measured on the packed message, and counted by hand |

A process a number of threads, one after the other. `GB/s` counts fp32 weights; `cpu seconds` the process's own time,
which a busy machine stretches less than the clock.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fedveil import rng
from fedveil.benchmarks.common import seeds
from fedveil.benchmarks.common.federations import method_of
from fedveil.benchmarks.run import Options, Outcome, interval
from fedveil.config import parse
from fedveil.contract.method import RoundContext
from fedveil.contract.spec import Spec, TensorSpec, Weights
from fedveil.federation.exchange import Exchange
from fedveil.models.places import places
from fedveil.strategies.fedqsn import FedQSN
from fedveil.wire.codes import word_of

_ASKED = 0.25  # GB/s of fp32 weights on two cores


def run(settings: dict[str, Any], options: Options) -> Outcome:
    """Measures with every number of threads, then the size of a message."""
    rows: list[dict[str, Any]] = []
    said = []
    for threads in settings["threads"]:
        asked = settings | {"seeds": 1, "now": threads}
        found = seeds.run(__name__, asked, options)[0]
        for name, metrics in found["rows"].items():
            rows.append({"name": name, "metrics": {m: interval(v) for m, v in metrics.items()}})
        speed, copy = (statistics.median(m["GB/s"]) for m in found["rows"].values())
        text = (
            f"{threads} threads: {speed:.2f} GB/s of fp32 weights (median of {settings['repeats']}), a clone {copy:.2f}"
        )
        held = f"; asked: {_ASKED} on two cores: {'held' if speed >= _ASKED else 'NOT HELD'}"
        said.append(text + (held if threads == 2 else "") + ".")
    sizes = found["bytes"]
    rows.append({"name": "message", "metrics": {}, **sizes})
    off = sizes["download_bytes"] / sizes["counted_bytes"] - 1
    said.append(
        f"Download of a proxy: {sizes['download_bytes']:,} bytes, {100 * off:+.3f} % beside codes, scales, bitmaps and "
        f"the rest counted by hand (asked: within 2 %: {'held' if abs(off) <= 0.02 else 'NOT HELD'}); FedAvg's is "
        f"{sizes['fedavg_bytes']:,}, {sizes['fedavg_bytes'] / sizes['download_bytes']:.2f} times as many."
    )
    return Outcome(rows, said)


def of_seed(settings: dict[str, Any], seed: int, options: Options) -> Any:
    """What `run` asks of each seed."""
    torch.set_num_threads(settings["now"])
    device = torch.device("cuda" if options.device == "cuda" else "cpu")
    method = method_of(FedQSN, parse({"method.name": "fedqsn", "method.fields": settings["fields"]}))
    spec = spec_of_gpt2(settings["model"])
    generator = torch.Generator().manual_seed(seed)
    weights = {n: torch.randn(t.shape, generator=generator).to(device) for n, t in spec.items()}
    nbytes = sum(w.nbytes for w in weights.values())
    server = method.init(spec, weights, rng.initial(seed, "method init"))
    name = f"{settings['now']} threads"
    rows: dict[str, dict[str, list[float]]] = {name: {}, f"{name}, clone": {}}
    for repeat in range(settings["repeats"]):
        ctx = RoundContext(repeat, "a", True, bytes(32))
        for row, work in (
            (name, lambda ctx=ctx: method.broadcast(server, ctx)),
            (f"{name}, clone", lambda: [w.clone() for w in weights.values()]),
        ):
            clock, processor = _timed(work, device)
            rows[row].setdefault("GB/s", []).append(nbytes / clock / 1e9)
            rows[row].setdefault("cpu seconds", []).append(processor)
        options.say(f"repeat {repeat}: " + "; ".join(f"{n} {m['GB/s'][-1]:.2f} GB/s" for n, m in rows.items()))
    sizes = {}
    if settings["now"] == settings["threads"][-1]:
        ctx = RoundContext(0, "a", True, bytes(32))
        found = len(Exchange(method, "fedqsn", spec).broadcast(server, ctx))
        visible = {n: v for n, v in method.broadcast(server, ctx).fields.items() if n.startswith("visible.")}
        sizes = {
            "download_bytes": found,
            "counted_bytes": round(counted(method, spec, {n.removeprefix("visible."): v for n, v in visible.items()})),  # type: ignore[misc]
            "fedavg_bytes": nbytes,
        }
    return {"rows": rows, "bytes": sizes}


def _timed(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    clock, processor = time.perf_counter(), time.process_time()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - clock, time.process_time() - processor


def spec_of_gpt2(model: Mapping[str, Any]) -> Spec:
    """Names, shapes and places of the weights of a GPT-2 of that configuration. No weight is made."""
    from transformers import AutoModelForCausalLM, GPT2Config

    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(GPT2Config(**model))
    trained = dict(built.named_parameters())
    found = places(built, trained)
    return {n: TensorSpec(tuple(p.shape), place=found.get(n)) for n, p in trained.items()}


def counted(method: FedQSN, spec: Spec, visible: Weights) -> float:
    """Bytes of a message by hand; `visible` are the masks of columns, by name.

    They are w-bit codes and a scale for each block of visible columns, bitmaps, and 4 bytes for every other weight.
    """
    digits, bits = word_of(2**method.bits + 1)
    total = float(sum(math.ceil(len(mask) / 8) for mask in visible.values()))
    for t in spec.values():
        entries = math.prod(t.shape)
        if t.place is not None and t.place.columns in visible:
            entries = entries // t.shape[t.place.axis] * int(visible[t.place.columns].sum())
        is_coded = t.place is not None and t.place.part == "linear" and len(t.shape) == 2
        total += entries * (bits / digits / 8 + 4 / method.block) if is_coded else 4 * entries
    return total
