"""Runs one preset: a TOML file in `presets/<paper>/<table>.toml` that names its runner and its settings.

| form | its settings | what for |
|---|---|---|
| full | `[settings]` | the paper's base where it has one |
| small | those of `[small]` over them, where there are any | the bundled base: what was measured without a GPU |
| quick | those of `[quick]` over either | to see it work, in less than four minutes on two cores |

One that differs from another in a few settings names it (`like = "<paper>/<table>"`) and has those alone.

A runner is a module below this folder with `run(preset, options) -> Outcome`. The result has one schema for all:

    {"preset", "form", "seconds", "commit", "environment",
     "rows": [{"name", "metrics": {name: {mean, low, high, n}}, ...}], "paper": {row: {metric: value}},
     "differences": [...], "verdicts": [...]}
"""

from __future__ import annotations

import importlib
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from fedveil.errors import ConfigError
from fedveil.records.provenance import environment_info, git_commit
from fedveil_bench import folders

Form = Literal["full", "small", "quick"]


@dataclass(frozen=True)
class BenchOptions:
    """The options of the command line.

    Attributes:
        form: which of the preset's settings replace the full ones.
        seeds: how many; 0 = as many as the preset says.
        device: "auto", "cpu" or "cuda".
        launch: the module that starts a real federation (`fedveil.testing.deployment`), for presets that need one.
        simulation: the class that runs the app on Flower's simulation engine (`fedveil.testing.simulation`).
        say: gets progress, one line at a time.
        pieces: the file of a preset that runs in pieces; None = all at once.
        minutes: after these no further piece is begun; None = all of them.
    """

    form: Form = "full"
    seeds: int = 0
    device: str = "auto"
    launch: Any = None
    simulation: Any = None
    say: Callable[[str], None] = lambda text: None
    pieces: Path | None = None
    minutes: float | None = None

    def after(self, seconds: float) -> BenchOptions:
        """The same once so many seconds have passed: with fewer minutes, where there is a bound."""
        return self if self.minutes is None else replace(self, minutes=max(0.0, self.minutes - seconds / 60))


@dataclass
class BenchOutcome:
    """The result of a runner.

    Attributes:
        rows: of the table, as the result file has them.
        verdicts: sentences that are computed from the rows' intervals.
        differences: sentences on where this run differs from the paper's setting.
        files: files beside the result, by suffix.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)


def list_presets() -> list[str]:
    """Names of all presets, "<paper>/<table>"."""
    presets = folders.presets_folder()
    return sorted(str(p.relative_to(presets).with_suffix("")) for p in presets.glob("*/*.toml"))


def read_preset(name: str, form: Form) -> dict[str, Any]:
    """A preset as its file has it; "settings" and "differences" are those of the form asked for.

    Raises:
        ConfigError: no such preset, or it has no such form.
    """
    if name not in list_presets():
        raise ConfigError(f'preset: expected one of {list_presets()}, found "{name}"')
    preset = _parsed(name)
    if form not in (known := _forms(preset)):
        raise ConfigError(
            f"--{form}: expected a preset that has this form, found {name}, which has {' and '.join(known)}; leave "
            "it out, or use the other"
        )
    settings, differences = preset["settings"], list(preset.get("differences", []))
    for part in {"full": (), "small": ("small",), "quick": ("small", "quick")}[form]:
        settings = _merged(settings, preset.get(part, {}))
        differences += preset.get(f"{part}_differences", [])
    if form == "quick" and "small" in preset:
        differences.append("the quick form, to see it work: too few rows, rounds and seeds for its figures to say much")
    return preset | {"settings": settings, "differences": differences}


def check_forms(name: str) -> list[Form]:
    """The forms that a preset has, the largest first."""
    return _forms(_parsed(name))


def _forms(preset: Mapping[str, Any]) -> list[Form]:
    every: tuple[Form, ...] = ("full", "small", "quick")
    return [form for form in every if form == "full" or form in preset]


def _parsed(name: str) -> dict[str, Any]:
    """Return the content of the file, over the content of the one that it is `like`."""
    own = tomllib.loads((folders.presets_folder() / f"{name}.toml").read_text())
    return _merged(_parsed(own["like"]), own) if "like" in own else own


def load_runner(preset: Mapping[str, Any]) -> ModuleType:
    """The module that runs it."""
    return importlib.import_module(f"fedveil_bench.{preset['runner']}")


def run_preset(name: str, options: BenchOptions) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The result of one preset, and the files beside it, by suffix.

    Raises:
        ConfigError: an unknown preset, or minutes for one that cannot end before it is whole.
    """
    preset = read_preset(name, options.form)
    if options.minutes is not None and not getattr(load_runner(preset), "IN_PIECES", False):
        raise ConfigError(f"--minutes: expected a preset whose table can have fewer rows, found {name}; leave it out")
    began = time.monotonic()
    outcome: BenchOutcome = load_runner(preset).run_benchmark(preset["settings"], options)
    result = {
        "preset": name,
        "title": preset["title"],
        "form": options.form,
        "seconds": round(time.monotonic() - began, 1),
        "commit": git_commit(),
        "environment": environment_info(),
        "rows": outcome.rows,
        "verdicts": outcome.verdicts,
        "paper": preset.get("paper", {}),
        "differences": [*preset["differences"], *outcome.differences],
    }
    return result, outcome.files


def _merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Tables are merged, everything else is replaced."""
    nested = {k: _merged(settings.get(k, {}), v) for k, v in changes.items() if isinstance(v, dict)}
    return settings | changes | nested
