"""`flower-superexec` of a server: Flower's program, which here survives unexpected answers.

It asks its SuperLink for the next task. Flower's program ends at nearly any error, and with it every run: its SuperLink
answers 500 while its database is locked, for example. Here it asks again (flower/retries.py). For a site,
process_zygote.py starts it.
"""

from __future__ import annotations

import sys

from fedveil.errors import ConfigError
from fedveil.guard.flower import replaced, retries


def patch_superexec() -> None:
    """Make a SuperExec in this process retry this way; exit with the reason if Flower is unsupported."""
    try:
        replaced.require_attributes("SuperExec")
    except ConfigError as error:
        sys.exit(f"error: {error}")
    # For all its calls: the client created with it only asks for tasks.
    retries.patch_retries("flwr.supercore.superexec.run_superexec", "make_simple_http_retry_invoker")


def main() -> None:
    """Run the process. Its arguments are those of Flower's own `flower-superexec`."""
    patch_superexec()
    from flwr.supercore.cli import flower_superexec

    flower_superexec()
