"""Why a turn failed, from the ClientApp to the site's guard, which runs in the same process and writes the audit log.

The server learns the kind of an error alone, and the reply goes to the server. So the text goes by the environment of
this process: what the bundle brings and what the site has installed may be two versions, and this is all they share.
"""

from __future__ import annotations

import os

from fedveil.sanitize import sanitize

VARIABLE = "FEDVEIL_TURN_CAUSE"
_LONGEST = 1000  # characters; as the audit log cuts


def note_failure(kind: str, text: str) -> None:
    """Store kind and text of an error for `take_failure`."""
    os.environ[VARIABLE] = sanitize(f"{kind}: {text}", _LONGEST)


def take_failure() -> str:
    """Return and clear the noted failure, or "" if there is none; it is untrusted text from the app bundle."""
    return sanitize(os.environ.pop(VARIABLE, ""), _LONGEST)
