"""What a site permits of the run config, key by key."""

from __future__ import annotations

import json
import re

import pytest

from fedveil import paths
from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.policy import run_config_rules
from fedveil.client_app.policy.decisions import check_run
from fedveil.config import parse
from fedveil.console.main import main
from fedveil.errors import PolicyError

RUN = {
    "method.name": "fedavg", "method.params": 'wire_dtype = "bfloat16"\nadapter = {rank = 4}',
    "task.target-column": 'a "b" é', "train.batch-size": 4, "train.learning-rate": 1e-4, "run.rounds": 3,
    "run.name": "pilot", "run.deterministic": True, "cohort.fraction": 0.5,
}  # fmt: skip


def judge(tmp_path, policy: str, config: dict) -> None:
    """Raises PolicyError where the policy refuses the run."""
    file = tmp_path / "site-policy.toml"
    file.write_text(policy)
    order = {"round": 0, "is-new": True, "site": "north", "run": "r", "fields": "{}"}
    order["method"] = config.get("method.name", "fedrand")
    check_run(ClientAssignment.from_instruction(order, config, {"policy": str(file), "state-dir": str(tmp_path)}))


def printed(capsys, config: dict) -> str:
    chosen = [f"--set={key}={json.dumps(value, ensure_ascii=False)}" for key, value in config.items()]
    assert main(["explain", "--permits", *chosen]) == 0
    return capsys.readouterr().out


OTHERS = {"secure.ring-bits": 64, "secure.graph-degree": 2, "secure.noise": "sum",
    "method.name": "fedrand", "method.params": "", "task.partition": "natural",
    "task.buffers": "initial", "task.source-template": "{a}", "task.empty-texts": "drop", "task.max-tokens": 64,
    "task.tag-scheme": "iob1",
    "task.image-window": "-1000,400",
    "train.precision": "bf16",
    "train.optimizer": "adamw-8bit", "train.lr-schedule": "linear", "train.loss-mask": "all",
    "train.quantized-base": "8bit", "evaluate.generate": "never", "evaluate.select-model": "best",
    "dp.adjacency": "zero-out", "dp.unit": "row", "dp.no-unit": "one",
    "cohort.max-weight-fraction": 0.75, "aggregate.rule": "median",
    "server.optimizer": "fedadam",
    "sinks.mlflow-uri": "http://127.0.0.1:5000",
}  # fmt: skip


def changes(config: dict) -> list[dict]:
    """The run with one key changed, for every key; and with one field of the method changed, dropped or more."""
    changed_configs = []
    for key, value in parse(config).flat().items():
        other = OTHERS.get(
            key, not value if isinstance(value, bool) else value + "x" if isinstance(value, str) else None
        )
        if other is None:
            other = value / 2 if isinstance(value, float) and value else 0.25 if isinstance(value, float) else value + 1
        changed_configs.append(config | {key: other})
    for fields in ('wire_dtype = "float16"\nadapter = {rank = 4}',
                   'wire_dtype = "bfloat16"\nadapter = {rank = 5}',
                   'wire_dtype = "bfloat16"\nadapter = {rank = 4, alpha = 3.0}'):  # fmt: skip
        changed_configs.append(config | {"method.params": fields})
    return changed_configs


def test_what_explain_prints_admits_that_run_and_no_other(tmp_path, capsys):
    policy = printed(capsys, RUN)
    judge(tmp_path, policy, RUN)
    others = [other for other in changes(RUN) if other != RUN | {"method.params": ""}]
    assert len(others) > 50
    for other in others:
        if "evaluate.held-out" in other:  # max-scores decides it, in the turn, which goes on without scores
            judge(tmp_path, policy, other)
            continue
        if "run.resume" in other:
            continue  # a test of its own
        with pytest.raises(PolicyError, match="this site permits"):
            judge(tmp_path, policy, other)
    _, table = printed(capsys, {}).split("\n", 1)
    assert table == '[permits]\n"run.resume" = [false, true]\n'


def test_a_comment_above_the_table_names_the_other_keys_that_a_policy_needs(capsys):
    comment, table = printed(capsys, {"method.name": "fedavg", "task.model": "/models/a\nb = 1"}).split("\n", 1)
    assert comment == (
        '# above this table, the policy needs methods = ["fedavg"], tasks = ["text-generation"], '
        'models = ["/models/a\\nb = 1"], and app-digests (`fedveil app digest`) or signers'
    )
    assert table.startswith("[permits]\n")
    assert ", modules with the SHA-256 of heart.py, and" in printed(
        capsys, {"task.name": "own-model", "task.module": "heart"}
    )


@pytest.mark.parametrize(
    "key,value",
    [("run.deterministic", True), ("client.worker", False), ("task.data", "/etc"), ("run.capture-messages", True),
     ("train.batch-size", 1), ("task.target-column", "name"), ("method.params", "rho = 0.0")],
)  # fmt: skip
@pytest.mark.parametrize("policy", ["", 'methods = ["fedrand"]\ntasks = ["text-generation"]\nmax-rounds = 9'])
def test_what_a_server_could_set_unseen_is_refused(key, value, policy, tmp_path):
    judge(tmp_path, policy, {})
    with pytest.raises(PolicyError, match=f"{key}.*: this site permits .*explain --permits"):
        judge(tmp_path, policy, {key: value})


@pytest.mark.parametrize(
    "permit,key,inside,outside",
    [
        ("8", "train.batch-size", [8, 16], [7, 1]),  # 16 is the default, and is named away
        ("[8, 32]", "train.batch-size", [8, 32], [16, 9]),
        ("{min = 8, max = 32}", "train.batch-size", [8, 32], [7, 33]),
        ("{max = 1e-3}", "train.learning-rate", [1e-3, 1e-9], [2e-3]),
        ('{pattern = "pilot-[0-9]+"}', "task.target-column", ["pilot-1"],
         ["pilot-", "xpilot-1", "pilot-1\n", "pilot-" + "1" * 9999]),
        ("true", "run.deterministic", [True], [False]),
        ('{min = 0.5}', "method.params.rho", [0.5, 1], [0.4, True, "x", []]),
        ("[0.5, 1]", "method.params.rho", [0.5, [0.5, 1]], [[], [0.5, 2], [[]]]),
        ('{pattern = "a+"}', "method.params.rho", ["aa", ["a"]], [[], [["a"], []]]),
        ("[]", "method.params.rho", [[]], [0.5, [0.5], ""]),
    ],
)  # fmt: skip
def test_values_lists_ranges_and_patterns(permit, key, inside, outside, tmp_path):
    def config(value: object) -> dict:
        text = json.dumps(value)
        return {"method.params": f"rho = {text}"} if key == "method.params.rho" else {key: value}

    for policy in (f'[permits]\n"{key}" = {permit}', f"[permits]\n{key} = {permit}"):
        for value in inside[: 1 if permit == "8" else None]:
            judge(tmp_path, policy, config(value))
        for value in outside:
            with pytest.raises(PolicyError, match=f"{key}: this site permits"):
                judge(tmp_path, policy, config(value))


@pytest.mark.parametrize(
    "text",
    ['"train.batch" = 1', "train = 1", '"run.name" = {pattern = "("}', '"train.epochs" = {}', '"method.params" = "x"',
     '"train.epochs" = {min = 1, pattern = "x"}', '"train.epochs" = {min = "1"}', '"run.name" = {pattern = 1}'],
)  # fmt: skip
def test_a_table_that_is_not_understood_closes_the_site(text, tmp_path):
    with pytest.raises(PolicyError, match="policy: the site's policy file is invalid"):
        judge(tmp_path, f"[permits]\n{text}", {})


def test_what_admits_a_run_admits_its_resume_and_no_other_run(tmp_path):
    asked = {"run.name": "pilot", "train.batch-size": 8}
    policy = run_config_rules.permits_for_run(parse(asked))
    for flat in (asked, asked | {"run.resume": True}):
        judge(tmp_path, policy, flat)
    for change in ({"run.name": "another"}, {"train.batch-size": 16}, {"run.rounds": 9}):
        with pytest.raises(PolicyError, match=f"{next(iter(change))}: this site permits"):
            judge(tmp_path, policy, asked | {"run.resume": True} | change)


def test_no_code_at_a_site_acts_on_run_resume():
    """Why a policy may permit it: a server gains nothing by either value."""
    for folder in ("client_app", "guard"):
        for file in paths.find_folder(folder).rglob("*.py"):
            if file.name != "run_config_rules.py":
                assert not re.search(r"\brun\.resume\b", file.read_text()), file


@pytest.mark.parametrize("asked,configured", [("fedavg", "fedrand"), ("fedrand", "fedavg")])
def test_the_methods_of_a_policy_judge_the_message_and_the_run_config(asked, configured, tmp_path):
    """The bundle's code goes by the run config: what the message alone names says nothing of it."""
    file = tmp_path / "site-policy.toml"
    file.write_text('methods = ["fedrand"]')
    order = {"round": 0, "is-new": True, "site": "north", "run": "r", "fields": "{}", "method": asked}
    node = {"policy": str(file), "state-dir": str(tmp_path)}
    with pytest.raises(PolicyError, match='method.name: this site permits .*, found "fedavg"'):
        check_run(ClientAssignment.from_instruction(order, {"method.name": configured}, node))
