"""The ClientApp: hands the message's bytes to this site's turn, and returns the bytes it gets.

What goes wrong here is logged here, in full. The server learns the kind of the error and nothing of its text, which may
quote data or paths. A configuration that the server itself sent, and a site's policy, are answered with their reason.
"""

from __future__ import annotations

import time
from logging import ERROR, INFO

from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore import log

app = ClientApp()

_RAISED = 2  # Flower's ErrorCode.CLIENT_APP_RAISED_EXCEPTION
_STYPE = "fedveil.message/1"


@app.train()
def train(message: Message, context: Context) -> Message:
    """One participation."""
    started = time.monotonic()
    try:
        upload = _take_part(message, context)
    except Exception as error:
        log(ERROR, "this site's turn failed", exc_info=error)
        return Message(Error(_RAISED, public_reason(error)), reply_to=message)
    log(INFO, "turn of %.1f s, upload of %s bytes", time.monotonic() - started, len(upload))
    array = Array("uint8", (len(upload),), _STYPE, upload)
    return Message(RecordDict({"fedveil": ArrayRecord({"message": array})}), reply_to=message)


def _take_part(message: Message, context: Context) -> bytes:
    from client_app.site import parse_site
    from client_app.turn import Order, take_part
    from fedveil.config import parse
    from fedveil.errors import WireError

    try:
        array = message.content.array_records["fedveil"]["message"]
        order = message.content.config_records["order"]
        asked = Order(**{key.replace("-", "_"): value for key, value in order.items()})  # type: ignore[arg-type]
    except (KeyError, TypeError) as error:
        raise WireError(
            f"message: expected the records fedveil.message and order of this version, found {error}"
        ) from None
    return take_part(array.data, asked, parse(context.run_config), parse_site(context.node_config))


def public_reason(error: Exception) -> str:
    """What the server may know of an error at this site."""
    from fedveil.errors import PolicyError, WireError

    kind = type(error).__name__
    if isinstance(error, PolicyError | WireError):
        return f"{kind}: {error}"
    return f"{kind} at the site; its log has the text"
