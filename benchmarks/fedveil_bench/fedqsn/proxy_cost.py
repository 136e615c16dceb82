"""Measure masking and quantizing a proxy, as FedQSN's server does for every client, compared with cloning its tensors.

| row | operation |
|---|---|
| <n> threads | `FedQSN.broadcast` of all tensors: masks are drawn, and columns are packed, scaled and coded |
| <n> threads, clone | `torch.clone` of the same tensors |
| message | download bytes of the proxy and of FedAvg, measured on the packed message and counted by hand |
| large | with `--device cuda`: `FedQSN.broadcast` of a large model in bf16, its proxy as a message, and a clone |

Each number of threads runs in its own process, one after another. `GB/s` counts fp32 weights; `cpu seconds` is the
process's own time, which a busy machine affects less than wall-clock time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from fedveil import rng
from fedveil.attacks.statistics import confidence_interval
from fedveil.config import parse
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import ParamSpec, Spec, Weights
from fedveil.federation.exchange import MessageExchange
from fedveil.strategies.fedqsn import FedQSN
from fedveil.testing.messages import code_word
from fedveil.testing.planner import param_locations
from fedveil_bench.common import seeds
from fedveil_bench.common.federations import method_of
from fedveil_bench.runner import BenchOptions, BenchOutcome

_ASKED = 0.25  # required GB/s of fp32 weights on two cores
_MOST_COPIES = 5.0  # maximum time for a large model on a GPU, in multiples of a copy
_ROOM = 3  # required memory, as a multiple of the weights: the weights, the clone, and the codes with the uncoded parts


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Measure with each number of threads, and then the size of a message. On a GPU, measure only once."""
    rows: list[dict[str, Any]] = []
    said = []
    for threads in settings["threads"][-1:] if options.device == "cuda" else settings["threads"]:
        asked = settings | {"seeds": 1, "now": threads}
        found = seeds.run_seeds(__name__, asked, options)[0]
        for name, metrics in found["rows"].items():
            rows.append({"name": name, "metrics": {m: confidence_interval(v) for m, v in metrics.items()}})
        speed, copy = (statistics.median(m["GB/s"]) for m in found["rows"].values())
        text = (
            f"{threads} threads: {speed:.2f} GB/s of fp32 weights (median of {settings['repeats']}), a clone {copy:.2f}"
        )
        held = f"; asked: {_ASKED} on two cores: {'held' if speed >= _ASKED else 'NOT HELD'}"
        said.append(text + (held if threads == 2 and options.device != "cuda" else "") + ".")
    if options.device == "cuda":
        large = seeds.run_seeds(__name__, settings | {"seeds": 1, "now": "large"}, options)[0]
        rows += [
            {"name": n, "metrics": {m: confidence_interval(v) for m, v in of.items()}}
            for n, of in large["rows"].items()
        ]
        said.append(_in_copies(large, settings["repeats"]))
    sizes = found["bytes"]
    rows.append({"name": "message", "metrics": {}, **sizes})
    off = sizes["download_bytes"] / sizes["counted_bytes"] - 1
    said.append(
        f"Download of a proxy: {sizes['download_bytes']:,} bytes, {100 * off:+.3f} % more than codes, scales, bitmaps "
        f"and the rest counted by hand (asked: within 2 %: {'held' if abs(off) <= 0.02 else 'NOT HELD'}); FedAvg's is "
        f"{sizes['fedavg_bytes']:,}, {sizes['fedavg_bytes'] / sizes['download_bytes']:.2f} times as many."
    )
    return BenchOutcome(rows, said)


def _in_copies(found: dict[str, Any], repeats: int) -> str:
    copies = {name: statistics.median(of["copies"]) for name, of in found["rows"].items()}
    held = "held" if copies["large"] <= _MOST_COPIES else "NOT HELD"
    return (
        f"{found['billions']:.1f} billion weights in bf16 on the GPU ({found['layers']} layers): masked and quantised "
        f"in {copies['large']:.2f} copies (median of {repeats}; asked: at most {_MOST_COPIES:g}: {held}), with the "
        f"message on the CPU in {copies['large, message']:.2f}."
    )


def of_seed(settings: dict[str, Any], seed: int, options: BenchOptions) -> Any:
    """Return one seed's results for `run_benchmark`."""
    if settings["now"] == "large":
        return of_large(settings, seed, options)
    torch.set_num_threads(settings["now"])
    device = torch.device("cuda" if options.device == "cuda" else "cpu")
    method = method_of(FedQSN, parse({"method.name": "fedqsn", "method.params": settings["fields"]}))
    spec = spec_of_gpt2(settings["model"])
    generator = torch.Generator().manual_seed(seed)
    weights = {n: torch.randn(t.shape, generator=generator).to(device) for n, t in spec.items()}
    nbytes = sum(w.nbytes for w in weights.values())
    server = method.init(spec, weights, rng.initial_stream(seed, "method init"))
    name = f"{settings['now']} threads"
    rows: dict[str, dict[str, list[float]]] = {name: {}, f"{name}, clone": {}}
    if device.type == "cuda":
        method.broadcast(server, RoundContext(0, "a", True, bytes(32)))  # the first use compiles
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
        found = len(MessageExchange(method, "fedqsn", spec).broadcast(server, ctx))
        visible = {n: v for n, v in method.broadcast(server, ctx).fields.items() if n.startswith("visible.")}
        masks = {n.removeprefix("visible."): v for n, v in visible.items()}
        sizes = {
            "download_bytes": found,
            "counted_bytes": round(count_bytes(method, spec, masks)),  # type: ignore[arg-type]
            "fedavg_bytes": nbytes,
        }
    return {"rows": rows, "bytes": sizes}


def of_large(settings: dict[str, Any], seed: int, options: BenchOptions) -> Any:
    """Measure a proxy with as many layers as fit on the GPU (on the CPU in a test), and a clone."""
    device = torch.device("cuda" if options.device == "cuda" else "cpu")
    fields = f'{settings["fields"]}\nwire_dtype = "bfloat16"'
    method = method_of(FedQSN, parse({"method.name": "fedqsn", "method.params": fields}))
    layers = settings["large"]["num_hidden_layers"]
    spec = spec_of_llama(settings["large"])
    if device.type == "cuda":
        free = torch.cuda.mem_get_info()[0]
        while layers > 1 and _ROOM * _bytes_of(spec) > free:
            layers -= 1
            spec = spec_of_llama(settings["large"] | {"num_hidden_layers": layers})
    generator = torch.Generator(device).manual_seed(seed)
    bf16 = torch.bfloat16
    weights = {n: torch.randn(t.shape, generator=generator, device=device, dtype=bf16) for n, t in spec.items()}
    server = method.init(spec, weights, rng.initial_stream(seed, "method init"))
    exchange, rows = MessageExchange(method, "fedqsn", spec), dict[str, dict[str, list[float]]]()
    method.broadcast(server, RoundContext(0, "a", True, bytes(32)))  # the first use compiles
    for repeat in range(settings["repeats"]):
        ctx = RoundContext(repeat, "a", True, bytes(32))
        work: dict[str, Callable[[], object]] = {
            "large, clone": lambda: [w.clone() for w in weights.values()],
            "large": partial(method.broadcast, server, ctx),
            "large, message": partial(exchange.packed, server, ctx),
        }
        seconds = {row: _timed(of, device)[0] for row, of in work.items()}
        for row, found in seconds.items():
            rows.setdefault(row, {}).setdefault("seconds", []).append(found)
            rows[row].setdefault("copies", []).append(found / seconds["large, clone"])
        options.say(f"repeat {repeat}: " + "; ".join(f"{n} {s:.3f} s" for n, s in seconds.items()))
    return {"rows": rows, "layers": layers, "billions": _bytes_of(spec) / 2e9}


def _bytes_of(spec: Spec) -> int:
    return 2 * sum(math.prod(t.shape) for t in spec.values())


def _timed(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    clock, processor = time.perf_counter(), time.process_time()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - clock, time.process_time() - processor


def spec_of_gpt2(model: Mapping[str, Any]) -> Spec:
    """Return the specs of a GPT-2 with this configuration: names, shapes and locations. No weights are created."""
    from transformers import GPT2Config

    return _spec_of(GPT2Config(**model))


def spec_of_llama(model: Mapping[str, Any]) -> Spec:
    """Return the specs of a Llama with this configuration, like `spec_of_gpt2`."""
    from transformers import LlamaConfig

    return _spec_of(LlamaConfig(**model))


def _spec_of(config: Any) -> Spec:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    trained = dict(built.named_parameters())
    found = param_locations(built, trained)
    return {n: ParamSpec(tuple(p.shape), place=found.get(n)) for n, p in trained.items()}


def count_bytes(method: FedQSN, spec: Spec, visible: Weights) -> float:
    """Return the bytes in a message, counted by hand; `visible` has the column masks, by name.

    The bytes are w-bit codes and a scale for each block of visible columns, bitmaps, and 4 bytes per remaining weight.
    """
    digits, bits = code_word(2**method.bits + 1)
    total = float(sum(math.ceil(len(mask) / 8) for mask in visible.values()))
    for t in spec.values():
        entries = math.prod(t.shape)
        if t.place is not None and t.place.columns in visible:
            entries = entries // t.shape[t.place.axis] * int(visible[t.place.columns].sum())
        is_coded = t.place is not None and t.place.part == "linear" and len(t.shape) == 2
        total += entries * (bits / digits / 8 + 4 / method.block) if is_coded else 4 * entries
    return total
