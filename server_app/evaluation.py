"""Score a method's models on the server's test data, and select the best round.

| evaluations so far | `BestEvaluation` |
|---|---|
| none, or none with a finite value | no round; only the last model is stored |
| an evaluation better than all earlier ones | that round |
| an evaluation equal to the best | the earlier round |
| a gain of less than evaluate.min-delta | its round, but evaluate.patience does not count an improvement |
| a round that is not scored | unchanged; it does not count for evaluate.patience |
| the model before round 0 | it is scored, but is not a candidate: no site has contributed to it |

If scores make a decision, these examples decide:

| `task.evaluation` | evaluate.validation-share | scores of | view or report |
|---|---|---|---|
| has a validation split | any | that split | VALIDATION |
| has none | above 0 | test examples that are held out; see `validation_split` | VALIDATION |
| has none | 0 | the test split, so its scores are better than on new data, as log and record state | "server" |
| is not set | above 0 | training examples that the sites hold out and report a loss for | SITES |
| is not set | 0 | refused | |

The server's own data cost no privacy, because the server has the models anyway. Sites report as for evaluate.held-out:
only with their policy's permission, and never under a guarantee or with masked uploads. A site scores the model that it
receives, so the last round's model has no such score and is never selected.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedveil.config import EvaluateConfig, RunConfig
from fedveil.contract import held_out_report
from fedveil.contract.method import FederatedState, Method
from fedveil.contract.task import Examples, Metrics, Task, TaskMetric
from fedveil.data import tables
from fedveil.data.reading_notes import MAX_NOTES, collect_notes
from fedveil.data.split_files import has_split
from fedveil.errors import ConfigError, StateError
from fedveil.server_app.validation_split import KEY, VALIDATION, read_test_split

Scores = dict[str, dict[str, float]]
SITES = "sites"  # name of the split whose scores decide: training examples that the sites hold out
log = logging.getLogger("fedveil.server")


@dataclass(frozen=True)
class ServerEvaluator:
    """Scores models by view, in the rounds that the config selects.

    Attributes:
        task: the task with the adapter of the server's model.
        examples: the test split, without examples that are held out for validation.
        validation: the validation split or the held-out examples, if there are any and scores make a decision.
        notes: how the data has been read so far; see `fedveil.data.reading_notes`.
        keeps_model: the task also trains, so its model stays in memory after the scores.
    """

    task: Task
    examples: Examples
    config: EvaluateConfig
    rounds: int
    validation: Examples | None = None
    notes: list[str] = field(default_factory=list)
    keeps_model: bool = False

    @classmethod
    def from_config(cls, task: Task, config: RunConfig, keeps_model: bool = False) -> ServerEvaluator | None:
        """Build the evaluator; None without test data. Raises TaskError if task.evaluation names missing data."""
        if not config.task.evaluation:
            return None
        data, validation = Path(config.task.evaluation), None
        with tables.columns_named_by("task.evaluation"), collect_notes() as notes:
            divided = read_test_split(task, config, data)
            examples = divided.test
            if why := _what_decides(config.evaluate):
                if said := divided.describe():
                    validation = divided.validation
                    log.info("%s: %s", why, said)
                    notes.append(said)
                elif has_split(data, VALIDATION):
                    validation = task.examples(data, VALIDATION)
                    log.info('%s: the validation split of "%s" decides, %d examples', why, data, len(validation))
                else:
                    log.warning(
                        '%s: "%s" has no validation split (validation.*, valid, val or dev), so the test split '
                        "decides, and the chosen model's test scores are better than on new data; add one, or set %s",
                        why, data, KEY,
                    )  # fmt: skip
            task.require_shared_classes()
        return cls(task, examples, config.evaluate, config.run.rounds, validation, notes, keeps_model)

    def scores(self, method: Method, server: FederatedState, round_: int) -> Scores:
        """Return {view: {metric: value}}; empty for a round that is not scored. Round -1: the model before round 0."""
        last = round_ == self.rounds - 1
        due = last or (self.config.every > 0 and (round_ + 1) % self.config.every == 0)
        if not due:
            return {}
        at_ends = last or round_ == -1
        generate = self.config.generate == "always" or (self.config.generate == "last" and at_ends)
        try:
            with collect_notes() as notes:
                return self._scores(method, server, generate)
        finally:
            if not self.keeps_model:
                self.task.release()
            self.notes.extend([note for note in notes if note not in self.notes][: MAX_NOTES - len(self.notes)])

    def _scores(self, method: Method, server: FederatedState, generate: bool) -> Scores:
        models = method.models(server)
        scores = {
            view: self.task.evaluate({n: weights[n] for n in self.task.spec}, self.examples, generate)
            for view, weights in models.items()
        }
        if self.validation is not None and "server" in models:
            weights = {n: models["server"][n] for n in self.task.spec}
            needs_texts = generate and self.config.metric != "loss"
            scores[VALIDATION] = self.task.evaluate(weights, self.validation, needs_texts)
        return scores


@dataclass(frozen=True)
class ModelSelection:
    """The settings by which a run chooses its final model and stops early.

    Attributes:
        name, metric: identify the deciding score of the server's model.
        keep: end the run with the best round's model.
        patience, min_delta: the values of evaluate.patience and evaluate.min-delta.
        by_sites: whether the sites' scores on examples that they hold out decide.
        min_sites: the value of cohort.min-sites.
    """

    name: str
    metric: TaskMetric
    keep: bool = True
    patience: int = 0
    min_delta: float = 0.0
    by_sites: bool = False
    min_sites: int = 1

    @classmethod
    def from_config(cls, config: RunConfig, metrics: Metrics, method: Method) -> ModelSelection | None:
        """Build it from the config; None if no setting asks for it. `metrics` are the task's metrics.

        Raises:
            ConfigError: the task or its evaluations lack the metric, there are no evaluations, or the sites' scores
                cannot decide.
        """
        asked, name = config.evaluate, config.evaluate.metric
        if name not in metrics:
            raise ConfigError(
                f'evaluate.metric: expected one of {sorted(metrics)} with the task "{config.task.name}", found {name!r}'
            )
        if not _what_decides(asked):
            if asked.min_delta:
                raise ConfigError(
                    f"evaluate.min-delta: {asked.min_delta:g} has no effect without evaluate.patience; set both"
                )
            if asked.validation_share:
                raise ConfigError(
                    f"{KEY}: it is {asked.validation_share:g}, but no score decides anything; leave it out, or set "
                    'evaluate.select-model = "best" or evaluate.patience'
                )
            return None
        why = _what_decides(asked)
        if not config.task.evaluation:
            if not asked.validation_share:
                raise ConfigError(
                    f"task.evaluation: {why} needs the server's test data, and none is named; name a folder, or set "
                    f"{KEY}, with which each site holds out examples"
                )
            _check_by_sites(config, method)
        elif not asked.every:
            raise ConfigError(f"evaluate.every: with {why} it must be at least 1; 0 evaluates only the last round")
        if metrics[name].generated and asked.generate != "always":
            raise ConfigError(
                f'evaluate.generate: evaluate.metric = "{name}" scores generated texts, so this must be "always", not '
                f'"{asked.generate}"; set it, or choose another metric'
            )
        by_sites = not config.task.evaluation
        least = config.cohort.min_sites
        return cls(name, metrics[name], asked.select_model == "best", asked.patience, asked.min_delta, by_sites, least)

    def gain(self, before: float, now: float) -> float:
        """Return how much better `now` is than `before`; negative if it is worse."""
        return before - now if self.metric.better == "lower" else now - before


@dataclass(frozen=True)
class SiteScores:
    """One round's scores of the model that the sites received, on examples that they hold out.

    Attributes:
        by_site: each site's mean loss and its number of held-out examples, which is above 0; {} without scores.
    """

    by_site: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def from_reports(cls, reports: Mapping[str, Mapping[str, float]]) -> SiteScores:
        """Return the scores in a round's reports, by site."""
        scored = {
            site: (float(report[held_out_report.LOSS]), float(report.get(held_out_report.ROWS, 0)))
            for site, report in reports.items()
            if held_out_report.LOSS in report
        }
        return cls({site: score for site, score in sorted(scored.items()) if score[1] > 0})

    @property
    def sites(self) -> tuple[str, ...]:
        """Return the sites with a score, sorted."""
        return tuple(self.by_site)

    @property
    def loss(self) -> float:
        """Return the mean loss, weighted by the number of held-out examples; NaN without sites."""
        return self.mean_over(self.sites, self)

    def mean_over(self, sites: Collection[str], weights: SiteScores) -> float:
        """Return the mean loss of these sites, weighted by their numbers of examples in `weights`; NaN for none."""
        rows = {site: weights.by_site[site][1] for site in sites}
        total = sum(self.by_site[site][0] * number for site, number in rows.items())
        return total / sum(rows.values()) if rows else math.nan


@dataclass(frozen=True)
class BestEvaluation:
    """The best evaluation so far.

    Attributes:
        round: round of the best model, 0-based; None before the first finite value.
        value: the score of that model.
        reference: the score that the next improvement must exceed by evaluate.min-delta.
        waited: number of consecutive evaluations without such an improvement.
        split: the split whose scores decide: VALIDATION, SITES or "test".
        by_sites: with SITES, the sites' scores of the best model, of which `value` is the mean.
    """

    round: int | None = None
    value: float = math.nan
    reference: float = math.nan
    waited: int = 0
    split: str = "test"
    by_sites: SiteScores = field(default_factory=SiteScores)

    @property
    def sites(self) -> tuple[str, ...]:
        """Return the sites with a score of the best model, sorted; () unless sites decide."""
        return self.by_sites.sites

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> BestEvaluation:
        """Return the best evaluation in a checkpoint, or the initial one if the checkpoint has none."""
        split = str(saved.get("split", "test"))
        sites = SiteScores({site: (float(loss), float(rows)) for site, (loss, rows) in saved.get("sites", {}).items()})
        if saved.get("round") is None:
            return cls(waited=int(saved.get("waited", 0)), split=split, by_sites=sites)
        return cls(
            int(saved["round"]), float(saved["value"]), float(saved["reference"]), int(saved["waited"]), split, sites
        )

    def saved(self) -> dict[str, Any]:
        """Return the values for a checkpoint, as numbers that JSON can represent."""
        return {
            "round": self.round, "value": None if self.round is None else self.value,
            "reference": None if self.round is None else self.reference, "waited": self.waited, "split": self.split,
            "sites": {site: list(score) for site, score in self.by_sites.by_site.items()},
        }  # fmt: skip

    def after(self, choice: ModelSelection, round_: int, scores: Mapping[str, Mapping[str, float]]) -> BestEvaluation:
        """Return the best evaluation after a round with these scores, by view.

        Raises:
            StateError: earlier rounds were scored on a different split, so the scores cannot be compared.
        """
        split = next((name for name in (SITES, VALIDATION) if scores.get(name)), "test")
        server_scores = scores.get("server" if split == "test" else split)
        if not server_scores:
            return self
        if self.split != split and (self.round is not None or self.waited):
            raise StateError(
                f"task.evaluation: earlier rounds were scored on the {self.split} split, but now the {split} split "
                "would decide; restore the folder's validation split as it was, and resume"
            )
        now = server_scores[choice.name]
        if not math.isfinite(now):
            return replace(self, waited=self.waited + 1, split=split)
        if self.round is None:
            return BestEvaluation(round_, now, now, split=split)
        gain = choice.gain(self.reference, now)
        improved = gain > 0 and gain >= choice.min_delta
        best = replace(self, round=round_, value=now) if choice.gain(self.value, now) > 0 else self
        if not improved:
            return replace(best, waited=self.waited + 1)
        return replace(best, reference=now, waited=0)

    def after_sites(self, choice: ModelSelection, round_: int, scores: SiteScores) -> tuple[BestEvaluation, str]:
        """Return the best evaluation after a round that these sites scored, and what to log; "" for nothing.

        Two rounds are compared over the sites that both have, with the best round's numbers of examples, so that a
        missing site does not change any mean:

        | sites that both rounds have | what happens |
        |---|---|
        | at least cohort.min-sites and half of the best round's sites, or all of both | the better round is the best |
        | fewer, and the newer round has more sites than the best | the newer round is the best, without a comparison |
        | fewer otherwise | the newer round has no score |
        """
        old, best, newer = self.by_sites, self.round, ", ".join(scores.sites)
        if not scores.sites:
            return self, (
                "the model has no score, because no site reported one; the sites' logs and the reports say why "
                "(max-scores in their policies)"
            )
        if best is None:
            first = self.after(choice, round_, {SITES: {choice.name: scores.loss}})
            return (first if first.round is None else replace(first, by_sites=scores)), ""
        common = [site for site in scores.sites if site in old.by_site]
        is_enough = len(common) >= max(choice.min_sites, len(old.sites) / 2) or scores.sites == old.sites
        if not is_enough and len(scores.sites) > len(old.sites) and math.isfinite(scores.loss):
            return replace(self, round=round_, value=scores.loss, reference=scores.loss, by_sites=scores), (
                f"the model replaces that of round {best + 1} as the best without a comparison: the sites {newer} "
                f"reported scores, and only {', '.join(old.sites)} did before"
            )
        if not is_enough:
            return self, (
                f"the model has no score: the sites {newer} reported scores, but {', '.join(old.sites)} did for the "
                f"best model, that of round {best + 1}"
            )
        before, now = old.mean_over(common, old), scores.mean_over(common, old)
        there = replace(self, value=before, reference=before + self.reference - self.value)
        after = there.after(choice, round_, {SITES: {choice.name: now}})
        if after.round == best:
            return replace(self, waited=after.waited), ""
        loss, left = scores.loss, after.reference - after.value
        return replace(after, value=loss, reference=loss + left, by_sites=scores), ""

    def stopped(self, choice: ModelSelection, done: int) -> str:
        """Explain why a run stops after round `done`; "" if it continues."""
        if not 0 < choice.patience <= self.waited:
            return ""
        least = f" by {choice.min_delta:g} or more" if choice.min_delta else ""
        best = "no value was finite" if self.round is None else f"best {self.value:.6g} after round {self.round + 1}"
        return (
            f"stopped early, after round {done + 1}: {choice.name} has not improved{least} in {self.waited} "
            f"evaluations (evaluate.patience); {best}"
        )

    def about(self, choice: ModelSelection) -> dict[str, Any]:
        """Return the entry for status.json; {} before the first finite value."""
        if self.round is None:
            return {}
        about = {"round": self.round, "metric": choice.name, "value": self.value, "kept": choice.keep}
        return {"best": {**about, "split": self.split}}


def _check_by_sites(config: RunConfig, method: Method) -> None:
    """Raise ConfigError for a run in which scores of the sites cannot decide."""
    asked, why = config.evaluate, f"{KEY} and no task.evaluation"
    expected = {
        "evaluate.metric": ("loss", asked.metric, "which is all that sites report"),
        "evaluate.held-out": (0.0, asked.held_out, "because both hold out training examples"),
        "evaluate.every": (1, asked.every, "because sites score every model that they receive"),
        "cohort.fraction": (1.0, config.cohort.fraction, "because the scores of different sites cannot be compared"),
        "cohort.buffer-size": (0, config.cohort.buffer_size, "because sites score models of different server steps"),
    }
    for key, (value, found, because) in expected.items():
        if found != value:
            raise ConfigError(
                f"{key}: expected {value!r} with {why}, {because}, found {found!r}; leave it out, or name the server's "
                "test data"
            )
    if reason := method.site_score_conflict:
        raise ConfigError(
            f"method.name: with {why}, sites must start from the server's model, but "
            f'"{config.method.name}" {reason}; name the server\'s test data (task.evaluation)'
        )


def _what_decides(asked: EvaluateConfig) -> str:
    """Return the key that lets scores decide which model is final or when a run stops; "" if no key does."""
    if asked.select_model == "best":
        return 'evaluate.select-model = "best"'
    return "evaluate.patience" if asked.patience else ""
