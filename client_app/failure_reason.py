"""Pass the failure reason from the ClientApp to the site's guard, which shares its process and writes the audit log.

The reply tells the server only the type of an error. So the full text is passed through this process's environment:
the bundle and the site's installation may be different versions and share nothing else.
"""

from __future__ import annotations

import os

from fedveil.sanitize import sanitize

VARIABLE = "FEDVEIL_TURN_CAUSE"
_LONGEST = 1000  # characters; as the audit log cuts


def note_failure(kind: str, text: str) -> None:
    """Store type and text of an error for `take_failure`."""
    os.environ[VARIABLE] = sanitize(f"{kind}: {text}", _LONGEST)


def take_failure() -> str:
    """Return and clear the noted failure, or "" if there is none; it is untrusted text from the app bundle."""
    return sanitize(os.environ.pop(VARIABLE, ""), _LONGEST)
