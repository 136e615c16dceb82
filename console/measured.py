"""What was measured of each method, from the committed results of a checkout, for `fedveil methods --table`.

LoRA methods stand in one table, `lora/attacks`, and can be compared. The others are in those of their own papers, each
with what that paper asks; such figures compare within a table alone, and so a cell names its table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedveil import places
from fedveil.errors import StateError
from fedveil.foreign import shown

_LORA = "lora/attacks"
_WORDS = (
    "measured, 95 %: without a table's name fedveil bench lora/attacks: test loss of the server's model, and AUROC of "
    "the attack alignment on what a client sent (0.5: a coin; 1: told every time); else the table that is named, of "
    "the method's own paper. -: in none of these. docs/results.md has all, with their controls"
)
_NOT_HERE = "measured: -, for benchmarks/results is in a checkout alone; docs/results.md has the figures"

# By a method's title: the table, and in it (words, row, metric).
_ACCURACY, _SHARE = "accuracy", "recovered"
_ABOVE = "a client's loss above the server's, less that of a run that hides nothing,"
_OF_PAPERS: dict[str, list[tuple[str, str, str, str]]] = {
    "DP-FPL": [
        ("dp_fpl/table3", "% right at its own site, epsilon 0.4,", "DP-FPL, epsilon 0.4", "local"),
        ("dp_fpl/mia", "attack", "DP-FPL, noise 4 C each", "AUROC, global"),
    ],
    "PromptFL": [("dp_fpl/table3", "% right at its own site, epsilon 0.4,", "PromptFL, epsilon 0.4", "local")],
    "FedOTP": [("dp_fpl/table3", "% right at its own site, without noise,", "FedOTP", "local")],
    "FedPGP": [("dp_fpl/table3", "% right at its own site, without noise,", "FedPGP", "local")],
    "FedQSN": [
        ("fedqsn/table1", _ABOVE, "FedQSN gap less control", "e2e_nlg loss"),
        ("fedqsn/table1", "after its own training", "FedQSN tuned gap less control", "e2e_nlg loss"),
    ],
    "FedLPP": [
        ("fedqsn/table1", _ABOVE, "FedLPP gap less control", "e2e_nlg loss"),
        ("fedqsn/table1", "after its own training", "FedLPP tuned gap less control", "e2e_nlg loss"),
    ],
    "FedSP": [
        ("fedqsn/table1", "a client's loss above the server's", "FedSP gap", "e2e_nlg loss"),
        ("fedqsn/table1", "after its own training", "FedSP tuned gap", "e2e_nlg loss"),
    ],
    "Random binary weights for gradients": [
        ("random_binary/accuracy", "% right", "scratch, R = 0.5", _ACCURACY),
        ("random_binary/accuracy", "without masks", "scratch, plain", _ACCURACY),
        ("random_binary/adaptive", "share of pictures that who knows the mask reads", "R = 0.5, batch 1", _SHARE),
    ],
    "Fixed position embedding": [
        ("random_binary/accuracy", "% right", "scratch, fixed position", _ACCURACY),
        ("random_binary/april", "share of pictures that APRIL reads", "modified, fixed position, APRIL", _SHARE),
    ],
}


def committed() -> tuple[dict[str, str], str]:
    """Figures by a method's title, and in words where they are from; no figures outside a checkout.

    Raises:
        StateError: a committed file is no result, or lacks a row or metric.
    """
    at = places.checkout()
    if at is None or not _file(at, _LORA).is_file():
        return {}, _NOT_HERE
    of_papers = {title: _of_paper(at, cells) for title, cells in _OF_PAPERS.items()}
    return {title: words for title, words in of_papers.items() if words} | _compared(_rows(at, _LORA)), _WORDS


def _of_paper(at: Path, cells: list[tuple[str, str, str, str]]) -> str:
    said: dict[str, list[str]] = {}
    for preset, words, row, metric in cells:
        if _file(at, preset).is_file():
            said.setdefault(preset, []).append(f"{words} {_interval(_metric(_rows(at, preset), preset, row, metric))}")
    return "; ".join(f"{preset}: {', '.join(parts)}" for preset, parts in said.items())


def _compared(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Test loss of the server's model, and the attack on one client, of methods with both."""
    start = _metric(rows, _LORA, "round 0", " test loss")["mean"]
    found = {}
    for title in (name.removesuffix(" server") for name in rows if name.endswith(" server")):
        loss = _metric(rows, _LORA, f"{title} server", " test loss")
        told = _metric(rows, _LORA, f"{title} client", " alignment")
        same = ", the base's: the server has no other" if loss["mean"] == start else ""
        most = {**told, "high": min(1.0, told["high"])}  # of an AUROC
        found[title] = f"loss {_interval(loss)}{same}; attack {_interval(most)}"
    return found


def _interval(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"


def _file(at: Path, preset: str) -> Path:
    return at / "benchmarks" / "results" / f"{preset.replace('/', '_')}.json"


def _rows(at: Path, preset: str) -> dict[str, Mapping[str, Any]]:
    try:
        return {str(row["name"]): row["metrics"] for row in json.loads(_file(at, preset).read_text())["rows"]}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _no_result(at, preset, error) from None


def _metric(rows: Mapping[str, Mapping[str, Any]], preset: str, row: str, name: str) -> Mapping[str, float]:
    """A metric by its name, or by what it ends with: before a space stands what the data are called."""
    try:
        value = next(value for key, value in rows[row].items() if key == name or key.endswith(name))
        return {key: float(value[key]) for key in ("mean", "low", "high")}
    except (StopIteration, KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(
            f"benchmarks/results: expected {row!r} with {name.strip()!r} in the result of fedveil bench {preset}, "
            f"found {shown(repr(error), 80)}; take the committed one"
        ) from None


def _no_result(at: Path, preset: str, error: Exception) -> StateError:
    return StateError(
        f"{_file(at, preset)}: expected a result of fedveil bench {preset}, found {shown(error, 80)}; take the "
        "committed one"
    )
