"""Build a method's trainer: the task's trainer inside the wrappers that the site and the run require.

The table lists them from the outermost to the innermost:

| wrapper | when | effect |
|---|---|---|
| NoisyTrainer | `dp.*` | adds noise to the clipped gradients that the site's ledger was charged for |
| GradientsOnlyTrainer over ChargedGradientSource | a guarantee, not deterministic | no uncharged use of an example |
| ExampleCounter | always | counts the examples used by all of the above |
| BroadcastGuard | always | refuses first weights that the policy does not permit |
| HeldOutScoringTrainer | `held_out_key` | scores the received weights; these examples are not counted |
| RowCountTrainer | unless `why_counts_stay` | reports how many rows were truncated or dropped |
| UnitTrainer | `dp.unit-column` | replaces rows with units for everything above |
| the task's trainer | always | trains on the examples that are not held out |

With noise in the sum, the charge of a site whose policy does not name a roster counts only the site's own share of the
noise (privacy/own_share.py). The run's entry is in the site's ledger before any example is used. A run without a
guarantee, or a deterministic run, whose seeded noise protects no one, writes an open entry, which makes epsilon over
all runs infinite.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from fedveil import rng
from fedveil.client_app.client_round import ClientRound, LoadedTask, SiteData
from fedveil.client_app.guards.broadcast_guard import BroadcastGuard
from fedveil.client_app.guards.example_counter import ExampleCounter
from fedveil.client_app.policy.planned_examples import MAX_TRAININGS
from fedveil.client_app.state.client_state import open_ledger
from fedveil.client_app.state.data_sets import FolderWitness
from fedveil.client_app.state.held_out_record import HeldOutRecord
from fedveil.contract import held_out_report
from fedveil.contract.method import Method, RoundContext
from fedveil.contract.param_spec import Weights
from fedveil.contract.privacy import PrivacyGuarantee
from fedveil.contract.task import Watch
from fedveil.contract.trainer import Trainer
from fedveil.errors import ConfigError
from fedveil.privacy.charged_gradients import ChargedGradientSource, GradientsOnlyTrainer
from fedveil.privacy.dp_sgd import DpSgdConfig, NoisyTrainer
from fedveil.privacy.guarantee_source import check_guarantee, check_public_length, guarantee_of
from fedveil.privacy.ledger import RunCharger
from fedveil.privacy.ledger_account import ROW, UNIT, RunTerms
from fedveil.training.held_out import HeldOutScoringTrainer, ReceivedLossFilter
from fedveil.training.per_example import PerExampleLoss
from fedveil.training.row_count_report import RowCountTrainer
from fedveil.training.unit_gradients import UnitTrainer

log = logging.getLogger("fedveil.private")


@dataclass(frozen=True)
class TrainerStack:
    """The outermost trainer, and the two wrappers that are queried after training."""

    trainer: Trainer
    counter: ExampleCounter
    guard: BroadcastGuard


def build_trainer(
    round_: ClientRound,
    loaded: LoadedTask,
    data: SiteData,
    context: RoundContext,
    watch: Watch,
) -> TrainerStack:
    """Wrap the task's trainer as listed in the module's table, from the last row to the first.

    Raises ConfigError, StateError.
    """

    def initial() -> Weights:
        return loaded.task.initial(rng.initial_stream(config.run.seed, "weights"))  # the run's initial weights

    assignment, config = round_.assignment, round_.assignment.config
    trainer: Trainer = loaded.task.trainer(data.split.trained, context.rng("batches"), watch, context.round)
    if data.units is not None:
        trainer = UnitTrainer(trainer, data.units, config)
    if data.prepared.counts is not None and not why_counts_stay(round_, loaded.exchange.method):
        trainer = RowCountTrainer(trainer, data.prepared.counts)
    if config.held_out_fraction:
        trainer = HeldOutScoringTrainer(trainer, data.split.held, lambda: refuse_score(round_, data))
    if assignment.site.policy:
        trainer = ReceivedLossFilter(trainer, round_.policy.report_received_loss)
    guard = BroadcastGuard(trainer, round_.policy, round_.references, initial)
    counter = ExampleCounter(guard)
    guarantee = check_guarantee(loaded.exchange.method, config, isinstance(loaded.task, PerExampleLoss))
    check_public_length(guarantee, config)
    if guarantee is None or config.run.deterministic:
        note_open(round_, "it has no privacy guarantee" if guarantee is None else "its noise is seeded")
    if guarantee is None:
        return TrainerStack(counter, counter, guard)
    trainer, rows = counter, counter.rows
    if not config.run.deterministic:
        charged = round_.charged_guarantee(loaded.exchange, guarantee)
        rows = ChargedGradientSource(rows, charged, open_charger(round_, charged))
        trainer = GradientsOnlyTrainer(counter.spec, rows)
    if dp := DpSgdConfig.from_config(config.dp):
        trainer = NoisyTrainer(trainer.spec, rows, dp, context)
    return TrainerStack(trainer, counter, guard)


def why_counts_stay(round_: ClientRound, method: Method) -> str:
    """Return why the site does not report how many of its rows were truncated or dropped; "" if it does."""
    assignment = round_.assignment
    if guarantee_of(method, assignment.config) is not None:
        return "the run's privacy guarantee does not cover counts that depend on the rows"
    if assignment.config.secure.enabled:
        return "a masked upload has no report"
    if assignment.site.policy and not round_.policy.report_row_counts:
        return "its policy does not permit them (report-row-counts)"
    return ""


def open_charger(round_: ClientRound, guarantee: PrivacyGuarantee) -> RunCharger:
    """Return the charger that records this run's cost in the site's ledger. Raises ConfigError, StateError."""
    assignment, policy = round_.assignment, round_.policy
    site, rounds = assignment.site, assignment.config.run.rounds
    if not site.site:
        raise ConfigError(
            "node config: site: a run with a privacy guarantee needs the site's name here, so that the server cannot "
            "choose it; set site"
        )
    most = rounds * (policy.max_retries + 1) * MAX_TRAININGS
    unit = UNIT if assignment.config.dp.unit_column else ROW
    if unit == ROW and site.unit_column and not assignment.config.dp.unit:
        raise ConfigError(
            "dp.unit-column: this site's node config names a unit-column, but the run's guarantee is for one row. It "
            'protects a unit with several rows less; set dp.unit-column, or dp.unit = "row"'
        )
    terms = RunTerms(assignment.order.run, guarantee.budget, rounds, most, unit, site.site)
    witness = None if site.shares_data else FolderWitness.open(Path(assignment.data), site.data_set, site.other_data)
    if witness is not None:
        for limit in witness.limits:
            log.warning("privacy ledger: %s: %s", witness.folder, limit)
    ledger = open_ledger(site.state_dir, round_.seal)
    return RunCharger(ledger, terms, policy.budget, witness, policy.after_open)


def note_open(round_: ClientRound, why: str) -> None:
    """Write this run's open entry to the site's ledger, and to its witness if there is one. Raises StateError."""
    assignment = round_.assignment
    folder = None if assignment.site.shares_data else FolderWitness.find(Path(assignment.data))
    ledger = open_ledger(assignment.site.state_dir, round_.seal)
    ledger.note_open(assignment.order.run, why, round_.policy.budget, folder)


def refuse_score(round_: ClientRound, data: SiteData) -> int:
    """Return why this site reports no held-out score: a key of `held_out_report.REFUSALS`.

    The result is 0 if the site reports a score, which has then been counted.
    """
    if not round_.policy.max_scores:
        return held_out_report.NOT_PERMITTED
    if data.refusal:
        return data.refusal
    assignment, most = round_.assignment, round_.policy.max_scores
    record = HeldOutRecord.open(assignment.site.state_dir, assignment.name)
    run = str(assignment.flower_run or assignment.order.run)
    is_counted = round_.replays.count_score(most) and record.count_score(data.data_set, run, most)
    return 0 if is_counted else held_out_report.SPENT
