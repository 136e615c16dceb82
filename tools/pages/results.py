"""The committed benchmark results, each on its own page, with every row, its intervals, and the conclusions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools import result_provenance

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
_FIGURES = re.compile(r"[+-][\d.]+ \[[+-][\d.]+, [+-][\d.]+\]")  # a difference with its interval
_COUNTS = {"upload_bytes": "bytes up", "download_bytes": "bytes down", "rounds": "rounds", "seconds": "seconds"}


def read_results() -> dict[str, dict[str, Any]]:
    """Read all committed results, by the name of their pages."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))}


def render_index(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the index page: a table of the results with their form, commit and number of rows."""
    lines = [
        f"| [{escape_markdown(result['preset'])}]({name}.md) | {escape_markdown(result['title'])} | {result['form']} "
        f"| {result['commit']} | {_describe_code(name, result['commit'])} | {len(result['rows'])} |"
        for name, result in results.items()
    ]
    dirty = sum(result["commit"].endswith("+") for result in results.values())
    unknown = sum(name in result_provenance.UNKNOWN for name in results)
    return "\n".join([
        "# Results of all benchmarks", "",
        "Each page is written from one file of `benchmarks/results/`. Intervals are of 95 %, each for one figure.",
        "The sentences below a table are the file's own; those of comparisons are corrected for all of them.", "",
        f"Of {len(results)} results, {dirty} were measured with changes that no commit has (\"+\"), and {unknown} at a",
        "commit that the history no longer has: their code cannot be checked out. New ones are refused in both cases.",
        "`python tools/result_provenance.py` lists how many commits have since changed the code that each measured.",
        "[The papers' claims](papers.md) are on a page of their own, with what of the papers is not here.",
        "", "| preset | | form | commit | code | rows |", "|---|---|---|---|---|---|", *lines, "",
        "## One measurement, two verdicts", "",
        "A verdict is corrected for the comparisons of its own table. So one measurement can be decided in a small",
        "table and open in a large one; then it counts as open. These are all such measurements:", "",
        *(f"- {_describe_pair(results, pair)}" for pair in find_double_verdicts(results)), "",
        "```{toctree}\n:hidden:\n:glob:\n\n*\n```", "",
    ])  # fmt: skip


def find_double_verdicts(results: Mapping[str, Mapping[str, Any]]) -> list[list[tuple[str, str]]]:
    """Return pairs of sentences about the same measurement with different verdicts, each with the name of its result.

    Sentences in different results are about the same measurement if they have the same figures and the same claim.
    """
    found: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for name, result in results.items():
        for sentence in result["verdicts"]:
            if (match := _FIGURES.search(sentence)) and ": " in sentence[match.end() :]:
                claim = stated[1] if (stated := re.search(r"(?:claim|paper) has it ([^:]+):", sentence)) else ""
                found.setdefault((match[0], claim), []).append((name, sentence))
    return [
        each
        for each in found.values()
        if len({name for name, _ in each}) > 1 and len({text.rpartition(": ")[2] for _, text in each}) > 1
    ]


def _describe_pair(results: Mapping[str, Mapping[str, Any]], pair: list[tuple[str, str]]) -> str:
    """Return the figures of a measurement, and each result with its verdict."""
    figures = _FIGURES.search(pair[0][1])
    assert figures is not None
    links = [f"[{escape_markdown(results[name]['preset'])}]({name}.md)" for name, _ in pair]
    words = [escape_markdown(text.rpartition(": ")[2].rstrip(".")) for _, text in pair]
    said = "; ".join(f"{link}: {word}" for link, word in zip(links, words, strict=True))
    return f"{escape_markdown(figures[0])}: {said}"


def _describe_code(name: str, commit: str) -> str:
    """Return whether the measured code can be checked out."""
    words = [
        *(["changed"] if commit.endswith("+") else []),
        *(["not in history"] if name in result_provenance.UNKNOWN else []),
    ]
    return ", ".join(words) or "clean"


def render_result(result: Mapping[str, Any]) -> str:
    """Return one result as a page: how to run it, its rows, its conclusions, and how it differs from the paper."""
    options = ("" if result["form"] == "full" else f" --{result['form']}") + _seeds_option(result)
    machine = ", ".join(f"{key} {value}" for key, value in result["environment"].items() if value is not None)
    seconds = f", {result['seconds']:,.0f} s" if "seconds" in result else ""  # older files lack it
    parts = [
        f"# {escape_markdown(result['preset'])}", "", f"{escape_markdown(result['title'])}.", "",
        f"`fedveil bench {result['preset']}{options}`, commit {result['commit']}{seconds}. "
        f"{escape_markdown(machine)}.", "",
        "## Rows", "", *(line for row in result["rows"] for line in _render_row(row, result.get("paper", {}))),
    ]  # fmt: skip
    for heading, sentences in (("What it decides", "verdicts"), ("Differences from the paper", "differences")):
        if result.get(sentences):
            parts += [f"## {heading}", "", *(f"- {escape_markdown(sentence)}" for sentence in result[sentences]), ""]
    return "\n".join(parts)


def _seeds_option(result: Mapping[str, Any]) -> str:
    """Return the option for the number of seeds stated in the file, which may differ from the preset's default."""
    texts = (*result.get("differences", ()), *result.get("verdicts", ()))
    stated = next((match[1] for text in texts if (match := re.search(r"\b(\d+) seeds", text))), None)
    return f" --seeds {stated}" if stated else ""


def _render_row(row: Mapping[str, Any], paper: Mapping[str, Mapping[str, float]]) -> list[str]:
    reported = paper.get(row["name"], {})
    counts = [f"{row[key]:,.10g} {words}" for key, words in _COUNTS.items() if isinstance(row.get(key), int | float)]
    lines = [f"### {escape_markdown(row['name'])}", "", *([f"{', '.join(counts)}.", ""] if counts else [])]
    if not row["metrics"]:
        return lines
    lines += ["| metric | mean | interval | n | paper |", "|---|---|---|---|---|"]
    for name, metric in row["metrics"].items():
        interval = f"{metric['low']:.4g} to {metric['high']:.4g}" if metric["n"] > 1 else "-"
        printed = f"{reported[name]:g}" if name in reported else "-"
        lines.append(f"| {escape_markdown(name)} | {metric['mean']:.6g} | {interval} | {metric['n']} | {printed} |")
    return [*lines, ""]


def escape_markdown(text: str) -> str:
    """Escape a result's text so that it is not interpreted as Markdown."""
    return "".join(f"\\{char}" if char in "\\|<>*_[]`" else char for char in text)
