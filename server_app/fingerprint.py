"""What makes a run that run: a resume with other settings would be another run under the old one's name.

The checkpoint carries all of it by key: the run config with the method's fields, the method's version, the layout of
its messages, and the files of the base model. A resume is refused where one of them differs.

| key | at a resume |
|---|---|
| `run.rounds` | may be raised, but under `train.schedule` and `train.warmup`, whose rates are over all rounds |
| `cohort.wait-seconds`, `cohort.deadline-seconds`, `cohort.repeats`, `cohort.sites`, `cohort.min-sites` | may change |
| `evaluate.*`, `task.evaluation` | may change: they score the model and change nothing in it |
| the same, where scores decide (`evaluate.keep = "best"` or `evaluate.patience`) | must be as they were, for scores are
  compared over rounds; but `evaluate.patience` and `evaluate.every` |
| `run.dir`, `run.tap`, `run.signature`, `client.worker`, `sinks.*` | may change |
| every other one | must be as it was |

A change that is permitted stands in the run folder's resumes.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from fedveil.config import RunConfig
from fedveil.contract.method import fields_of
from fedveil.errors import ConfigError
from fedveil.federation.exchange import Exchange
from fedveil.models import tiny
from fedveil.server_app.settings import RunSettings

Terms = dict[str, Any]

_MAY_CHANGE = {
    "cohort.wait-seconds", "cohort.deadline-seconds", "cohort.repeats", "cohort.sites", "cohort.min-sites",
    "task.evaluation", "run.dir", "run.tap", "run.signature", "client.worker",
}  # fmt: skip
_NOT_THE_RUNS = {"run.resume", "method.fields"}  # the fields stand there one by one, however they were written
_PIECES, _PIECE_BYTES = 64, 1 << 20  # a file of up to 64 MiB is read whole


def of(exchange: Exchange, settings: RunSettings) -> Terms:
    """The terms of a run, as JSON values by key."""
    sections = {"cohort": settings.cohort, "aggregate": settings.aggregate, "secure": settings.secure}
    own = {f"{s}.{k}": v for s, section in sections.items() for k, v in section.model_dump(by_alias=True).items()}
    config = {key: value for key, value in settings.config.items() if key not in _NOT_THE_RUNS}
    method = exchange.method
    terms = {
        **config, **own, "run.name": settings.name, "run.seed": settings.seed,
        "run.deterministic": settings.deterministic, "method.name": exchange.name, "method.version": method.version,
        **{f"method.fields.{key}": value for key, value in fields_of(method).items()},
        "layout": exchange.layout.digest, "base": base_digest(settings),
    }  # fmt: skip
    return dict(json.loads(json.dumps(terms)))  # as a checkpoint gives them back: no tuples


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What a resume changes: {key: [old, new]}.

    Raises:
        ConfigError: a key changes that may not; the message names each with both values.
    """
    found = {
        key: [before.get(key), now.get(key)]
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    }
    refused = {key: values for key, values in found.items() if not _permitted(key, *values)}
    if now.get("evaluate.keep") == "best" or now.get("evaluate.patience"):
        refused |= {key: values for key, values in found.items() if _is_compared(key, *values)}
    if "run.rounds" in found and (now.get("train.schedule", "constant"), now.get("train.warmup", 0)) != ("constant", 0):
        refused["run.rounds"] = found["run.rounds"]
    if refused:
        each = "; ".join(f"{key}: expected {old!r}, found {new!r}" for key, (old, new) in refused.items())
        raise ConfigError(
            f"run.resume: expected the config that the run began with: {each}; repeat it (resume.toml in the run "
            "folder has it), or start a new run under another run.name"
        )
    return found


def _permitted(key: str, old: Any, new: Any) -> bool:
    if key == "run.rounds":
        return isinstance(old, int) and isinstance(new, int) and new > old
    return key in _MAY_CHANGE or key.startswith(("evaluate.", "sinks."))


def _is_compared(key: str, old: Any, new: Any) -> bool:
    """Whether scores before and after the change would be of two kinds. A run of an older version lacks keys."""
    section, _, name = key.partition(".")
    if section != "evaluate" or name in ("patience", "every"):
        return key == "task.evaluation"
    return old is not None or new != RunConfig().flat()[key]


def base_digest(settings: RunSettings) -> str:
    """16 hex digits over names, sizes and pieces of the base model's files; "" where they are in no folder here."""
    name = str(settings.config.get("task.model", ""))
    bundled = tiny.folder(str(settings.config.get("task.name", ""))) if name == "tiny" else None
    folder = bundled or Path(name).expanduser()
    if not name or not folder.is_dir():
        return ""
    h = xxhash.xxh3_64()
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        size = file.stat().st_size
        h.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as data:
            for start in range(0, size, max(_PIECE_BYTES, size // _PIECES)):
                data.seek(start)
                h.update(data.read(_PIECE_BYTES))
    return h.hexdigest()
