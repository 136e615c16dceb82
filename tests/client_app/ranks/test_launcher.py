"""Real ranks come and go: with a turn, with a worker, and none of them stays behind."""

import logging
import os
import re
import socket
import subprocess
import sys
import threading

import psutil
import pytest

from fedveil import strategies
from fedveil.client_app import client_session
from fedveil.client_app.node_config import parse_site
from fedveil.client_app.ranks.launcher import at_first
from fedveil.client_app.worker import connection
from fedveil.client_app.worker.owner import OwnerProcess
from fedveil.client_app.worker.registry import WorkerRegistry
from fedveil.client_app.worker.worker_round import run_round_in_worker
from fedveil.console.runs.workers import list_workers
from fedveil.contract.trainer import BatchIndices
from fedveil.errors import ConfigError, RankError
from fedveil.rng import RandomStream
from fedveil.training.ranks.rendezvous import check_devices
from tests.client_app.ranks.two import KEY, Pair, asked, assert_same, message_of, ranks, task_of, until, uploaded
from tests.conftest import ROOT


@pytest.mark.long
def test_under_dp_each_row_is_clipped_once_and_noise_is_added_once(tmp_path):
    """The noise of a deterministic run is drawn from the run's seed, so it is the same in both turns."""
    keys = {"run__deterministic": True, "dp__clip_norm": 0.05, "dp__noise_multiplier": 1.0, "train__batch_size": 8}
    one, _ = uploaded(asked(tmp_path / "one", "fedavg", node__processes=1, **keys))
    two, initial = uploaded(asked(tmp_path / "two", "fedavg", **keys))
    assert_same(one, two, initial)


@pytest.mark.long
def test_a_base_in_shards_trains_as_a_whole_one(tmp_path):
    pair = Pair(tmp_path, node__shard_base=True)
    try:
        num_local_params = sum(
            p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in pair.both.base.model.parameters()
        )
        whole = sum(p.numel() for p in pair.alone.base.model.parameters())
        assert num_local_params < 0.6 * whole
        for _ in range(2):
            one, two = (trainer.train(pair.weights) for trainer in pair.trainers(pair.rows[:9]))
            assert_same(one.weights, two.weights, pair.weights)
            assert two.report["loss_received"] == pytest.approx(one.report["loss_received"], rel=1e-5)
        with pytest.raises(ConfigError, match="shard-base: it does not support per-example gradients"):
            two = pair.both.trainer(pair.rows[:9], RandomStream(KEY)).rows.per_sample(
                pair.weights, BatchIndices((0, 1))
            )
    finally:
        pair.launched.close()


@pytest.mark.long
def test_a_rank_that_is_killed_in_a_turn_ends_it_with_the_reason_and_no_process_stays(tmp_path):
    """Through the worker, as a site does it."""
    assignment = asked(tmp_path, train__max_steps=0, train__epochs=500)
    message, _, _ = message_of(assignment)
    errors = []

    def taken():
        with pytest.raises(connection.ClientRoundError) as error:
            run_round_in_worker([message], assignment, OwnerProcess.from_pid(os.getpid()), ROOT)
        errors.append(error.value)

    whole = threading.Thread(target=taken)
    whole.start()
    until(lambda: any(worker.says["state"] == "training" for worker in list_workers(tmp_path)))
    (rank,) = ranks()
    rank.kill()
    whole.join(60)
    assert [error.kind for error in errors] == [RankError.__name__]
    assert "processes: rank 1 of 2 was ended by SIGKILL" in str(errors[0])
    assert "was ended by SIGKILL" in WorkerRegistry(tmp_path, "s").turns.read_text()
    until(lambda: not list_workers(tmp_path))
    assert not ranks()


@pytest.mark.long
def test_ranks_end_with_a_worker_that_is_killed(tmp_path):
    assignment = asked(tmp_path, train__max_steps=0, train__epochs=500)
    code = (
        "import sys; from pathlib import Path; from fedveil.client_app.instruction import ClientAssignment;"
        "from tests.client_app.ranks import two as t; from fedveil.client_app import client_session;"
        "asked = ClientAssignment.from_json(Path(sys.argv[1]).read_text());"
        "print('begins', flush=True);"
        "client_session.ClientSession().run_round(lambda: t.message_of(asked)[0], asked, "
        "lambda step: print('step', flush=True))"
    )
    (tmp_path / "asked").write_text(assignment.to_json())
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", code, str(tmp_path / "asked")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as one:
        assert [one.stdout.readline().strip() for _ in range(2)] == ["begins", "step"]
        (rank,) = ranks()
        one.kill()
    until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.long
def test_a_rank_in_a_computation_that_notices_nothing_ends_with_the_other_end():
    own, other = socket.socketpair()
    code = (
        "import socket, sys, threading, time; from fedveil.client_app.ranks.rank_main import end_with;"
        "end = socket.socket(fileno=int(sys.argv[1])); threading.Thread(target=end_with, args=(end,)).start();"
        "print('computes', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-P", "-c", code, str(other.fileno())]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with other:
        one = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, pass_fds=[other.fileno()])
    with one:
        assert one.stdout.readline().strip() == "computes"
        own.send(b"x")  # what is said does not end it
        assert one.poll() is None
        own.close()
        assert one.wait(30) == 0


@pytest.mark.parametrize(
    ("device", "size", "there", "said"),
    [
        ("cuda:1", 2, 4, 'device: processes = 2 requires "auto" or "cuda", found "cuda:1"'),
        ("cuda", 4, 2, "processes: expected at most 2, the site's CUDA devices, found 4"),
    ],
)
def test_each_rank_needs_a_device_of_its_own(device, size, there, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_devices(device, size, there)
    check_devices("cpu", 64, 0)
    check_devices("auto", 4, 4)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"train__quantized_base": "4bit"}, 'train.quantized-base: shard-base = true requires "none"'),
        ({"train__compile": True}, "train.compile: shard-base = true requires false, found true"),
        ({"method": "random_binary"}, "method.params: shard-base = true requires an adapter that does not"),
    ],
)
def test_a_base_that_cannot_be_divided_is_refused_before_a_process_starts(tmp_path, keys, said):
    assignment = asked(tmp_path, node__shard_base=True, **keys)
    with pytest.raises(ConfigError, match=re.escape(said)):
        uploaded(assignment)
    assert not ranks()


def test_a_base_cannot_be_divided_among_one():
    with pytest.raises(ConfigError, match="shard-base divides the base among processes, .* processes is 1"):
        parse_site({"shard-base": True})
    assert parse_site({"shard-base": True, "processes": 2}).shard_base


def test_a_task_that_gains_nothing_from_more_processes_has_none(tmp_path, caplog):
    keys = {"task__name": "clip-prompt", "task__target_column": "label", "node__shard_base": True}
    assignment = asked(tmp_path, "promptfl", **keys, node__device="auto")
    assert at_first(assignment, strategies.create_method("promptfl")) == "auto"
    with caplog.at_level(logging.INFO):
        assert client_session.ClientSession().launch_ranks(task_of(assignment), assignment) is None
    assert "processes: only one of 2 trains, because clip-prompt does not benefit from more" in caplog.text
    assert not ranks()
