"""Set up the runs for a table of methods: a task and a method of the required kind, and an in-process federation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fedveil import rng, strategies, tasks
from fedveil.config import RunConfig
from fedveil.contract.method import Method, RoundContext
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import Rows, Task
from fedveil.contract.trainer import Trainer
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.wire.capture import MessageCapture
from fedveil_bench.runner import BenchOptions

Around = Callable[[str, RoundContext, Trainer], Trainer]
_Task = TypeVar("_Task", bound=Task)
_Method = TypeVar("_Method", bound=Method)


def method_of(kind: type[_Method], config: RunConfig) -> _Method:
    """Return the config's method with its fields. Raises ConfigError if it is not a `kind`."""
    method = strategies.create_method(config.method.name, config.method.params)
    if not isinstance(method, kind):
        raise ConfigError(
            f'method.name: expected {kind.__name__}, found "{config.method.name}"; name that method in the preset'
        )
    return method


def task_of(kind: type[_Task], config: RunConfig, options: BenchOptions, adapter: Any = None) -> _Task:
    """Return the config's task with `adapter`, by default the method's. Raises ConfigError if it is not a `kind`."""
    adapter = adapter or strategies.create_method(config.method.name, config.method.params).adapter
    task = tasks.load_task(config, adapter, options.device)
    if not isinstance(task, kind):
        raise ConfigError(
            f'task.name: expected the task {kind.__name__}, found "{config.task.name}"; correct it in the preset'
        )
    return task


def create_federation(
    exchange: MessageExchange,
    config: RunConfig,
    task: Task,
    rows: Mapping[str, Rows],
    initial: Weights,
    tap: MessageCapture | None = None,
    around: Around = lambda site, ctx, local: local,
) -> InProcessFederation:
    """Create a federation, before its first round, with one site per entry of `rows`.

    Args:
        rows: each site's examples, as prepared by `task`.
        initial: weights that the method starts from.
        tap: records every message, if not None.
        around: wraps a site's trainer for one round, if not None.
    """

    def trainer_for(site: str, ctx: RoundContext) -> Trainer:
        return around(site, ctx, task.trainer(rows[site], ctx.rng("batches"), round_=ctx.round))

    state = exchange.method.init(exchange.spec, initial, rng.initial_stream(config.run.seed, "method init"))
    return InProcessFederation(exchange, config, trainer_for, list(rows), state, tap=tap)
