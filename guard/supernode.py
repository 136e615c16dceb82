"""`flower-supernode` of an image: Flower's own, with what `prepare` changes in it. On a host: loopback.py.

Besides how often it asks (pace.py) and what its connection needs (flower/), three faults of Flower 1.39, 1.41 and 1.42:

| what happens | Flower's own | here |
|---|---|---|
| a run ends while the parts of its message are on their way to the site | the message stays, and a client process waits
  for its parts for ever | the message, its parts and its task go, as after any other failure of that kind |
| a reply that nobody waits for any more, for example of that client process once it dies | it is sent in place of the
  next message's reply, which then waits for the one after it: from there on each reply comes one message late, and the
  server hears nothing from the site within its deadlines | it is sent at the next look for messages |
| a client process dies between its reply and the reply's parts | the SuperNode waits for them for ever, and is online |
  three minutes after the last part the reply goes, as Flower has it for a server |
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from flwr.supercore.run import RunNotRunningException

from fedveil.errors import ConfigError, StateError
from fedveil.guard import flower, pace, repeats

_CALLS = ("pull_object", "confirm_message_received")


def main() -> None:
    """The process. Its arguments are those of Flower's own program."""
    prepare()
    repeats.of_flower()
    from flwr.supernode.cli import flower_supernode

    flower_supernode()


def prepare() -> None:
    """Changes Flower's SuperNode in this process. Ends the process where Flower is one that the guard does not know."""
    try:
        line = flower.here()
    except ConfigError as error:
        sys.exit(f"error: {error}")
    pace.of_supernode()
    if line.speaks == "gRPC":
        from fedveil.guard.flower import keepalive

        keepalive.of_supernode()
    else:
        from fedveil.guard.flower import redirects

        redirects.forbid()
        sys.argv[1:] = [word for word in sys.argv[1:] if word != "--grpc-rere"]  # of a compose file made for 1.39
    module = importlib.import_module("flwr.supernode.start_client_internal")
    module._pull_and_store_message = looked(module._pull_and_store_message)  # type: ignore[attr-defined]
    module._push_messages = pushed(module._push_messages)  # type: ignore[attr-defined]


def looked(original: Callable[..., int | None]) -> Callable[..., int | None]:
    """Flower's look for a message, without the two faults.

    The result is None where there is nothing to send: no message came, and no reply waits.
    """

    def look(**given: Any) -> int | None:
        calls = {name: _ending(given[name]) for name in _CALLS}
        run = original(**{**given, **calls})
        return 0 if run is None and _waits(given["state"]) else run

    return look


def pushed(original: Callable[..., None]) -> Callable[..., None]:
    """Flower's sending of replies, which ends also where a reply's parts have stopped coming."""

    def push(**given: Any) -> None:
        original(**{**given, "object_store": _Parts(given["object_store"], given["state"])})

    return push


class _Parts:
    """Flower's store of a SuperNode's objects, where waiting for one that nobody brings any more is an error."""

    def __init__(self, store: Any, state: Any) -> None:
        self._store, self._state = store, state

    def get(self, object_id: str) -> bytes:
        """Its content; b"" while it is on its way. Raises StateError once its sender was silent for too long."""
        runs = {session.run_id for session in [*self._state._object_push_sessions.values()]}
        for run in runs:
            self._state.get_object(run, object_id)  # forgets what has expired
        found: bytes | None = self._store.get(object_id)
        if found is None:
            raise StateError("the reply's parts stopped coming; its client process has ended")
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _ending(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, where the end of the run is an error as others are: Flower tidies up after an Exception alone."""

    def asked(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RunNotRunningException:
            raise StateError("the run has ended; nothing of its message is kept") from None

    return asked


def _waits(state: Any) -> bool:
    """Whether a reply is there that was not taken yet. `state`: Flower's InMemoryNodeState."""
    with state.lock_msg_store:
        return any(
            entry.message.metadata.reply_to_message_id and not entry.is_retrieved for entry in state.msg_store.values()
        )
