"""Measure the cost of the entry table: FedRand and FedQSN with it, compared with sites drawing their own entries.

Each row is a method, a number of sites, and who draws. The metrics, over seeds:

| metric | meaning |
|---|---|
| loss | of the server's model on test rows after the last round |
| exposed | share of sum entries that may come from only 1 to min-sites - 1 sites, with the most silent sites |
| vector_bytes | a site's masked vector in one round; the same with and without a table |
| broadcast_bytes | the message to one site in one round |
| table_bytes | the table sent with it |
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fedveil import rng, strategies, tasks
from fedveil.attacks.statistics import confidence_interval
from fedveil.config import parse
from fedveil.contract.layout import Payload
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.task import Rows, Task
from fedveil.contract.trainer import Trainer
from fedveil.federation.exchange import MessageExchange
from fedveil.testing.secagg import VectorLayout, fewest_senders, quorum_of
from fedveil_bench.common import data
from fedveil_bench.common.federations import create_federation
from fedveil_bench.runner import BenchOptions, BenchOutcome

OWN, TABLE = "sites draw", "table"
Figures = dict[str, float]


def list_requirements(settings: Mapping[str, Any]) -> list[data.DataRequirement]:
    """Return the requirements: the sites' training text, and the test text."""
    return [data.DataRequirement(settings["data"], ("train", "test"))]


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return two rows for each method and number of sites."""
    rows, verdicts = [], []
    for method, own in settings["methods"].items():
        for sites in settings["sites"]:
            figures: dict[str, list[Figures]] = {OWN: [], TABLE: []}
            for seed in range(options.seeds or settings["seeds"]):
                for who, of_seed in figures.items():
                    of_seed.append(measure_run(settings, settings["config"] | own, sites, seed, who == TABLE, options))
                    options.say(f"{method}, {sites} sites, {who}, seed {seed}: {of_seed[-1]}")
            for who, of_seed in figures.items():
                metrics = {name: confidence_interval([f[name] for f in of_seed]) for name in of_seed[0]}
                rows.append({"name": f"{method}, {sites} sites, {who}", "metrics": metrics})
            verdicts.append(describe_cost(method, sites, figures[OWN], figures[TABLE]))
    return BenchOutcome(rows, verdicts)


def describe_cost(method: str, sites: int, own: list[Figures], planned: list[Figures]) -> str:
    """Describe what the table changes for one method and number of sites."""
    loss = confidence_interval([b["loss"] - a["loss"] for a, b in zip(own, planned, strict=True)])
    mean = {name: [statistics.mean(f[name] for f in of) for of in (own, planned)] for name in own[0]}
    shown = f"{loss['mean']:+.3f} [{loss['low']:+.3f}, {loss['high']:+.3f}]"
    before, after = mean["broadcast_bytes"]
    return (
        f"{method}, {sites} sites: with the table {mean['exposed'][1]:.1%} of the entries may be of too few sites "
        f"instead of {mean['exposed'][0]:.1%}; the loss changes by {shown}, a broadcast by {after - before:+,.0f} "
        f"bytes of {before:,.0f}; the table has {mean['table_bytes'][1]:,.0f} bytes."
    )


def measure_run(
    settings: Mapping[str, Any], flat: Mapping[str, Any], sites: int, seed: int, planned: bool, options: BenchOptions
) -> Figures:
    """Run a federation and return its figures, with secure aggregation and a table or with neither."""
    torch.set_num_threads(1)
    config = parse({**flat, "run.seed": seed, "run.deterministic": True, "secure.enabled": planned})
    method = strategies.create_method(config.method.name, config.method.params)
    task = tasks.load_task(config, method.adapter, options.device)
    folder = data.find_data_folder(settings["data"])
    examples = task.examples(folder, "train")
    count = settings["rows"]
    drawn = random.Random(seed).sample(range(len(examples)), count * sites)
    encoded = task.encode([examples[i] for i in drawn])
    rows: dict[str, Rows] = {f"site-{i}": encoded[i * count : (i + 1) * count] for i in range(sites)}
    exchange = CountingExchange(method, config.method.name, task.spec)
    run = create_federation(exchange, config, task, rows, task.initial(rng.initial_stream(seed, "weights")))
    run.run()
    quorum, least = quorum_of(config.secure.threshold, sites, config.secure.max_colluders), config.secure.min_sites
    return {
        "loss": _loss(task, run.models()["server"], list(task.examples(folder, "test"))[: settings["test"]]),
        "exposed": exchange.fraction_below(fewest_senders(sites, least, quorum)),
        "vector_bytes": VectorLayout.from_exchange(exchange, 0).length * config.secure.ring_bits / 8,
        "broadcast_bytes": run.download_bytes / len(exchange.table_bytes),
        "table_bytes": statistics.mean(exchange.table_bytes),
    }


def _loss(task: Task, weights: Mapping[str, Tensor], examples: Any) -> float:
    return task.evaluate(weights, examples, generate=False)["loss"]


@dataclass(frozen=True)
class CountingExchange(MessageExchange):
    """An exchange that counts, round by round, how many sites send each entry.

    Attributes:
        counts: the counts, by round and name.
        table_bytes: the size of each site's table in each round.
    """

    counts: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    table_bytes: list[int] = field(default_factory=list)

    @override
    def trained(
        self, private: FederatedState | None, received: list[Payload], trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload, Mapping[str, float]]:
        private, payload, report = super().trained(private, received, trainer, ctx)
        self.table_bytes.append(len(ctx.entries.to_text()) if ctx.entries else 0)
        counts = self.counts.setdefault(ctx.round, {})
        for term in self.method.contributions(payload, 1, self.spec, ctx).tensors:
            sent = torch.ones(term.value.shape, dtype=torch.bool) if term.mask is None else term.mask
            counts[term.name] = counts.get(term.name, torch.zeros(sent.shape, dtype=torch.int16)) + sent
        return private, payload, report

    def fraction_below(self, fewest: int) -> float:
        """Return the fraction of all rounds' summed entries that fewer than `fewest` sites sent."""
        every = [count.flatten() for counts in self.counts.values() for count in counts.values()]
        summed = sum(int((n > 0).sum()) for n in every)
        return sum(int(((n > 0) & (n < fewest)).sum()) for n in every) / summed
