"""Sites with images for the DP-FPL presets: their rows, and a complete federation for one row of a table.

The data are Caltech-101 or CIFAR-10, without the part that the tiny CLIP model has seen, or a user's folder with
`train.parquet` and `test.parquet`, whose columns are `image` and `label` (a ClassLabel). Class names are public. A
preset may rename classes, and give several classes the same name.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from fedveil import rng, strategies
from fedveil.config import RunConfig, parse
from fedveil.contract.method import Method, RoundContext
from fedveil.contract.param_spec import Weights
from fedveil.contract.privacy import PrivacyGuarantee, SamplingPlan, stated_guarantee
from fedveil.contract.task import DatasetShard, Example
from fedveil.contract.trainer import Trainer
from fedveil.data import partition
from fedveil.data import tables as files
from fedveil.data.split_files import split_files
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.models.clip import EncodedImage
from fedveil.privacy import accounting
from fedveil.privacy.dp_sgd import DpSgdConfig
from fedveil.privacy.guarantee_source import check_guarantee, guarantee_of
from fedveil.strategies.dp_fpl import DPFPL
from fedveil.tasks.clip_prompt import ClipPrompt
from fedveil.testing.pretraining import PUBLIC_DIGITS, is_public
from fedveil.training import per_example
from fedveil_bench.common import data
from fedveil_bench.common.federations import create_federation, task_of
from fedveil_bench.common.noise_only_trainer import NoiseOnlyTrainer
from fedveil_bench.common.resampling import Numbers
from fedveil_bench.runner import BenchOptions

_CUT = {"task.partition": "pathological", "task.classes-per-site": 0}


@dataclass(frozen=True)
class PromptSites:
    """The data and settings of one seed.

    Attributes:
        settings: the preset's settings.
        flat: the run config that all rows of the table share.
        rows: each site's rows.
        classes: the classes of each site's rows.
        test: test rows from all classes.
        task: the task without a prompt, for the zero-shot model.
    """

    settings: Mapping[str, Any]
    flat: Mapping[str, Any]
    seed: int
    options: BenchOptions
    rows: Mapping[str, Sequence[EncodedImage]]
    classes: Mapping[str, frozenset[int]]
    test: Sequence[EncodedImage]
    task: ClipPrompt

    @property
    def names(self) -> list[str]:
        """Return the sites' names."""
        return list(self.rows)

    def zero_shot(self) -> Numbers:
        """Return (test rows,): 1 if the untrained model predicts the row's class, otherwise 0."""
        labels = torch.tensor([row.label for row in self.test])
        return (self.task.zero_shot_logits(self.test).argmax(-1) == labels).double().numpy()


@dataclass(frozen=True)
class FederatedPrompts:
    """One row of a table, after its run.

    Attributes:
        task: the task with the row's prompt.
        models: each site's own model if the method has one, otherwise the server's; the mean over the last rounds.
        last: the same models after the last round, without averaging.
        costs: "nominal epsilon" and the accountant's epsilon, by name; infinite if there is none.
        privacy: the privacy costs as text, with delta and relation.
        upload_bytes: total size of all uploads.
        claim, plans: the guarantee with its noise, or None; and the sampling plans of the most-charged sites.
    """

    task: ClipPrompt
    models: Mapping[str, Weights]
    last: Mapping[str, Weights]
    costs: Mapping[str, float]
    privacy: str
    upload_bytes: int
    claim: PrivacyGuarantee | None
    plans: Sequence[SamplingPlan]


def load_sites(settings: Mapping[str, Any], seed: int, options: BenchOptions) -> PromptSites:
    """Return a seed's sites, with each image passed once through the tower. Raises ConfigError without data."""
    folder = data.find_data_folder(settings["data"])
    flat = {
        "task.name": "clip-prompt", "task.target-column": "label", "task.label-column": "label", **_CUT,
        **settings["config"], "run.seed": seed,
    }  # fmt: skip
    flat = data.with_model(flat)
    # Compute patches if any row of the table needs them; the other rows use only the first point.
    transport = any(_form(row) == "transport" for row in settings.get("rows", {}).values())
    widest = f"adapter = {{form = '{'transport' if transport else 'sum'}'}}"
    found = files.read_table(split_files(folder, "train"), ("label",)).features["label"].names
    names = [settings.get("called", {}).get(name, name) for name in found]
    kinds = list(dict.fromkeys(names))
    kept = sorted(random.Random(seed).sample(kinds, settings.get("classes", len(kinds))))
    flat["task.class-names"] = ",".join(kept)
    task = task_of(ClipPrompt, parse({**flat, "method.name": "fedotp", "method.params": widest}), options)

    def examples(split: str) -> list[Example]:
        found = (
            # A subset of the data set's classes, renamed.
            replace(e, values={**e.values, "label": names[e.values["label"]]}, class_names=())
            for e in task.examples(folder, split)
        )
        federated = [e for e in found if e.values["label"] in kept and is_federated(settings["data"], split, e.values)]
        return federated[: settings.get("rows_read", len(federated))]

    train = examples("train")
    table = Dataset.from_list([{"label": example.values["label"]} for example in train])
    shares = [DatasetShard(i, settings["clients"]) for i in range(settings["clients"])]
    parts = [[train[j] for j in partition.partition_indices(table, share, task.config.task, seed)] for share in shares]
    parts = parts[: settings.get("take", len(parts))]
    rows = {f"site-{i:02d}": task.encode(part) for i, part in enumerate(parts)}
    test = task.encode(examples("test"))
    classes = {site: frozenset(row.label for row in of_site) for site, of_site in rows.items()}
    options.say(f"seed {seed}: {sum(map(len, rows.values()))} rows at {len(rows)} sites, {len(test)} test rows")
    return PromptSites(settings, flat, seed, options, rows, classes, test, task)


def _form(row: Mapping[str, Any]) -> str:
    return str(getattr(strategies.create_method(row["name"], row.get("fields", "")).adapter, "form", ""))


def is_federated(name: str, split: str, row: Mapping[str, Any]) -> bool:
    """Return whether a site may have this row, because the tiny CLIP model has not seen it."""
    return split != "train" or name not in PUBLIC_DIGITS or not is_public(row["source_path"], name)


def prompt_task(sites: PromptSites, chosen: Mapping[str, Any]) -> ClipPrompt:
    """Return the task for one row of a table."""
    flat = {**sites.flat, **chosen.get("config", {})}
    flat |= {"method.name": chosen["name"], "method.params": chosen.get("fields", "")}
    return task_of(ClipPrompt, parse(flat), sites.options)


def federate_prompts(
    sites: PromptSites, chosen: Mapping[str, Any], rows: Mapping[str, Sequence[EncodedImage]], dark: bool
) -> FederatedPrompts:
    """Run one row of a table on the sites' rows.

    The row's `epsilon` is converted to noise, the largest that any site needs. For a baseline, this is DP-SGD noise on
    the gradients of everything the baseline trains, clipped together to the row's `dp.clip-norm`.

    Args:
        chosen: the row, as in the preset. With `averaged`, a model is the mean over that many last rounds.
        dark: whether to set every gradient to zero, so that only noise is left.

    Raises:
        ConfigError: the row has an epsilon but no privacy guarantee, or a guarantee that its method cannot give.
    """
    task = prompt_task(sites, chosen)
    config = task.config
    method = strategies.create_method(config.method.name, config.method.params)
    check_guarantee(method, config, has_row_gradients=_form(chosen) != "transport")
    plans = _plans(config, rows, method)
    method, config = _with_noise(method, config, chosen.get("epsilon"), plans)
    claim = guarantee_of(method, config)
    exchange = MessageExchange(method, config.method.name, task.spec)
    initial = task.initial(rng.initial_stream(sites.seed, "weights"))

    def around(site: str, ctx: RoundContext, local: Trainer) -> Trainer:
        return NoiseOnlyTrainer(local) if dark else local

    last = deque[Mapping[str, Weights]](maxlen=chosen.get("averaged", 1))

    def keep(running: InProcessFederation, round_: int) -> None:
        last.append({site: (views := running.models(site)).get("client", views["server"]) for site in rows})

    done = create_federation(exchange, config, task, rows, initial, around=around)
    done.run(keep)
    models = {site: average_models([models[site] for models in last]) for site in rows}
    costs, words = _costs(claim, plans)
    return FederatedPrompts(task, models, last[-1], costs, words, done.upload_bytes, claim, plans)


def average_models(models: Sequence[Weights]) -> Weights:
    """Return the mean of several models, tensor by tensor."""
    return {name: torch.stack([model[name] for model in models]).mean(0) for name in models[0]}


def _plans(config: RunConfig, rows: Mapping[str, Sequence[EncodedImage]], method: Method) -> list[SamplingPlan]:
    """Return the sampling plans of the most-charged sites; none if neither the method nor `dp.*` gives a guarantee.

    A site is never charged more than another site that has at least as many steps and at most as many rows.
    """
    if (claim := guarantee_of(method, config)) is None:
        return []
    train = config.train
    plans = []
    for of_site in rows.values():
        steps = 1
        if not isinstance(method, DPFPL) or method.exchange == "epoch":
            steps = per_example.count_steps(len(of_site), train.batch_size, train.epochs, train.max_steps)
        plans.append(SamplingPlan(config.run.rounds, steps, train.batch_size, len(of_site), claim.budget.neighbours))
    each = sorted(set(plans), key=lambda p: (-p.steps, p.examples))
    return [p for i, p in enumerate(each) if all(p.examples < q.examples for q in each[:i])]


def _with_noise(
    method: Method, config: RunConfig, wished: float | None, plans: Sequence[SamplingPlan]
) -> tuple[Method, RunConfig]:
    """Return the method, or `dp.*`, with the noise for the epsilon `wished`, and that epsilon as the bound.

    DP-FPL uses equal noise multipliers, which together give `wished`.
    """
    if wished is None:
        return method, config
    found = guarantee_of(method, config)
    noisy: Callable[[float], DPFPL | DpSgdConfig]
    if isinstance(found, DPFPL):
        noisy = partial(_noisy_prompts, found, wished)
    elif isinstance(found, DpSgdConfig):
        noisy = partial(_noisy_steps, found, wished)
    else:
        raise ConfigError(
            f"epsilon: expected DP-FPL or a row whose config has dp.clip-norm, found {type(method).__name__} without "
            "it; set dp.clip-norm, or leave epsilon out"
        )
    budget = found.budget
    z = max(
        accounting.noise_multiplier_for(
            lambda z, p=plan: noisy(z).privacy_spent(p),  # type: ignore[misc]
            wished,
            budget.delta,
            budget.neighbours,
        )
        for plan in plans
    )
    with_noise = noisy(z)
    if isinstance(with_noise, DPFPL):
        return with_noise, config
    dp = config.dp.model_copy(update={"noise_multiplier": z, "epsilon": wished})
    return method, config.model_copy(update={"dp": dp})


def _noisy_prompts(method: DPFPL, wished: float, z: float) -> DPFPL:
    return replace(method, noise_local=z, noise_global=z, epsilon=wished)


def _noisy_steps(steps: DpSgdConfig, wished: float, z: float) -> DpSgdConfig:
    return replace(steps, noise=z, epsilon=wished)


def _costs(claim: PrivacyGuarantee | None, plans: Sequence[SamplingPlan]) -> tuple[dict[str, float], str]:
    if claim is None:
        return {}, "epsilon infinite: no claim"
    budget = claim.budget
    exact = max(accounting.compute_epsilon(claim.privacy_spent(p), budget.delta, budget.neighbours) for p in plans)
    nominal = budget.nominal if budget.nominal is not None else budget.epsilon
    costs = {"nominal epsilon": nominal, f"epsilon, {budget.neighbours.value}": exact}
    said = "none" if math.isinf(nominal) else f"{nominal:g}"
    words = f"nominal epsilon {said}; {stated_guarantee(exact, budget.delta, budget.neighbours)}"
    return costs, words + ("; against the server infinite" if budget.server_trusted else "")


def epsilon_of(done: FederatedPrompts, times: int) -> float:
    """Return the accountant's epsilon for `times` runs like this one on the same rows; infinite without a guarantee."""
    if done.claim is None:
        return math.inf
    budget, plans = done.claim.budget, [replace(plan, rounds=times * plan.rounds) for plan in done.plans]
    return max(accounting.compute_epsilon(done.claim.privacy_spent(p), budget.delta, budget.neighbours) for p in plans)


def mark_correct(task: ClipPrompt, weights: Weights, rows: Sequence[EncodedImage]) -> Numbers:
    """Return (rows,): 1 if the model predicts the row's class, otherwise 0."""
    return np.array([float(int(p.logits["target"].argmax()) == int(p.wanted)) for p in task.predict(weights, rows)])


def name_noise_control(name: str) -> str:
    """Return the name of the row's noise-only control, which uses no examples."""
    return f"{name}, noise only"
