"""The ServerApp: run config -> task and method -> rounds.

It checks the run before it contacts any node: unknown keys, fields out of range, a missing base model or data file. The
reason of a refusal is one line in the run's log and in the run folder's status.json.

Imports inside functions are heavy: Flower imports this module also where no run starts.
"""

from __future__ import annotations

from logging import ERROR, INFO
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import log

if TYPE_CHECKING:
    from fedveil.config import RunConfig
    from fedveil.contract.method import Method
    from fedveil.contract.spec import Weights
    from fedveil.contract.task import Task
    from fedveil.server_app.record import RunFolder
    from fedveil.server_app.strategy import MethodStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """One run."""
    from fedveil.config import parse
    from fedveil.errors import FedVeilError
    from fedveil.server_app import ending
    from fedveil.server_app.record import RunFolder

    config = parse(context.run_config)
    name = config.run.name or f"run-{context.run_id}"
    with RunFolder(Path(config.run.dir).expanduser() / name, config.run.resume) as folder:
        # For who cannot look into it: console/runs/following.py.
        log(INFO, "fedveil: the run folder is %s", folder.folder.absolute())
        try:
            folder.status("running", -1, config.run.rounds)
            folder.flower_run(context.run_id)
            run = {"flower_run": str(context.run_id), "app": grid.run.fab_hash, "method": config.method.name}
            folder.audit("started", run | {"task": config.task.name, "rounds": config.run.rounds})
            strategy = prepare(config, folder, name)
            strategy.run(grid, config.run.rounds)
            ending.leave_card(folder, config, strategy.rounds.method, strategy.rounds.course)
        except BaseException as error:
            try:
                folder.failed(config.run.rounds, ending.reason(error, folder.folder))
            except (FedVeilError, OSError) as second:  # the disk is full: the lock that falls tells readers
                log(ERROR, "the run's end could not be recorded: %s", second)
            raise
        course, why = strategy.rounds.course, strategy.rounds.course.stopped(config.run.rounds)
        folder.audit("ended", {"state": "completed"} | ({"reason": why} if why else {}))
        folder.status("completed", course.done, config.run.rounds, why, **course.about)
        log(INFO, "fedveil: %s rounds done; last scores: %s", course.done + 1, folder.last_scores() or "none")
        if best := course.about.get("best"):
            kept = "final/ holds" if best["kept"] else "best was"
            log(INFO, "fedveil: %s round %s, %s %.6g", kept, best["round"] + 1, best["metric"], best["value"])


def prepare(config: RunConfig, folder: RunFolder, name: str) -> MethodStrategy:
    """The strategy of a run, with its initial weights. Contacts no node.

    Raises:
        ConfigError, TaskError: the config or its files do not fit; one line names the key, the expected and the found.
    """
    from fedveil import strategies, tasks
    from fedveil.contract.method import ServerTrained
    from fedveil.privacy.claims import checked_claim
    from fedveil.server_app import sinks
    from fedveil.server_app.evaluate import Choice, Evaluator
    from fedveil.server_app.following.epsilon import accountant
    from fedveil.server_app.following.outlets import Outlets
    from fedveil.server_app.settings import RunSettings
    from fedveil.server_app.strategy import MethodStrategy
    from fedveil.training import optimisers
    from fedveil.training.per_sample import SampleLoss

    method = strategies.create(config.method.name, config.method.fields)
    task = tasks.load(config, method.adapter)
    claim = checked_claim(method, config, isinstance(task, SampleLoss))
    optimisers.check(method, config)
    own = method.server_adapter if isinstance(method, ServerTrained) else method.adapter
    choice = Choice.of(config, tasks.info(config.task.name).metrics(config.task))
    evaluator = Evaluator.of(task if own == method.adapter else tasks.load(config, own), config)
    folder.config(config, method)
    opened = sinks.opened(sinks.About(folder.folder, folder.id, config, folder.resumed))
    folder.outlets = Outlets(opened, accountant(claim, config, folder.folder / "metrics.jsonl"))

    def save(weights: Weights, into: Path) -> None:
        """The base is read again, where the server scores nothing: meanwhile the rounds need its memory."""
        last = evaluator.task if evaluator else tasks.load(config, own)
        last.save({name: weights[name] for name in last.spec}, into)

    strategy = MethodStrategy(
        method,
        RunSettings.of(config, name, choice),
        folder=folder,
        scores=None if evaluator is None else lambda server, round_: evaluator.scores(method, server, round_),
        spec=task.spec,
        device=task.accelerator,
        save=save,
    )
    strategy.rounds.initialise(initial(method, task, config))  # and no other reference to them
    return strategy


def initial(method: Method, task: Task, config: RunConfig) -> Weights:
    """The weights before round 0; for a `ServerTrained` method, after the server's own training.

    Raises:
        ConfigError: such a method has no task.server-data, or another task than text generation.
    """
    from fedveil import rng
    from fedveil.contract.method import ServerTrained

    weights = task.initial(rng.initial(config.run.seed, "weights"))
    if not isinstance(method, ServerTrained) or not method.needs_server_rows:
        return weights

    from fedveil import tasks
    from fedveil.errors import ConfigError
    from fedveil.rows import reading
    from fedveil.server_app.distillation import Distillation
    from fedveil.tasks.text_generation import TextGeneration

    model = tasks.load(config, method.server_adapter)
    if not (config.task.server_data and isinstance(task, TextGeneration) and isinstance(model, TextGeneration)):
        raise ConfigError(
            f"task.server-data: expected a folder of the server's own rows, on which {config.method.name} trains "
            f'before round 0, found "{config.task.server_data}"; name one, or set distil_steps = 0'
        )
    with reading.named_by("task.server-data"):
        rows = task.encode(task.examples(Path(config.task.server_data), "train"))
    return method.before_round_0(weights, Distillation(task, model, rows, rng.initial(config.run.seed, "preparation")))
