"""Read a resumed run's folder: its checkpoint, unfinished attempts and best checkpoint.

If a run ends with its best round's model, that round's checkpoint is stored under another name, as a link. The link
takes no extra space until that checkpoint has been replaced twice. The previous best checkpoint stays until the next
round, because a resume may go back one round.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import xxhash

from fedveil.contract.method import FederatedState
from fedveil.errors import StateError
from fedveil.records import atomic_files, disclosure_ledger, process_exit
from fedveil.records.tensor_state import load_state

CHECKPOINT, BEFORE, _DAMAGED = (
    "checkpoint.safetensors", "checkpoint-before.safetensors", "checkpoint-damaged.safetensors",
)  # fmt: skip
_BEST = re.compile(r"best-(\d{1,9})\.safetensors")
_LINES = ("metrics.jsonl", disclosure_ledger.NAME, "resumes.jsonl", "tap/index.jsonl")
_WITHOUT = 'resume with evaluate.select-model = "last" to end with the last round\'s model'
_LONGEST = 300  # maximum characters of a torn line that are stored


def has_checkpoint(folder: Path) -> bool:
    """Return whether the folder has a checkpoint, readable or not."""
    return any((folder / name).exists() for name in (CHECKPOINT, BEFORE))


def require_new(folder: Path) -> None:
    """Raise StateError if a new run's folder contains a run or anything else."""
    if (folder / "status.json").exists() or (folder / "id").exists():
        begun = has_checkpoint(folder) or (folder / disclosure_ledger.NAME).exists()
        unbegun = "" if begun or not process_exit.is_dead(folder) else " that ended before any site was contacted"
        mend = "remove the folder to use its name again, or choose another" if unbegun else "choose another"
        resume = "" if unbegun else ", or set run.resume = true"
        raise StateError(f"run folder {folder}: it already contains a run{unbegun}; {mend} run.name{resume}")
    if folder.is_dir() and any(file.name != process_exit.LOCK for file in folder.iterdir()):
        raise StateError(f"run folder {folder}: it is not empty; choose another run.name")


def require_resumable(folder: Path) -> None:
    """Raise StateError if the folder has no run, or one whose checkpoint is lost after sites took part in it.

    The server writes a checkpoint before it asks a site for anything, so a run with messages but no checkpoint has lost
    its checkpoint. Starting at round 0 would ask the sites for the same rounds again, and `dp.*` would charge them
    twice.
    """
    if has_checkpoint(folder):
        return
    messages = disclosure_ledger.read_messages(folder / disclosure_ledger.NAME)
    if messages:
        last = max(int(message["round"]) for message in messages)
        raise StateError(
            f"run.resume: {CHECKPOINT} is missing in {folder}, although sites took part up to round "
            f"{last + 1} ({disclosure_ledger.NAME}); restore it from a backup, or start a new run under another "
            "run.name. The sites' ledgers keep the charges of this run"
        )
    if not any((folder / name).exists() for name in ("id", "status.json")):
        raise StateError(f"run.resume: there is no run in {folder} to resume; start the run without it")


def repair_folder(folder: Path) -> dict[str, Any]:
    """Repair a folder after a crash. Return how the previous process ended, and the torn lines it left behind."""
    status: dict[str, Any] = {}
    try:
        status = dict(json.loads((folder / "status.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        ended = f"unknown: its status.json cannot be read ({type(error).__name__})"
    else:
        ended = f"{status.get('state')}: {status.get('reason') or ''}"
        if status.get("state") == "running":
            ended = process_exit.describe_ending(status.get("process") or {})
    torn = {name: atomic_files.cut_torn_line(folder / name)[:_LONGEST] for name in _LINES}
    if not _is_id(folder) and has_checkpoint(folder):
        run_id = newest_checkpoint(folder)[0].scalars.get("id")
        atomic_files.write_atomic(folder / "id", sealed_id(str(run_id)))
    return {"before": ended} | ({"torn": {k: v for k, v in torn.items() if v}} if any(torn.values()) else {})


def newest_checkpoint(folder: Path) -> tuple[FederatedState, str]:
    """Return the state in the last readable checkpoint, and a warning if it is not the newest checkpoint.

    An unreadable checkpoint is moved aside. Sites permit a server to go back one round.

    Raises:
        StateError: no checkpoint is readable.
    """
    try:
        return load_state(folder / CHECKPOINT), ""
    except StateError as error:
        try:
            state = load_state(folder / BEFORE)
        except StateError as second:
            raise StateError(f"{error}; nor can the one before it be read ({second}): start a new run") from None
        if (folder / CHECKPOINT).exists():
            (folder / CHECKPOINT).replace(folder / _DAMAGED)
        return state, f"went back to the checkpoint before the last one: {error}"


def keep_best(folder: Path, best: int | None, now: int) -> None:
    """Preserve the checkpoint of round `best` for the end, if the last readable checkpoint is from round `now`.

    Raises:
        StateError: the best round is earlier, and its checkpoint is missing.
        OSError: the folder is not writable.
    """
    if best is None:
        return
    file_by_round = {int(match[1]): file for file in folder.iterdir() if (match := _BEST.fullmatch(file.name))}
    if best == now:
        last = folder / CHECKPOINT if (folder / CHECKPOINT).exists() else folder / BEFORE
        atomic_files.link_atomic(last, best_file(folder, now))
    elif best not in file_by_round:
        raise StateError(f"{best_file(folder, best)}: the best round's checkpoint is missing; {_WITHOUT}")
    earlier = max((round_ for round_ in file_by_round if round_ < best), default=None) if best == now else None
    for round_, file in file_by_round.items():
        if round_ not in (best, earlier):
            file.unlink()


def best_file(folder: Path, round_: int) -> Path:
    """Return the path of a best round's checkpoint."""
    return folder / f"best-{round_}.safetensors"


def best_state(folder: Path, round_: int) -> FederatedState:
    """Return the server's state after the best round. Raises StateError if it cannot be read."""
    try:
        saved = load_state(best_file(folder, round_))
    except StateError as error:
        raise StateError(f"{error}; {_WITHOUT}") from None
    scalars, loop = (cast("dict[str, Any]", saved.scalars[key]) for key in ("server", "loop"))
    if loop["round"] != round_:
        raise StateError(f"{best_file(folder, round_)}: it is of round {loop['round']}, not {round_}; {_WITHOUT}")
    return replace(saved, scalars=scalars)


def sealed_id(name: str) -> bytes:
    """Return the content of the file `id`: the id and its checksum."""
    return f"{name} {xxhash.xxh3_64_hexdigest(name.encode())}\n".encode()


def read_id(folder: Path) -> str:
    """Return the run's id. Raises StateError if its file is damaged; a resume rewrites it from the checkpoint."""
    if not _is_id(folder):
        raise StateError(
            f"{folder / 'id'}: the run's id is missing or damaged; resume the run to rewrite it: run.resume=true"
        )
    return (folder / "id").read_text(encoding="utf-8").partition(" ")[0]


def _is_id(folder: Path) -> bool:
    try:
        data = (folder / "id").read_bytes()
    except FileNotFoundError:
        return False
    return data == sealed_id(data.partition(b" ")[0].decode(errors="replace"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return all lines of a JSON Lines file; [] if there is no file. Raises StateError, naming an invalid line."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], 1):
        try:
            row = json.loads(line)
            rows.append({"round": row["round"], **row})
        except (ValueError, KeyError, TypeError, RecursionError):
            raise StateError(
                f"{path}, line {number}: this is not a JSON object with a round, but {line[:40]!r}; repair the line, "
                "or move the file away to resume without these records"
            ) from None
    return rows


def resume_mark(folder: Path, round_: int) -> dict[str, Any]:
    """Return the line of metrics.jsonl that marks a resume at `round_` and counts the messages so far."""
    return {
        "round": round_,
        "resumed": True,
        "messages": len(disclosure_ledger.read_messages(folder / disclosure_ledger.NAME)),
    }


def interrupted_attempts(folder: Path) -> list[dict[str, Any]]:
    """Return the attempts that exchanged messages but have no line in metrics.jsonl, with a RoundRecord's keys."""
    rows, messages = (
        read_lines(folder / "metrics.jsonl"),
        disclosure_ledger.read_messages(folder / disclosure_ledger.NAME),
    )
    marks = [i for i, row in enumerate(rows) if row.get("resumed")]
    start = int(rows[marks[-1]].get("messages", 0)) if marks else 0
    known = {(row["round"], row.get("attempt")) for row in rows[marks[-1] + 1 if marks else 0 :]}
    by_attempt: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for message in messages[start:]:
        by_attempt[disclosure_ledger.counted_in(message)].append(message)
    return [
        _unfinished(round_, attempt, attempt_messages)
        for (round_, attempt), attempt_messages in by_attempt.items()
        if (round_, attempt) not in known
    ]


def _unfinished(round_: int, attempt: int, messages: list[Mapping[str, Any]]) -> dict[str, Any]:
    up = {message["site"] for message in messages if message["direction"] == "up"}
    cohort = sorted({message["site"] for message in messages})
    notes = {True: "its upload had arrived", False: "no upload had arrived"}
    size = {
        way: sum(int(message["bytes"]) for message in messages if message["direction"] == way) for way in ("up", "down")
    }
    return {
        "round": round_, "attempt": attempt, "cohort": cohort, "upload_bytes": size["up"],
        "download_bytes": size["down"],
        "failed": {site: f"interrupted: the server ended before the round did; {notes[site in up]}" for site in cohort},
    }  # fmt: skip
