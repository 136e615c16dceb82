"""A server and its sites in this process: `LocalFederation`."""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedveil import rng
from fedveil.attacks.samples import natural_key
from fedveil.cards.card import PrivacyCard
from fedveil.config import RunConfig
from fedveil.console.runs.run_reader import load_run
from fedveil.contract.method import Method, RoundContext
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import DatasetShard, Examples, PreparedData, Rows, Task
from fedveil.contract.trainer import Trainer
from fedveil.data.units import UnitRows, group_rows_of_run
from fedveil.errors import ConfigError, StateError, TaskError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.local.config_rules import read_config, require_local
from fedveil.local.run_recorder import LocalRunRecorder
from fedveil.runs import AuditOutcome, Run
from fedveil.sanitize import sanitize
from fedveil.server_app import checkpoints, validation_split
from fedveil.server_app.run_plan import RunPlan
from fedveil.training.held_out import HeldOutScoringTrainer, split_held_out
from fedveil.training.unit_gradients import UnitTrainer
from fedveil.wire.capture import MessageCapture

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["LocalFederation"]

log = logging.getLogger("fedveil.data")
_SPLIT = "local-"  # name prefix of sites that divide task.data


@final
@dataclass(frozen=True)
class LocalFederation:
    """A server and its sites in this process. Create one with `from_config`.

    Attributes:
        config: the validated run config.
        method: the method with its fields; it decides what is shared.
        task: base model, adapter, data and scores; all sites use this task.
        federation: the server's state and the sites' private states, with each round's byte counts and reports.
        data: each site's folder or file of rows.
    """

    config: RunConfig
    method: Method
    task: Task
    federation: InProcessFederation
    data: Mapping[str, Path]
    _recorder: LocalRunRecorder = field(repr=False)

    @classmethod
    def from_config(
        cls,
        config: str | Path | Mapping[str, object] | RunConfig,
        sites: Mapping[str, str | Path] | int,
        device: str = "cpu",
        tap: MessageCapture | None = None,
        site_seconds: Mapping[str, float] | None = None,
    ) -> LocalFederation:
        """Load the base model and every site's rows, without running a round.

        Args:
            config: the run config, as for `fedveil submit`: a TOML file, or {"method.name": "fedrand", "run.rounds":
                2}, or sections, {"run": {"rounds": 2}}. Omitted keys take their defaults.
            sites: each site's folder or file of rows, by name. Sites with the same path divide its rows among
                themselves according to task.partition. An integer instead divides task.data among that many sites.
            device: "cpu", "cuda" or "auto"; all sites train on it, one after another.
            tap: records every message for attacks. `audit` requires run.capture-messages instead.
            site_seconds: simulated seconds that each site's client round takes; 1 for sites not listed. With
                cohort.buffer-size they decide which uploads a round takes; they also set `federation.clock`.

        Raises:
            ConfigError: a key or value in the run config is invalid or would have no effect in one process, or there
                are no sites.
            TaskError: a base model, a folder, a column or a row is missing.
            StateError: another run already has this run.name, or there is no run to resume.
        """
        run_config = read_config(config)
        folders = _folders(run_config, sites)
        require_local(run_config, len(folders), divides_data=isinstance(sites, int))
        run = run_config.run
        if tap and run.capture_messages:
            raise ConfigError("tap: run.capture-messages already records the messages; use only one of the two")
        if run.name and not run.resume:
            checkpoints.require_new(Path(run.dir).expanduser() / run.name)
        plan = RunPlan.from_config(run_config, run.name or "local", device)
        method, task = plan.method, plan.task
        if plan.guarantee is not None and math.isfinite(plan.guarantee.budget.epsilon):
            raise ConfigError(
                "dp.epsilon, or epsilon in method.params: an in-process run has no ledger to enforce the limit "
                f"{plan.guarantee.budget.epsilon:g}; leave it out, and read `epsilon` after the run"
            )
        rows = _rows(task, run_config, folders)

        def trainer_for(site: str, ctx: RoundContext) -> Trainer:
            of_site = rows[site]
            trainer = task.trainer(of_site.trained, ctx.rng("batches"), round_=ctx.round)
            if of_site.units is not None:
                trainer = UnitTrainer(trainer, of_site.units, run_config)
            return HeldOutScoringTrainer(trainer, of_site.held, lambda: 0) if of_site.held else trainer

        state = method.init(task.spec, plan.initial_weights(), rng.initial_stream(run.seed, "method init"))
        exchange = MessageExchange(method, run_config.method.name, task.spec)
        share = run_config.cohort.max_weight_fraction
        federation = InProcessFederation(
            exchange,
            run_config,
            trainer_for,
            list(rows),
            state,
            tap=tap,
            max_share=share,
            site_seconds=site_seconds or {},
        )
        recorder = LocalRunRecorder(plan, federation)
        local = cls(run_config, method, task, federation, folders, recorder)
        recorder.end_with(local)
        return local

    def run(self, on_round: Callable[[LocalFederation, int], None] | None = None, progress: bool | None = None) -> Run:
        """Run the remaining rounds, or until evaluate.patience runs out, and write the final model with its card.

        Args:
            on_round: called after each round with this federation and the round number, from 0.
            progress: whether to show a progress bar on standard error, or None to show it only on a terminal.

        Returns:
            `results`.

        Raises:
            StateError: the run has already ended.
        """
        recorder = self._recorder
        if recorder.ended or recorder.has_failed:
            how = "has ended" if recorder.ended else "was ended by an error"
            resume = ", or resume it with run.resume = true" if self.config.run.name and recorder.has_failed else ""
            raise StateError(f"run: this run {how} and cannot continue; create a new federation{resume}")
        try:
            recorder.begin()
            with _progress_bar(sys.stderr.isatty() if progress is None else progress) as bar:
                shown = bar.add_task("rounds", total=recorder.rounds, completed=recorder.next_round, scores="")
                while not recorder.is_over():
                    record = recorder.run_round()
                    scores = ", ".join(f"{name} {value:.4g}" for name, value in record.scores.get("server", {}).items())
                    bar.update(shown, advance=1, scores=sanitize(scores, 60))
                    if on_round:
                        on_round(self, record.round)
            recorder.finish()
        except BaseException as error:
            recorder.fail(error)
            raise
        return self.results

    def evaluate(
        self, data: str | Path, site: str | None = None, split: str = "test", generate: bool = False
    ) -> dict[str, float]:
        """Return the current model's scores: always "loss" and, with `generate`, also the scores of its generated text.

        Args:
            data: folder or file of rows.
            site: the site whose own model is scored, if sites keep models; None scores the server's model.
            split: the split of the folder to score. Under evaluate.validation-share, the rows that are held out to
                choose the model are left out of "test", and serve as "validation" in a folder without that split.
            generate: whether to generate text, which takes longer.

        Raises:
            ConfigError: there is no such site, or it has no model of its own.
            TaskError: the folder, the split or a column is missing.
        """
        if site is not None and site not in self.federation.sites:
            raise ConfigError(f"site: expected one of {', '.join(self.federation.sites)}, found {site!r}")
        views = self.federation.models(site)
        view = "server" if site is None else "client"
        if view not in views:
            raise ConfigError(
                f"site: {site} does not have its own model, only {', '.join(views)}: either "
                f"{self.config.method.name} keeps no model at a site, or the site has not trained yet; leave site "
                "out"
            )
        # Under FedSP, the sites' own task trains a proxy.
        task = self._recorder.server_task if site is None else self.task
        weights = {name: views[view][name] for name in task.spec}
        divided = validation_split.read_test_split(task, self.config, Path(data).expanduser(), split)
        return task.evaluate(weights, divided.test, generate)

    @property
    def results(self) -> Run:
        """Return the run. Without run.name, its folder is deleted once both this object and the returned one are gone.

        Raises:
            StateError: `run` has not been called yet.
        """
        folder = self._recorder.folder.folder
        if not (folder / "status.json").is_file():
            raise StateError("run: the run has not started; call run() first")
        return Run(folder, owner=self)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return one row per round; see `Run.metrics`. Raises StateError before `run`."""
        return self.results.metrics

    def metrics_frame(self) -> DataFrame:
        """Return `metrics` as a pandas DataFrame. Raises ConfigError without pandas, StateError before `run`."""
        return self.results.metrics_frame()

    @property
    def scores(self) -> dict[str, float]:
        """Return the server model's last scores on task.evaluation; {} if that is not set."""
        return self.results.scores

    @property
    def epsilon(self) -> dict[str, float]:
        """Return, by site, an upper bound on the epsilon charged to any record; see `Run.epsilon`."""
        return self.results.epsilon

    @property
    def privacy(self) -> list[str]:
        """Return sentences that state the guarantee and its bound for each site; see `Run.privacy`."""
        return self.results.privacy

    @property
    def models(self) -> dict[str, Weights]:
        """Return the current models, by view. `federation.models(site)` also includes the site's own model."""
        return dict(self.federation.models())

    @property
    def card(self) -> PrivacyCard:
        """Return the privacy card of the final model. Raises StateError before the run ends."""
        return self.results.card

    def report(self, file: str | Path = "report.html") -> Path:
        """Write the same page as `fedveil report` and return its path. Raises StateError before `run`."""
        return self.results.report(file)

    def save(self, folder: str | Path) -> Path:
        """Write the final model and its card to a new folder that PEFT or transformers can load. Return its path.

        Raises:
            StateError: the run does not have a final model yet, or the folder is not empty.
        """
        return self.results.save(folder)

    def audit(
        self,
        non_members: str | Path | None = None,
        max_rows: int = 300,
        seed: int = 0,
        minutes: float | None = None,
        canaries: tuple[str, str | Path] | None = None,
        device: str = "auto",
        say: Callable[[str], None] = lambda text: None,
    ) -> AuditOutcome:
        """Attack the run using its captured messages, with controls, like `fedveil audit`. Members are the sites' rows.

        The arguments are those of `Run.audit`. By default, if all sites divide one folder, the non-members come from
        that folder: the rows beyond task.examples-per-site, or the split "test".

        Raises:
            StateError: the run has no final model, or run.capture-messages was not set.
            ConfigError: there are too few examples, several folders are each divided among sites, or one of the sites
                that divide the folder was never drawn in a round.
        """
        results = self.results
        if not self.config.run.capture_messages:
            raise StateError(
                "run.capture-messages: an audit attacks the captured messages, but this run captured none; set "
                "this key to true and run again"
            )
        data, sites = _members(self.data)
        if data is not None and set(load_run(results.folder).sites) != set(self.data):
            raise ConfigError(
                "cohort.fraction: no round drew one of the sites that divide the folder, so their shares cannot "
                "be determined for an audit; run more rounds, or draw all sites"
            )
        return results.audit(data, sites, non_members, max_rows, seed, minutes, canaries, device, say)


@dataclass(frozen=True)
class _SiteRows:
    """A site's prepared rows: the training rows, with their units, and the rows held out for validation."""

    trained: Rows
    units: UnitRows | None = None
    held: Rows = ()


def _folders(config: RunConfig, sites: Mapping[str, str | Path] | int) -> dict[str, Path]:
    """Return each site's folder. Raises ConfigError if there are no sites, or no task.data to divide."""
    if not isinstance(sites, int):
        if not sites:
            raise ConfigError("sites: there are none; give a mapping from each site's name to its folder of examples")
        # Sorted, so that a resumed run or an audit gives each site the same state and share of a divided folder.
        return {name: Path(sites[name]).expanduser() for name in sorted(sites, key=natural_key)}
    if sites < 1 or not config.task.data:
        raise ConfigError(
            f"sites: a number of sites must be positive and divide task.data, found {sites} and task.data = "
            f'"{config.task.data}"; set both, or name each site and its folder'
        )
    return {f"{_SPLIT}{i}": Path(config.task.data).expanduser() for i in range(sites)}


def _members(folders: Mapping[str, Path]) -> tuple[Path | None, Mapping[str, Path]]:
    """Return what an audit needs: the folder that all sites divide, or each site's own folder. Raises ConfigError."""
    shared = Counter(folders.values())
    if len(folders) > 1 and len(shared) == 1:
        return next(iter(shared)), {}
    if len(shared) < len(folders):
        raise ConfigError(
            "sites: only some of the sites divide a folder, so the audit cannot tell which rows are whose; call "
            "results.audit(sites=...) with each site's own files"
        )
    return None, folders


def _rows(task: Task, config: RunConfig, folders: Mapping[str, Path]) -> dict[str, _SiteRows]:
    """Return each site's prepared rows. A folder named by several sites is divided among them.

    Raises TaskError if evaluate.validation-share leaves a site without a row to train on, or without a row to hold out.
    """
    shared, used = Counter(folders.values()), Counter[Path]()
    site_examples = dict[str, _SiteRows]()
    for name, folder in folders.items():
        share = DatasetShard(used[folder], shared[folder]) if shared[folder] > 1 else None
        prepared = task.prepare(folder, "train", share)
        units = group_rows_of_run(config, prepared, folder, share)
        if config.held_out_fraction:
            site_examples[name] = _split_rows(task, config, name, prepared, task.examples(folder, "train", share))
        else:
            site_examples[name] = _SiteRows(prepared.rows, units)
        used[folder] += 1
    return site_examples


def _split_rows(task: Task, config: RunConfig, site: str, prepared: PreparedData, examples: Examples) -> _SiteRows:
    """Split off a site's held-out rows, which the content of their `examples` determines. Raises TaskError."""
    origins = [example.origin for example in examples]
    marks = dict(zip(origins, validation_split.mark_held_out(examples, config), strict=True))
    held = frozenset(at for at, origin in enumerate(prepared.origins()) if marks[origin])  # a task may drop rows
    if not 0 < len(held) < len(prepared.rows):
        raise TaskError(
            f"{validation_split.KEY}: the site {site} needs at least one row to hold out and one to train on, but "
            f"{len(held)} of its {len(prepared.rows)} rows are held out; add rows, or set the server's test data "
            "(task.evaluation)"
        )
    log.info(
        "%s: %s of the %s rows of %s are held out", validation_split.KEY, f"{len(held):,}", f"{len(prepared.rows):,}",
        site,
    )  # fmt: skip
    split = split_held_out(prepared.rows, held)
    return _SiteRows(split.trained, held=split.held)


def _progress_bar(is_shown: bool) -> Progress:
    """Return a progress bar on standard error; it prints nothing unless `is_shown`."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    from rich.console import Console

    last = TextColumn("{task.fields[scores]}", markup=False)
    return Progress(*columns, last, console=Console(stderr=True), disable=not is_shown)
