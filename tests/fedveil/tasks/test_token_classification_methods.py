"""Every method with token classification either trains the head and the base, or refuses with the reason."""

from __future__ import annotations

import pytest
import torch

from fedveil import strategies
from fedveil.errors import ConfigError
from fedveil.local import LocalFederation
from tests.fedveil.tasks.small_taggers import draw_rows, keys_of, save_base, save_rows

pytestmark = pytest.mark.long
METHODS = strategies.list_methods()
PARAMS = {"hetlora": 'ranks = {"a" = 2}', "flora": 'ranks = {"a" = 2}', "fedper": "layers = 1"}


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
    return keys_of(
        task__model=str(place / kind), method__name=method, method__params=PARAMS.get(method, ""), run__rounds=2,
        train__learning_rate=1e-2, run__deterministic=True, **keys,
    )  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_a_method_trains_the_head_and_the_base_or_says_why_not(place, method):
    kind = "llama" if METHODS.index(method) % 2 else "bert"
    if strategies.create_method(method, PARAMS.get(method, "")).adapter.mount != "layers":
        with pytest.raises(ConfigError, match='the task "token-classification" supports LoRA pairs or all'):
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


@pytest.mark.parametrize(
    "keys",
    [
        {"secure__enabled": True, "secure__min_sites": 3},
        {"dp__clip_norm": 1.0, "dp__noise_multiplier": 1.0, "dp__learning_rate": 0.1},
    ],
    ids=["secure", "dp"],
)
def test_fedavg_runs_with_secure_sums_and_with_noise(place, keys):
    federation = LocalFederation.from_config(flat(place, "fedavg", "bert", **keys), {s: place / s for s in "abc"})
    start = {name: w.clone() for name, w in federation.federation.models()["server"].items()}
    federation.run()
    end = federation.federation.models()["server"]
    assert any(not torch.equal(start[name], end[name]) for name in start)
    assert all(torch.isfinite(w).all() for w in end.values())
