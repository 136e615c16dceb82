"""The tables of FedQSN: the server's model beside the proxies that clients got, and what these are after local training.

Every method runs the same federation in process on the same rows. Models are chosen by their loss on validation rows, over
all rounds and scored clients, and scored on test rows. Rows of a result:

| row | which model |
|---|---|
| public base | W_0: what everybody has |
| public base, fine-tuned | W_0 after a client's training of as many steps as all its rounds would have: a proxy is worth something above this |
| <method> global | the server's model |
| <method> proxy | the best received by a client, before it trains |
| <method> tuned | the best that a client holds after its local training: the proxy's score that counts |
| <method> gap, <method> tuned gap | global less proxy, paired; for the loss proxy less global, so that above 0 always means hidden |
| <method> with `dark` | a control: gradients of zero, so that noise alone is left |
| <method> similarity | cosine of last-round proxies to the server's weights of attention and MLP layers, LoRA merged into the base |

Intervals are of 95 %, bootstrapped over test sources and averaged over seeds, see `resampling`.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedveil import rng, strategies, tasks
from fedveil.adapters.all_weights import AllWeights
from fedveil.adapters.lora import Lora
from fedveil.attacks.hidden_model import proxy as attack
from fedveil.attacks.hidden_model.proxy import Proxy
from fedveil.benchmarks.common import data, resampling, seeds, texts
from fedveil.benchmarks.common.forwarding import Dark, Forwarding
from fedveil.benchmarks.common.resampling import Figure
from fedveil.benchmarks.run import Options, Outcome
from fedveil.config import RunConfig, parse
from fedveil.contract.budget import Plan
from fedveil.contract.method import Method, RoundContext
from fedveil.contract.spec import Weights
from fedveil.contract.task import Example, Rows
from fedveil.contract.trainer import Local, Trained
from fedveil.federation.exchange import Exchange
from fedveil.federation.inprocess import Federation
from fedveil.privacy import accounting
from fedveil.privacy.dp_sgd import Noisy
from fedveil.server_app.distillation import Distillation
from fedveil.tasks.text_generation import TextGeneration
from fedveil.training import per_sample

_SITES = 9  # the name of the draws over proxies
_FORMS = ("whole", "visible", "mean")


def run(settings: dict[str, Any], options: Options) -> Outcome:
    """Every method of `settings["methods"]` on each of `settings["data"]`, a run a seed."""
    answers = seeds.run("fedveil.benchmarks.fedqsn.tables", settings, options)
    listed = []
    rows: dict[str, dict[str, Figure]] = {}
    for name in answers[0]:
        of_seeds = [answer[name] for answer in answers]
        figures = {
            m: resampling.over_seeds([Figure(v, np.array(r), n) for v, r, n in (a["figures"][m] for a in of_seeds)])
            for m in of_seeds[0]["figures"]
        }
        rows[name] = figures | _over_data(figures, settings["data"])
        shown: dict[str, Any] = {"name": name, "metrics": {m: resampling.interval(f) for m, f in rows[name].items()}}
        for key in ("upload_bytes", "download_bytes", "seconds"):
            if of_seeds[0].get(key):
                shown[key] = round(statistics.fmean(a[key] for a in of_seeds))
        listed.append(shown)
    config = settings["config"]
    done = (
        f"this run: {settings['clients']} clients, fraction {config.get('cohort.fraction', 1.0):g} a round, "
        f"{config['run.rounds']} rounds, at most {config.get('train.max-steps') or 'all'} steps of "
        f"{config['train.batch-size']} rows; {len(answers)} seeds; NIST is left out, it has no bootstrap over sources here"
    )
    return Outcome(listed, _verdicts(rows), [done])


def _over_data(figures: Mapping[str, Figure], names: Sequence[str]) -> dict[str, Figure]:
    """The mean over data sets of every metric that all of them have."""
    shared = [m.removeprefix(f"{names[0]} ") for m in figures if m.startswith(f"{names[0]} ")]
    return {m: resampling.average([figures[f"{n} {m}"] for n in names]) for m in shared}


def _verdicts(rows: Mapping[str, Mapping[str, Figure]]) -> list[str]:
    said = []
    for name, figures in rows.items():
        if name.endswith(" gap") and "loss" in figures:
            i = resampling.interval(figures["loss"])
            told = "a gap" if i["low"] > 0 else "the proxy is better" if i["high"] < 0 else "no gap can be told"
            said.append(f"{name}, loss: {i['mean']:+.3f} [{i['low']:+.3f}, {i['high']:+.3f}]: {told}.")
        if name.endswith(" tuned") and "loss" in figures:
            d = resampling.difference(rows["public base, fine-tuned"]["loss"], figures["loss"])
            told = "better" if d["low"] > 0 else "worse" if d["high"] < 0 else "not told apart"
            said.append(
                f"{name} against the public base fine-tuned alone, loss: {d['mean']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}] lower: "
                f"{told}."
            )
    return said


@dataclass
class Best:
    """The model of least validation loss so far, of each kind."""

    task: TextGeneration
    validation: Rows
    found: dict[str, tuple[float, Weights]] = field(default_factory=dict)

    def offer(self, kind: str, weights: Weights, task: TextGeneration | None = None) -> None:
        """One more model of a kind; `task` where it is not the clients'."""
        task = task or self.task
        mine = {n: weights[n] for n in task.spec}
        task.put(mine)
        loss = task.mean_loss(self.validation)
        if kind not in self.found or loss < self.found[kind][0]:
            self.found[kind] = loss, mine


class _Watched(Forwarding):
    """Shows what it is asked to train, and what came out."""

    def __init__(self, local: Local) -> None:
        super().__init__(local)
        self.received: Proxy | None = None
        self.trained: Weights = {}

    def train(self, weights: Weights, frozen: Weights | None = None) -> Trained:
        self.received = self.received or Proxy(weights, frozen or {})
        trained = super().train(weights, frozen)
        self.trained = trained.weights
        return trained


@dataclass(frozen=True)
class Texts:
    """Rows of one data set and seed."""

    clients: Mapping[str, list[texts.Row]]
    validation: list[texts.Row]
    test: list[texts.Row]
    server: list[texts.Row]  # the server's own, for its work before round 0; no client has them


def of_seed(name: str, settings: Mapping[str, Any], seed: int) -> Texts:
    """A seeded cut of the rows: of the server, then of equal clients."""
    train = texts.rows(name, "train")
    random.Random(seed).shuffle(train)
    train = train[: settings["rows"] + settings["server_rows"]] if settings["rows"] else train
    server, rest = train[: settings["server_rows"]], train[settings["server_rows"] :]
    count = settings["clients"]
    return Texts(
        {f"client-{i:02d}": rest[i::count] for i in range(count)},
        texts.chosen(texts.rows(name, "validation"), settings["validation_sources"], settings["references"], seed),
        texts.chosen(texts.rows(name, "test"), settings["test_sources"], settings["references"], seed),
        server,
    )


def configured(settings: Mapping[str, Any], chosen: Mapping[str, Any], seed: int) -> RunConfig:
    """The run config of one method."""
    flat = {**settings["config"], **chosen.get("config", {}), "run.seed": seed, "run.deterministic": True}
    flat |= {"method.name": chosen["name"], "method.fields": chosen.get("fields", "")}
    if flat.get("task.model", "tiny") != "tiny":
        flat["task.model"] = str(data.folder(flat["task.model"]))
    return parse(flat)


def task_of(config: RunConfig, adapter: Any, options: Options) -> TextGeneration:
    """The text task."""
    task = tasks.load(config, adapter, options.device)
    assert isinstance(task, TextGeneration)
    return task


def _of_seed(settings: dict[str, Any], seed: int, options: Options) -> Any:
    rows: dict[str, Any] = {}
    for name in settings["data"]:
        found = of_seed(name, settings, seed)
        for row, answer in _part(name, found, settings, seed, options).items():
            kept = rows.setdefault(row, {"figures": {}, "upload_bytes": 0, "download_bytes": 0, "seconds": 0.0})
            kept["figures"] |= {
                f"{name} {m}": [f.value, f.replicates.tolist(), f.count] for m, f in answer["figures"].items()
            }
            for key in ("upload_bytes", "download_bytes", "seconds"):
                kept[key] += answer.get(key, 0)
    return rows


def _part(
    name: str, found: Texts, settings: Mapping[str, Any], seed: int, options: Options
) -> dict[str, dict[str, Any]]:
    config = configured(settings, {"name": "fedqsn"}, seed)
    bare = task_of(config, AllWeights(), options)
    base = bare.initial(rng.initial(seed, "weights"))
    rows = {"public base": {"figures": texts.scores(bare, base, found.test, seed)}}
    longer = {"train.max-steps": config.train.max_steps * config.run.rounds, "train.epochs": config.run.rounds}
    alone = task_of(parse({**config.flat(), **longer}), AllWeights(), options)
    first = alone.encode(Example.of(next(iter(found.clients.values()))))
    tuned = alone.local(first, rng.initial(seed, "alone")).train(base).weights
    rows["public base, fine-tuned"] = {"figures": texts.scores(alone, tuned, found.test, seed)}
    for label, chosen in settings["methods"].items():
        rows |= _method(label, configured(settings, chosen, seed), chosen, found, base, settings, seed, options)
        heads = {
            kind: rows[f"{label} {kind}"]["figures"]["loss"].value
            for kind in ("global", "proxy", "tuned")
            if f"{label} {kind}" in rows
        }
        options.say(f"seed {seed}: {name}: {label}: loss {', '.join(f'{k} {v:.3f}' for k, v in heads.items())}")
    return rows


def _method(
    label: str,
    config: RunConfig,
    chosen: Mapping[str, Any],
    found: Texts,
    base: Weights,
    settings: Mapping[str, Any],
    seed: int,
    options: Options,
) -> dict[str, dict[str, Any]]:
    started = time.perf_counter()
    method = strategies.create(config.method.name, config.method.fields)
    task = task_of(config, method.adapter, options)
    own = method.server_adapter
    model = task if own == method.adapter else task_of(config, own, options)
    clients = {site: task.encode(Example.of(rows)) for site, rows in found.clients.items()}
    best = Best(task, task.encode(Example.of(found.validation)))
    watched: dict[str, _Watched] = {}

    def local_for(site: str, ctx: RoundContext) -> Local:
        local: Local = task.local(clients[site], ctx.rng("batches"))
        if chosen.get("dark", False):
            local = Dark(local)
        watched[site] = _Watched(method.training(local, ctx) if isinstance(method, Noisy) else local)
        return watched[site]

    weights = task.initial(rng.initial(seed, "weights"))
    if method.prepares:
        distilling = Distillation(task, model, task.encode(Example.of(found.server)), rng.initial(seed, "preparation"))
        weights = method.prepare(weights, distilling)
    exchange = Exchange(method.plain, config.method.name, task.spec)
    state = method.init(task.spec, weights, rng.initial(seed, "method init"))
    federation = Federation(exchange, config, local_for, list(clients), state)
    alike: list[attack.Similarity] = []
    for round_ in range(config.run.rounds):
        watched.clear()
        server = federation.deployed()["server"]
        federation.round(round_)
        best.offer("global", federation.deployed()["server"], model)
        for at in list(watched.values())[: settings["clients_scored"]] if chosen.get("proxy", True) else []:
            assert at.received is not None
            best.offer("proxy", at.received.weights)
            best.offer("tuned", at.trained)
        if settings.get("similarity") and round_ == config.run.rounds - 1:
            alike = similarities(task, method, list(watched.values()), server, base)
    seconds = time.perf_counter() - started
    rows: dict[str, dict[str, Any]] = {}
    for kind, (_, weights) in best.found.items():
        scored = texts.scores(model if kind == "global" else task, weights, found.test, seed)
        rows[f"{label} {kind}"] = {"figures": scored}
    rows[f"{label} global"] |= {
        "upload_bytes": federation.upload_bytes, "download_bytes": federation.download_bytes, "seconds": seconds
    }  # fmt: skip
    if isinstance(method, Noisy) and method.dp_sgd.noise:
        title = f"epsilon at delta {method.budget.delta:g} ({method.budget.neighbours})"
        rows[f"{label} global"]["figures"][title] = resampling.fixed(_epsilon(method, config, clients))
    for kind, title in (("proxy", "gap"), ("tuned", "tuned gap")):
        if f"{label} {kind}" in rows:
            rows[f"{label} {title}"] = {"figures": _gap(*(rows[f"{label} {k}"]["figures"] for k in ("global", kind)))}
    if alike:
        forms = {
            f"{form}{suffix}": resampling.mean([getattr(s, form) for s in side], _SITES, seed)
            for suffix, side in (("", alike[0::2]), (" of the difference to the base", alike[1::2]))
            for form in _FORMS
        }
        rows[f"{label} similarity"] = {"figures": forms}
    return rows


def _epsilon(method: Noisy, config: RunConfig, clients: Mapping[str, Rows]) -> float:
    """Of a row of the client with the fewest rows, which are looked at most often, in a client that is in every round."""
    fewest, train, budget = min(map(len, clients.values())), config.train, method.budget
    steps = per_sample.steps(fewest, train.batch_size, train.epochs, train.max_steps)
    plan = Plan(config.run.rounds, steps, train.batch_size, fewest, budget.neighbours)
    return accounting.epsilon(method.privacy_spent(plan), budget.delta, budget.neighbours)


def _gap(mine: Mapping[str, Figure], other: Mapping[str, Figure]) -> dict[str, Figure]:
    signs = {m: -1.0 if m == "loss" else 1.0 for m in other}
    return {
        m: Figure(s * (mine[m].value - other[m].value), s * (mine[m].replicates - other[m].replicates), mine[m].count)
        for m, s in signs.items()
    }


def similarities(
    task: TextGeneration, method: Method, seen: Sequence[_Watched], server: Weights, base: Weights
) -> list[attack.Similarity]:
    """For every client two: to the server's weights, and of the differences to the base."""
    found = []
    scale = getattr(method.plain, "scale", 1.0) if isinstance(method.adapter, AllWeights) else 1.0
    true = merged(task, server)
    for at in seen:
        assert at.received is not None
        proxy = Proxy(merged(task, at.received.weights), at.received.missing, scale)
        names = [n for n in true if n in base]
        found += [attack.similarity(proxy, true, names), attack.similarity(proxy, true, names, base)]
    return found


def merged(task: TextGeneration, weights: Weights) -> Weights:
    """The matrices of attention and MLP layers by their names in the bare model; W_0 + scale B A under LoRA."""
    if not isinstance(task.adapter, Lora):
        return {n: w for n, w in weights.items() if (p := task.spec[n].place) and p.part == "linear" and w.ndim == 2}
    found = {}
    for module in (n.removesuffix(".lora_A") for n in weights if n.endswith(".lora_A")):
        layer: Any = task.base.model.get_submodule(module).base_layer
        change = task.adapter.scale * weights[f"{module}.lora_B"] @ weights[f"{module}.lora_A"]
        is_conv = not isinstance(layer, torch.nn.Linear)
        found[f"{module}.weight"] = layer.weight.detach().cpu().float() + (change.T if is_conv else change)
    return found


if __name__ == "__main__":
    seeds.serve(_of_seed)
