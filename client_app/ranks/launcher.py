"""Start ranks 1 to N - 1, for a site whose node config has processes = N.

    <temporary folder>/fedveil-ranks-<random>/store    the ranks' rendezvous; the folder has mode 0700

A rank holds one end of an unnamed socket pair. It ends when the other end closes: when its training is over,
or when the process that started it ends for any reason.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, final

import torch

from fedveil import paths, tasks
from fedveil.client_app.instruction import ClientAssignment
from fedveil.contract.method import Method
from fedveil.records import process_exit
from fedveil.training.adapter_task import AdaptedTask
from fedveil.training.ranks import sharding
from fedveil.training.ranks.channel import RankChannel, RankMessage
from fedveil.training.ranks.coordinator import RankProcess, RankTeam
from fedveil.training.ranks.rendezvous import check_devices, join_group, rank_device

_ENDING_SECONDS = 5.0
_PROGRAM = "fedveil.client_app.ranks.rank_main"


def count_ranks(assignment: ClientAssignment) -> int:
    """Return how many processes train together: the site's setting, or 1 if the task does not benefit from more."""
    return assignment.site.processes if tasks.task_info(assignment.config.task.name).divisible else 1


def at_first(assignment: ClientAssignment, method: Method) -> str:
    """Return the device for building rank 0's task: a base that will be sharded is first loaded into main memory.

    Raises ConfigError if it cannot be sharded.
    """
    site = assignment.site
    if count_ranks(assignment) < 2 or not site.shard_base:
        return site.device
    sharding.check_shardable(assignment.config, method.adapter)
    return "cpu"


@final
class RankLauncher:
    """The other ranks that train a task. The task uses them until they are closed.

    Args:
        task: the task of rank 0, on the device from `at_first`.
        assignment: the assignment of a site with 2 or more processes.

    Raises:
        ConfigError: there are fewer devices than processes, or the base cannot be sharded.
        RankError: a rank does not start.
    """

    def __init__(self, task: AdaptedTask, assignment: ClientAssignment) -> None:
        site, count = assignment.site, count_ranks(assignment)
        there = torch.cuda.device_count() if site.device != "cpu" else 0
        check_devices(site.device, count, there)
        self._folder = tempfile.TemporaryDirectory(prefix="fedveil-ranks-")  # with mode 0700
        store = Path(self._folder.name) / "store"
        self._started: list[subprocess.Popen[bytes]] = []
        self._channels: list[RankChannel] = []
        self._team: RankTeam | None = None
        self._threads = torch.get_num_threads()
        threads = max(1, self._threads // count)
        rank_settings = {"assignment": assignment.to_json(), "store": str(store), "size": count, "threads": threads}
        device = rank_device(torch.device("cuda" if there else "cpu"), 0)
        join = partial(join_group, task, store, 0, count, device, site.shard_base)
        try:
            members = [self._start(rank, {**rank_settings, "rank": rank}, threads) for rank in range(1, count)]
            torch.set_num_threads(threads)
            self._team = RankTeam(task, members, join, site.shard_base)
        except BaseException:
            self.close()
            raise
        task.by = self._team

    def close(self) -> None:
        """End all ranks. A second call does nothing."""
        for channel in self._channels:
            channel.close()
        if self._team:
            self._team.leave()
        for started in self._started:
            try:
                started.wait(_ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()
        torch.set_num_threads(self._threads)
        self._folder.cleanup()

    def _start(self, rank: int, said: Mapping[str, Any], threads: int) -> RankProcess:
        own, other = socket.socketpair()
        before = process_exit.note_memory()
        with other:
            started = subprocess.Popen(
                [sys.executable, "-P", "-m", _PROGRAM, "--channel", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env={**os.environ, "PYTHONPATH": str(paths.import_root()), "OMP_NUM_THREADS": str(threads)},
            )
        self._started.append(started)
        channel = RankChannel(own)
        self._channels.append(channel)
        channel.say(RankMessage(said))
        return RankProcess(channel, partial(_ended, started, before))


def _ended(started: subprocess.Popen[bytes], before: Mapping[str, Any]) -> str:
    """Describe how a rank ended after its channel closed."""
    try:
        code = started.wait(_ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        return "closed its channel"
    if code >= 0:
        return f"ended with exit code {code}"
    _, lower = process_exit.child_exit_cause(code, before)
    return f"was ended by {signal.Signals(-code).name}{lower}"
