"""Texts before and after, of a run that was made in process."""

from __future__ import annotations

import json

import pytest

from fedveil.console.runs import sample_texts
from tests.fedveil.console.commands.test_audit import DATA, SITES, made


@pytest.mark.long
def test_a_run_of_texts_has_samples_of_its_first_and_its_last_model(tmp_path):
    run = made(tmp_path / "run", SITES, {"task.evaluation": str(DATA), "run.rounds": 1, "method.name": "fedavg"})
    sample_texts.write_samples(run)
    samples = sample_texts.read_samples(run)
    first = dict[str, str]()  # a prompt has many rows
    for row in map(json.loads, (DATA / "test.jsonl").read_text().splitlines()):
        first.setdefault(row["mr"], row["ref"])
    assert [(s.prompt, s.wanted) for s in samples] == list(first.items())[:3]
    assert any(s.before != s.after for s in samples)
    assert all(s.after for s in samples)


@pytest.mark.long
def test_without_test_rows_there_are_none(tmp_path):
    run = made(tmp_path / "run", SITES, {"run.rounds": 1, "train.epochs": 1})
    sample_texts.write_samples(run)
    assert sample_texts.read_samples(run) == []
