"""Collect each method's measurements from the committed results in a checkout, for `fedveil methods --table`.

LoRA methods are all in one table, `lora/attacks`, and can be compared. Each other method is in a paper's table, from
either its own paper or a paper that uses it as a baseline. Such numbers can be compared only within a table, so a cell
names its table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.errors import StateError
from fedveil.sanitize import sanitize
from fedveil_bench import folders

_LORA = "lora/attacks"
_WORDS = (
    "measured, 95 %: from {lora} unless a table is named: test loss of the server's model, and AUROC of the attack "
    "alignment on what a client sent (0.5: a coin; 1: always right; FedAvg's is the undefended one). -: in none of "
    "these. docs/results.md has all, with all controls"
)
_NOT_HERE = "measured: -, because benchmarks/results is only in a checkout; docs/results.md has the figures"
_PROPORTIONS = ("alignment", "AUROC, LiRA", "recovered")  # between 0 and 1, though their intervals may extend beyond

# By method title: tables, and for each table (words, row, metric). Each defense is next to the undefended case.
_SITE, _NOISE = "% right at its own site, epsilon 0.4,", "by noise only"
_ABOVE, _TUNED = "a client's loss above the server's, mean of four data sets,", "after its own training"
_LESS = f"{_ABOVE} minus that of a run that hides nothing,"
_LOSS, _FEDAVG = "test loss of the server's model", ("FedAvg's", "FedAvg", "loss")
_OF_PAPERS: dict[str, dict[str, list[tuple[str, str, str]]]] = {
    "FedPer": {"fedrand/quality": [(f"{_LOSS}, two of four layers shared,", "FedPer-2", "loss"), _FEDAVG]},
    "FedPara": {
        "fedrand/quality": [
            (f"{_LOSS}, as plus-one", "FedPara", "loss"),
            ("as product", "FedPara, product", "loss"),
            _FEDAVG,
        ]
    },
    "DP-FPL": {
        "dp_fpl/table3": [
            (_SITE, "DP-FPL, epsilon 0.4", "local"),
            (_NOISE, "DP-FPL, epsilon 0.4, noise only", "local"),
        ],
        "dp_fpl/mia_learns": [
            ("attack at epsilon 8", "private", "AUROC, LiRA"),
            ("on FedOTP's prompts, undefended,", "undefended", "AUROC, LiRA"),
        ],
    },
    "PromptFL": {
        "dp_fpl/table3": [
            (_SITE, "PromptFL, epsilon 0.4", "local"),
            (_NOISE, "PromptFL, epsilon 0.4, noise only", "local"),
        ]
    },
    "FedOTP": {
        "dp_fpl/table3": [("% right at its own site, without noise,", "FedOTP", "local")],
        "dp_fpl/mia_learns": [("attack", "undefended", "AUROC, LiRA")],
    },
    "FedPGP": {"dp_fpl/table3": [("% right at its own site, without noise,", "FedPGP", "local")]},
    "FedQSN": {
        "fedqsn/table1": [
            (_LESS, "FedQSN gap less control", "loss"),
            (_TUNED, "FedQSN tuned gap less control", "loss"),
        ]
    },
    "FedLPP": {
        "fedqsn/table1": [
            (_LESS, "FedLPP gap less control", "loss"),
            (_TUNED, "FedLPP tuned gap less control", "loss"),
        ]
    },
    "FedSP": {
        "fedqsn/table1": [(_ABOVE, "FedSP gap", "loss"), (_TUNED, "FedSP tuned gap", "loss")],
    },
    "Random binary weights for gradients": {
        "random_binary/accuracy": [
            ("% right", "scratch, R = 0.5", "accuracy"),
            ("without masks", "scratch, plain", "accuracy"),
        ],
        "random_binary/april": [
            ("share of pictures that APRIL reads", "modified, R = 0.5, APRIL", "recovered"),
            ("without masks", "modified, no defence, APRIL", "recovered"),
        ],
        "random_binary/adaptive": [("an attacker who knows the mask reads", "R = 0.5, batch 1", "read")],
    },
    "Fixed position embedding": {
        "random_binary/accuracy": [
            ("% right", "scratch, fixed position", "accuracy"),
            ("where it is trained", "scratch, plain", "accuracy"),
        ],
        "random_binary/april": [
            ("share of pictures that APRIL reads", "modified, fixed position, APRIL", "recovered"),
            ("where it is trained", "modified, no defence, APRIL", "recovered"),
        ],
        "random_binary/adaptive": [("an attacker who knows of it reads", "fixed position, batch 1", "read")],
    },
}


def read_column() -> tuple[dict[str, str], str]:
    """Return the cells by method title, and a sentence about their source; no cells outside a checkout.

    Raises:
        StateError: a committed file is not a result, or lacks a row or metric.
    """
    folder = folders.results_folder()
    if folder is None or not _file(folder, _LORA).is_file():
        return {}, _NOT_HERE
    presets = {_LORA, *(preset for tables in _OF_PAPERS.values() for preset in tables)}
    results = {preset: _Result.read(folder, preset) for preset in presets if _file(folder, preset).is_file()}
    found = {title: _of_papers(results, tables) for title, tables in _OF_PAPERS.items()}
    return {title: words for title, words in found.items() if words} | _compared(results[_LORA]), _WORDS.format(
        lora=f"{results[_LORA].command}, commit {results[_LORA].commit}"
    )


@dataclass(frozen=True)
class _Result:
    """A committed result: its table, command and commit, and each row's metrics."""

    preset: str
    command: str
    commit: str
    rows: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, folder: Path, preset: str) -> _Result:
        """Read a result. Raises StateError if the file is not a result."""
        try:
            content = json.loads(_file(folder, preset).read_text())
            rows = {str(row["name"]): row["metrics"] for row in content["rows"]}
            command = (
                f"fedveil bench {preset}{'' if content['form'] == 'full' else ' --' + sanitize(content['form'], 8)}"
            )
            return cls(preset, command, sanitize(content["commit"], 40), rows)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StateError(
                f"{_file(folder, preset)}: expected a result of fedveil bench {preset}, found {sanitize(error, 80)}; "
                "take the committed one"
            ) from None

    def metric(self, row: str, name: str) -> dict[str, float]:
        """Return a metric's mean and bounds; the data set's name before it may be omitted. Raises StateError."""
        try:
            of = self.rows[row]
            value = of[name] if name in of else next(v for key, v in of.items() if key.endswith(f" {name}"))
            estimate = {key: float(value[key]) for key in ("mean", "low", "high")}
        except (StopIteration, KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(
                f"benchmarks/results: expected {row!r} with {name!r} in the result of fedveil bench {self.preset}, "
                f"found {sanitize(repr(error), 80)}; use the committed one"
            ) from None
        return {key: min(1.0, max(0.0, x)) for key, x in estimate.items()} if name in _PROPORTIONS else estimate


def _of_papers(results: Mapping[str, _Result], tables: Mapping[str, list[tuple[str, str, str]]]) -> str:
    parts = []
    for preset, cells in tables.items():
        if preset in results:
            cell_texts = (f"{words} {_interval(results[preset].metric(row, name))}" for words, row, name in cells)
            parts.append(f"{results[preset].command.removeprefix('fedveil bench ')}: {', '.join(cell_texts)}")
    return "; ".join(parts)


def _compared(lora: _Result) -> dict[str, str]:
    """Return the server model's test loss, and the result of the attack on one client, for methods with both."""
    start, summaries = lora.metric("round 0", "test loss")["mean"], {}
    for title in (name.removesuffix(" server") for name in lora.rows if name.endswith(" server")):
        loss, alignment = lora.metric(f"{title} server", "test loss"), lora.metric(f"{title} client", "alignment")
        same = ", the base's: the server has no other" if loss["mean"] == start else ""
        summaries[title] = f"loss {_interval(loss)}{same}; attack {_interval(alignment)}"
    return summaries


def _interval(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"


def _file(folder: Path, preset: str) -> Path:
    return folder / f"{preset.replace('/', '_')}.json"
