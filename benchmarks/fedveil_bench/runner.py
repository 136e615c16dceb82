"""Run one preset: a TOML file `presets/<paper>/<table>.toml` that names its runner and its settings.

| form | its settings | purpose |
|---|---|---|
| full | `[settings]` | the paper's base, if it has one |
| small | `[settings]`, overridden by `[small]` if there is one | the bundled base: measured without a GPU |
| quick | either, overridden by `[quick]` | a trial, in less than four minutes on two cores |

A preset that differs from another preset in a few settings names that preset (`like = "<paper>/<table>"`) and contains
only those settings.

A runner is a module in this package with `run_benchmark(settings, options) -> BenchOutcome`. All results have the same
schema:

    {"preset", "form", "seconds", "commit", "environment",
     "rows": [{"name", "metrics": {name: {mean, low, high, n}}, ...}], "paper": {row: {metric: value}},
     "differences": [...], "verdicts": [...]}
"""

from __future__ import annotations

import difflib
import importlib
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from fedveil.errors import ConfigError
from fedveil.records.provenance import environment_info
from fedveil_bench import folders, provenance

Form = Literal["full", "small", "quick"]


@dataclass(frozen=True)
class BenchOptions:
    """The options of the command line.

    Attributes:
        form: the form of the preset to run: full, small or quick.
        seeds: number of seeds, or 0 for the preset's default.
        device: "auto", "cpu" or "cuda".
        launch: the module that starts a real federation (`fedveil.testing.deployment`), for presets that need one.
        simulation: the class that runs the app on Flower's simulation engine (`fedveil.testing.simulation`).
        say: called with progress messages, one line at a time.
        pieces: the pieces file, for a preset that runs in pieces, or None to run all at once.
        minutes: after this time, no further piece is started; None runs all pieces.
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
        """Return the options with the limit `minutes`, if there is one, reduced by this many seconds."""
        return self if self.minutes is None else replace(self, minutes=max(0.0, self.minutes - seconds / 60))


@dataclass
class BenchOutcome:
    """The result of a runner.

    Attributes:
        rows: the table's rows, as in the result file.
        verdicts: sentences computed from the rows' intervals.
        differences: sentences about how this run differs from the paper's setup.
        files: additional files to write with the result, by suffix.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)


def list_presets() -> list[str]:
    """Return the names of all presets, "<paper>/<table>"."""
    presets = folders.presets_folder()
    return sorted(str(p.relative_to(presets).with_suffix("")) for p in presets.glob("*/*.toml"))


def read_preset(name: str, form: Form) -> dict[str, Any]:
    """Return a preset from its file, with the "settings" and "differences" for the requested form.

    Raises:
        ConfigError: there is no such preset, or it does not have this form.
    """
    if name not in (known_names := list_presets()):
        whole = {each.rpartition("/")[2]: each for each in known_names} | {each: each for each in known_names}
        near = difflib.get_close_matches(name, whole, 1)
        said = f"; did you mean {whole[near[0]]}?" if near else ""
        raise ConfigError(f'preset: expected one of {known_names}, found "{name}"{said}')
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
        differences.append(
            "the quick form, which only shows that it works: it has too few rows, rounds and seeds for meaningful "
            "figures"
        )
    return preset | {"settings": settings, "differences": differences}


def check_forms(name: str) -> list[Form]:
    """Return the forms that a preset has, starting with the largest."""
    return _forms(_parsed(name))


def _forms(preset: Mapping[str, Any]) -> list[Form]:
    every: tuple[Form, ...] = ("full", "small", "quick")
    return [form for form in every if form == "full" or form in preset]


def _parsed(name: str) -> dict[str, Any]:
    """Return the file's content, merged over the preset named in `like`, if any."""
    own = tomllib.loads((folders.presets_folder() / f"{name}.toml").read_text())
    return _merged(_parsed(own["like"]), own) if "like" in own else own


def load_runner(preset: Mapping[str, Any]) -> ModuleType:
    """Import the module that runs a preset."""
    return importlib.import_module(f"fedveil_bench.{preset['runner']}")


def run_preset(name: str, options: BenchOptions) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Run one preset; return its result and the additional files, by suffix.

    Raises:
        ConfigError: the preset is unknown, or `minutes` is set for a preset whose table cannot be partial.
    """
    preset = read_preset(name, options.form)
    if options.minutes is not None and not getattr(load_runner(preset), "IN_PIECES", False):
        raise ConfigError(f"--minutes: expected a preset whose table can have fewer rows, found {name}; leave it out")
    began, commit = time.monotonic(), provenance.measured_commit()
    outcome: BenchOutcome = load_runner(preset).run_benchmark(preset["settings"], options)
    result = {
        "preset": name,
        "title": preset["title"],
        "form": options.form,
        "seconds": round(time.monotonic() - began, 1),
        # If code changed during the run, the result belongs to no commit.
        "commit": commit if commit == provenance.measured_commit() else f"{commit.rstrip('+')}+",
        "environment": environment_info(),
        "rows": outcome.rows,
        "verdicts": outcome.verdicts,
        "paper": preset.get("paper", {}),
        "differences": [*preset["differences"], *outcome.differences],
    }
    return result, outcome.files


def _merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merge tables recursively; replace all other values."""
    nested = {k: _merged(settings.get(k, {}), v) for k, v in changes.items() if isinstance(v, dict)}
    return settings | changes | nested
