"""The model that a run produced: its task and final weights, ready for inference, scoring or merging.

A run folder is untrusted. Its config is parsed as for a run; weights are safetensors with a checksum and must match the
base's shapes; and no code from a model folder is run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil import strategies, tasks
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.config import RunConfig, parse
from fedveil.console.runs.run_reader import config_of
from fedveil.contract.adapter import Adapter, AttachedModel
from fedveil.contract.method import ServerTrained
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import Task
from fedveil.errors import ConfigError, StateError
from fedveil.records.tensor_state import load_state
from fedveil.training.adapter_task import AdaptedTask


@dataclass(frozen=True)
class FinalModel:
    """The server's model from a run.

    Attributes:
        config: the run's config.
        adapter: the server model's adapter.
        tensors: the final weights, and any tensors that the method deploys with them.
    """

    config: RunConfig
    adapter: Adapter
    tensors: Weights

    def task(self, device: str) -> tuple[Task, dict[str, Any]]:
        """Return the task with the base, and its weights. Raises ConfigError or TaskError like `tasks.load_task`."""
        task = tasks.load_task(self.config, self.adapter, device)
        return task, {name: weight for name, weight in self.tensors.items() if name in task.spec}

    def merged(self) -> AttachedModel:
        """Return the base model in fp32 on the CPU, with the run's changes merged into its weights.

        Raises:
            ConfigError: the run's adapter cannot be merged into weights.
            TaskError: the base cannot be loaded.
        """
        if self.adapter.mount != "layers":
            self.adapter.merge(AttachedModel(None, {}, ""), {})  # raises
        plain = _with(self.config, "train", precision="fp32", quantized_base="none", gradient_checkpointing=False)
        task = tasks.load_task(plain, AllWeightsAdapter(), "cpu")
        if not isinstance(task, AdaptedTask):
            raise ConfigError(
                f'task.name: expected a task with one model, found "{self.config.task.name}"; name another run'
            )
        attached = task.attached
        self.adapter.merge(attached, self.tensors)
        return attached


def load_final_model(folder: Path, base: str = "", **evaluate: Any) -> FinalModel:
    """Load the model of the run in `folder`.

    Args:
        base: the base's folder or Hub ID on this machine; "" means the one in the run config.
        evaluate: `evaluate` section fields that override the run's.

    Raises:
        StateError: there is no run, or it has no weights.
        ConfigError: its config is from another version.
    """
    config = _with(parse(config_of(folder)), "evaluate", **evaluate)
    config = _with(config, "train", compile=False)
    if base:
        config = _with(config, "task", model=base)
    method = strategies.create_method(config.method.name, config.method.params)
    file = folder / "final" / "server.safetensors"
    if not file.is_file():
        raise StateError(
            f"run folder {folder}: expected final/server.safetensors, which a run writes when it ends, found none; "
            "wait until it ends, or resume it"
        )
    adapter = method.server_adapter if isinstance(method, ServerTrained) else method.adapter
    return FinalModel(config, adapter, load_state(file).tensors)


def _with(config: RunConfig, section: str, **values: Any) -> RunConfig:
    """Return the config with some values in one section replaced and checked."""
    return parse(config.flat() | {f"{section}.{key.replace('_', '-')}": value for key, value in values.items()})
