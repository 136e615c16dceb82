"""What a run leaves in final/, by the server's own way there, for methods with every kind of adapter."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from fedveil import tasks
from fedveil.config import parse
from fedveil.contract.method import FederatedState
from fedveil.errors import TaskError
from fedveil.models import bundled, library_logging
from fedveil.records.tensor_state import load_state
from fedveil.server_app.run import prepare_strategy
from fedveil.server_app.run_folder import RunFolder
from fedveil.server_app.run_plan import RunPlan

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
IDS = torch.arange(2 * 9).reshape(2, 9)


def ended(folder, **changes):
    """A run whose last model has no zero factor, up to its end. Returns its config and server weights."""
    config = parse({"run.dir": str(folder), "run.name": "run", **changes})
    with RunFolder(folder / "run") as run:
        strategy = prepare_strategy(RunPlan.from_config(config, "run"), run)
        rounds, generator = strategy.rounds, torch.Generator().manual_seed(5)
        noisy = {n: w + 0.1 * torch.randn(w.shape, generator=generator) for n, w in rounds.server.tensors.items()}
        rounds._server = FederatedState(noisy, rounds.server.scalars)
        run.final(rounds.method.models(rounds.server), strategy._save)
    return config, rounds.method


@torch.no_grad()
def of_task(folder, config, adapter) -> torch.Tensor:
    """The logits of the project's own task with the weights in server.safetensors."""
    task = tasks.load_task(config, adapter, "cpu")
    weights = load_state(folder / "run" / "final" / "server.safetensors").tensors
    task.put({name: weights[name] for name in task.spec})
    return task.base.model(input_ids=IDS, attention_mask=torch.ones_like(IDS), use_cache=False).logits


def base():
    with library_logging.quiet_libraries():
        return AutoModelForCausalLM.from_pretrained(
            bundled.bundled_folder("text-generation"), dtype=torch.float32
        ).eval()


@pytest.mark.long
@pytest.mark.parametrize(
    "name,fields",
    [
        ("fedrand", "adapter = {rank = 4, alpha = 6.0}"),
        ("fedper", 'adapter = {rank = 2, targets = ".*c_attn"}'),
        ("fedpara", "adapter = {rank = 4}"),
        ("fedavg", 'adapter = {kind = "prefix", length = 4}'),
        ("fedsp", "distil_steps = 0\nadapter = {cells = 2, length = 4}"),
    ],
)
def test_peft_loads_final_with_the_logits_of_the_run(name, fields, tmp_path):
    config, method = ended(tmp_path, **{"method.name": name, "method.params": fields, "task.max-tokens": 32})
    with library_logging.quiet_libraries(), torch.no_grad():
        theirs = PeftModel.from_pretrained(base(), tmp_path / "run" / "final").eval()
        logits, plain = theirs(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits, base()(IDS).logits
    torch.testing.assert_close(
        logits, of_task(tmp_path, config, getattr(method, "server_adapter", method.adapter)), rtol=1e-5, atol=1e-5
    )
    assert not torch.allclose(logits, plain, atol=1e-2)
    adapter_config = json.loads((tmp_path / "run" / "final" / "adapter_config.json").read_text())
    assert adapter_config["base_model_name_or_path"] == "fedveil/tiny-text-generation"
    if name == "fedpara":
        assert adapter_config["r"] == 4


@pytest.mark.parametrize(
    "fields,file,key",
    [
        ("adapter = {rank = 2}", "adapter_config.json", "base_model_name_or_path"),
        ('adapter = {kind = "prefix", length = 4, cells = 2}', "adapter.json", "base"),
        ('adapter = {kind = "all"}', None, None),
    ],
)
def test_no_file_of_final_tells_where_the_base_lies_here(fields, file, key, tmp_path):
    own = tmp_path / "secret-project" / "llama"
    shutil.copytree(bundled.bundled_folder("text-generation"), own)
    ended(
        tmp_path, **{"method.name": "fedavg", "method.params": fields, "task.model": f"{own}/", "task.max-tokens": 32}
    )
    files = list((tmp_path / "run" / "final").iterdir())
    assert len(files) >= 3
    assert not [final_file.name for final_file in files if b"secret-project" in final_file.read_bytes()]
    if file:
        assert json.loads((tmp_path / "run" / "final" / file).read_text())[key] == "llama"


def test_transformers_loads_final_of_a_run_over_all_weights(tmp_path):
    config, method = ended(tmp_path, **{"method.name": "fedavg", "method.params": 'adapter = {kind = "all"}'})
    with library_logging.quiet_libraries(), torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final").eval()
        logits = theirs(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits
    torch.testing.assert_close(logits, of_task(tmp_path, config, method.adapter), rtol=1e-5, atol=1e-5)
    assert {file.stat().st_mode & 0o77 for file in (tmp_path / "run" / "final").iterdir()} == {0}


def test_an_end_that_is_repeated_replaces_the_files_and_one_that_fails_leaves_them(tmp_path):
    ended(tmp_path, **{"method.params": "adapter = {rank = 2}"})
    final = tmp_path / "run" / "final"
    (final / ".part").mkdir()  # a server that was killed
    (final / ".part" / "half").write_text("half")
    before = {file.name: file.read_bytes() for file in final.iterdir() if file.is_file()}
    with RunFolder(tmp_path / "run", resume=True) as run:
        weights = load_state(final / "server.safetensors").tensors

        def fails(given, into):
            (into / "adapter_config.json").write_text("{}")
            raise TaskError("no base any more")

        with pytest.raises(TaskError):
            run.final({"server": weights}, fails)
        assert {file.name: file.read_bytes() for file in final.iterdir()} == before
        run.final({"server": weights}, lambda given, into: (into / "adapter_config.json").write_text("new"))
    assert (final / "adapter_config.json").read_text() == "new"
    assert {file.name for file in final.iterdir()} == set(before)
