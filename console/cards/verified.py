"""Whether a model's folder is what was signed, and by whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedveil.cards import card
from fedveil.console.cards import envelope, statement
from fedveil.console.cards.envelope import Envelope
from fedveil.errors import StateError
from fedveil.foreign import shown


@dataclass(frozen=True)
class Verified:
    """What was found.

    Attributes:
        files: number of files that the statement names.
        signed: fingerprints of the given keys whose signature holds.
        unknown: fingerprints of keys that were not given: their signatures are not checked, and count for nothing.
        wrong: in what the folder is not as it was signed, a sentence each; [] where all is right.
    """

    files: int
    signed: list[str]
    unknown: list[str]
    wrong: list[str]


def verify(folder: Path, known: Mapping[str, Ed25519PublicKey]) -> Verified:
    """Checks the envelope, every signature by a known key, and every file; each known key must have signed.

    Args:
        folder: the model's.
        known: public keys by fingerprint.

    Raises:
        StateError: the envelope or what it holds is no such thing, or a link lies in the folder.
    """
    file = folder / statement.NAME
    found = read(file)
    signed, bad, unknown = envelope.signers(found, known)
    wrong = [f"the signature by {each} is of other bytes" for each in bad]
    wrong += [f"no signature by {each}" for each in known if each not in (*signed, *bad)]
    said = statement.parse(found.content, str(file))
    return Verified(len(said.subject), signed, unknown, wrong + statement.differences(said, folder))


def read(file: Path) -> Envelope:
    """The envelope in a file. Raises StateError where there is none, or none of a statement."""
    if file.is_symlink() or not file.is_file():
        raise StateError(f"{file}: expected signatures, found none; fedveil card sign makes one")
    with file.open("rb") as data:
        found = envelope.parse(data.read(envelope.MOST_BYTES + 1), str(file))
    if found.payload_type != statement.PAYLOAD_TYPE:
        kind = shown(found.payload_type, 80)
        raise StateError(f"{file}, payloadType: expected {statement.PAYLOAD_TYPE}, found {kind}; get it anew")
    return found


def model(folder: Path) -> Path:
    """The model's folder: final/ of a run folder, or `folder` itself. Raises StateError where neither has a card."""
    for place in (folder / "final", folder):
        if (place / card.NAME).is_file():
            return place
    raise StateError(
        f"{folder}: expected a run folder or a model's folder with {card.NAME}, found none; fedveil card make writes it"
    )
