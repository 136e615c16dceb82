"""Measure, by round, how much of FedQSN's model a client recovers by waiting, colluding, and training a public base.

The adversary has the proxies it received and knows the hyperparameters. These models are scored after every round, on
the same test rows:

| row | model |
|---|---|
| server | the true model after the previous round, from which this round's proxies are derived |
| public base; public base, fine-tuned | W_0, and W_0 after one client's training: available without a proxy |
| received | one client's last proxy |
| averaged | the mean of all proxies the client has received so far, with the scale undone |
| colluding | the mean of all proxies that all clients have received so far |
| <one>, filled | one of these, with missing entries taken from the public base |
| <one>, filled, fine-tuned | the same, trained on the client's own rows without frozen entries |

| metric | meaning |
|---|---|
| loss | per token, on test rows |
| visible | fraction of the masked layers' columns that the adversary has seen |
| similarity, to the difference | cosine to the server's attention and MLP matrices; of differences from the base |

The metrics are for the last round; `curve` has the loss for every round. Intervals are 95% (see `resampling`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedveil import rng
from fedveil.attacks.base import AdversaryView
from fedveil.attacks.model_extraction import proxy as attack
from fedveil.attacks.model_extraction.proxy import ProxyModel
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import Example
from fedveil.federation.exchange import MessageExchange
from fedveil.strategies.fedqsn import FedQSN
from fedveil.tasks.text_generation import TextGeneration
from fedveil.wire.capture import MessageCapture
from fedveil_bench.common import resampling, seeds, texts, verdicts
from fedveil_bench.common.federations import create_federation, method_of, task_of
from fedveil_bench.common.resampling import ResampledMetric
from fedveil_bench.common.verdicts import ClaimSentence
from fedveil_bench.fedqsn.similarity import collect_matrices
from fedveil_bench.fedqsn.text_partition import TextPartition, build_run_config, partition_rows
from fedveil_bench.fedqsn.text_partition import list_requirements as list_requirements
from fedveil_bench.runner import BenchOptions, BenchOutcome


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return all of `settings["methods"]`, with one run per seed."""
    answers = seeds.run_seeds(__name__, settings, options)
    rows, last = [], {}
    for name in answers[0]:
        of_seeds = [answer[name] for answer in answers]
        curve = [
            resampling.over_seeds([ResampledMetric.from_json(found) for found in each])
            for each in zip(*(a["loss"] for a in of_seeds), strict=True)
        ]
        last[name] = curve[-1]
        fixed = {m: float(np.mean([a[m] for a in of_seeds])) for m in of_seeds[0] if m not in ("loss", "seconds")}
        figures = {"loss": curve[-1], **{m: resampling.from_constant(v) for m, v in fixed.items()}}
        rows.append(
            {
                "name": name,
                "metrics": {m: resampling.compute_interval(f) for m, f in figures.items()},
                "curve": [resampling.compute_interval(f) for f in curve],
            }
        )
    said: list[tuple[str, ClaimSentence]] = []
    for label in settings["methods"]:
        for name, figure in last.items():
            if name.startswith(f"{label}, ") and name.endswith("fine-tuned"):
                said.append(_told(name, figure, last["public base, fine-tuned"], "the public base fine-tuned"))
                said.append(_told(name, figure, last[f"{label}, server"], "the server's model"))
    return BenchOutcome(rows, verdicts.list_verdicts(said, len(answers)), [f"this run: {len(answers)} seeds"])


def _told(name: str, mine: ResampledMetric, other: ResampledMetric, what: str) -> tuple[str, ClaimSentence]:
    d = resampling.subtract_metrics(mine, other)
    shown = resampling.format_interval(resampling.compute_interval(d), "+.3f")
    return f"{name}: loss {shown} compared with {what}", verdicts.judge_sign(d, "better", "worse")


def of_seed(settings: dict[str, Any], seed: int, options: BenchOptions) -> Any:
    """Return one seed's results for `run_benchmark`."""
    found = partition_rows(settings["data"], settings, seed)
    rows: dict[str, Any] = {}
    for label, chosen in settings["methods"].items():
        started = time.perf_counter()
        _method(label, chosen, found, settings, seed, options, rows)
        options.say(
            f"seed {seed}: {label}: last losses "
            + ", ".join(f"{n.removeprefix(label + ', ')} {r['loss'][-1][0]:.3f}" for n, r in rows.items())
            + f" in {time.perf_counter() - started:.0f} s"
        )
    return rows


def _method(
    label: str,
    chosen: Mapping[str, Any],
    found: TextPartition,
    settings: Mapping[str, Any],
    seed: int,
    options: BenchOptions,
    rows: dict[str, Any],
) -> None:
    """Add the clients' knowledge after each round to `rows`."""
    config = build_run_config(settings, chosen, seed)
    method = method_of(FedQSN, config)
    task = task_of(TextGeneration, config, options)
    clients = {site: task.encode(Example.from_columns(of_site)) for site, of_site in found.clients.items()}
    base = task.initial(rng.initial_stream(seed, "weights"))
    own, matrices = min(clients), list(collect_matrices(task, base))

    def note(name: str, weights: Weights, **more: float) -> None:
        row = rows.setdefault(name, {"loss": []})
        row["loss"].append(texts.compute_loss(task, weights, found.test).to_json())
        row |= more

    def tuned(weights: Weights) -> Weights:
        return attack.fine_tune_proxy(
            ProxyModel(weights, {}), task.trainer(clients[own], rng.initial_stream(seed, "attack"))
        ).weights

    alone = tuned(base)
    with tempfile.TemporaryDirectory() as folder:
        exchange, tap = MessageExchange(method, "fedqsn", task.spec), MessageCapture(Path(folder))
        running = create_federation(exchange, config, task, clients, base, tap)
        for round_ in range(config.run.rounds):
            server = running.models()["server"]
            running.round(round_)
            note(f"{label}, server", server)
            if "public base" not in rows or len(rows["public base"]["loss"]) <= round_:
                note("public base", base)
                note("public base, fine-tuned", alone)
            view = AdversaryView.server(tap, exchange)
            received = list(attack.list_proxies(view, [own], method.scale))
            kept = {
                "received": received[-1],
                "averaged": attack.average_proxies(received),
                "colluding": attack.average_proxies(attack.list_proxies(view, None, method.scale)),
            }
            for name, proxy in kept.items():
                whole = attack.fill_from_base(proxy, base)
                note(
                    f"{label}, {name}", proxy.weights, visible=_visible(proxy, received[0]),
                    **_alike(proxy, whole, {n: server[n] for n in matrices}, base),
                )  # fmt: skip
                note(f"{label}, {name}, filled", whole.weights)
                note(f"{label}, {name}, filled, fine-tuned", tuned(whole.weights))


def _alike(proxy: ProxyModel, whole: ProxyModel, true: Weights, base: Weights) -> dict[str, float]:
    """Compare the proxy, and the same proxy filled from the base (`whole`), with the server's matrices (`true`)."""
    return {
        "similarity": attack.proxy_similarity(proxy, true, true).visible,
        "to the difference": attack.proxy_similarity(whole, true, true, base).whole,
    }


def _visible(proxy: ProxyModel, masked: ProxyModel) -> float:
    """Return the fraction of the masked tensors' columns that are known; 1 if nothing was masked."""
    known = [1.0 - float(proxy.missing[n].float().mean()) if n in proxy.missing else 1.0 for n in masked.missing]
    return float(np.mean(known)) if known else 1.0
