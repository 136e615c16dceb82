"""A task is a model with its data, loss and metrics. Like a method, each task is one file, found by its name.

A file defines `INFO`, a `fedveil.contract.task.TaskInfo`, and `create(config, adapter, device) -> Task`. A module in
another package, named by an entry point in the group "fedveil.tasks", defines the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedveil.plugins import PluginPackage

if TYPE_CHECKING:  # these import torch, which is not needed to list names
    from fedveil.config import RunConfig
    from fedveil.contract.adapter import Adapter
    from fedveil.contract.task import Task, TaskInfo

__all__ = ["list_tasks", "load_task", "task_info"]

_PLUGINS = PluginPackage("fedveil.tasks", "fedveil.tasks", "task.name", "-", ("INFO", "create"))


def list_tasks() -> list[str]:
    """Return the names of all tasks in this folder and in other packages, with hyphens ("text-generation")."""
    return _PLUGINS.list_names()


def task_info(name: str) -> TaskInfo:
    """Return the description of the task with that name. Raises ConfigError for an unknown name."""
    info: TaskInfo = _PLUGINS.load_module(name).INFO
    return info


def load_task(config: RunConfig, adapter: Adapter, device: str = "auto") -> Task:
    """Load the task `config.task.name`. Raises ConfigError for an unknown name, TaskError for a missing base."""
    task: Task = _PLUGINS.load_module(config.task.name).create(config, adapter, device)
    return task
