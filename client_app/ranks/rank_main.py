"""The program of every rank except rank 0. launcher.py starts it; it ends with the process that started it."""

from __future__ import annotations

import argparse
import logging
import os
import select
import socket
import threading
import time
from pathlib import Path

import torch

from fedveil import strategies, tasks
from fedveil.client_app.instruction import ClientAssignment
from fedveil.errors import FedVeilError
from fedveil.records import process_exit
from fedveil.sanitize import sanitize
from fedveil.training.adapter_task import AdaptedTask
from fedveil.training.ranks.channel import RankChannel, RankMessage
from fedveil.training.ranks.rendezvous import join_group, rank_device
from fedveil.training.ranks.worker_loop import serve_rank
from fedveil.training.threads import limit_threads

_REASON_CHARACTERS = 1000
_GRACE_SECONDS = 1.0

log = logging.getLogger("fedveil.rank")


def _compute(channel: RankChannel) -> None:
    """Run this rank, starting with its first message."""
    if (message := channel.hear()) is None:
        return
    head = message.head
    torch.set_num_threads(head["threads"])
    assignment = ClientAssignment.from_json(head["assignment"])
    method = strategies.create_from_json(assignment.order.method, assignment.order.fields)
    site, rank = assignment.site, head["rank"]
    on_gpu = site.device != "cpu" and torch.cuda.is_available()
    device = rank_device(torch.device("cuda" if on_gpu else "cpu"), rank)
    task = tasks.load_task(assignment.site_config, method.adapter, "cpu" if site.shard_base else str(device))
    if not isinstance(task, AdaptedTask):
        raise TypeError(f"task.name: expected a task around a model, found {type(task).__name__}")
    task.base  # noqa: B018  # loaded before this rank reports that it is ready
    channel.say(RankMessage({"ready": rank}))
    group = join_group(task, Path(head["store"]), rank, head["size"], device, site.shard_base, lambda: None)
    with limit_threads(assignment.config):
        serve_rank(task, channel, group)


def end_with(end: socket.socket) -> None:
    """End this process when the other end closes, even while a computation is waiting for the other ranks."""
    closed = select.poll()
    closed.register(end, select.POLLRDHUP)
    closed.poll()
    time.sleep(_GRACE_SECONDS)
    os._exit(0)


def main() -> None:
    """Run the process. Only launcher.py starts it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int, required=True)
    end = socket.socket(fileno=parser.parse_args().channel)
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s")
    channel = RankChannel(end)
    threading.Thread(target=end_with, args=(end,), daemon=True).start()
    try:
        _compute(channel)
    except Exception as error:  # any library error; rank 0 reports it and ends the client round
        log.exception("rank failed")
        text = str(error) if isinstance(error, FedVeilError) else f"{type(error).__name__}: {error}"
        more = f"; {process_exit.LOWER_AT_SITE}" if process_exit.is_out_of_memory(error) else ""
        try:
            channel.say(RankMessage({"failed": sanitize(text, _REASON_CHARACTERS) + more}))
        except OSError:
            log.info("rank 0 has ended")
        os._exit(1)
    os._exit(0)  # library threads must not keep the process alive


if __name__ == "__main__":
    main()
