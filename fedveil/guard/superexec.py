"""`flower-superexec` of a server: Flower's own, which outlives an answer that it does not expect.

It asks its SuperLink for the next task. At any answer but a few Flower's own ends, and with it every run: its SuperLink
answers 500 for as long as its database is locked, for example. Here it asks again (flower/retries.py). A site's starts
in process_zygote.py.
"""

from __future__ import annotations

import sys

from fedveil.errors import ConfigError
from fedveil.guard.flower import replaced, retries


def patch_superexec() -> None:
    """Make a SuperExec in this process retry this way; exit with the reason if Flower is unknown."""
    try:
        replaced.require_attributes("SuperExec")
    except ConfigError as error:
        sys.exit(f"error: {error}")
    # Of all its calls: the client that is made with it asks for tasks and nothing else.
    retries.patch_retries("flwr.supercore.superexec.run_superexec", "make_simple_http_retry_invoker")


def main() -> None:
    """The process. Its arguments are those of Flower's own `flower-superexec`."""
    patch_superexec()
    from flwr.supercore.cli import flower_superexec

    flower_superexec()
