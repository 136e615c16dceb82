"""What a site's environment, folders and model folders can slip under the guard."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedveil import paths
from fedveil.adapters.lora import LoraAdapter
from fedveil.config import parse
from fedveil.console.flower.site_process import write_guard
from fedveil.errors import TaskError
from fedveil.models import image_classifier, loading
from fedveil.privacy.ledger import PrivacyLedger
from fedveil.records import audit_log
from fedveil.records.tensor_state import write_atomic
from fedveil.wire.capture import MessageCapture
from tests.conftest import ROOT

STEALS = "from pathlib import Path; Path({marker!r}).write_text('ran')\n"


@pytest.mark.long
@pytest.mark.parametrize("module", ["sitecustomize.py", "fedveil/__init__.py", "flwr/__init__.py", "grpc.py"])
def test_no_python_variable_reaches_the_guard(tmp_path, module):
    script, marker, planted = write_guard(tmp_path / "bin"), tmp_path / "marker", tmp_path / "planted" / module
    planted.parent.mkdir(parents=True)
    planted.write_text(STEALS.format(marker=str(marker)))
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "planted"), "PYTHONUSERBASE": str(tmp_path)}
    done = subprocess.run([str(script), "--help"], capture_output=True, text=True, env=env, check=True, cwd=tmp_path)
    assert "Runtime API" in done.stdout
    assert not marker.exists()


def test_nor_what_the_guard_starts(tmp_path):
    script = write_guard(tmp_path / "bin").read_text().partition("from fedveil")[0]
    code = f"{script}\nprint(sorted(name for name in os.environ if name.startswith('PYTHON')), sys.path[-1])"
    env = {**os.environ, "PYTHONPATH": "/planted", "PYTHONHASHSEED": "1", "PYTHONSTARTUP": "/planted"}
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout == f"[] {ROOT}\n"


def test_folders_of_private_files_are_closed_from_the_top(tmp_path):
    top = tmp_path / "home"
    audit_log.append_entry(top / "a" / "state" / "log.jsonl", "sent", {})
    write_atomic(top / "b" / "run" / "site" / "secret", b"x")
    MessageCapture(top / "c" / "tap").write(b"x", 0, 0, "north", "up")
    with PrivacyLedger(top / "d" / ".ledger")._locked():
        pass
    paths.private_folder(top / "e" / "f")
    folders = [folder for folder in (top, *top.rglob("*")) if folder.is_dir()]
    assert len(folders) == 12
    assert {oct(folder.stat().st_mode & 0o777) for folder in folders} == {"0o700"}


@pytest.fixture
def tempting(tmp_path) -> Path:
    """A model folder whose config asks for code of its own."""
    folder, marker = tmp_path / "model", tmp_path / "marker"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"model_type": "stolen", "architectures": ["Stolen"], "auto_map": {"AutoConfig": "code.Config", '
        '"AutoModelForCausalLM": "code.Model", "AutoModelForImageClassification": "code.Model"}}'
    )
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["code.Tokenizer", null]}}')
    (folder / "code.py").write_text(STEALS.format(marker=str(marker)))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    "load",
    [
        lambda config: loading.load_causal(config, LoraAdapter(), torch.device("cpu"), None),
        lambda config: image_classifier.load_image_classifier(config, LoraAdapter(), torch.device("cpu"), {}),
    ],
    ids=["text", "images"],
)
def test_a_model_folder_runs_no_code_even_where_somebody_would_say_yes(tempting, monkeypatch, load):
    monkeypatch.setattr("builtins.input", lambda *words: "y")
    with pytest.raises(TaskError, match="cannot load"):
        load(parse({"task.model": str(tempting)}))
    assert not (tempting.parent / "marker").exists()
