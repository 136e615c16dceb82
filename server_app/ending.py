"""Why a run has failed, in one line: what happened, what to lower, and how to go on."""

from __future__ import annotations

import errno
from pathlib import Path

from fedveil.errors import ConfigError, FedVeilError
from fedveil.records import process
from fedveil.server_app import going_back


def reason(error: BaseException, folder: Path) -> str:
    """The reason for status.json; with the command that resumes the run, if it can be resumed as it is."""
    said = str(error) if isinstance(error, FedVeilError) else f"{type(error).__name__}: {error}"
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    if any(isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT) for each in chain):
        said += "; the server's disk is full: free space"
    elif process.is_out_of_memory(error):
        said += f"; {process.LOWER}"
    elif process.Cause.MEMORY in said:  # so a site has answered
        said += f"; {process.LOWER_AT_SITE}"
    if isinstance(error, ConfigError) or not going_back.has_checkpoint(folder):
        return said
    return f"{said}; {process.resume_command(folder)}"
