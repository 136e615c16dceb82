"""The signed in-toto Statement v1 about a model folder: its files are the subjects, its card is the predicate.

| in the folder | in the statement |
|---|---|
| every file except the envelope, including those in subfolders | a subject, with its SHA-256 |
| the card, privacy.json | a subject, and the predicate |
| a link, or anything else that is not a plain file | refused: its content could differ on another machine |
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedveil.cards import card, digests
from fedveil.errors import StateError
from fedveil.sanitize import sanitize

NAME = "privacy.dsse.json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
_TYPE = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://github.com/fedveil/fedveil/privacy-card/v1"
_MOST_FILES = 10_000
_NAMED = 5
_OF_THE_HUB = re.compile(r"\.gitattributes|\.git/.*|\.cache/huggingface/.*")


class _Digests(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Subject(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, Field(min_length=1, max_length=1000)]
    digest: _Digests


class InTotoStatement(BaseModel):
    """The statement; `type_` and `predicate_type` are `_type` and `predicateType` of in-toto."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    type_: Annotated[Literal["https://in-toto.io/Statement/v1"], Field(alias="_type")]
    subject: Annotated[list[_Subject], Field(min_length=1, max_length=_MOST_FILES)]
    predicate_type: Annotated[
        Literal["https://github.com/fedveil/fedveil/privacy-card/v1"], Field(alias="predicateType")
    ]
    predicate: dict[str, Any]


def digest_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in a model's folder except the envelope. Raises StateError if any is a link."""
    file_hashes = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise StateError(f"{folder}: {sanitize(name, 200)} is not a plain file; remove it")
        if stat.S_ISREG(mode) and name != NAME:
            file_hashes[name] = digests.digest_file(path)
        if len(file_hashes) > _MOST_FILES:
            raise StateError(f"{folder}: it contains more than {_MOST_FILES} files; give a model's folder")
    return file_hashes


def make_statement(folder: Path) -> bytes:
    """Return the statement about a folder's current files, with its card as predicate; equal folders give equal bytes.

    Raises:
        StateError: the folder has no card, or contains a link.
    """
    about = json.loads(card.read_card(folder).to_bytes())
    subjects = [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(digest_files(folder).items())]
    content = {"_type": _TYPE, "subject": subjects, "predicateType": _PREDICATE, "predicate": about}
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def parse_statement(data: bytes, where: str) -> InTotoStatement:
    """Parse the statement in a payload. Raises StateError if it is malformed or names a file twice."""
    try:
        statement = InTotoStatement.model_validate_json(data)
    except (ValidationError, RecursionError) as error:
        raise _other(where, sanitize(error, 300)) from None
    if len({subject.name for subject in statement.subject}) < len(statement.subject):
        raise _other(where, "one that names a file twice")
    return statement


def find_differences(said: InTotoStatement, folder: Path) -> list[str]:
    """Compare the folder with what was signed; return a sentence for each kind of difference, [] if there is none.

    Raises:
        StateError: the folder contains a link, or its card is not valid.
    """
    signed = {subject.name: subject.digest.sha256 for subject in said.subject}
    here = digest_files(folder)
    changed = [name for name in signed if name in here and here[name] != signed[name]]
    missing = [name for name in signed if name not in here]
    more = [name for name in here if name not in signed and not is_of_the_hub(name)]
    kinds: Mapping[str, list[str]] = {"changed": changed, "missing": missing, "not signed, but present": more}
    differences = [f"{what}: {_listed(names)}" for what, names in kinds.items() if names]
    if (
        card.NAME in here
        and card.NAME not in changed
        and json.loads(card.read_card(folder).to_bytes()) != said.predicate
    ):
        differences.append(f"{card.NAME} differs from the card in the statement")
    return differences


def is_of_the_hub(name: str) -> bool:
    """Return whether the Hugging Face Hub, its client or git adds a file of this name to a downloaded folder."""
    return bool(_OF_THE_HUB.fullmatch(name))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(sanitize(name, 200) for name in sorted(names)[:_NAMED]) + more


def _other(where: str, found: str) -> StateError:
    return StateError(f"{where}: expected an in-toto statement about a privacy card, found {found}; get a new copy")
