"""Verify that a model's folder has not changed since it was signed, and determine whose keys signed it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedveil.cards import card
from fedveil.cards.signing import dsse, in_toto
from fedveil.cards.signing.dsse import DsseEnvelope
from fedveil.errors import StateError
from fedveil.sanitize import sanitize


@dataclass(frozen=True)
class VerificationResult:
    """The result of verifying a model folder.

    Attributes:
        files: number of files that the statement names.
        signed: fingerprints of the given keys whose signatures are valid.
        unknown: fingerprints of keys that were not given; their signatures are not checked and do not count.
        wrong: differences between the folder and what was signed, one sentence each; [] if there are none.
    """

    files: int
    signed: list[str]
    unknown: list[str]
    wrong: list[str]


def verify_model(folder: Path, known: Mapping[str, Ed25519PublicKey]) -> VerificationResult:
    """Check the envelope, every signature by a known key, and every file. Each known key must have signed.

    Args:
        folder: the model's folder.
        known: public keys by fingerprint.

    Raises:
        StateError: the envelope or its content is invalid, or the folder contains a link.
    """
    file = folder / in_toto.NAME
    envelope = read_envelope(file)
    signed, bad, unknown = dsse.verified_signers(envelope, known)
    wrong = [f"the signature by {each} is for other bytes" for each in bad]
    wrong += [f"no signature by {each}" for each in known if each not in (*signed, *bad)]
    statement = in_toto.parse_statement(envelope.content, str(file))
    return VerificationResult(
        len(statement.subject), signed, unknown, wrong + in_toto.find_differences(statement, folder)
    )


def read_envelope(file: Path) -> DsseEnvelope:
    """Read the envelope in a file. Raises StateError if it is missing or does not contain a statement."""
    if file.is_symlink() or not file.is_file():
        raise StateError(f"{file}: there are no signatures; sign the folder with fedveil card sign")
    with file.open("rb") as data:
        envelope = dsse.parse_envelope(data.read(dsse.MOST_BYTES + 1), str(file))
    if envelope.payload_type != in_toto.PAYLOAD_TYPE:
        kind = sanitize(envelope.payload_type, 80)
        raise StateError(f"{file}, payloadType: expected {in_toto.PAYLOAD_TYPE}, found {kind}; get a new copy")
    return envelope


def model_folder(folder: Path) -> Path:
    """Return the model's folder: a run folder's final/, or `folder` itself. Raises StateError if neither has a card."""
    for place in (folder / "final", folder):
        if (place / card.NAME).is_file():
            return place
    raise StateError(
        f"{folder}: this is neither a run folder nor a model's folder with {card.NAME}; write a card with fedveil "
        "card make"
    )
