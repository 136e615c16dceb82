"""What every table of methods does first: a task and a method of the kind it needs, and a federation in process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fedveil import rng, strategies, tasks
from fedveil.benchmarks.run import Options
from fedveil.config import RunConfig
from fedveil.contract.method import Method, RoundContext
from fedveil.contract.spec import Weights
from fedveil.contract.task import Rows, Task
from fedveil.contract.trainer import Trainer
from fedveil.errors import ConfigError
from fedveil.federation.exchange import Exchange
from fedveil.federation.inprocess import Federation
from fedveil.wire.tap import Tap

Around = Callable[[str, RoundContext, Trainer], Trainer]
_Task = TypeVar("_Task", bound=Task)
_Method = TypeVar("_Method", bound=Method)


def method_of(kind: type[_Method], config: RunConfig) -> _Method:
    """The config's method with its fields. Raises ConfigError where it is no `kind`."""
    method = strategies.create(config.method.name, config.method.fields)
    if not isinstance(method, kind):
        raise ConfigError(
            f'method.name: expected {kind.__name__}, found "{config.method.name}"; name that method in the preset'
        )
    return method


def task_of(kind: type[_Task], config: RunConfig, options: Options, adapter: Any = None) -> _Task:
    """The config's task with `adapter`, by default its method's. Raises ConfigError where it is no `kind`."""
    adapter = adapter or strategies.create(config.method.name, config.method.fields).adapter
    task = tasks.load(config, adapter, options.device)
    if not isinstance(task, kind):
        raise ConfigError(
            f'task.name: expected the task {kind.__name__}, found "{config.task.name}"; mend it in the preset'
        )
    return task


def federation(
    exchange: Exchange,
    config: RunConfig,
    task: Task,
    rows: Mapping[str, Rows],
    initial: Weights,
    tap: Tap | None = None,
    around: Around = lambda site, ctx, local: local,
) -> Federation:
    """A federation before its first round, with a site for each entry of `rows`.

    Args:
        rows: each site's, as `task` prepared them.
        initial: weights that the method starts from.
        tap: records every message, where it is given.
        around: puts something in front of a site's training for one round.
    """

    def trainer_for(site: str, ctx: RoundContext) -> Trainer:
        return around(site, ctx, task.trainer(rows[site], ctx.rng("batches"), round_=ctx.round))

    state = exchange.method.init(exchange.spec, initial, rng.initial(config.run.seed, "method init"))
    return Federation(exchange, config, trainer_for, list(rows), state, tap=tap)
