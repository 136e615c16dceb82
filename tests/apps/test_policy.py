from __future__ import annotations

import pytest

from client_app import app as client
from client_app.assignment import Assignment
from client_app.policy import check
from fedveil.errors import PolicyError
from tests.apps.grid import LocalGrid, use_toy_task
from tests.apps.test_strategy import initial, strategy

ORDER = {"round": 3, "is-new": False, "site": "north", "run": "r", "method": "fedrand", "fields": "{}"}


def assignment(tmp_path, text: str | None, config=None, order=None) -> Assignment:
    file = tmp_path / "site-policy.toml"
    if text is not None:
        file.write_text(text)
    return Assignment.of(ORDER | (order or {}), config or {}, {"policy": str(file), "state-dir": str(tmp_path)})


@pytest.mark.parametrize(
    "text",
    ["", 'methods = ["fedrand"]', 'tasks = ["text-generation"]\nmodels = ["tiny", "gpt2"]\nmax-rounds = 5'],
)
def test_what_the_policy_permits_passes(text, tmp_path):
    check(assignment(tmp_path, text))


def test_without_a_policy_everything_passes():
    check(Assignment.of(ORDER, {}, {}))


@pytest.mark.parametrize(
    "text,reason",
    [
        ('methods = ["fedavg"]', r"method.name: this site permits \['fedavg'\], found \"fedrand\""),
        ("methods = []", r"method.name: this site permits \[\]"),
        ('tasks = ["image-classification"]', "task.name: this site permits"),
        ('models = ["gpt2"]', 'task.model: this site permits .* found "tiny"'),
        ("max-rounds = 4", "run.rounds: this site permits at most 4, found 5"),
        (None, r"policy: expected a readable policy file, found none \(FileNotFoundError\)"),
        ("methods = fedavg", r"found none \(TOMLDecodeError\)"),
        ("method = []", "found none .method: Extra inputs are not permitted"),
        ('methods = "fedavg"', "found none .methods: Input should be a valid list"),
    ],
)
def test_it_fails_closed_and_names_the_key(text, reason, tmp_path):
    with pytest.raises(PolicyError, match=reason):
        check(assignment(tmp_path, text))


def test_a_round_beyond_what_the_config_says_is_counted(tmp_path):
    with pytest.raises(PolicyError, match="at most 5, found 9"):
        check(assignment(tmp_path, "max-rounds = 5", order={"round": 8}))


def test_a_refusal_reaches_the_server_with_its_reason_and_no_data_is_opened(tmp_path, monkeypatch):
    task = use_toy_task(monkeypatch)
    opened = []
    monkeypatch.setattr(type(task), "examples", lambda self, *a, **k: opened.append(a) or [{}] * 3)
    (tmp_path / "site-policy.toml").write_text('methods = ["dp_fpl"]')
    grid = LocalGrid(client.app, ["north", "south", "west"], tmp_path / "state", {"run.deterministic": True})
    grid.node_config = {"west": {"policy": str(tmp_path / "site-policy.toml")}}
    ours = strategy()
    ours.start(grid, initial(task), num_rounds=1)
    (record,) = ours.history
    assert record.accepted == ["north", "south"]
    assert record.failed["west"].startswith("PolicyError: method.name: this site permits ['dp_fpl'], found \"fedrand\"")
    assert len(opened) == 2
