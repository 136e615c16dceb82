"""Bound what a server can make a SuperNode store: a message's tree, its bundle and its bytes.

    receive -> the metadata, require_tree   before Flower logs it, and before the store registers the tree
    get_fab -> require_bundle               before Flower reads pyproject.toml in it
    pull_object -> the sum of bytes         before the next object is pulled
    afterwards -> limit_runs                the runs, bundles and contexts that stay (kept_runs.py)

A refused message is logged, confirmed (so that the server does not send it again) and answered with an error that gives
the reason. The SuperNode continues. A message whose run or bundle Flower cannot read is refused, too.

Formal guarantees, for one message:
- the SuperNode stores at most the limit below and the responses to the calls in progress (flower/response_sizes.py);
- its tree expands to the tree that was sent (received_tree.py);
- each text in its metadata has at most `MAX_TEXT` characters, all printable ASCII;
- if it is refused, or its parts do not arrive, nothing of a run that it brought stays.

| site | limit on a message's bytes |
|---|---|
| a policy with `max-bytes-a-round` | that many, plus `EXTRA_BYTES` for headers and records |
| a policy without the key, or no policy | none; the tree bounds the number of objects |
| a policy that this process cannot read, or that is not TOML | `EXTRA_BYTES`: enough for the guard to refuse and log a
  small message |
"""

from __future__ import annotations

import importlib
import threading
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.app import Error, Message, MessageType
from flwr.supercore import log
from flwr.supercore.run import RunNotRunningException

from fedveil.errors import WireError
from fedveil.guard import kept_runs
from fedveil.guard.flower import retries
from fedveil.guard.flower.response_sizes import MAX_RESPONSE_BYTES
from fedveil.guard.received_bundle import require_bundle
from fedveil.guard.received_tree import max_tree_nodes, require_tree
from fedveil.sanitize import sanitize
from fedveil.wire.flower_objects import is_object_id

EXTRA_BYTES = 16 << 20
MAX_TEXT = 200
_KEY = "max-bytes-a-round"
_RAISED = 2  # Flower's ErrorCode.CLIENT_APP_RAISED_EXCEPTION
_REASON = 500


@dataclass(frozen=True)
class MessageLimit:
    """The limit on the bytes of a message's objects.

    Attributes:
        max_bytes: None = no limit.
        reason: the reason for the limit, for the site and the server.
    """

    max_bytes: int | None
    reason: str


def read_limit(node_config: Mapping[str, Any]) -> MessageLimit:
    """Return the limit that the site's policy sets at this moment."""
    path = str(node_config.get("policy", ""))
    if not path:
        return MessageLimit(None, "")
    try:
        limit = tomllib.loads(Path(path).expanduser().read_text("utf-8-sig")).get(_KEY)
    except (OSError, ValueError, RecursionError) as error:
        return MessageLimit(EXTRA_BYTES, f"the SuperNode cannot read the site's policy ({type(error).__name__})")
    if limit is None:
        return MessageLimit(None, "")
    if type(limit) is not int or limit < 1:
        return MessageLimit(EXTRA_BYTES, f"{_KEY} in the site's policy is not a positive whole number")
    return MessageLimit(EXTRA_BYTES + limit, f"{_KEY} is {limit}, plus {EXTRA_BYTES} for headers and records")


class MessageIntake:
    """One call of Flower's `_pull_and_store_message`, with bounds on the server's responses.

    Args:
        given: the arguments of Flower's function.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self._limit = MessageLimit(None, "")
        self._message: Message | None = None
        self._refusal: WireError | None = None
        self._bytes = 0
        self._has_run = True
        self._has_call_failed = False
        self._lock = threading.Lock()

    def pull(self, original: Callable[..., int | None]) -> int | None:
        """Return the run of a message that was stored, or that was refused and answered; None if there was none."""
        asked = ("get_run", "get_fab", "pull_object")
        calls = {"receive": self._receive, **{name: getattr(self, f"_{name}") for name in asked}}
        try:
            run = original(**{**self._given, **calls})
        except Exception as error:
            if self._refusal is None and (self._message is None or self._has_call_failed):
                raise
            if self._refusal is None:
                words = f"{type(error).__name__}: {sanitize(error, _REASON)}"
                self._refusal = WireError(f"message: its run or bundle cannot be read: {words}")
        finally:
            if self._message is not None:
                self._limit_runs(self._message.metadata.run_id)
        return run if self._refusal is None else self._answer_refusal()

    def _receive(self) -> Any:
        received = self._given["receive"]()
        if received is not None:
            self._message, tree = received
            self._has_run = kept_runs.mark_used(self._given["state"], self._message.metadata.run_id)
            self._require(self._require_metadata)
            self._limit = read_limit(self._given["node_config"])  # only now: there are many polls a second
            root, max_nodes = self._message.metadata.message_id, max_tree_nodes(self._limit.max_bytes)
            self._require(lambda: require_tree(tree, root, max_nodes, self._given["object_store"]))
        return received

    def _get_run(self, run_id: int) -> Any:
        return self._ask("get_run", run_id)

    def _get_fab(self, *args: Any) -> Any:
        fab = self._ask("get_fab", *args)
        self._require(lambda: require_bundle(fab.content))
        return fab

    def _pull_object(self, run: int, object_id: str) -> bytes:
        self._require(self._require_bytes)
        content: bytes = self._ask("pull_object", run, object_id)
        with self._lock:
            self._bytes += len(content)
        self._require(self._require_bytes)
        return content

    def _ask(self, name: str, *args: Any) -> Any:
        """Call the server, and refuse the message if a response is too large (flower/response_sizes.py)."""
        try:
            return self._given[name](*args)
        except WireError as error:
            self._refusal = error
            raise
        except Exception as error:
            if not retries.is_too_large(error):
                self._has_call_failed = True
                raise
            self._refusal = WireError(f"answer: it has more than {MAX_RESPONSE_BYTES} bytes")
            raise self._refusal from None

    def _limit_runs(self, run_id: int) -> None:
        state = self._given["state"]
        if not self._has_run:
            kept_runs.forget_run(state, run_id)  # keeps it if its message was stored
        kept_runs.limit_runs(state)

    def _require_metadata(self) -> None:
        """Raise WireError for text that Flower would log, and keep it out of the reply, which repeats it."""
        assert self._message is not None
        texts = self._message.metadata.__dict__
        wrong = [name for name, text in texts.items() if isinstance(text, str) and not _is_short_ascii(text)]
        for name in wrong:
            if name != "_message_id":  # is_object_id decides whether there is a reply
                texts[name] = MessageType.QUERY if name == "_message_type" else ""
        if wrong:
            name = sanitize(wrong[0].lstrip("_"), 40)
            raise WireError(f"message: {name} is longer than {MAX_TEXT} characters or not printable ASCII")

    def _require_bytes(self) -> None:
        limit = self._limit
        with self._lock:
            is_over = limit.max_bytes is not None and self._bytes > limit.max_bytes
        if is_over:
            raise WireError(f"message: it has more than {limit.max_bytes} bytes: {limit.reason}")

    def _require(self, check: Callable[[], None]) -> None:
        """Run a check, and remember the error that it raises."""
        try:
            check()
        except WireError as error:
            self._refusal = error
            raise

    def _answer_refusal(self) -> int | None:
        """Confirm the refused message, and store an error as its reply. Return its run; None if it has no valid id."""
        assert self._message is not None
        run, message_id = self._message.metadata.run_id, self._message.metadata.message_id
        reason = sanitize(self._refusal, _REASON)
        log(WARNING, "fedveil: refused the server's message %s of run %d: %s", sanitize(message_id, 80), run, reason)
        if not is_object_id(message_id):
            return None  # otherwise, Flower would wait forever for a reply to it
        try:
            self._given["confirm_message_received"](run, message_id)
        except (Exception, RunNotRunningException) as error:  # the refusal must be sent all the same
            log(WARNING, "fedveil: the server may send a refused message again: %s", sanitize(error, 200))
        reply = Message(Error(_RAISED, f"WireError: {reason}"), reply_to=self._message)
        flowers = importlib.import_module("flwr.supernode.start_client_internal")
        flowers._insert_message(reply, self._given["state"], self._given["object_store"])
        return run


def _is_short_ascii(text: str) -> bool:
    return len(text) <= MAX_TEXT and text.isascii() and text.isprintable()
