"""A task is a model, its data, a loss and metrics. One file each; found by its file name, as methods are."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

from fedveil.errors import ConfigError

if TYPE_CHECKING:
    from fedveil.config import RunConfig
    from fedveil.contract.adapter import Adapter
    from fedveil.contract.task import Task


def names() -> list[str]:
    """Names of all tasks, with hyphens ("text-generation"): the files of this folder."""
    return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(__path__))


def load(config: RunConfig, adapter: Adapter, device: str = "auto") -> Task:
    """The task that `config.task.name` names. Raises ConfigError for an unknown name, TaskError for a missing base."""
    if config.task.name not in names():
        raise ConfigError(f'task.name: expected one of {names()}, found "{config.task.name}"')
    module = importlib.import_module(f"fedveil.tasks.{config.task.name.replace('-', '_')}")
    task: Task = module.create(config, adapter, device)
    return task
