"""Measure memory and throughput of folding uploads, compared with a plain sum and with Flower's own FedAvg.

"gate and fold" is the server's processing of a reply: checksum, finite and norm checks, then the running mean. "fold"
is only the running mean, on messages already checked, like Flower's aggregate_train, which checks nothing. In half
precision, the same number of entries takes half the bytes; GB/s counts these actual bytes.

Each case runs in a separate process, so that peak memory is measured per case. The received messages cycle through a
small set of distinct ones, as for a server that pulls replies one at a time.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from fedveil import rng
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.attacks.statistics import confidence_interval
from fedveil.contract.method import AcceptedUpload, RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.federation.exchange import MessageExchange
from fedveil.strategies.fedavg import FedAvg
from fedveil.testing.server_loop import UploadLimits, check_upload
from fedveil.wire.envelope import describe_message
from fedveil_bench.common.untrained import NoOpTrainer
from fedveil_bench.runner import BenchOptions, BenchOutcome

_RING = 2
_TENSORS = 8
_HALF = {"bf16": "bfloat16", "fp16": "float16"}


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return rows for FedVeil's fold at each N, the plain sum, and Flower's FedAvg. Repeats are interleaved."""
    megabytes, counts = settings["megabytes"], settings["uploads"]
    cases = [("gate-and-fold", n) for n in counts] + [("fold", n) for n in counts]
    cases += [(f"{case}-{half}", settings["half_uploads"]) for half in _HALF for case in ("gate-and-fold", "fold")]
    cases += [("plain", counts[0]), ("flower", settings["flower_uploads"])]
    results: dict[tuple[str, int], list[dict[str, float]]] = {case: [] for case in cases}
    for repeat in range(settings["repeats"]):
        for case in cases:
            results[case].append(_measure(*case, megabytes))
            options.say(f"repeat {repeat}: {case[0]} N = {case[1]}: {results[case][-1]['gb_per_second']:.2f} GB/s")
    rows = [_row(name, n, measured) for (name, n), measured in results.items()]
    return BenchOutcome(rows, _verdicts(rows, counts))


def _row(name: str, n: int, measured: list[dict[str, float]]) -> dict[str, Any]:
    keys = ("gb_per_second", "peak_mb")
    metrics = {key: confidence_interval([m[key] for m in measured]) for key in keys}
    metrics["gb_per_second"]["median"] = statistics.median(m["gb_per_second"] for m in measured)
    return {"name": f"{name} N={n}", "metrics": metrics, "seconds": sum(m["seconds"] for m in measured)}


def _verdicts(rows: list[dict[str, Any]], counts: list[int]) -> list[str]:
    by_name = {row["name"]: row["metrics"] for row in rows}
    speed = {name: m["gb_per_second"]["median"] for name, m in by_name.items()}
    peak = [by_name[f"gate-and-fold N={n}"]["peak_mb"]["mean"] for n in counts]
    slowest = {case: min(speed[f"{case} N={n}"] for n in counts) for case in ("fold", "gate-and-fold")}
    starts = {case: tuple(f"{case}-{half} " for half in _HALF) for case in slowest}
    half = {case: min(v for k, v in speed.items() if k.startswith(start)) for case, start in starts.items()}
    plain, flower = (next(v for k, v in speed.items() if k.startswith(p)) for p in ("plain", "flower"))
    return [
        f"Peak memory at N = {counts} is {', '.join(f'{p / peak[0]:.2f}' for p in peak)} times that at N = {counts[0]} "
        "(asked: at most 1.2).",
        *(
            f"The slowest {case} takes {plain / value:.2f} times as long as the plain sum of the same bytes (asked: at "
            f"most 2) and is {value / flower:.1f} times as fast as Flower's FedAvg.aggregate_train (asked: at least 5)."
            for case, value in slowest.items()
        ),
        f"Slowest in half precision: fold {half['fold']:.1f} GB/s of upload (asked: above 4), gate-and-fold "
        f"{half['gate-and-fold']:.1f} GB/s.",
    ]


def _measure(case: str, n: int, megabytes: int) -> dict[str, float]:
    command = [sys.executable, "-m", "fedveil_bench.core.aggregate", case, str(n), str(megabytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _spec(megabytes: int) -> dict[str, ParamSpec]:
    return {f"w{i}": ParamSpec((megabytes * 1_000_000 // 4 // _TENSORS,)) for i in range(_TENSORS)}


def _fold(n: int, megabytes: int, dtype: str = "float32", judged: bool = False) -> tuple[float, int]:
    spec = _spec(megabytes)
    method = FedAvg(adapter=AllWeightsAdapter(), wire_dtype=dtype)  # type: ignore[arg-type]
    exchange = MessageExchange(method, "fedavg", spec)
    server = method.init(spec, {k: torch.randn(t.shape) for k, t in spec.items()}, rng.initial_stream(0, "method init"))
    ctx = RoundContext(0, "a", True, bytes(32))
    down = exchange.broadcast(server, ctx)
    ring = [b"".join(exchange.participate(down, None, NoOpTrainer(spec, float(i)), ctx)[1]) for i in range(_RING)]
    payload_bytes = describe_message(ring[0])["payload_bytes"]
    del down

    messages = [exchange.receive(data, 0) for data in ring] if judged else []

    def uploads() -> Iterator[AcceptedUpload]:
        for i in range(n):
            message = messages[i % _RING] if judged else exchange.receive(ring[i % _RING], 0)
            yield AcceptedUpload(message.payload, check_upload(message, UploadLimits()), ctx)

    started = time.perf_counter()
    exchange.aggregate(server, uploads())
    return time.perf_counter() - started, payload_bytes * n


def _plain(n: int, megabytes: int) -> tuple[float, int]:
    spec = _spec(megabytes)
    ring = [{k: torch.randn(t.shape) for k, t in spec.items()} for _ in range(_RING)]
    total = {k: torch.zeros(t.shape) for k, t in spec.items()}
    started = time.perf_counter()
    for i in range(n):
        for name, value in ring[i % _RING].items():
            total[name] += 0.125 * value
    seconds = time.perf_counter() - started
    return seconds, n * sum(t.numel() * 4 for t in total.values())


def _flower(n: int, megabytes: int) -> tuple[float, int]:
    """Run Flower's own strategy on replies that are all in memory, as its `start` passes them."""
    # Imported only here, so that the other cases' peak memory does not include Flower.
    from flwr.app import ArrayRecord, Message, MessageType, MetricRecord, RecordDict
    from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
    from flwr.supercore.task_identity import TaskIdentity

    logging.getLogger("flwr").setLevel(logging.ERROR)
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    spec = _spec(megabytes)
    order = Message(RecordDict(), 7, MessageType.TRAIN)
    replies = []
    for i in range(n):
        arrays = ArrayRecord({k: torch.randn(t.shape) for k, t in spec.items()})
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 100 + i})})
        replies.append(Message(content, reply_to=order))
    started = time.perf_counter()
    FlowerFedAvg().aggregate_train(1, replies)
    return time.perf_counter() - started, n * sum(4 * t.shape[0] for t in spec.values())


def _dtypes() -> dict[str, str]:
    """Return the wire dtype for each case."""
    return {
        f"{case}{half}": dtype
        for case in ("gate-and-fold", "fold")
        for half, dtype in (("", "float32"), *((f"-{name}", dtype) for name, dtype in _HALF.items()))
    }


def main() -> None:
    """Run one case in this process; print its metrics as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=[*_dtypes(), "plain", "flower"])
    parser.add_argument("uploads", type=int)
    parser.add_argument("megabytes", type=int)
    asked = parser.parse_args()
    torch.manual_seed(0)
    match asked.case:
        case "plain":
            seconds, payload = _plain(asked.uploads, asked.megabytes)
        case "flower":
            seconds, payload = _flower(asked.uploads, asked.megabytes)
        case case:
            judged = case.startswith("fold")
            seconds, payload = _fold(asked.uploads, asked.megabytes, _dtypes()[case], judged)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    sys.stdout.write(json.dumps({"seconds": seconds, "gb_per_second": payload / seconds / 1e9, "peak_mb": peak}) + "\n")


if __name__ == "__main__":
    main()
