"""Make a SuperNode or SuperExec retry after more kinds of errors than Flower does.

Flower retries when nothing answers and gives up on any other error: its SuperNode then leaves its loop permanently.

| the answer | Flower's behavior | here |
|---|---|---|
| UNAVAILABLE, 503, 504; 502 since Flower 1.42 | retries without limit | the same; 502 with every version |
| INTERNAL, UNKNOWN, DEADLINE_EXCEEDED, ABORTED, CANCELLED, RESOURCE_EXHAUSTED; 408, 429, 500 | gives up | retries; a
  push for at most `PUSH_SECONDS`, because a server that cannot accept it would otherwise get it forever |
| RESOURCE_EXHAUSTED from gRPC itself, for a response larger than response_sizes.py permits | gives up | the same |
| a TLS handshake that fails after an earlier call succeeded | gives up | retries: it was the right server before |
| a TLS handshake that fails before that | gives up | the same: this is a different server, or a different CA |
| PERMISSION_DENIED, 403: the run has ended | gives up | the same |
| UNAUTHENTICATED, 401 | the process ends | the same |

The patch does not change `_RETRYABLE_STATUS_CODES` in Flower's http_retry.py, because it does not limit pushes, and the
app's processes use it too.
"""

from __future__ import annotations

import importlib
import re
import threading
import time
from collections.abc import Callable
from logging import WARNING
from typing import Any

from fedveil.guard.minute_log import MinuteLog
from fedveil.sanitize import sanitize

AGAIN = frozenset(
    ("INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED", "RESOURCE_EXHAUSTED", "408", "429", "500")
)
PUSH_SECONDS = 300.0
_PUSHES = ("PushMessagesRequest", "PushObjectRequest")
_BAD_GATEWAY = "502"
_TOO_LARGE = ("eceived message larger than max", "ecompressed message larger than max")  # in gRPC's own text
_TLS_WORDS = ("certificate", "ssl", "tls")  # the same as in Flower's http_retry.py

_OWN = re.compile(r"fedveil: ((?:the site's clock is|this key is registered, but) [^\"\n]{1,300})")

_log = MinuteLog()


def status_of(error: BaseException) -> str:
    """Return the status of a gRPC ("INTERNAL") or HTTP ("500") error; "" if there was no answer."""
    response = getattr(error, "response", None)
    if response is not None:
        return str(int(response.status_code))
    code = getattr(error, "code", None)
    return str(getattr(code(), "name", "")) if callable(code) else ""


def own_words(error: BaseException) -> str:
    """Return the fleet port's own explanation of a temporary refusal, such as a wrong clock; "" if there is none."""
    details = getattr(error, "details", None)
    text = details() if callable(details) else getattr(getattr(error, "response", None), "text", "")
    match = _OWN.search(str(text)[:2000])
    return sanitize(f"fedveil: {match[1]}", 500) if match else ""


def is_too_large(error: BaseException) -> bool:
    """Return whether gRPC refused an answer for its size (response_sizes.py)."""
    details = getattr(error, "details", None)
    text = str(details() if callable(details) else "")[:500]
    return status_of(error) == "RESOURCE_EXHAUSTED" and any(words in text for words in _TOO_LARGE)


def is_unauthenticated(error: BaseException) -> bool:
    """Return whether the server rejected this process's key."""
    return status_of(error) in ("UNAUTHENTICATED", "401")


class RetryPolicy:
    """Retry decisions for one of Flower's retry invokers."""

    def __init__(self, invoker: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._invoke, self._give_up, self._clock = invoker.invoke, invoker.should_giveup, clock
        self._call = threading.local()  # several threads pull and push a message's parts
        self._has_succeeded = False

    def invoke(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Act like Flower's `invoke`, for a call whose request is among the arguments."""
        asked = {type(value).__name__ for value in (*args, *kwargs.values())}
        self._call.push_began = self._clock() if asked & {*_PUSHES} else None
        result = self._invoke(target, *args, **kwargs)
        self._has_succeeded = True
        return result

    def should_give_up(self, error: Exception) -> bool:
        """Decide like Flower's `should_giveup`, but by the module's table."""
        status = status_of(error)
        if said := own_words(error):
            _log.write(WARNING, said, key="fedveil")
        if status in AGAIN and not is_too_large(error):
            began = getattr(self._call, "push_began", None)
            late = began is not None and self._clock() - began >= PUSH_SECONDS
            if late:
                _log.write(
                    WARNING, f"the server has not accepted a push for {PUSH_SECONDS:g} s ({status}); dropping it"
                )
            return late
        if status == _BAD_GATEWAY or (self._has_succeeded and _is_handshake(error, status)):
            return False
        return bool(self._give_up(error))


def retry_persistently(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `make`, which creates Flower's retry invokers, to give each a `RetryPolicy`."""

    def made(*args: Any, **kwargs: Any) -> Any:
        invoker = make(*args, **kwargs)
        policy = RetryPolicy(invoker)
        invoker.invoke, invoker.should_giveup = policy.invoke, policy.should_give_up
        return invoker

    return made


def patch_retries(module: str, name: str) -> None:
    """Make the invokers from function `name` in Flower's `module` retry as in the module's table."""
    loaded = importlib.import_module(module)
    setattr(loaded, name, retry_persistently(getattr(loaded, name)))


def _is_handshake(error: Exception, status: str) -> bool:
    if status == "UNAVAILABLE":
        details = getattr(error, "details", None)
        return "handshake failed" in str(details() if callable(details) else "").lower()
    return not status and any(word in str(error).lower() for word in _TLS_WORDS)
