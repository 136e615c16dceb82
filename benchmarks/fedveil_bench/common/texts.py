"""The presets' text data as rows with a source and one reference, and scores with bootstrap replicates over sources.

| data | source | reference | train, validation, test |
|---|---|---|---|
| e2e_nlg, viggo | mr | ref | its own splits |
| dart | triples "s | p | o" joined by "; " | each of refs | its own test split; two halves of dev, divided by source |
| dialogsum | dialogue | summary, or summary1 to 3 | its own splits |
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedveil.attacks.membership.model_scores import target_loss
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import Example
from fedveil.errors import ConfigError
from fedveil.tasks.text_generation import TextGeneration
from fedveil.training import text_metrics
from fedveil_bench.common import data, quality, resampling
from fedveil_bench.common.resampling import ResampledMetric

METRICS = ("loss", "bleu", "nist", "rouge_l", "meteor", "cider")
_TEST = 8  # names the random draws
_OTHERWISE = ("dart", "dialogsum")  # data sets whose lines are not {"mr", "ref"}

Row = dict[str, str]


def load_rows(name: str, split: str) -> list[Row]:
    """Return a split's rows ("train", "validation", "test") as {"mr", "ref"}, one-line sources. Raises ConfigError."""
    file = _file(name, split)
    path = data.find_data_folder(name) / f"{file}.jsonl"
    if not path.is_file():
        raise ConfigError(f"data {name}: expected {path.name} in {path.parent}, found none; see benchmarks/README.md")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = [{"mr": " ".join(source.split()), "ref": ref} for line in lines for source, ref in _pairs(name, line)]
    if file == "dev":
        return [row for row in found if (_digest(row["mr"]) % 2 == 0) == (split == "test")]
    return found


def prepare_folder(name: str, scratch: Path) -> Path:
    """Return a folder with one {"mr", "ref"} file per split: the data folder, or `scratch`, which is then written."""
    if name not in _OTHERWISE:
        return data.find_data_folder(name)
    for split in ("train", "validation", "test"):
        lines = "".join(f"{json.dumps(row)}\n" for row in load_rows(name, split))
        (scratch / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return scratch


def require_splits(name: str, *splits: str, by_task: bool = False) -> data.DataRequirement:
    """Require the files that `load_rows` reads or, with `by_task`, that a task reads, which may be Parquet."""
    suffixes = data.ROWS if by_task and name not in _OTHERWISE else (".jsonl",)
    return data.DataRequirement(name, tuple(dict.fromkeys(_file(name, split) for split in splits)), suffixes)


def _file(name: str, split: str) -> str:
    return {"train": "test", "validation": "dev", "test": "dev"}[split] if name == "dart" else split


def _pairs(name: str, line: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    match name:
        case "dart":
            source = "; ".join(" | ".join(triple) for triple in line["tripleset"])
            yield from ((source, ref) for ref in line["refs"])
        case "dialogsum":
            yield from ((line["dialogue"], line[k]) for k in sorted(line) if k.startswith("summary"))
        case _:
            yield line["mr"], line["ref"]


def _digest(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


def select_rows(found: Sequence[Row], sources: int, references: int, seed: int) -> list[Row]:
    """Return the rows for `sources` sources, drawn by the seed, with the first `references` rows of each."""
    grouped: dict[str, list[Row]] = {}
    for row in found:
        grouped.setdefault(row["mr"], []).append(row)
    kept = set(random.Random(seed).sample(list(grouped), min(sources, len(grouped))))
    return [row for mr, rows in grouped.items() if mr in kept for row in rows[:references]]


def compute_scores(task: TextGeneration, weights: Weights, test: Sequence[Row]) -> dict[str, ResampledMetric]:
    """Return METRICS of the model on `test`, by name.

    "loss" is in nats per token. The others score the text that the model generates for each source, in percent
    except for nist and cider.
    """
    targets: dict[str, list[str]] = {}
    for row in test:
        targets.setdefault(row["mr"], []).append(row["ref"])
    losses = losses_of(task, weights, test)
    written = task.generate(weights, list(targets))
    references = list(targets.values())
    each = [text_metrics.score_texts([c], [refs]) for c, refs in zip(written, references, strict=True)]
    ciders = text_metrics.cider_d(
        [text_metrics.tokenize_words(c) for c in written],
        [[text_metrics.tokenize_words(t) for t in refs] for refs in references],
    )
    statistics = quality.bleu_statistics(written, references)
    return {
        "loss": resampling.resample_mean(losses, _TEST),
        "bleu": resampling.resample_statistic(statistics, quality.compute_bleu, _TEST),
        "nist": resampling.resample_statistic(
            quality.nist_statistics(written, references), quality.compute_nist, _TEST
        ),
        **{m: resampling.resample_mean([100 * s[m] for s in each], _TEST) for m in ("rouge_l", "meteor")},
        "cider": resampling.resample_mean(ciders, _TEST),
    }


def compute_loss(task: TextGeneration, weights: Weights, test: Sequence[Row]) -> ResampledMetric:
    """Return only the "loss" from `compute_scores`."""
    return resampling.resample_mean(losses_of(task, weights, test), _TEST)


def losses_of(task: TextGeneration, weights: Weights, test: Sequence[Row]) -> list[float]:
    """Return the mean loss of each source over its references, in nats per token, in order of first appearance."""
    found: dict[str, list[float]] = {}
    for row, prediction in zip(test, task.predict(weights, task.encode(Example.from_columns(test))), strict=True):
        found.setdefault(row["mr"], []).append(target_loss(prediction))
    return [sum(each) / len(each) for each in found.values()]
