"""Pass the failure reason from the ClientApp to the site's guard, which shares its process and writes the audit log.

The reply tells the server only an error's type. So the full text is passed through this process's environment:
the bundle and the site's installation may be different versions and share nothing else.
"""

from __future__ import annotations

import os

from fedveil.sanitize import sanitize

VARIABLE = "FEDVEIL_TURN_CAUSE"
_LONGEST = 1000  # characters; the audit log truncates text at the same length


def note_failure(kind: str, text: str) -> None:
    """Store an error's type and text for `take_failure`."""
    os.environ[VARIABLE] = sanitize(f"{kind}: {text}", _LONGEST)


def take_failure() -> str:
    """Return and clear the stored failure, or "" if there is none; it is untrusted text from the app bundle."""
    return sanitize(os.environ.pop(VARIABLE, ""), _LONGEST)
