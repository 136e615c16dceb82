"""Check the objects of a server's message before Flower decodes any of them.

Flower's reader trusts the objects: an Array that names one chunk of 1.3 MB 2,400 times becomes 3.1 GB, and a body of
nested brackets ends the process, both before the site's policy is consulted. A site refuses such a message and logs
the refusal in its audit log.

Formal guarantees, for a message that `decode_message` returns:
- each of its Arrays is one chunk, named once, and so is no larger than the bytes received. Other objects may take up 10
  to 30 times their size in memory, as Python objects do;
- if a record names an Array several times, memory holds it once. `max-bytes-a-round` counts it each time.

| object | result |
|---|---|
| an Array that names two chunks, or one chunk twice | WireError, before anything is decoded |
| another object that Flower cannot decode, or a root that is not a Message | WireError |
| an object that never arrives, or a run that ends | Flower's own error |

Flower's SuperNode has compared each object with its hash. It keeps a message's objects until they are confirmed, so a
refused message is confirmed, too.
"""

from __future__ import annotations

from collections.abc import Callable
from logging import WARNING
from typing import Any

from flwr.common.serde import message_from_proto
from flwr.supercore import log
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

from fedveil.errors import WireError
from fedveil.sanitize import sanitize
from fedveil.wire import flower_objects
from fedveil.wire.flower_objects import ObjectFormError, ObjectType

_ARRAY = ObjectType.ARRAY.value.encode() + b" "


class ReceivingClient:
    """Flower's client for the runtime API, which also keeps the metadata of the message that it pulls."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._message: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def PullMessages(self, request: Any) -> Any:  # noqa: N802 - Flower's name
        """Pull the task's message, as Flower's client does."""
        response = self._client.PullMessages(request)
        self._message = next(iter(response.messages_list), None)
        return response

    def bare_message(self) -> Any:
        """Return the message without its content, for a reply that refuses it."""
        return message_from_proto(self._message)


def decode_message(
    decode: Callable[..., Any], tree: Any, pull: Callable[[str], bytes], confirm: Callable[[str], None], **more: Any
) -> Any:
    """Check each object, then return the result of Flower's `decode`. Raises WireError.

    Args:
        decode: Flower's `pull_and_inflate_object_from_tree`, with the arguments that follow.
    """
    waiting, has_come, confirmed = {node.object_id for node in iterate_object_tree(tree)}, False, False

    def pull_checked(object_id: str) -> bytes:
        content = pull(object_id)
        _check_object(content)
        waiting.discard(object_id)
        return content

    def confirm_all(object_id: str) -> None:
        nonlocal has_come, confirmed
        confirm(object_id)
        has_come, confirmed = not waiting, True

    try:
        return decode(tree, pull_checked, confirm_all, **more)
    except WireError:
        if not confirmed:
            _release(confirm, tree.object_id)
        raise
    except Exception as error:  # Flower's parsers read bytes that the server chose
        if not has_come:
            raise
        raise WireError(f"message: Flower cannot decode its objects: {sanitize(error, 200)}") from None


def _release(confirm: Callable[[str], None], message_id: str) -> None:
    """Confirm a refused message: Flower's SuperNode keeps its objects in memory until then."""
    try:
        confirm(message_id)
    except Exception as error:  # gRPC's and requests' errors; the refusal must be sent all the same
        log(WARNING, "fedveil: the SuperNode keeps the objects of a refused message: %s", sanitize(error, 200))


def _check_object(content: bytes) -> None:
    """Raise WireError for an Array that does not consist of one chunk, named once."""
    if not content.startswith(_ARRAY):
        return
    try:
        flower_objects.read_array(flower_objects.parse_object(content, ObjectType.ARRAY, 1))
    except ObjectFormError:
        raise WireError("message: an Array must consist of one slice, as FedVeil's server sends it") from None
