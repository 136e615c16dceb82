"""`flower-supernode` in an image: Flower's program, patched by `patch_supernode`.

On a host, loopback_ports.py does this. The patch changes polling (poll_backoff.py), heartbeats (heartbeat.py), retries
(flower/retries.py) and the connection (flower/), bounds what a server can make the SuperNode keep (message_intake.py),
and makes agent runs create tasks for ClientApps, which the guard judges. It also fixes five faults in Flower 1.39, 1.41
and 1.42:

| event | Flower's behavior | here |
|---|---|---|
| a run ends while its message's parts are in transit to the site | the message stays, and a client process waits
  for its parts forever | the message, its parts and its task are removed, as after other such failures |
| a reply that no process is waiting for, for example from that client process after it has died | it is sent instead of
  the next message's reply. From then on, each reply is one message late, and the server gets nothing from the site
  before its deadlines | it is sent at the next poll for messages |
| a client process dies between its reply and the reply's parts | the SuperNode waits for them forever, and is
  online | three minutes after the last part, the reply is dropped, as in Flower's server |
| a client process dies before it has read its message | the message's objects stay in memory forever | they are removed
  with the reply that reports the death |
| any other error in the loop that polls for messages | the process keeps running, permanently offline | it is logged,
  and the loop continues after 1, 2, 4 .. 60 s, unless the server refuses the site's key |
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Sequence
from logging import ERROR, WARNING
from typing import Any

from flwr.supercore import log
from flwr.supercore.run import RunNotRunningException

from fedveil.errors import ConfigError, StateError
from fedveil.guard import duplicate_pushes, flower, heartbeat, poll_backoff
from fedveil.guard.flower import replaced, response_sizes, retries
from fedveil.guard.message_intake import MessageIntake
from fedveil.guard.minute_log import MinuteLog
from fedveil.guard.plain_log import write_plain_log
from fedveil.guard.task_programs import SERVER_APP
from fedveil.sanitize import sanitize

_CALLS = ("pull_object", "confirm_message_received")
_LONGEST_PAUSE = 60.0
_LONGEST_TEXT = 500


def main() -> None:
    """Run the process. It takes the arguments of Flower's own program."""
    patch_supernode()
    duplicate_pushes.patch_duplicate_pushes()
    from flwr.supernode.cli import flower_supernode

    flower_supernode()


def patch_supernode() -> None:
    """Patch Flower's SuperNode in this process. Exits if the guard does not support the installed Flower."""
    try:
        line = flower.installed_release()
        replaced.require_attributes("SuperNode")
    except ConfigError as error:
        sys.exit(f"error: {error}")
    write_plain_log()
    poll_backoff.patch_supernode_polling()
    patch_connection(line)
    if line.speaks == "gRPC":
        from fedveil.guard.flower import keepalive

        keepalive.patch_supernode_keepalive()
        response_sizes.limit_grpc_responses()
    else:
        from fedveil.guard.flower import redirects

        redirects.forbid_redirects()
        response_sizes.limit_http_responses()
        sys.argv[1:] = [word for word in sys.argv[1:] if word != "--grpc-rere"]  # from a compose file for 1.39
    module = importlib.import_module("flwr.supernode.start_client_internal")
    module._pull_and_store_message = pull_message(module._pull_and_store_message)  # type: ignore[attr-defined]
    module._push_messages = push_reply(module._push_messages)  # type: ignore[attr-defined]


def patch_connection(line: flower.FlowerRelease) -> None:
    """Make the connections of this process's SuperNode survive any answer from the server."""
    if line.speaks == "gRPC":
        heartbeat.patch_node_heartbeat("flwr.client.grpc_rere_client.connection")
        retries.patch_retries("flwr.supernode.start_client_internal", "_make_fleet_connection_retry_invoker")
    else:
        heartbeat.patch_node_heartbeat("flwr.supernode.fleet_http_connection")
        retries.patch_retries("flwr.supernode.fleet_http_connection", "make_simple_http_retry_invoker")


class LoopErrors:
    """Keeps Flower's loop running: logs a failed step and then waits, 1 s at first and at most 60 s."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep, self._failures, self._log = sleep, 0, MinuteLog()

    def run(self, step: Callable[..., Any], **given: Any) -> Any:
        """Return the step's result, or None if the step failed. Re-raises the server's refusal of this site's key."""
        try:
            result = step(**given)
        except (Exception, RunNotRunningException) as error:
            if retries.is_unauthenticated(error):
                raise
            pause = min(2.0**self._failures, _LONGEST_PAUSE)
            self._failures = min(self._failures + 1, 10)
            words = f"{type(error).__name__}: {sanitize(error, _LONGEST_TEXT)}"
            self._log.write(
                ERROR, f"the SuperNode will continue in {pause:g} s after an error: {words}", key=type(error).__name__
            )
            self._sleep(pause)
            return None
        self._failures = 0
        return result


def pull_message(original: Callable[..., int | None], errors: LoopErrors | None = None) -> Callable[..., int | None]:
    """Poll for a message like Flower, without the faults.

    Returns None if there is nothing to send: no message has arrived, and no reply is waiting.
    """
    errors = errors or LoopErrors()

    def look(**given: Any) -> int | None:
        calls = {name: _ending(given[name]) for name in _CALLS} | {"get_run": _for_client_app(given["get_run"])}
        intake = MessageIntake({**given, **calls})
        run = errors.run(intake.pull, original=original)
        return 0 if run is None and _waits(given["state"]) else run

    return look


def push_reply(original: Callable[..., None], errors: LoopErrors | None = None) -> Callable[..., None]:
    """Send replies like Flower, but give up when a reply's parts have stopped arriving."""
    errors = errors or LoopErrors()

    def push(**given: Any) -> None:
        store, state = given["object_store"], given["state"]
        errors.run(original, **{**given, "object_store": _Parts(store, state), "state": _Messages(state, store)})

    return push


class _Parts:
    """A SuperNode's Flower object store, which raises an error for parts that no process will send anymore."""

    def __init__(self, store: Any, state: Any) -> None:
        self._store, self._state = store, state

    def get(self, object_id: str) -> bytes:
        """Return the content; b"" until it has arrived. Raises StateError if its sender is silent for too long."""
        runs = {session.run_id for session in [*self._state._object_push_sessions.values()]}
        for run in runs:
            self._state.get_object(run, object_id)  # drops expired objects
        content: bytes | None = self._store.get(object_id)
        if content is None:
            raise StateError("the reply's parts stopped arriving; its client process has ended")
        return content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _Messages:
    """A SuperNode's state, which deletes a message's objects with the message."""

    def __init__(self, state: Any, store: Any) -> None:
        self._state, self._store = state, store

    def delete_messages(self, *, message_ids: Sequence[str]) -> None:
        """Delete the messages, and objects that no client process has confirmed."""
        self._state.delete_messages(message_ids=message_ids)
        for message_id in message_ids:
            self._store.delete(message_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


def _ending(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `call` to turn the end of the run into an ordinary error; Flower cleans up only after an Exception."""

    def asked(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RunNotRunningException:
            raise StateError("the run has ended; its message is discarded") from None

    return asked


def _for_client_app(get_run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `get_run` so that runs create tasks only for ClientApps. Flower would also create tasks for agents, which
    have no guard."""

    def asked(run_id: int) -> Any:
        run = get_run(run_id)
        if run.primary_task_type not in ("", SERVER_APP):
            kind = sanitize(run.primary_task_type, 80)
            log(
                WARNING,
                "run %d is of type %s; the guard treats its messages like those of a ServerApp",
                run_id,
                kind,
            )
            run.primary_task_type = SERVER_APP
        return run

    return asked


def _waits(state: Any) -> bool:
    """Return whether a reply has not been retrieved yet. `state`: Flower's InMemoryNodeState."""
    with state.lock_msg_store:
        return any(
            entry.message.metadata.reply_to_message_id and not entry.is_retrieved for entry in state.msg_store.values()
        )
