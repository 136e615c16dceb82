"""Resolve a run from its run config before the server contacts a node or writes a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedveil import rng, strategies, tasks
from fedveil.config import RunConfig
from fedveil.contract.adapter import Adapter
from fedveil.contract.method import Method, ServerTrained
from fedveil.contract.param_spec import Weights
from fedveil.contract.privacy import PrivacyGuarantee
from fedveil.contract.task import Task
from fedveil.data import tables
from fedveil.errors import ConfigError
from fedveil.privacy.guarantee_source import check_guarantee, check_public_length
from fedveil.server_app.distillation import ServerDistillation
from fedveil.server_app.evaluation import ModelSelection
from fedveil.server_app.run_settings import RunSettings
from fedveil.tasks.text_generation import TextGeneration
from fedveil.training import optimizers
from fedveil.training.per_example import PerExampleLoss


@dataclass(frozen=True)
class RunPlan:
    """A run's method, task and rules.

    Attributes:
        config: the run config.
        method: the method with its parameters.
        task: the task with the adapter that clients train; its base model is loaded on first use.
        guarantee: the guarantee of the method or of noisy training steps; None if there is none.
        selection: how the run's final model is chosen, or None to use the last round's model.
        server_adapter: the adapter of the server's model.
        settings: the settings for the rounds.
        device: the device for the tasks: "auto", "cpu", "cuda".
    """

    config: RunConfig
    method: Method
    task: Task
    guarantee: PrivacyGuarantee | None
    selection: ModelSelection | None
    server_adapter: Adapter
    settings: RunSettings
    device: str = "auto"

    @classmethod
    def from_config(cls, config: RunConfig, name: str, device: str = "auto") -> RunPlan:
        """Resolve a run config. Contacts no node and writes nothing.

        Raises:
            ConfigError, TaskError: the config is invalid, or its files do not match it; the message names the key.
        """
        method = strategies.create_method(config.method.name, config.method.params)
        task = tasks.load_task(config, method.adapter, device)
        guarantee = check_guarantee(method, config, isinstance(task, PerExampleLoss))
        check_public_length(guarantee, config)
        optimizers.check_optimizer(method, config)
        selection = ModelSelection.from_config(config, tasks.task_info(config.task.name).metrics(config.task), method)
        server_adapter = method.server_adapter if isinstance(method, ServerTrained) else method.adapter
        settings = RunSettings.from_config(config, name, selection)
        return cls(config, method, task, guarantee, selection, server_adapter, settings, device)

    def load_server_task(self) -> Task:
        """Return the task with the server's adapter: the clients' own if the two are equal."""
        if self.server_adapter == self.method.adapter:
            return self.task
        return tasks.load_task(self.config, self.server_adapter, self.device)

    def initial_weights(self) -> Weights:
        """Return the weights before round 0; for a `ServerTrained` method, after the server's own training.

        Raises:
            ConfigError: for such a method, task.server-data is not set, or the task is not text generation.
        """
        method, config, task = self.method, self.config, self.task
        weights = task.initial(rng.initial_stream(config.run.seed, "weights"))
        if not isinstance(method, ServerTrained) or not method.needs_server_rows:
            return weights
        model = tasks.load_task(config, method.server_adapter, self.device)
        if not (config.task.server_data and isinstance(task, TextGeneration) and isinstance(model, TextGeneration)):
            raise ConfigError(
                f"task.server-data: before round 0, {config.method.name} trains on the server's own examples, for text "
                f'generation only, found "{config.task.server_data}"; name a folder with them, or set distil_steps = 0'
            )
        with tables.columns_named_by("task.server-data"):
            rows = task.encode(task.examples(Path(config.task.server_data), "train"))
        draws = rng.initial_stream(config.run.seed, "preparation")
        return method.before_round_0(weights, ServerDistillation(task, model, rows, draws))
