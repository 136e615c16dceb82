"""Compare the server's model with the proxies that clients receive, before and after local training.

Every method runs the same in-process federation on the same rows. Models are selected by their loss on validation rows,
over all rounds and scored clients, and scored on test rows. Rows in a result:

| row | model |
|---|---|
| public base | W_0, which everyone has |
| public base, fine-tuned | W_0 after one client's steps in all rounds: a useful proxy must beat this model |
| <method> global | the server's model |
| <method> proxy | the best model that a client received, before local training |
| <method> tuned | a client's best model after local training: the proxy's score that counts |
| <method> gap, <method> tuned gap | global minus proxy, paired; for the loss, proxy minus global |
| <one of these> less control | that gap minus the control's gap: above 0 means hidden (see `gaps`) |
| <method> with `dark` | a control: zero gradients, so that only noise is left |
| <method> similarity | cosine of the last proxies to the server's attention and MLP layers, with LoRA merged |

Intervals are 95%, bootstrapped over test sources and averaged over seeds (see `resampling`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from fedveil import rng, strategies
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.attacks.model_extraction.proxy import ProxyModel
from fedveil.config import DpConfig, RunConfig, parse
from fedveil.contract.method import RoundContext, ServerTrained
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import Example, Rows
from fedveil.contract.trainer import Frozen, Penalty, Trainer, TrainingResult, alternating_sets
from fedveil.contract.trainer_wrappers import TrainerWrapper
from fedveil.federation.exchange import MessageExchange
from fedveil.privacy.dp_sgd import DpSgdConfig, NoisyTrainer
from fedveil.tasks.text_generation import TextGeneration
from fedveil.testing.server_loop import ServerDistillation
from fedveil_bench.common import noise_tables, resampling, seeds, texts
from fedveil_bench.common.federations import create_federation, task_of
from fedveil_bench.common.noise_only_trainer import NoiseOnlyTrainer
from fedveil_bench.common.resampling import ResampledMetric
from fedveil_bench.fedqsn import gaps, similarity
from fedveil_bench.fedqsn.text_partition import TextPartition, build_run_config, partition_rows
from fedveil_bench.fedqsn.text_partition import list_requirements as list_requirements
from fedveil_bench.runner import BenchOptions, BenchOutcome


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return all of `settings["methods"]` on each of `settings["data"]`, with one run per seed.

    Raises:
        ConfigError: a control is not a method in the preset; raised before any training.
    """
    controls = gaps.controls_of(settings["methods"])
    answers = seeds.run_seeds(__name__, settings, options)
    rows: dict[str, dict[str, ResampledMetric]] = {}
    for name in answers[0]:
        of_seeds = [answer[name] for answer in answers]
        figures = {
            m: resampling.over_seeds(
                [ResampledMetric.from_json(found) for found in (a["figures"][m] for a in of_seeds)]
            )
            for m in of_seeds[0]["figures"]
        }
        rows[name] = figures | _over_data(figures, settings["data"])
    rows |= gaps.less_controls(rows, controls)
    listed = []
    for name, figures in rows.items():
        shown: dict[str, Any] = {
            "name": name,
            "metrics": {m: resampling.compute_interval(f) for m, f in figures.items()},
        }
        of_seeds = [answer.get(name, {}) for answer in answers]
        for key in ("upload_bytes", "download_bytes", "seconds"):
            if of_seeds[0].get(key):
                shown[key] = round(statistics.fmean(a[key] for a in of_seeds))
        listed.append(shown)
    config = settings["config"]
    done = (
        f"this run: {settings['clients']} clients, fraction {config.get('cohort.fraction', 1.0):g} a round, "
        f"{config['run.rounds']} rounds, at most {config.get('train.max-steps') or 'all'} steps of "
        f"{config['train.batch-size']} rows; {len(answers)} seeds"
    )
    return BenchOutcome(listed, gaps.judge_gaps(rows, controls, len(answers)), [done])


def _over_data(figures: Mapping[str, ResampledMetric], names: Sequence[str]) -> dict[str, ResampledMetric]:
    """Return, for every metric that all data sets have, the mean over data sets."""
    shared = [m.removeprefix(f"{names[0]} ") for m in figures if m.startswith(f"{names[0]} ")]
    return {m: resampling.average_metrics([figures[f"{n} {m}"] for n in names]) for m in shared}


@dataclass
class BestProxy:
    """The model with the lowest validation loss so far, for each kind ("global", "proxy", "tuned").

    Attributes:
        task: the clients' task.
        validation: rows for the selection.
        found: loss and weights of the best model, by kind.
    """

    task: TextGeneration
    validation: Rows
    found: dict[str, tuple[float, Weights]] = field(default_factory=dict)

    def offer(self, kind: str, weights: Weights, task: TextGeneration | None = None) -> None:
        """Consider one more model. `task` is the model's task, if different from the clients' task."""
        task = task or self.task
        mine = {n: weights[n] for n in task.spec}
        task.put(mine)
        loss = task.mean_loss(self.validation)
        if kind not in self.found or loss < self.found[kind][0]:
            self.found[kind] = loss, mine


class _Watched(TrainerWrapper):
    """Records a trainer's input and result."""

    def __init__(self, local: Trainer) -> None:
        super().__init__(local)
        self._received: list[ProxyModel] = []
        self.trained: Weights = {}

    @property
    def received(self) -> ProxyModel:
        """Return the first proxy that the trainer received."""
        return self._received[0]

    @override
    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> TrainingResult:
        self._received.append(ProxyModel(weights, alternating_sets(frozen)[0]))
        trained = super().train(weights, frozen, penalty)
        self.trained = trained.weights
        return trained


def of_seed(settings: dict[str, Any], seed: int, options: BenchOptions) -> Any:
    """Return one seed's results for `run_benchmark`."""
    rows: dict[str, Any] = {}
    for name in settings["data"]:
        found = partition_rows(name, settings, seed)
        for row, answer in _part(name, found, settings, seed, options).items():
            kept = rows.setdefault(row, {"figures": {}, "upload_bytes": 0, "download_bytes": 0, "seconds": 0.0})
            kept["figures"] |= {f"{name} {m}": f.to_json() for m, f in answer["figures"].items()}
            for key in ("upload_bytes", "download_bytes", "seconds"):
                kept[key] += answer.get(key, 0)
    return rows


def _part(
    name: str, found: TextPartition, settings: Mapping[str, Any], seed: int, options: BenchOptions
) -> dict[str, dict[str, Any]]:
    config = build_run_config(settings, {"name": "fedqsn"}, seed)
    bare = task_of(TextGeneration, config, options, AllWeightsAdapter())
    base = bare.initial(rng.initial_stream(seed, "weights"))
    rows = {"public base": {"figures": texts.compute_scores(bare, base, found.test)}}
    longer = {"train.max-steps": config.train.max_steps * config.run.rounds, "train.epochs": config.run.rounds}
    alone = task_of(TextGeneration, parse({**config.flat(), **longer}), options, AllWeightsAdapter())
    first = alone.encode(Example.from_columns(next(iter(found.clients.values()))))
    tuned = alone.trainer(first, rng.initial_stream(seed, "alone")).train(base).weights
    rows["public base, fine-tuned"] = {"figures": texts.compute_scores(alone, tuned, found.test)}
    for label, chosen in settings["methods"].items():
        rows |= _method(label, build_run_config(settings, chosen, seed), chosen, found, base, settings, seed, options)
        heads = {kind: rows[f"{label} {kind}"]["figures"]["loss"].value for kind in ("global", "proxy", "tuned")}
        options.say(f"seed {seed}: {name}: {label}: loss {', '.join(f'{k} {v:.3f}' for k, v in heads.items())}")
    return rows


def _method(
    label: str,
    config: RunConfig,
    chosen: Mapping[str, Any],
    found: TextPartition,
    base: Weights,
    settings: Mapping[str, Any],
    seed: int,
    options: BenchOptions,
) -> dict[str, dict[str, Any]]:
    started = time.perf_counter()
    method = strategies.create_method(config.method.name, config.method.params)
    task = task_of(TextGeneration, config, options, method.adapter)
    own = method.server_adapter if isinstance(method, ServerTrained) else method.adapter
    dp, undefended = DpSgdConfig.from_config(config.dp), config.model_copy(update={"dp": DpConfig()})
    model = task if own == method.adapter else task_of(TextGeneration, config, options, own)
    clients = {site: task.encode(Example.from_columns(rows)) for site, rows in found.clients.items()}
    watched: dict[str, _Watched] = {}

    def around(site: str, ctx: RoundContext, local: Trainer) -> Trainer:
        if chosen.get("dark", False):
            local = NoiseOnlyTrainer(local)
        # Wraps the noisy steps, to record what the method passes to them and what they return.
        watched[site] = _Watched(NoisyTrainer(local.spec, local.rows, dp, ctx) if dp else local)
        return watched[site]

    weights = task.initial(rng.initial_stream(seed, "weights"))
    if isinstance(method, ServerTrained) and method.needs_server_rows:
        distilling = ServerDistillation(
            task, model, task.encode(Example.from_columns(found.server)), rng.initial_stream(seed, "preparation")
        )
        weights = method.before_round_0(weights, distilling)
    exchange = MessageExchange(method, config.method.name, task.spec)
    running = create_federation(exchange, undefended, task, clients, weights, around=around)
    best, scored = BestProxy(task, task.encode(Example.from_columns(found.validation))), settings["clients_scored"]
    for round_ in range(config.run.rounds):
        watched.clear()
        server = running.models()["server"]
        running.round(round_)
        best.offer("global", running.models()["server"], model)
        for at in list(watched.values())[:scored]:
            best.offer("proxy", at.received.weights)
            best.offer("tuned", at.trained)
    seconds = time.perf_counter() - started
    rows = _scored(label, best, model, found)
    rows[f"{label} global"] |= {
        "upload_bytes": running.upload_bytes, "download_bytes": running.download_bytes, "seconds": seconds
    }  # fmt: skip
    if dp and dp.noise:
        fewest = min(map(len, clients.values()))  # the client with the fewest rows is charged most
        epsilon = resampling.from_constant(noise_tables.epsilon_of(dp, config, fewest))
        rows[f"{label} global"]["figures"][noise_tables.name_epsilon_column(config.dp)] = epsilon
    if settings.get("similarity"):
        last = [at.received for at in watched.values()]
        rows[f"{label} similarity"] = {"figures": similarity.compute_similarities(task, method, last, server, base)}
    return rows


def _scored(label: str, best: BestProxy, model: TextGeneration, found: TextPartition) -> dict[str, dict[str, Any]]:
    """Return the best models' scores on test rows, and the gaps between them. `model` is the server's task."""
    figures = {
        kind: texts.compute_scores(model if kind == "global" else best.task, weights, found.test)
        for kind, (_, weights) in best.found.items()
    }
    apart = {
        title: _gap(figures["global"], figures[kind]) for kind, title in (("proxy", "gap"), ("tuned", "tuned gap"))
    }
    return {f"{label} {kind}": {"figures": each} for kind, each in (figures | apart).items()}


def _gap(mine: Mapping[str, ResampledMetric], other: Mapping[str, ResampledMetric]) -> dict[str, ResampledMetric]:
    return {
        m: resampling.subtract_metrics(other[m], mine[m])
        if m == "loss"
        else resampling.subtract_metrics(mine[m], other[m])
        for m in other
    }
