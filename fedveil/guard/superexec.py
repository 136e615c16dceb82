"""`flower-superexec` for a server: Flower's with three changes. On Linux, a site's SuperExec is in process_zygote.py.

It starts only one type of task: ServerApps on a server, ClientApps at a site. Flower's own starts every type it knows,
including agents, models, connectors and simulations. Their programs are Flower's, so the guard would not see the code
that they run.

It survives unexpected answers when it asks its SuperLink for the next task. Flower's own program exits after most of
them, and every run ends with it: for example, the SuperLink answers 500 while its database is locked. This one retries
(flower/retries.py).

A task stays claimed while its program starts, however slowly (flower/task_claims.py).
"""

from __future__ import annotations

import importlib
import os
import sys

from fedveil.errors import ConfigError
from fedveil.federation.message_signatures.environment import BUNDLES_VARIABLE, KEY_VARIABLE, SIGNERS_VARIABLE
from fedveil.guard.flower import replaced, retries, task_claims
from fedveil.guard.plain_log import write_plain_log
from fedveil.guard.task_programs import CLIENT_APP, SERVER_APP

_OF_A_SERVER = (KEY_VARIABLE, SIGNERS_VARIABLE, BUNDLES_VARIABLE)


def patch_superexec(task_type: str) -> None:
    """Make a SuperExec in this process retry, and start only this type of task; exit if Flower is unsupported."""
    try:
        replaced.require_attributes("SuperExec")
    except ConfigError as error:
        sys.exit(f"error: {error}")
    write_plain_log()
    # This covers all of its calls: the client created with it only asks for tasks.
    retries.patch_retries("flwr.supercore.superexec.run_superexec", "make_simple_http_retry_invoker")
    patch_task_types(task_type)


def patch_task_types(task_type: str) -> None:
    """Make a SuperExec in this process ask for tasks of this type, and refuse tasks of any other type."""
    known = importlib.import_module("flwr.supercore.constant").TaskType
    module = importlib.import_module("flwr.supercore.superexec.plugin.base_exec_plugin")
    module.AutoExecPlugin.supported_task_types = frozenset({known(task_type)})


def task_type_of_environment() -> str:
    """Return the task type for an image's SuperExec: only a server's environment has a ServerApp's variables."""
    return SERVER_APP if any(os.environ.get(name) for name in _OF_A_SERVER) else CLIENT_APP


def main(task_type: str | None = SERVER_APP) -> None:
    """Run the process with the arguments of Flower's `flower-superexec`. If None, the environment gives the type."""
    patch_superexec(task_type or task_type_of_environment())
    task_claims.patch_subprocesses()
    from flwr.supercore.cli import flower_superexec

    flower_superexec()
