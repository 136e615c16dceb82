"""Check whether a preset can run here, and how long its last run took, without loading, training or writing anything.

A runner may declare the data that it reads (`list_requirements`, see `common/data.py`) and packages beyond FedVeil's
own (`PACKAGES`).
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.errors import ConfigError
from fedveil_bench import runner
from fedveil_bench.common import data
from fedveil_bench.runner import BenchOptions

_PICTURES = "`image` (bytes), `label` (ClassLabel), `class_name`, `source_path`"
_CAPTIONS = "train.parquet and test.parquet with `image`, `caption` (a list), `label` (the object)"
# Where each required folder comes from, and what it contains.
SOURCES = {
    "e2e_nlg": "github.com/tuetschek/e2e-dataset; lines {mr, ref}",
    "viggo": "huggingface.co/datasets/GEM/viggo; lines {mr, ref}",
    "dart": "github.com/Yale-LILY/dart; lines {tripleset, refs}",
    "dialogsum": "github.com/cylnlp/dialogsum; lines {dialogue, summary or summary1 to summary3}",
    "caltech101": f"Caltech-101 (Fei-Fei et al. 2004); {_PICTURES}",
    "cifar10": "cs.toronto.edu/~kriz/cifar.html; `image` (bytes), `label` (ClassLabel), `source_path`",
    "coco_captions_mini": "some pictures of cocodataset.org; train.parquet with `image`, `captions` (a list)",
    "coco2017-caption": f"cocodataset.org; {_CAPTIONS}",
    "nocaps-caption": f"nocaps.org; {_CAPTIONS}",
    "scienceqa-choice": "scienceqa.github.io; `image`, `question`, `hint`, `choices`, `answer` (index), `label`",
    "gpt2-medium": "hf download openai-community/gpt2-medium --local-dir $FEDVEIL_DATA/gpt2-medium",
    "clip-vit-base-patch16": "hf download openai/clip-vit-base-patch16 --local-dir $FEDVEIL_DATA/clip-vit-base-patch16",
    "vit-small-patch16-224": "hf download WinKawaks/vit-small-patch16-224 --local-dir "
    "$FEDVEIL_DATA/vit-small-patch16-224; or another ViT-S/16 at 224 of transformers' own classes",
    "vlm-base": "an image-text-to-text model of transformers' own classes, as `save_pretrained` writes it",
    "ray": "pip install --require-hashes --no-deps -r lock/simulation.txt",
    "opacus": "pip install 'fedveil[test]'",
}


@dataclass(frozen=True)
class PresetReadiness:
    """The available inputs, the missing inputs with the next step for each, and a sentence about the time."""

    there: Sequence[str]
    missing: Sequence[str]
    time: str


def preset_needs(preset: Mapping[str, Any]) -> list[data.DataRequirement]:
    """Return the data that the preset's runner reads with these settings."""
    module = runner.load_runner(preset)
    found: list[data.DataRequirement] = getattr(module, "list_requirements", data.list_requirements)(preset["settings"])
    return found


def check_ready(name: str, options: BenchOptions, results: Path) -> PresetReadiness:
    """Check a preset's folders, packages, device and time; `results` is the results folder.

    Raises:
        ConfigError: there is no such preset or form.
    """
    preset = runner.read_preset(name, options.form)
    there, missing = _found(preset)
    from fedveil.models import loading  # torch

    kind = options.device.partition(":")[0]
    try:
        kind = loading.pick_device(options.device).type
        there.append(f"device: {kind}")
    except ConfigError as error:
        missing.append(f"{error}. A GPU needs its driver and a torch build for it")
    return PresetReadiness(there, missing, recorded_time(name, preset["settings"], options, results, kind))


def require_ready(name: str, options: BenchOptions) -> None:
    """Raise ConfigError if a folder or package that a preset needs is missing, and say where to get each."""
    if missing := _found(runner.read_preset(name, options.form))[1]:
        form = "" if options.form == "full" else f" --{options.form}"
        raise ConfigError(
            f"{name}: {len(missing)} of its inputs are missing: {'; '.join(missing)}; check again with fedveil "
            f"bench {name}{form} --dry-run, which runs nothing"
        )


def _found(preset: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the available folders and packages, and how to get each missing one."""
    there: list[str] = []
    missing: list[str] = []
    for need in preset_needs(preset):
        try:
            there.append(data.describe_files(need))
        except ConfigError as error:
            missing.append(f"{error}. From: {SOURCES.get(need.name, 'your own preset')}")
    for package in getattr(runner.load_runner(preset), "PACKAGES", ()):
        if importlib.util.find_spec(package) is None:
            missing.append(f"package {package}: not installed. From: {SOURCES[package]}")
    return there, missing


def recorded_time(name: str, settings: Mapping[str, Any], options: BenchOptions, results: Path, device: str) -> str:
    """Describe how long the last run with a result took, and how long this one is expected to take."""
    found = _last(results, name, device, options.form)
    if found is None:
        return f"time: unknown, no result of {name} is in {results}"
    where, count, asked = found["environment"], recorded_seeds(found), options.seeds or settings.get("seeds", 0)
    machine = where.get("gpu") or f"{where['cores']} cores of {where['cpu'].strip()}"
    with_seeds = f" with {_count(count)}" if count else ""
    said = f"time: last run, {found['form']}{with_seeds}, on {machine}, commit {found['commit'] or 'unknown'}: "
    took, of_rows = found.get("seconds"), sum(row.get("seconds") or 0 for row in found["rows"])
    if took is None and not of_rows:
        return said + "its result has no seconds, so this run's are unknown"
    said += f"took {took:,.0f} s" if took is not None else f"its rows took {of_rows:,.0f} s, the total is not recorded"
    if found["form"] != options.form:
        return f"{said}; the {options.form} form was not measured, so its seconds are unknown"
    if bool(where.get("gpu")) != (device == "cuda"):
        return f"{said}; on a {'GPU' if device == 'cuda' else 'CPU'} it was not measured, so its seconds are unknown"
    if took is None:
        return f"{said}; about as long on such a machine, or longer"
    if not asked:
        return f"{said}; about as long on such a machine"
    if not count:
        return f"{said}; its result does not state its seeds, so the seconds of {_count(asked)} are unknown"
    return f"{said}; about {took * asked / count:,.0f} s on such a machine with {_count(asked)}"


def _count(seeds: int) -> str:
    return f"{seeds} seed{'' if seeds == 1 else 's'}"


def recorded_seeds(result: Mapping[str, Any]) -> int | None:
    """Return the number of seeds stated in a result's sentences, or None if not stated."""
    for text in [*result["differences"], *result["verdicts"]]:
        if said := re.search(r"\b(\d+) seeds", text):
            return int(said[1])
    return None


def _last(results: Path, name: str, device: str, form: runner.Form) -> dict[str, Any] | None:
    """Return the preset's last result; for a quick run or one from `make gpu`, prefer the same form."""
    file = f"{name.replace('/', '_')}.json"
    folders = [*(["gpu"] if device == "cuda" else []), *(["quick"] if form == "quick" else []), ""]
    for place in (results / folder / file for folder in folders):
        if place.is_file():
            try:
                found: dict[str, Any] = json.loads(place.read_text())
            except ValueError as error:
                raise ConfigError(
                    f"{place}: expected a result, found no JSON ({error}); run the preset again"
                ) from None
            if "form" not in found:
                raise ConfigError(
                    f'{place}: expected a result with its "form" (full, small or quick), found none, as before '
                    "0.2.0; run the preset again, or move the file away"
                )
            return found
    return None
