"""Which examples choose the model: fixed by their content, never in the test scores, and at the sites a round late."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil import rng, strategies, tasks
from fedveil.config import parse
from fedveil.contract.method import FederatedState
from fedveil.contract.task import Example, TaskMetric
from fedveil.errors import ConfigError, TaskError
from fedveil.privacy.guarantee_source import check_guarantee
from fedveil.server_app.completion import BestRoundTracker
from fedveil.server_app.evaluation import BestEvaluation, ModelSelection, ServerEvaluator, SiteScores
from fedveil.server_app.validation_split import mark_held_out, read_test_split
from fedveil.strategies.fedavg import FedAvg

SHARE = {"evaluate.validation-share": 0.3, "evaluate.select-model": "best"}
SOURCES = st.lists(st.text(max_size=6), min_size=1, max_size=40)


def config_of(folder="x", **keys):
    flat = {"method.name": "fedavg", "task.evaluation": str(folder), "task.max-tokens": 32, "run.rounds": 2}
    return parse(flat | SHARE | {key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()})


def examples(sources) -> list[Example]:
    return Example.from_columns([{"mr": text, "ref": f"answer {i}"} for i, text in enumerate(sources)])


@settings(max_examples=30)
@given(SOURCES, SOURCES, st.integers(0, 99))
def test_other_rows_and_another_seed_move_no_row_and_equal_inputs_stay_together(sources, more, seed):
    alone = mark_held_out(examples(sources), config_of())
    among = mark_held_out(examples([*more, *sources]), config_of(run__seed=seed))
    assert among[len(more) :] == alone
    sides = dict(zip(sources, alone, strict=True))
    assert [sides[text] for text in sources] == alone
    key = rng.initial_stream(0, "validation share").bytes(32)
    twin = [
        int.from_bytes(hashlib.blake2b(json.dumps({"mr": text}).encode(), digest_size=8, key=key).digest(), "little")
        < 0.3 * 2**64
        for text in sources
    ]
    assert alone == twin


@settings(max_examples=10)
@given(st.floats(0.01, 0.5), st.floats(0.01, 0.5))
def test_a_larger_share_holds_out_more_rows_and_all_those_of_a_smaller_one(a, b):
    small, large = (
        mark_held_out(examples(map(str, range(1000))), config_of(evaluate__validation_share=each))
        for each in sorted((a, b))
    )
    assert all(of_large or not of_small for of_small, of_large in zip(small, large, strict=True))
    for marks, share in ((small, min(a, b)), (large, max(a, b))):
        assert abs(sum(marks) - 1000 * share) < 5 * math.sqrt(1000 * share * (1 - share)) + 1


def test_an_image_is_held_out_by_its_bytes_and_not_by_its_name(tmp_path):
    config = config_of(task__name="image-classification", task__target_column="label", task__class_names="a,b")
    for i in range(40):
        (tmp_path / f"{i}.png").write_bytes(bytes([i]))
        (tmp_path / f"renamed-{i}.png").write_bytes(bytes([i]))
    named, renamed = (
        [Example({"image": f"{prefix}{i}.png", "label": i % 2}, folder=str(tmp_path)) for i in range(40)]
        for prefix in ("", "renamed-")
    )
    stored = [Example({"image": {"bytes": bytes([i]), "path": None}, "label": 0}) for i in range(40)]
    marks = mark_held_out(named, config)
    assert marks == mark_held_out(renamed, config) == mark_held_out(stored, config)
    assert 0 < sum(marks) < 40


def test_a_conversation_is_held_out_by_its_turns_before_the_last_answer():
    """Whatever the format and the answer; a last question without an answer is no input either."""
    config = config_of(task__messages_column="talk", task__chat_template=True)
    says = [("user", "role", "content"), ("human", "from", "value")]

    def talk(i: int, answer: str, form: int, *more: str) -> Example:
        user, role, text = says[form]
        turns = [(user, f"question {i}"), (("assistant", "gpt")[form], answer), *((user, each) for each in more)]
        return Example({"talk": [{role: who, text: said} for who, said in turns]})

    marks = [mark_held_out([talk(i, "a", 0) for i in range(40)], config)]
    marks += [
        mark_held_out([talk(i, f"b{i}", form, *more) for i in range(40)], config) for form, *more in [(0,), (1, "?")]
    ]
    assert marks[0] == marks[1] == marks[2]
    assert 0 < sum(marks[0]) < 40
    assert len(mark_held_out([Example({"talk": []}), Example({"talk": None})], config)) == 2


def test_a_value_of_an_unknown_kind_is_refused_without_the_value():
    with pytest.raises(TaskError, match="texts, numbers, lists and images in mr .* another kind") as caught:
        mark_held_out(Example.from_columns([{"mr": {"Jane Roe"}, "ref": "b"}]), config_of())
    assert "Jane" not in str(caught.value)


def write(folder, split: str, count: int, **columns) -> None:
    rows = [{"mr": f"name {i}", "ref": f"is {i}", **{k: v(i) for k, v in columns.items()}} for i in range(count)]
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_held_out_rows_decide_and_are_not_in_the_test_scores(tmp_path):
    write(tmp_path, "test", 10)
    config = config_of(tmp_path)
    task = tasks.load_task(config, FedAvg().adapter)
    evaluator = ServerEvaluator.from_config(task, config)
    rows = list(task.examples(tmp_path, "test"))
    marks = mark_held_out(rows, config)
    held, kept = ([row for row, mark in zip(rows, marks, strict=True) if mark is side] for side in (True, False))
    state = FederatedState(dict(task.initial(rng.initial_stream(1, "weights"))))
    scores = evaluator.scores(FedAvg(), state, 0)
    for view, side in (("server", kept), ("validation", held)):
        assert scores[view]["loss"] == pytest.approx(task.evaluate(state.tensors, side, False)["loss"])
    assert held
    assert f"{len(held)} of 10 test examples choose the model, and the other {len(kept)} test it" in evaluator.notes[0]
    divided = read_test_split(task, config, tmp_path, "validation")
    assert ([row.values for row in divided.test], len(divided.validation)) == ([row.values for row in held], 0)


def test_a_validation_split_is_used_instead_of_a_share(tmp_path):
    write(tmp_path, "test", 20)
    write(tmp_path, "dev", 3)
    config = config_of(tmp_path)
    evaluator = ServerEvaluator.from_config(tasks.load_task(config, FedAvg().adapter), config)
    assert (len(evaluator.examples), len(evaluator.validation)) == (20, 3)
    assert not any("choose the model" in each for each in evaluator.notes)


def test_all_rows_of_a_unit_are_on_one_side(tmp_path):
    """Thirty rows of ten patients; a patient's side is the same when the rows are others."""
    unit = {"dp__unit_column": "patient", "dp__clip_norm": 1.0, "dp__noise_multiplier": 1.0}
    sides: list[dict[str, set[bool]]] = []
    for name, shift in (("first", 0), ("second", 7)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "test", 30, mr=lambda i, s=shift: f"n{i + s}", patient=lambda i: f"Secret-{i % 10}")
        config = config_of(tmp_path / name, **unit)
        task = tasks.load_task(config, FedAvg().adapter)
        divided = read_test_split(task, config, tmp_path / name)
        by_unit: dict[str, set[bool]] = {}
        for is_held, side in ((False, divided.test), (True, divided.validation)):
            for row in side:
                by_unit.setdefault(f"{(row.origin.row - 1) % 10}", set()).add(is_held)
        assert all(len(each) == 1 for each in by_unit.values())
        sides.append(by_unit)
    assert sides[0] == sides[1]
    assert {True} in sides[0].values()
    write(tmp_path / "first", "test", 30)
    with pytest.raises(TaskError, match='dp.unit-column: .* has no column "patient"'):
        read_test_split(task, config_of(tmp_path / "first", **unit), tmp_path / "first")


def test_too_few_rows_are_refused(tmp_path):
    write(tmp_path, "test", 1)
    config = config_of(tmp_path)
    with pytest.raises(TaskError, match=r"evaluate.validation-share: .* at least one .* \d of 1 would be held"):
        ServerEvaluator.from_config(tasks.load_task(config, FedAvg().adapter), config)


def check_selection(config) -> None:
    method = strategies.create_method(config.method.name, config.method.params)
    ModelSelection.from_config(config, tasks.task_info(config.task.name).metrics(config.task), method)


BY_SITES = SHARE | {"method.name": "fedavg"}
REFUSED = {
    "nothing decides": (
        {"evaluate.select-model": "last"},
        "evaluate.validation-share: it is .*, but no score decides anything",
    ),
    "another metric": ({"evaluate.metric": "bleu"}, "evaluate.metric: expected 'loss' with evaluate.validation-share"),
    "both keys": ({"evaluate.held-out": 0.2}, "evaluate.held-out: expected 0.0 with evaluate.validation-share"),
    "some sites": ({"cohort.fraction": 0.5}, "cohort.fraction: expected 1.0 .* different sites cannot be compared"),
    "a buffer": ({"cohort.buffer-size": 2}, "cohort.buffer-size: expected 0 .* models of different server steps"),
    "own models": ({"method.name": "ditto"}, '"ditto" keeps a part .* name the server\'s test data'),
    "a proxy": ({"method.name": "fedlpp"}, '"fedlpp" sends a quantized proxy'),
    "cut models": ({"method.name": "hetlora"}, '"hetlora" truncates the model to each site\'s rank'),
    "seldom": ({"evaluate.every": 2}, "evaluate.every: expected 1 .* sites score every model"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_scores_of_sites_that_cannot_decide_are_refused(what):
    keys, words = REFUSED[what]
    config = parse(BY_SITES | keys)
    with pytest.raises(ConfigError, match=words):
        check_selection(config)


def test_sites_that_start_from_the_servers_model_may_score_it():
    for name, params in (("scaffold", ""), ("fedqsn", 'server_rate = 0.0\nclient_rate = 0.0\nquantiser = "none"')):
        check_selection(parse(BY_SITES | {"method.name": name, "method.params": params}))
    with pytest.raises(ConfigError, match='"fedqsn" sends a masked or quantized proxy'):
        check_selection(parse(BY_SITES | {"method.name": "fedqsn"}))
    check_selection(parse(BY_SITES | {"method.name": "ditto", "task.evaluation": "x"}))


@pytest.mark.parametrize(
    "keys",
    [{"dp.clip-norm": 1.0, "dp.noise-multiplier": 1.0}, {"secure.enabled": True}],
    ids=["a guarantee", "masked uploads"],
)
def test_sites_send_no_score_under_a_guarantee_or_masks_but_the_servers_rows_may_decide(keys):
    method = strategies.create_method("fedavg", "")
    with pytest.raises(ConfigError, match="evaluate.validation-share: expected 0 with .* found 0.3; leave it out"):
        check_guarantee(method, parse(BY_SITES | keys), True)
    check_guarantee(method, parse(BY_SITES | keys | {"task.evaluation": "x"}), True)


CHOICE = ModelSelection("loss", TaskMetric("lower"), keep=False, patience=2, by_sites=True)


def reports(**losses) -> dict[str, dict[str, float]]:
    return {site: {"num_examples": 9.0, "loss_held_out": loss, "rows_held_out": 64.0} for site, loss in losses.items()}


def test_the_mean_of_the_sites_is_weighted_by_their_held_out_rows():
    found = SiteScores.from_reports({"b": {"loss_held_out": 1.0, "rows_held_out": 300.0}, **reports(a=5.0), "c": {}})
    assert (found.sites, found.loss) == (("a", "b"), (64 * 5.0 + 300 * 1.0) / 364)


def test_a_round_reports_the_score_of_the_model_before_it():
    tracker = BestRoundTracker(CHOICE, None)
    for round_, loss in enumerate([0.1, 3.0, 2.0, 2.5]):  # of the models before round 0, after 0, after 1, after 2
        tracker.scored_by_sites(reports(a=loss, b=loss))
        tracker.scored(round_, {})
        assert (tracker.done, tracker.best.waited) == (round_, max(0, round_ - 2))
    best = tracker.best
    assert (best.round, best.value, best.split, best.sites) == (1, 2.0, "sites", ("a", "b"))
    assert BestEvaluation.read(json.loads(json.dumps(best.saved()))) == best
    tracker.scored_by_sites(reports(a=2.5, b=2.5))
    assert "loss has not improved in 2 evaluations" in tracker.stopped(9)


def test_sites_that_drop_out_do_not_change_a_comparison():
    """The first scored round lacks site c, whose loss is high; the best one is compared over the sites of both."""
    tracker = BestRoundTracker(replace(CHOICE, min_sites=2), None)
    tracker.scored(0, {})
    scored = [{"a": 2.0, "b": 2.0}, {"a": 1.9, "b": 1.9, "c": 9.0}, {"a": 1.8, "c": 8.9}, {"b": 0.1}]
    for round_, losses in enumerate(scored):
        tracker.scored_by_sites(reports(**losses))
        tracker.best = BestEvaluation.read(json.loads(json.dumps(tracker.best.saved())))  # a restart in between
        assert (tracker.best.round, tracker.best.waited) == (min(round_, 2), 0)
        tracker.scored(round_ + 1, {})
    assert tracker.best.value == pytest.approx((1.8 + 8.9) / 2)
    tracker.scored_by_sites(reports(a=1.85, b=0.1, c=8.9))
    assert (tracker.best.round, tracker.best.waited) == (2, 1)


def test_the_gain_that_is_left_until_an_improvement_survives_other_sites():
    """The third round gains 0.8 + 0.8 over the first, on the sites that each pair of rounds has."""
    tracker = BestRoundTracker(replace(CHOICE, min_sites=1, min_delta=1.0), None)
    tracker.scored(0, {})
    for round_, losses in enumerate([{"a": 5.0, "b": 7.0}, {"a": 4.2}, {"a": 3.4, "b": 9.0}]):
        tracker.scored_by_sites(reports(**losses))
        tracker.scored(round_ + 1, {})
        assert (tracker.best.round, tracker.best.waited) == (round_, round_ % 2)
    assert tracker.best.reference == tracker.best.value == pytest.approx(6.2)


def test_more_sites_replace_a_best_round_of_few(caplog):
    tracker = BestRoundTracker(replace(CHOICE, min_sites=3), None)
    tracker.scored(0, {})
    for round_, losses in enumerate([{"a": 0.1}, {"a": 3.0, "b": 3.0, "c": 3.0}, {"a": 2.0, "b": 2.0, "c": 2.0}]):
        tracker.scored_by_sites(reports(**losses))
        tracker.scored(round_ + 1, {})
        assert tracker.best.round == round_
    assert caplog.text.count("round 2: the model replaces that of round 1 as the best without a comparison") == 1


@pytest.mark.parametrize("other", [{"a": 0.0}, {"a": 0.0, "c": 0.0}, {}], ids=["fewer", "others", "none"])
def test_scores_of_other_sites_do_not_count(other, caplog):
    tracker = BestRoundTracker(replace(CHOICE, min_sites=2), None)
    for round_ in range(2):
        tracker.scored_by_sites(reports(a=1.0, b=1.0))
        tracker.scored(round_, {})
    before = tracker.best
    tracker.scored_by_sites(reports(**other))
    assert tracker.best == before
    assert "evaluate.validation-share: round 2: the model has no score" in caplog.text
