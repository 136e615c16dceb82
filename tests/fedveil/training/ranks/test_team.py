"""Rank 0's side with a second rank that only answers: what it does with what the others say."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest
import torch

from fedveil.config import parse
from fedveil.errors import RankError
from fedveil.rng import Stream
from fedveil.rows.batches import LabelledBatch
from fedveil.training import per_sample
from fedveil.training.per_sample import PerSample
from fedveil.training.ranks.channel import Channel, Said
from fedveil.training.ranks.team import Member, Team


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
    ends[1].settimeout(10.0)  # of a test that waits for what is never said
    own, other = map(Channel, ends)
    other.say(Said({"ready": 1}))
    toy = Toy()
    yield Team(toy, [Member(own, lambda: "fell asleep")], lambda check: Silent()), toy, other
    own.close()
    other.close()


def answering(other, reached):
    """The other rank, which says what its loss has reached when it is asked to add up."""

    def answers():
        while (said := other.hear()) is not None:
            if said.head["do"] == "add":
                other.say(Said({"reached": reached}))
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
    other.say(Said({"failed": "TaskError: no such thing"}))
    with pytest.raises(RankError, match="expected rank 1 of 2 to compute, found TaskError: no such thing"):
        team.backward([team.batch([torch.ones(2), torch.ones(2)])])


def test_a_rank_that_is_gone_ends_the_step_with_how_it_ended(team):
    team, _, other = team
    other.close()
    with pytest.raises(RankError, match="expected rank 1 of 2 to compute, found that it fell asleep"):
        team.backward([team.batch([torch.ones(2), torch.ones(2)])])
    with pytest.raises(RankError, match="fell asleep"):
        team.check()


def test_a_rank_that_speaks_unasked_is_noticed(team):
    team, _, other = team
    team.check()
    other.say(Said({"x": 1}))
    with pytest.raises(RankError, match="expected rank 1 to wait, found that it said"):
        team.check()


@pytest.fixture
def of_no_rows(team, monkeypatch):
    """The team, which can compute gradients of single rows, and of none; and the other rank's end."""
    team[1].spec = {}
    monkeypatch.setattr(per_sample, "SampleLoss", object)
    monkeypatch.setattr(per_sample, "gradients", lambda *_: PerSample({}, torch.zeros(0)))
    return team[0], team[2]


def test_a_rank_may_have_its_answer_before_rank_0_has_sent_all_weights(of_no_rows):
    """One without rows answers at once. Rank 0 took it for one that speaks unasked, now and then."""
    team, other = of_no_rows

    class Early(Silent):
        def broadcast(self, tensors):
            assert other.hear().head == {"do": "nothing"}
            other.say(Said({"rows": 0}))
            team.check()
            team.check()

    team._group = Early()
    assert len(team.gradients([], {}).losses) == 0
    other.say(Said({"rows": 0}))  # unasked again
    with pytest.raises(RankError, match="expected rank 1 to wait"):
        team.check()


def test_a_rank_that_fails_while_weights_are_sent_ends_the_step(of_no_rows):
    team, other = of_no_rows

    class Failing(Silent):
        def broadcast(self, tensors):
            other.say(Said({"failed": "TaskError: no such thing"}))
            team.check()

    team._group = Failing()
    with pytest.raises(RankError, match="found TaskError: no such thing"):
        team.gradients([], {})


def test_every_rank_drops_out_by_a_stream_of_its_own(team):
    team, _, other = team
    stream = Stream(bytes(32))
    with pytest.raises(ZeroDivisionError), team.training(stream):
        raise ZeroDivisionError
    said = [other.hear().head for _ in range(2)]
    assert [head["do"] for head in said] == ["train", "trained"]
    assert said[0]["dropout"] == stream.split("rank 1").key.hex()
