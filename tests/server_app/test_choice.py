"""Which evaluation is the best and when to stop, against a naive twin; which choices no evaluation can make."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedveil import rng, strategies, tasks
from fedveil.config import parse
from fedveil.contract.task import Example, TaskMetric
from fedveil.errors import ConfigError
from fedveil.server_app.evaluation import BestEvaluation, ModelSelection
from fedveil.server_app.run import prepare_strategy
from fedveil.server_app.run_folder import RunFolder
from fedveil.server_app.run_plan import RunPlan

VALUES = st.one_of(
    st.sampled_from([0.0, 0.1, 0.2, 0.3, 1.0, -1.0]), st.floats(-5, 5), st.sampled_from([math.nan, math.inf])
)


def naive(values: list[float | None], better: str, patience: int, least: float) -> tuple[int | None, int | None]:
    """The best round, and the round after which a run stops: from all values at once, None = not scored."""
    sign = -1 if better == "lower" else 1
    seen: list[tuple[int, float]] = []
    improvements: list[int] = []  # of the evaluations, by number
    evaluations = 0
    for round_, value in enumerate(values):
        if value is None:
            continue
        evaluations += 1
        if math.isfinite(value):
            reference = [v for number, v in seen if number in improvements][-1:]
            step = sign * (value - reference[0]) if reference else 1.0
            if not reference or (step > 0 and step >= least):
                improvements.append(evaluations)
            seen.append((evaluations, value))
        if patience and evaluations - (improvements[-1] if improvements else 0) >= patience:
            return _best(values[: round_ + 1], sign), round_
    return _best(values, sign), None


def _best(values: list[float | None], sign: int) -> int | None:
    finite = [(sign * v, -i) for i, v in enumerate(values) if v is not None and math.isfinite(v)]
    return -max(finite)[1] if finite else None


@given(
    st.lists(st.one_of(st.none(), VALUES), max_size=12),
    st.sampled_from(["lower", "higher"]),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.15, 1.0]),
)
def test_best_and_stop_are_those_of_all_values_seen_at_once(values, better, patience, least):
    choice, best, stop = ModelSelection("m", TaskMetric(better), True, patience, least), BestEvaluation(), None
    for round_, value in enumerate(values):
        best = best.after(choice, round_, {} if value is None else {"server": {"m": value}, "other": {"m": -9.0}})
        best = BestEvaluation.read(json.loads(json.dumps(best.saved(), allow_nan=False)))  # through a checkpoint
        if best.stopped(choice, round_):
            stop = round_
            break
    assert (best.round, stop) == naive(values, better, patience, least)
    assert best.round is None or best.value == values[best.round]


REFUSED = {
    "unknown": (
        {"evaluate.metric": "accuracy"},
        r"evaluate.metric: expected one of \['bleu', .*'loss'.*found 'accuracy'",
    ),
    "no data": (
        {"evaluate.select-model": "best"},
        r"task.evaluation: evaluate.select-model = \"best\" needs the server's test data",
    ),
    "no data to stop": ({"evaluate.patience": 1}, "task.evaluation: evaluate.patience needs the server's test data"),
    "never": (
        {"evaluate.patience": 1, "evaluate.every": 0, "task.evaluation": "x"},
        "evaluate.every: with .* it must be at least 1",
    ),
    "texts": (
        {"evaluate.select-model": "best", "evaluate.metric": "bleu", "task.evaluation": "x"},
        r"evaluate.generate: evaluate.metric = \"bleu\" scores generated texts",
    ),
    "no patience": ({"evaluate.min-delta": 0.1}, "evaluate.min-delta: 0.1 has no effect without evaluate.patience"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_choice_that_no_evaluation_can_make_is_refused_before_a_site_is_asked(what, tmp_path):
    keys, words = REFUSED[what]
    with RunFolder(tmp_path / "run") as folder, pytest.raises(ConfigError, match=words):
        prepare_strategy(RunPlan.from_config(parse(keys), "run"), folder)


@pytest.mark.parametrize("generate", [False, True])
def test_a_task_names_every_score_that_it_gives(generate):
    config = parse({"evaluate.eval-examples": 2, "evaluate.max-new-tokens": 2})
    task = tasks.load_task(config, strategies.create_method("fedavg", "").adapter, "cpu")
    weights = task.initial(rng.initial_stream(0, "weights"))
    scores = dict[str, float]()
    for target in ("is here", "is a pub here, by the river"):  # short answers have scores of their own
        rows = [{"mr": f"name[x{i}]", "ref": f"x{i} {target}"} for i in range(2)]
        scores |= task.evaluate(weights, Example.from_columns(rows), generate)
    named = tasks.task_info("text-generation").metrics(config.task)
    assert set(scores) == {name for name, metric in named.items() if generate or not metric.generated}
    assert torch.isfinite(torch.tensor(list(scores.values()))).all()
