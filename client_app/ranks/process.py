"""The program of a rank from 1 on. launched.py starts it; it ends with what started it."""

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
from fedveil.client_app.site.assignment import Assignment
from fedveil.errors import FedVeilError
from fedveil.foreign import shown
from fedveil.records import process
from fedveil.training.adapted import AdaptedTask
from fedveil.training.ranks.channel import Channel, Said
from fedveil.training.ranks.joining import device_of, joined
from fedveil.training.ranks.serving import serve
from fedveil.training.threads import threads

_REASON_CHARACTERS = 1000
_GRACE_SECONDS = 1.0

log = logging.getLogger("fedveil.rank")


def _compute(channel: Channel) -> None:
    """All that this rank does, from its first message on."""
    if (said := channel.hear()) is None:
        return
    head = said.head
    torch.set_num_threads(head["threads"])
    assignment = Assignment.from_json(head["assignment"])
    method = strategies.create_from_json(assignment.order.method, assignment.order.fields)
    site, rank = assignment.site, head["rank"]
    on_gpu = site.device != "cpu" and torch.cuda.is_available()
    device = device_of(torch.device("cuda" if on_gpu else "cpu"), rank)
    task = tasks.load(assignment.config, method.adapter, "cpu" if site.shard_base else str(device))
    if not isinstance(task, AdaptedTask):
        raise TypeError(f"task.name: expected a task around a model, found {type(task).__name__}")
    task.base  # noqa: B018  # loaded before it says that it is ready
    channel.say(Said({"ready": rank}))
    group = joined(task, Path(head["store"]), rank, head["size"], device, site.shard_base, lambda: None)
    with threads(assignment.config):
        serve(task, channel, group)


def end_with(end: socket.socket) -> None:
    """Ends this process when the other end is closed, also where a computation waits for the other ranks."""
    closed = select.poll()
    closed.register(end, select.POLLRDHUP)
    closed.poll()
    time.sleep(_GRACE_SECONDS)
    os._exit(0)


def main() -> None:
    """The process. Only launched.py starts it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int, required=True)
    end = socket.socket(fileno=parser.parse_args().channel)
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s")
    channel = Channel(end)
    threading.Thread(target=end_with, args=(end,), daemon=True).start()
    try:
        _compute(channel)
    except Exception as error:  # whatever a library raises; rank 0 says it, and ends the turn
        log.exception("rank failed")
        text = str(error) if isinstance(error, FedVeilError) else f"{type(error).__name__}: {error}"
        more = f"; {process.LOWER_AT_SITE}" if process.is_out_of_memory(error) else ""
        try:
            channel.say(Said({"failed": shown(text, _REASON_CHARACTERS) + more}))
        except OSError:
            log.info("rank 0 is gone")
        os._exit(1)
    os._exit(0)  # other threads of libraries must not keep it


if __name__ == "__main__":
    main()
