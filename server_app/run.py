"""One run on the server, from its run config to the final model, the card and the recorded end.

| step | where |
|---|---|
| 1. resolve the run | `RunPlan` |
| 2. the run folder records the config; metrics have their sinks | `RunFolder`, `MetricsDispatcher` |
| 3. the state before round 0 | `RoundLoop.initialise` |
| 4. the rounds, over Flower | `MethodStrategy.run` |
| 5. the card | `completion.leave_card` |
| 6. "completed" or "failed", in status.json and in the audit log | `record_run` |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from logging import ERROR, INFO
from pathlib import Path

from flwr.serverapp import Grid
from flwr.supercore import log

from fedveil import tasks
from fedveil.config import RunConfig, parse
from fedveil.contract.param_spec import Weights
from fedveil.errors import FedVeilError
from fedveil.server_app import completion
from fedveil.server_app.evaluation import ServerEvaluator
from fedveil.server_app.flower_strategy import MethodStrategy
from fedveil.server_app.message_signing import MessageSigner
from fedveil.server_app.metrics import sinks
from fedveil.server_app.metrics.dispatcher import MetricsDispatcher
from fedveil.server_app.metrics.epsilon import make_epsilon_sink
from fedveil.server_app.run_folder import RunFolder
from fedveil.server_app.run_plan import RunPlan
from fedveil.training.adapter_task import count_adapter_weights


def run_federation(grid: Grid, run_config: Mapping[str, bool | int | float | str], run_id: int) -> None:
    """Run a run config's rounds over `grid`. Errors that end the run are recorded in the run folder and raised."""
    config = parse(run_config)
    name = config.run.name or f"run-{run_id}"
    with RunFolder(Path(config.run.dir).expanduser() / name, config.run.resume) as folder:
        # For users who cannot read the run folder: fedveil/console/runs/run_follower.py.
        log(INFO, "fedveil: the run folder is %s", folder.folder.absolute())
        with record_run(folder, config, run_id, grid.run.fab_hash):
            signer = MessageSigner.from_environment(run_id, grid.run.fab_hash, run_config)
            strategy = prepare_strategy(RunPlan.from_config(config, name), folder, signer, grid.run.fab_hash)
            strategy.run(grid, config.run.rounds)
            completion.leave_card(folder, config, strategy.rounds.method, strategy.rounds.course)
        _record_end(folder, config, strategy)


@contextlib.contextmanager
def record_run(folder: RunFolder, config: RunConfig, run_id: int, app: str) -> Iterator[None]:
    """Record the start of a run, and its failure if an error ends it."""
    try:
        folder.status("running", -1, config.run.rounds)
        folder.flower_run(run_id)
        run = {"flower_run": str(run_id), "app": app, "method": config.method.name}
        folder.audit("started", run | {"task": config.task.name, "rounds": config.run.rounds})
        yield
    except BaseException as error:
        try:
            folder.failed(config.run.rounds, completion.failure_reason(error, folder.folder))
        except (FedVeilError, OSError) as second:  # the disk is full: the released lock tells readers
            log(ERROR, "the run's end could not be recorded: %s", second)
        raise


def prepare_strategy(
    plan: RunPlan, folder: RunFolder, signer: MessageSigner | None = None, app: str = ""
) -> MethodStrategy:
    """Return the run's strategy with its initial weights. Contacts no node. Raises ConfigError, TaskError."""
    config, method = plan.config, plan.method
    evaluator = ServerEvaluator.from_config(plan.load_server_task(), config)
    counted = count_adapter_weights(plan.task)
    if counted:
        share = 100 * int(str(counted["weights"])) / max(1, int(str(counted["of"])))
        log(INFO, "%s: %s of %s weights are trained (%.2f %%)", *counted.values(), share)
    folder.config(config, method, counted)
    opened = sinks.open_sinks(sinks.SinkRunInfo(folder.folder, folder.id, config, folder.resumed))
    folder.reading = evaluator.notes if evaluator else []
    epsilon = make_epsilon_sink(plan.guarantee, config, folder.folder / "metrics.jsonl")
    folder.outlets = MetricsDispatcher(opened, epsilon)
    strategy = MethodStrategy(
        method,
        plan.settings,
        folder=folder,
        scores=None if evaluator is None else lambda server, round_: evaluator.scores(method, server, round_),
        spec=plan.task.spec,
        device=plan.task.accelerator,
        save=ModelWriter(plan, evaluator).write,
        signer=signer,
        app=app,
    )
    strategy.rounds.initialise(plan.initial_weights())  # no other references to them remain
    return strategy


class ModelWriter:
    """Writes a run's final model in its libraries' file formats."""

    def __init__(self, plan: RunPlan, evaluator: ServerEvaluator | None) -> None:
        self._plan, self._evaluator = plan, evaluator

    def write(self, weights: Weights, into: Path) -> None:
        """Write the weights. Without an evaluator, load the base again, because the rounds need its memory."""
        plan = self._plan
        task = self._evaluator.task if self._evaluator else tasks.load_task(plan.config, plan.server_adapter)
        task.save({name: weights[name] for name in task.spec}, into)


def _record_end(folder: RunFolder, config: RunConfig, strategy: MethodStrategy) -> None:
    course = strategy.rounds.course
    why = course.stopped(config.run.rounds)
    folder.audit("ended", {"state": "completed"} | ({"reason": why} if why else {}))
    folder.status("completed", course.done, config.run.rounds, why, **course.about)
    log(INFO, "fedveil: %s rounds done; last scores: %s", course.done + 1, folder.last_scores() or "none")
    if best := course.about.get("best"):
        prefix = "final/ holds" if best["kept"] else "best was"
        log(INFO, "fedveil: %s round %s, %s %.6g", prefix, best["round"] + 1, best["metric"], best["value"])
