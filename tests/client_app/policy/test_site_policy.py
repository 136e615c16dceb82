from __future__ import annotations

import json
import subprocess
from datetime import datetime

import pytest

from fedveil.client_app import app as client
from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.node_config import SiteConfig
from fedveil.client_app.policy.decisions import VerifiedBundle, check_run, check_upload
from fedveil.client_app.policy.privacy_cost import run_epsilon
from fedveil.client_app.policy.site_policy import load_policy
from fedveil.contract.task import Example
from fedveil.errors import PolicyError
from tests.server_app.grid import LocalGrid, use_toy_task
from tests.server_app.test_flower_strategy import initial, strategy

ORDER = {"round": 3, "is-new": False, "site": "north", "run": "r", "method": "fedrand", "fields": "{}"}


def assignment(tmp_path, text: str | None, config=None, order=None) -> ClientAssignment:
    file = tmp_path / "site-policy.toml"
    if text is not None:
        file.write_text(text)
    return ClientAssignment.from_instruction(
        ORDER | (order or {}), config or {}, {"policy": str(file), "state-dir": str(tmp_path)}
    )


@pytest.mark.parametrize(
    "text",
    ["", 'methods = ["fedrand"]', 'tasks = ["text-generation"]\nmodels = ["tiny", "gpt2"]\nmax-rounds = 5'],
)
def test_what_the_policy_permits_passes_and_another_method_does_not_where_it_names_one(text, tmp_path):
    assert check_run(assignment(tmp_path, text)) is None
    other = assignment(tmp_path, text, order={"method": "fedper"})
    if "methods" not in text:
        assert check_run(other) is None
        return
    with pytest.raises(PolicyError, match="method.name: this site permits"):
        check_run(other)


@pytest.mark.parametrize(("text", "without_keys", "with_keys"), [
    ("require-signed-instructions = true\n", True, True), ("require-signed-instructions = false\n", False, False),
    ("", False, True), (None, False, True),
])  # fmt: skip
def test_pinned_keys_require_signed_instructions_unless_the_policy_says_otherwise(
    text, without_keys, with_keys, tmp_path
):
    file = tmp_path / "site-policy.toml"
    if text is not None:
        file.write_text(text)
    for keys, required in (("", without_keys), ("instruction-keys.toml", with_keys)):
        site = SiteConfig(policy="" if text is None else str(file), instruction_keys=keys)
        assert load_policy(site).requires_signed_instructions(site) is required


def test_without_a_policy_everything_passes():
    assert (
        check_run(ClientAssignment.from_instruction(ORDER | {"method": "fedper"}, {"train.batch-size": 999}, {}))
        is None
    )


@pytest.mark.parametrize(
    "text,reason",
    [
        ('methods = ["fedavg"]', r"method.name: this site permits \['fedavg'\], found \"fedrand\""),
        ("methods = []", r"method.name: this site permits \[\]"),
        ('tasks = ["image-classification"]', "task.name: this site permits"),
        ('models = ["gpt2"]', 'task.model: this site permits .* found "tiny"'),
        ("max-rounds = 4", "run.rounds: this site permits at most 4, found 5"),
        (None, r"policy: the site's policy file cannot be read \(FileNotFoundError\)"),
        ("methods = fedavg", r"is invalid \(not TOML: Invalid value \(at line 1, column 11\)\)"),
        (
            "[permits]\nmax-epsilon = 3\ndelta = 1e-5",
            "delta, max-epsilon: move it above the line .permits.",
        ),
        ("method = []", "is invalid .method: Extra inputs are not permitted"),
        ('methods = "fedavg"', "is invalid .methods: Input should be a valid list"),
    ],
)
def test_it_fails_closed_and_names_the_key(text, reason, tmp_path):
    with pytest.raises(PolicyError, match=reason):
        check_run(assignment(tmp_path, text))


def test_a_refusal_reaches_the_server_with_its_reason_and_no_data_is_opened(tmp_path, monkeypatch):
    task = use_toy_task(monkeypatch)
    opened = []
    monkeypatch.setattr(
        type(task), "examples", lambda self, *a, **k: opened.append(a) or Example.from_columns([{}] * 3)
    )
    (tmp_path / "site-policy.toml").write_text('methods = ["dp_fpl"]')
    grid = LocalGrid(client.app, ["north", "south", "west"], tmp_path / "state", {"run.deterministic": True})
    grid.node_config = {"west": {"policy": str(tmp_path / "site-policy.toml")}}
    ours = strategy()
    ours.start(grid, initial(task), num_rounds=1)
    (record,) = ours.history
    assert record.accepted == ["north", "south"]
    assert record.failed["west"].startswith("PolicyError: method.name: this site permits ['dp_fpl'], found \"fedrand\"")
    assert len(opened) == 2


DIGEST, KEY = "5f" * 32, "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAOhB7/zzhC+HXDdGOdLwJln5NYwm6UNXx3chmQSVTG4"


@pytest.mark.parametrize(
    "text,bundle,permitted",
    [
        (f'app-digests = ["{DIGEST}"]', VerifiedBundle(DIGEST), True),
        (f'app-digests = ["{DIGEST}"]', VerifiedBundle("0" * 64), False),
        (f'app-digests = ["{DIGEST}"]', None, False),
        ("app-digests = []", VerifiedBundle(DIGEST), False),
        (f'signers = ["{KEY} a comment"]', VerifiedBundle(DIGEST, KEY), True),
        (f'signers = ["{KEY}"]', VerifiedBundle(DIGEST), False),
        (f'signers = ["{KEY}"]', VerifiedBundle(DIGEST, KEY[:-1] + "5"), False),
        (f'signers = ["{KEY}"]\napp-digests = ["{DIGEST}"]', VerifiedBundle("0" * 64, KEY), False),
        ("", None, True),
    ],
)
def test_the_bundle_must_be_one_that_the_entry_point_has_looked_at(text, bundle, permitted, tmp_path):
    if permitted:
        check_run(assignment(tmp_path, text), bundle)
        return
    with pytest.raises(PolicyError, match="app (digest|signer): this site permits"):
        check_run(assignment(tmp_path, text), bundle)


@pytest.mark.parametrize(
    "hours,inside,outside",
    [
        ('"20:00-06:00"', ["20:00", "23:59", "00:00", "05:59"], ["06:00", "12:00", "19:59"]),
        ('"08:30-17:00"', ["08:30", "16:59"], ["08:29", "17:00", "00:00"]),
        ('"00:00-24:00"', ["00:00", "23:59"], []),
        ('"01:00-02:00", "03:00-04:00"', ["01:30", "03:30"], ["02:30", "00:30"]),
    ],
)
def test_hours_hold_their_first_minute_and_not_their_last(hours, inside, outside, tmp_path):
    asked = assignment(tmp_path, f"hours = [{hours}]")
    for time in inside:
        check_run(asked, now=datetime.fromisoformat(f"2026-03-01T{time}"))
    for time in outside:
        with pytest.raises(PolicyError, match=f"hours: this site trains only at .* it is {time}"):
            check_run(asked, now=datetime.fromisoformat(f"2026-03-01T{time}"))


@pytest.mark.parametrize(
    "text", ['hours = ["8:00-9:00"]', 'hours = ["08:00-25:00"]', 'app-digests = ["5f"]', 'signers = ["ssh-rsa AAAA"]',
             "require-signed-instructions = 1", 'require-signed-instructions = "true"',
             'max-epsilon = "8"', "max-epsilon = inf", "delta = 1.0",
             "require-secure = 1", 'require-secure = "true"', "min-cohort = 1", 'min-cohort = "3"',
             "min-threshold = 2.0", "min-threshold = 1", 'roster = "5f"', 'roster = "sha256:5f"',
             f'roster = "sha256:{"5F" * 32}"', "roster = []",
             'adjacency = "none"', "max-retries = -1", "min-batch = 0", "max-bytes-a-round = 0", "min-examples = true"]
)  # fmt: skip
def test_a_value_of_another_kind_closes_the_site(text, tmp_path):
    with pytest.raises(PolicyError, match="the site's policy file is invalid"):
        check_run(assignment(tmp_path, text))


@pytest.mark.parametrize(("text", "new"), [
    ('neighbours = "replace-one"', "adjacency"), ("max-repeats = 3", "max-retries"),
    ("min-noise = 1.0", "min-noise-multiplier"),
    ('[permits]\n"train.accumulate" = 2', "train.gradient-accumulation-steps"),
    ('[permits]\n"method.fields.rho" = 0.5', "method.params.rho"),
])  # fmt: skip
def test_a_key_by_its_old_name_closes_the_site_and_the_new_one_is_said(text, new, tmp_path):
    with pytest.raises(PolicyError, match=f"this is the key's old name; write {new}"):
        check_run(assignment(tmp_path, text))


def test_bytes_are_bounded_before_and_with_the_upload(tmp_path):
    asked = assignment(tmp_path, "max-bytes-a-round = 1000")
    check_run(asked, down_bytes=1000)
    check_upload(asked, 400, 600, 1)
    with pytest.raises(PolicyError, match="at most 1000, found 1001 in the server's message alone"):
        check_run(asked, down_bytes=1001)
    with pytest.raises(PolicyError, match=r"at most 1000, found 1001 \(400 down, 601 up\)"):
        check_upload(asked, 400, 601, 1)


@pytest.mark.parametrize(
    "found,permitted", [(30, True), (31, True), (29, False), ("31", False), (None, False), (True, False)]
)
def test_an_upload_needs_its_examples_and_the_server_does_not_learn_how_many(found, permitted, tmp_path):
    site = assignment(tmp_path, "min-examples = 30")
    if permitted:
        check_upload(site, 0, 0, found)
        return
    with pytest.raises(PolicyError, match=r"with at least 30 examples, found fewer \(min-examples of its policy\)"):
        check_upload(site, 0, 0, found)


def test_a_truth_is_not_a_number_of_examples(tmp_path):
    with pytest.raises(PolicyError, match="with at least 1 examples, found fewer"):
        check_upload(assignment(tmp_path, "min-examples = 1"), 0, 0, True)


def test_an_upload_of_too_few_examples_does_not_leave(tmp_path, monkeypatch):
    task = use_toy_task(monkeypatch)
    moved = "max-broadcast-change = 100.0\nmax-broadcast-drift = 100.0"  # the toy's few rows move the weights far
    (tmp_path / "site-policy.toml").write_text(f"min-examples = 5\n{moved}\n[permits]\nrun.deterministic = true")
    grid = LocalGrid(client.app, ["north", "south", "west"], tmp_path / "state", {"run.deterministic": True})
    policy = {"policy": str(tmp_path / "site-policy.toml")}
    grid.node_config = {"west": policy, "south": policy}  # of 5 and of 4 rows
    ours = strategy()
    ours.start(grid, initial(task), num_rounds=1)
    assert ours.history[0].accepted == ["north", "west"]
    assert ours.history[0].failed["south"].startswith("PolicyError: examples: this site takes part with at least 5")


@pytest.mark.slow
def test_epsilon_of_a_method_without_a_guarantee_is_beyond_any_bound(tmp_path):
    with pytest.raises(PolicyError, match="epsilon: this site permits at most 8 at delta = 1e-05, found inf"):
        check_run(assignment(tmp_path, "max-epsilon = 8.0"))


@pytest.mark.parametrize(
    "found,permitted", [(8.0, True), (0.0, True), (8.001, False), (float("inf"), False), (float("nan"), False)]
)
def test_epsilon_is_compared_and_closes_on_what_is_no_number(found, permitted, tmp_path, monkeypatch):
    asked = []

    def run(command, input, **kwargs):
        asked.append(json.loads(input))
        return subprocess.CompletedProcess(command, 0, json.dumps({"epsilon": found}), "")

    monkeypatch.setattr("subprocess.run", run)
    order = {"round": 4, "fields": '{"rho": 0.25}'}
    if permitted:
        check_run(assignment(tmp_path, "max-epsilon = 8\ndelta = 1e-6", order=order))
    else:
        with pytest.raises(PolicyError, match="epsilon: this site permits at most 8"):
            check_run(assignment(tmp_path, "max-epsilon = 8\ndelta = 1e-6", order=order))
    (question,) = asked
    assert (question["method"], question["fields"], question["delta"]) == ("fedrand", '{"rho": 0.25}', 1e-6)


@pytest.mark.long
def test_an_epsilon_that_cannot_be_had_closes_the_site(tmp_path):
    with pytest.raises(
        PolicyError, match="epsilon: the method's epsilon could not be computed .*unknown field of fedrand"
    ):
        run_epsilon(assignment(tmp_path, "", order={"fields": '{"nothing": 1}'}), 1e-5)


@pytest.mark.parametrize(
    "config,permitted",
    [
        ({}, False),
        ({"dp.noise-multiplier": 2.0}, False),  # without a bound on the rows' gradients the noise is of no size
        ({"dp.clip-norm": 1.0, "dp.noise-multiplier": 0.99}, False),
        ({"dp.clip-norm": 1.0, "dp.noise-multiplier": 1.0}, True),
    ],
)
def test_a_site_may_ask_for_noisy_steps(config, permitted, tmp_path):
    asked = assignment(tmp_path, 'min-noise-multiplier = 1.0\n[permits]\n"dp.clip-norm" = 1.0', config=config)
    if permitted:
        check_run(asked)
    else:
        with pytest.raises(
            PolicyError, match=r"dp\.noise-multiplier: this site permits noisy steps of at least 1, found 0"
        ):
            check_run(asked)
