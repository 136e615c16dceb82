"""A federation in one process, from a run config and the folders of its sites: for research, and for notebooks.

    from fedveil.local import LocalFederation

    local = LocalFederation.from_config(
        {"method.name": "fedrand", "run.rounds": 2}, {"north": "rows/north", "south": "rows/south"}
    )
    local.run()
    local.evaluate("rows/test")                   # the server's model
    local.evaluate("rows/test", site="north")     # that of one site
    local.federation.upload_bytes                 # bytes sent by the sites

Neither Flower nor any other process takes part, and no site has a policy or a ledger of its own. It encodes, draws and
sums the same values as a run over gRPC (`fedveil.federation.in_process`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from fedveil import rng, strategies, tasks
from fedveil.config import RunConfig, parse
from fedveil.contract.method import Method, RoundContext
from fedveil.contract.task import DatasetShard, Rows, Task
from fedveil.contract.trainer import Trainer
from fedveil.data.units import UnitRows, group_rows_of_run
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.models import own_module
from fedveil.privacy.guarantee_source import check_public_length, guarantee_of
from fedveil.training.unit_gradients import UnitTrainer
from fedveil.wire.capture import MessageCapture

__all__ = ["LocalFederation"]

# What only a run with a server or sites of its own does; a value here would be passed over.
_ELSEWHERE = (
    "task.data", "task.evaluation", "task.server-data", "evaluate.select-model", "evaluate.patience",
    "evaluate.held-out", "cohort.max-norm-ratio", "run.resume", "run.signature", "run.capture-messages",
)  # fmt: skip


@final
@dataclass(frozen=True)
class LocalFederation:
    """A server and its sites in this process. `of` makes one.

    Attributes:
        config: the run config, checked.
        method: the method with its fields; it decides what is shared.
        task: base model, adapter, data and scores; all sites use this one.
        federation: the server's state, the sites' private states, bytes and reports of each round.
    """

    config: RunConfig
    method: Method
    task: Task
    federation: InProcessFederation

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, object] | RunConfig,
        sites: Mapping[str, str | Path],
        device: str = "cpu",
        tap: MessageCapture | None = None,
    ) -> LocalFederation:
        """Loads the base model and every site's rows; no round has run.

        Args:
            config: the run config, as for `fedveil submit`: {"method.name": "fedrand", "run.rounds": 2}. Omitted keys
                have their defaults.
            sites: each site's folder or file of rows, by name. Sites that name the same one divide its rows among them,
                as task.partition says.
            device: on which all sites train, one after the other: "cpu", "cuda", "auto".
            tap: keeps every message, for attacks; None keeps none.

        Raises:
            ConfigError: a key or value of the run config is wrong, or asks for what does not happen in one process; or
                there is no site.
            TaskError: a base model, a folder, a column or a row is missing.
        """
        run_config = config if isinstance(config, RunConfig) else parse(own_module.with_own_task(config))
        _require_local(run_config)
        if not sites:
            raise ConfigError("sites: expected a mapping from each site's name to its folder of examples, found none")
        method = strategies.create_method(run_config.method.name, run_config.method.params)
        check_public_length(guarantee_of(method, run_config), run_config)
        task = tasks.load_task(run_config, method.adapter, device)
        rows = _rows(task, run_config, {name: Path(folder).expanduser() for name, folder in sites.items()})

        def trainer_for(site: str, ctx: RoundContext) -> Trainer:
            of_site, units = rows[site]
            trainer = task.trainer(of_site, ctx.rng("batches"), round_=ctx.round)
            return trainer if units is None else UnitTrainer(trainer, units, run_config)

        initial = task.initial(rng.initial_stream(run_config.run.seed, "weights"))
        state = method.init(task.spec, initial, rng.initial_stream(run_config.run.seed, "method init"))
        exchange = MessageExchange(method, run_config.method.name, task.spec)
        share = run_config.cohort.max_weight_fraction
        federation = InProcessFederation(exchange, run_config, trainer_for, list(rows), state, tap=tap, max_share=share)
        return cls(run_config, method, task, federation)

    def run(self, on_round: Callable[[LocalFederation, int], None] | None = None) -> None:
        """All rounds of the config; `on_round` is called with this federation and the round, from 0, after each."""
        self.federation.run(lambda _, round_: on_round(self, round_) if on_round else None)

    def evaluate(
        self, data: str | Path, site: str | None = None, split: str = "test", generate: bool = False
    ) -> dict[str, float]:
        """Scores of the model as it is now: always "loss"; with `generate` also of what it writes.

        Args:
            data: folder or file of rows.
            site: the site whose own model is scored, if the method gives sites one; None = the server's.
            split: the split of the folder to score.
            generate: whether texts are generated, which takes longer.

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
                f"site: expected a site with its own model, found {site}, which has only {', '.join(views)}: either "
                f"{self.config.method.name} keeps no model at a site, or it has not trained yet; leave site out"
            )
        weights = {name: views[view][name] for name in self.task.spec}
        return self.task.evaluate(weights, self.task.examples(Path(data).expanduser(), split), generate)


def _rows(task: Task, config: RunConfig, folders: Mapping[str, Path]) -> dict[str, tuple[Rows, UnitRows | None]]:
    """Each site's rows, prepared, with their units; the rows of a folder that several name are divided."""
    shared, used = Counter(folders.values()), Counter[Path]()
    site_examples = dict[str, tuple[Rows, UnitRows | None]]()
    for name, folder in folders.items():
        share = DatasetShard(used[folder], shared[folder]) if shared[folder] > 1 else None
        prepared = task.prepare(folder, "train", share)
        site_examples[name] = prepared.rows, group_rows_of_run(config, prepared, folder, share)
        used[folder] += 1
    return site_examples


def _require_local(config: RunConfig) -> None:
    given, plain = config.flat(), RunConfig().flat()
    for key in _ELSEWHERE:
        if given[key] != plain[key]:
            raise ConfigError(
                f"{key}: expected {plain[key]!r} for a run in one process, found {given[key]!r}; leave it out, or "
                "submit the run"
            )
