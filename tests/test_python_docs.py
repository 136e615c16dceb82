"""docs/python.md: its examples run as shown, and none has more than fifteen lines."""

from __future__ import annotations

import json
import random
import re
import sqlite3
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fedveil import tasks
from fedveil.local import LocalFederation
from fedveil.models import bundled, library_logging
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "python.md").read_text()
WARDS = {
    "chest pain": "cardiology",
    "short breath": "pulmonology",
    "broken arm": "surgery",
    "blurred sight": "neurology",
}
LOCAL, RUN, AUDIT, PEFT, SWEEP, OPTUNA = range(6)


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """A folder with the page's rows, as the current folder."""
    draw = random.Random(0)
    for name, split in (("north", "train"), ("south", "train"), ("server", "test")):
        (tmp_path / "rows" / name).mkdir(parents=True)
        with (tmp_path / "rows" / name / f"{split}.jsonl").open("w") as file:
            for _ in range(24):
                symptom = draw.choice(sorted(WARDS))
                file.write(
                    json.dumps({"note": f"{draw.randint(20, 90)} years, {symptom}", "ward": WARDS[symptom]}) + "\n"
                )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_config(rows) -> None:
    (rows / "run.toml").write_text(
        'run.rounds = 1\nmethod.name = "fedavg"\ntrain.max-steps = 1\n[task]\nsource-column = "note"\n'
        'target-column = "ward"\nlabel-column = "ward"\nevaluation = "rows/server"\n[evaluate]\ngenerate = "never"\n'
    )


def execute(number: int) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(blocks()[number], f"docs/python.md[{number}]", "exec"), names)
    return names


def test_examples_are_short_and_compile():
    assert len(blocks()) == 6
    for number, block in enumerate(blocks()):
        assert len([line for line in block.splitlines() if line.strip()]) <= 15
        compile(block, f"docs/python.md[{number}]", "exec")
    assert "[train, save, audit and sweep in Python](python.md)" in (ROOT / "docs" / "index.md").read_text()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_federation_is_trained_and_saved_and_peft_has_its_logits(rows):
    local = execute(LOCAL)["local"]
    assert isinstance(local, LocalFederation)
    assert (rows / "report.html").is_file()
    assert [row["round"] for row in local.metrics] == [0, 1, 2, 3]
    (rows / "base").symlink_to(bundled.bundled_folder("text-generation"))
    ids = torch.arange(2 * 9).reshape(2, 9)
    task = tasks.load_task(local.config, local.method.adapter, "cpu")
    task.put(local.models["server"])
    with library_logging.quiet_libraries(), torch.no_grad():
        names = execute(PEFT)
        theirs = names["model"].eval()(input_ids=ids).logits
        ours = task.base.model(input_ids=ids, use_cache=False).logits
        plain = AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32).eval()(input_ids=ids).logits
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(theirs, plain, atol=1e-2)


@pytest.mark.long
def test_a_run_folder_has_the_same_names(rows):
    config = {
        "method.name": "fedavg", "run.rounds": 1, "run.name": "study", "task.evaluation": "rows/server",
        "task.source-column": "note", "task.target-column": "ward", "task.label-column": "ward", "train.max-steps": 1,
    }  # fmt: skip
    LocalFederation.from_config(config, {"north": "rows/north", "south": "rows/south"}).run()
    names = execute(RUN)
    assert names["run"].state == "completed"
    assert (rows / "study.html").is_file()
    assert (rows / "study-final" / "privacy.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_is_audited(rows):
    names = execute(AUDIT)
    assert names["audit"].verdict
    assert names["audit"].rows


@pytest.mark.long
def test_a_sweep_ends_with_its_best_cell(rows):
    write_config(rows)
    names = execute(SWEEP)
    assert len(names["result"].runs) == 4


@pytest.mark.long
def test_optuna_has_all_it_needs(rows, monkeypatch):
    """Optuna is in no lock, so its names are stood in for."""
    asked = []

    class Study:
        def optimize(self, objective, n_trials):
            trial = SimpleNamespace(suggest_float=lambda name, low, high, log: asked.append((name, low, high)) or low)
            self.value = objective(trial)

    study = Study()

    def create_study(storage, study_name, load_if_exists):
        sqlite3.connect(storage.removeprefix("sqlite:///")).close()
        return study

    write_config(rows)
    monkeypatch.setitem(sys.modules, "optuna", SimpleNamespace(create_study=create_study))
    execute(OPTUNA)
    assert study.value > 0
    assert asked == [("rate", 1e-4, 1e-2)]
