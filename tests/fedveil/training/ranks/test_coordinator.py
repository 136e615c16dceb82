"""Rank 0 with a scripted second rank: its reactions to that rank's messages."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest
import torch

from fedveil.config import parse
from fedveil.contract.trainer import PerExampleGradients
from fedveil.data.batches import LabelledBatch
from fedveil.errors import RankError
from fedveil.rng import RandomStream
from fedveil.training import per_example
from fedveil.training.ranks.channel import RankChannel, RankMessage
from fedveil.training.ranks.coordinator import RankProcess, RankTeam


class Toy:
    """The loss reaches one of two tensors."""

    config = parse({"train.batch-size": 4})

    def __init__(self) -> None:
        self.trained = {"a": torch.nn.Parameter(torch.ones(2)), "b": torch.nn.Parameter(torch.ones(3))}

    def training(self, rng):
        return contextlib.nullcontext()

    def training_batch(self, rows):
        return LabelledBatch(torch.stack(list(rows)), torch.zeros(len(rows), dtype=torch.int64))

    def loss_sum(self, batch):
        return (batch.inputs * self.trained["a"]).sum()


class Silent:
    """A group in which nobody adds anything."""

    def broadcast(self, tensors):
        pass

    def add(self, tensors):
        pass


@pytest.fixture
def team():
    """A team, its toy, and the other rank's end."""
    ends = socket.socketpair()
    ends[1].settimeout(10.0)  # in case a test waits for a message that never comes
    own, other = map(RankChannel, ends)
    other.say(RankMessage({"ready": 1}))
    toy = Toy()
    yield RankTeam(toy, [RankProcess(own, lambda: "fell asleep")], lambda check: Silent()), toy, other
    own.close()
    other.close()


def answering(other, reached):
    """The other rank, which says what its loss has reached when it is asked to add up."""

    def answers():
        while (message := other.hear()) is not None:
            if message.head["do"] == "add":
                other.say(RankMessage({"reached": reached}))
                return

    thread = threading.Thread(target=answers)
    thread.start()
    return thread


@pytest.mark.parametrize(("reached", "there"), [([True, False], False), ([False, True], True)])
def test_a_tensor_has_a_gradient_where_any_rank_s_loss_reaches_it(team, reached, there):
    """Without one, no weight decay moves it: as in one process."""
    team, toy, other = team
    thread = answering(other, reached)
    rows = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    loss = team.backward([team.batch(rows)])
    thread.join()
    assert torch.equal(toy.trained["a"].grad, torch.tensor([0.5, 1.0]))  # rank 0's row, over the terms of both
    assert float(loss) == 1.5
    assert (toy.trained["b"].grad is not None) == there


def test_rows_are_divided_once_each(team):
    team, _, _ = team
    divided = team.batch([torch.tensor([float(i), 0.0]) for i in range(5)])
    assert [part.inputs[:, 0].tolist() for part in divided.parts] == [[0.0, 1.0, 2.0], [3.0, 4.0]]
    assert (divided.counted, divided.terms) == (2, 5)
    alone = team.batch([torch.tensor([7.0, 0.0])])
    assert [part.inputs[:, 0].tolist() for part in alone.parts] == [[7.0], [7.0]]
    assert (alone.counted, alone.terms) == (1, 1)


def test_what_failed_at_a_rank_ends_the_step_with_its_words(team):
    team, _, other = team
    other.say(RankMessage({"failed": "TaskError: no such thing"}))
    with pytest.raises(RankError, match="rank 1 of 2 failed: TaskError: no such thing"):
        team.backward([team.batch([torch.ones(2), torch.ones(2)])])


def test_a_rank_that_is_gone_ends_the_step_with_how_it_ended(team):
    team, _, other = team
    other.close()
    with pytest.raises(RankError, match="rank 1 of 2 fell asleep"):
        team.backward([team.batch([torch.ones(2), torch.ones(2)])])
    with pytest.raises(RankError, match="fell asleep"):
        team.check()


def test_a_rank_that_speaks_unasked_is_noticed(team):
    team, _, other = team
    team.check()
    other.say(RankMessage({"x": 1}))
    with pytest.raises(RankError, match="rank 1, which should be waiting, sent"):
        team.check()


@pytest.fixture
def of_no_rows(team, monkeypatch):
    """The team, which can compute gradients of single rows, and of none; and the other rank's end."""
    team[1].spec = {}
    monkeypatch.setattr(per_example, "PerExampleLoss", object)
    monkeypatch.setattr(per_example, "per_example_gradients", lambda *_: PerExampleGradients({}, torch.zeros(0)))
    return team[0], team[2]


def test_a_rank_may_have_its_answer_before_rank_0_has_sent_all_weights(of_no_rows):
    """One without rows answers at once. Rank 0 took it for one that speaks unasked, now and then."""
    team, other = of_no_rows

    class Early(Silent):
        def broadcast(self, tensors):
            assert other.hear().head == {"do": "nothing"}
            other.say(RankMessage({"rows": 0}))
            team.check()
            team.check()

    team._group = Early()
    assert len(team.gradients([], {}).losses) == 0
    other.say(RankMessage({"rows": 0}))  # unasked again
    with pytest.raises(RankError, match="rank 1, which should be waiting, sent"):
        team.check()


def test_a_rank_that_fails_while_weights_are_sent_ends_the_step(of_no_rows):
    team, other = of_no_rows

    class Failing(Silent):
        def broadcast(self, tensors):
            other.say(RankMessage({"failed": "TaskError: no such thing"}))
            team.check()

    team._group = Failing()
    with pytest.raises(RankError, match="failed: TaskError: no such thing"):
        team.gradients([], {})


def test_every_rank_drops_out_by_a_stream_of_its_own(team):
    team, _, other = team
    stream = RandomStream(bytes(32))
    with pytest.raises(ZeroDivisionError), team.training(stream):
        raise ZeroDivisionError
    heads = [other.hear().head for _ in range(2)]
    assert [head["do"] for head in heads] == ["train", "trained"]
    assert heads[0]["dropout"] == stream.split("rank 1").key.hex()
