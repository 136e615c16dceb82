"""Define what identifies a run: a resume with other settings would be another run under the same name.

The checkpoint contains all of it by key: the run config with the method's fields, the method's version, the layout
of its messages, and the files of the base model. The server refuses a resume that changes one of them, except as
listed in the table.

| key | at a resume |
|---|---|
| `run.rounds` | may be raised, except with `train.lr-schedule` and `train.warmup-ratio`, whose rates cover all
  rounds |
| `cohort.wait-seconds`, `cohort.deadline-seconds`, `cohort.max-retries`, `cohort.sites`, `cohort.min-sites` | may
  change |
| `evaluate.*`, `task.evaluation` | may change: they score the model and do not change it |
| the same, where scores decide (`evaluate.select-model = "best"` or `evaluate.patience`) | must not change, because
  scores are compared over rounds; exceptions: `evaluate.patience` and `evaluate.every` |
| `run.dir`, `run.capture-messages`, `run.signature`, `client.worker`, `sinks.*` | may change |
| every other key | must not change |

The run folder's resumes.jsonl records a permitted change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from fedveil.config import RunConfig
from fedveil.contract.method import hyperparameters_of
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.models import bundled as tiny
from fedveil.server_app.run_settings import RunSettings

Terms = dict[str, Any]

_MAY_CHANGE = {
    "cohort.wait-seconds", "cohort.deadline-seconds", "cohort.max-retries", "cohort.sites", "cohort.min-sites",
    "task.evaluation", "run.dir", "run.capture-messages", "run.signature", "client.worker",
}  # fmt: skip
_NOT_THE_RUNS = {"run.resume", "method.params"}  # the fields are there one by one, however they were written
_PIECES, _PIECE_BYTES = 64, 1 << 20  # a file of up to 64 MiB is read whole


def run_terms(exchange: MessageExchange, settings: RunSettings) -> Terms:
    """The terms of a run, as JSON values by key."""
    parts = ("cohort", "aggregate", "server", "secure")
    sections = {part: getattr(settings, part) for part in parts}
    own = {f"{s}.{k}": v for s, section in sections.items() for k, v in section.model_dump(by_alias=True).items()}
    config = {key: value for key, value in settings.config.items() if key not in _NOT_THE_RUNS}
    method = exchange.method
    terms = {
        **config, **own, "run.name": settings.name, "run.seed": settings.seed,
        "run.deterministic": settings.deterministic, "method.name": exchange.name, "method.version": method.version,
        **{f"method.params.{key}": value for key, value in hyperparameters_of(method).items()},
        "layout": exchange.layout.digest, "base": base_digest(settings),
    }  # fmt: skip
    return dict(json.loads(json.dumps(terms)))  # in the form in which a checkpoint returns them: no tuples


def changed_terms(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the settings that a resume changes, as {key: [old, new]}.

    Raises:
        ConfigError: a key changes that must not change; the message names each such key with both values.
    """
    changes = {
        key: [before.get(key), now.get(key)]
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    }
    refused = {key: values for key, values in changes.items() if not _permitted(key, *values)}
    if now.get("evaluate.select-model") == "best" or now.get("evaluate.patience"):
        refused |= {key: values for key, values in changes.items() if _is_compared(key, *values)}
    rates = now.get("train.lr-schedule", "constant"), now.get("train.warmup-ratio", 0)
    if "run.rounds" in changes and rates != ("constant", 0):
        refused["run.rounds"] = changes["run.rounds"]
    if refused:
        each = "; ".join(f"{key}: expected {old!r}, found {new!r}" for key, (old, new) in refused.items())
        raise ConfigError(
            f"run.resume: expected the config that the run began with: {each}; repeat it (resume.toml in the run "
            "folder has it), or start a new run under another run.name"
        )
    return changes


def _permitted(key: str, old: Any, new: Any) -> bool:
    if key == "run.rounds":
        return isinstance(old, int) and isinstance(new, int) and new > old
    return key in _MAY_CHANGE or key.startswith(("evaluate.", "sinks."))


def _is_compared(key: str, old: Any, new: Any) -> bool:
    """Return whether the change makes scores before and after it incomparable.

    A run of an older version may lack keys.
    """
    section, _, name = key.partition(".")
    if section != "evaluate" or name in ("patience", "every"):
        return key == "task.evaluation"
    return old is not None or new != RunConfig().flat()[key]


def base_digest(settings: RunSettings) -> str:
    """Return 16 hex digits over names, sizes and pieces of the base model's files; "" if no local folder has them."""
    name = str(settings.config.get("task.model", ""))
    bundled = tiny.bundled_folder(str(settings.config.get("task.name", ""))) if name == "tiny" else None
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
