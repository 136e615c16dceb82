"""A task is a model, its data, a loss and metrics. One file each; found by its file name, as methods are.

A file has `INFO`, a `fedveil.contract.task.TaskInfo`, and `create(config, adapter, device) -> Task`. So has a module of
another package that an entry point in the group "fedveil.tasks" names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedveil.discovery import Room

if TYPE_CHECKING:  # they import torch, which whoever asks for names alone does not need
    from fedveil.config import RunConfig
    from fedveil.contract.adapter import Adapter
    from fedveil.contract.task import Task, TaskInfo

_ROOM = Room("fedveil.tasks", "fedveil.tasks", "task.name", "-", ("INFO", "create"))


def names() -> list[str]:
    """Names of all tasks, with hyphens ("text-generation"): the files of this folder, and those of other packages."""
    return _ROOM.names()


def info(name: str) -> TaskInfo:
    """What the task of that name says of itself. Raises ConfigError for an unknown name."""
    found: TaskInfo = _ROOM.module(name).INFO
    return found


def load(config: RunConfig, adapter: Adapter, device: str = "auto") -> Task:
    """The task that `config.task.name` names. Raises ConfigError for an unknown name, TaskError for a missing base."""
    task: Task = _ROOM.module(config.task.name).create(config, adapter, device)
    return task
