"""`flower-superexec` of a server: Flower's own with three changes. A site's on Linux starts in process_zygote.py.

It starts one type of task: ServerApps at a server, ClientApps at a site. Flower's own starts every type that it knows:
agents, models, connectors and simulations too. Their programs are Flower's, so the guard would not see what they run.

It outlives an answer that it does not expect. It asks its SuperLink for the next task. At any answer but a few Flower's
own ends, and with it every run: its SuperLink answers 500 for as long as its database is locked, for example. Here it
asks again (flower/retries.py).

A task stays claimed while its program starts, however slowly (flower/task_claims.py).
"""

from __future__ import annotations

import importlib
import os
import sys

from fedveil.errors import ConfigError
from fedveil.federation.message_signatures.environment import BUNDLES_VARIABLE, KEY_VARIABLE, SIGNERS_VARIABLE
from fedveil.guard.flower import replaced, retries, task_claims
from fedveil.guard.task_programs import CLIENT_APP, SERVER_APP

_OF_A_SERVER = (KEY_VARIABLE, SIGNERS_VARIABLE, BUNDLES_VARIABLE)


def patch_superexec(task_type: str) -> None:
    """Make a SuperExec in this process retry, and start only this type of task; exit if Flower is unknown."""
    try:
        replaced.require_attributes("SuperExec")
    except ConfigError as error:
        sys.exit(f"error: {error}")
    # For all its calls: the client created with it only asks for tasks.
    retries.patch_retries("flwr.supercore.superexec.run_superexec", "make_simple_http_retry_invoker")
    patch_task_types(task_type)


def patch_task_types(task_type: str) -> None:
    """Make a SuperExec in this process ask for tasks of this type, and refuse tasks of any other type."""
    known = importlib.import_module("flwr.supercore.constant").TaskType
    module = importlib.import_module("flwr.supercore.superexec.plugin.base_exec_plugin")
    module.AutoExecPlugin.supported_task_types = frozenset({known(task_type)})


def task_type_of_environment() -> str:
    """Return the type of task for an image's SuperExec: a server's has the variables of a ServerApp, a site's none."""
    return SERVER_APP if any(os.environ.get(name) for name in _OF_A_SERVER) else CLIENT_APP


def main(task_type: str | None = SERVER_APP) -> None:
    """The process. Its arguments are those of Flower's own `flower-superexec`. None: the environment says the type."""
    patch_superexec(task_type or task_type_of_environment())
    task_claims.patch_subprocesses()
    from flwr.supercore.cli import flower_superexec

    flower_superexec()
