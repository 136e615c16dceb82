"""Every method with text classification either trains the head and the base, or refuses with the reason."""

from __future__ import annotations

import pytest
import torch

from fedveil import strategies
from fedveil.errors import ConfigError
from fedveil.local import LocalFederation
from fedveil.tasks import load_task
from tests.fedveil.tasks.small_classifiers import CONTEXT, NAMES, draw_rows, save_base, save_rows

METHODS = strategies.list_methods()
# One of each kind that trains, and all that are refused; the others are long.
FAST = {"fedavg", "fedper", "fedqsn", "fedrand", "fedsa_lora", "random_binary", "scaffold"}
FAST |= {"dp_fpl", "fedotp", "fedpgp", "fedsp", "promptfl"}
PARAMS = {"fedlpp": "", "hetlora": 'ranks = {"a" = 2}', "flora": 'ranks = {"a" = 2}', "fedper": "layers = 1"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("methods")
    for kind in ("bert", "llama"):
        save_base(root / kind, kind)
    for number, site in enumerate("abc"):
        save_rows(root / site, draw_rows(8, seed=number))
    save_rows(root / "server", draw_rows(20, seed=9), "test")
    return root


def flat(place, method: str, kind: str, **keys: object) -> dict[str, object]:
    return {
        "task.name": "text-classification", "task.model": str(place / kind), "task.class-names": ",".join(NAMES),
        "task.source-column": "note", "task.target-column": "ward", "task.label-column": "ward",
        "task.max-tokens": CONTEXT, "method.name": method, "method.params": PARAMS.get(method, ""), "run.rounds": 2,
        "train.batch-size": 4, "train.learning-rate": 1e-2, "run.deterministic": True,
    } | {name.replace("__", ".").replace("_", "-"): value for name, value in keys.items()}  # fmt: skip


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[pytest.mark.long] if name not in FAST else []) for name in METHODS]
)
def test_a_method_trains_the_head_and_the_base_or_says_why_not(place, method):
    kind = "llama" if METHODS.index(method) % 2 else "bert"
    if strategies.create_method(method, PARAMS.get(method, "")).adapter.mount != "layers":
        with pytest.raises(ConfigError, match='the task "text-classification" supports LoRA pairs or all'):
            LocalFederation.from_config(flat(place, method, kind), {"a": place / "a"})
        return
    federation = LocalFederation.from_config(flat(place, method, kind), {site: place / site for site in "abc"})
    before = {name: w.clone() for name, w in federation.federation.models()["server"].items()}
    start = federation.evaluate(place / "server")
    federation.run()
    own = "a" if method == "fedsa_lora" else None  # every B stays at its site, and B of the server is zero
    after, end = federation.federation.models()["server"], federation.evaluate(place / "server", site=own)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert end["loss"] != start["loss"]
    assert all(torch.isfinite(w).all() for w in after.values())
    assert any(name.startswith(("classifier", "score")) for name in changed)
    assert any(name.startswith(("bert", "model")) for name in changed)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_sites_with_one_seed_start_equal_and_with_another_otherwise(place, kind):
    """Two processes would load the base each: nothing but run.seed decides their heads."""
    tasks = [
        load_task(LocalFederation.from_config(flat(place, "fedavg", kind, run__seed=seed), {"a": place / "a"}).config,
                  strategies.create_method("fedavg", "").adapter, "cpu")
        for seed in (1, 1, 2)
    ]  # fmt: skip
    rows = [task.encode(task.examples(place / "server", "test")) for task in tasks]
    zeros = {name: torch.zeros(spec.shape) for name, spec in tasks[0].spec.items()}
    logits = [
        torch.cat([p.logits["target"] for p in task.predict(zeros, r)]) for task, r in zip(tasks, rows, strict=True)
    ]
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2], atol=1e-2)
