"""A site's refusals: each names the broken rule and adds a line to the site's audit log."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fedveil.errors import FedVeilError
from fedveil.sanitize import sanitize

AuditLogWriter = Callable[[str, Mapping[str, Any]], object]  # appends an event with these fields; raises StateError


def ignore_entry(event: str, about: Mapping[str, Any]) -> None:
    """Write nothing; for in-process sites, which have no audit log."""


@contextlib.contextmanager
def number_refusals(rule: str) -> Iterator[None]:
    """Attach the number of the enforced rule to each error raised inside, unless it already has one."""
    try:
        yield
    except FedVeilError as error:
        error.rule = error.rule or rule
        raise


@contextlib.contextmanager
def log_refusals(write: AuditLogWriter, request: str, about: Mapping[str, Any]) -> Iterator[None]:
    """Write a line for each error raised inside: the server's request, the broken rule, and the reason."""
    try:
        yield
    except FedVeilError as error:
        reason = sanitize(f"{type(error).__name__}: {error}", 2000)
        write("sum-refused", {**about, "request": request, "rule": error.rule, "reason": reason})
        raise
