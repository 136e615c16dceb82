"""Settings that identify a run: a resume with different settings would be a different run under the same name.

The checkpoint contains them all by key: the run config with the method parameters, the method's version, its message
layout, and the base model's files. The server refuses a resume that changes any of them, except as listed in the table.

| key | on a resume |
|---|---|
| `run.rounds` | may be raised, except with `train.lr-schedule` and `train.warmup-ratio`, whose rates cover all
  rounds |
| `cohort.wait-seconds`, `cohort.deadline-seconds`, `cohort.max-retries`, `cohort.sites`, `cohort.min-sites` | may
  change |
| `evaluate.*`, `task.evaluation` | may change: they score the model but do not change it |
| `evaluate.*`, `task.evaluation`, if scores decide (`evaluate.select-model = "best"` or `evaluate.patience`) | must not
  change, because scores are compared across rounds; exceptions: `evaluate.patience` and `evaluate.every` |
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
_NOT_THE_RUNS = {"run.resume", "method.params"}  # each method parameter has its own key
_PIECES, _PIECE_BYTES = 64, 1 << 20  # files of up to 64 MiB are read whole


def run_terms(exchange: MessageExchange, settings: RunSettings) -> Terms:
    """Return a run's settings, as JSON values by key."""
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
    return dict(json.loads(json.dumps(terms)))  # as a checkpoint returns them: without tuples


def changed_terms(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the settings that a resume changes, as {key: [old, new]}.

    Raises:
        ConfigError: keys change that must not; the message names each of them with both values.
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
            f"run.resume: the config differs from the one that the run started with: {each}; use the original config "
            "(resume.toml in the run folder), or start a new run under another run.name"
        )
    return changes


def _permitted(key: str, old: Any, new: Any) -> bool:
    if key == "run.rounds":
        return isinstance(old, int) and isinstance(new, int) and new > old
    return key in _MAY_CHANGE or key.startswith(("evaluate.", "sinks."))


def _is_compared(key: str, old: Any, new: Any) -> bool:
    """Return whether scores before and after the change cannot be compared.

    Runs of an older version may lack keys.
    """
    section, _, name = key.partition(".")
    if section != "evaluate" or name in ("patience", "every"):
        return key == "task.evaluation"
    return old is not None or new != RunConfig().flat()[key]


def base_digest(settings: RunSettings) -> str:
    """Return a digest (16 hex digits) of the base model files' names, sizes and pieces; "" without a local folder."""
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
