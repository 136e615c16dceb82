"""Flower's Grid without a network: messages go straight into a ClientApp, in this process."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedveil import tasks
from fedveil.contract.param_spec import ParamSpec
from fedveil.contract.task import Example, Task
from tests.conftest import ToyTrainer

SHAPES = {"h.0.lora_A": (2, 5), "h.0.lora_B": (7, 2), "h.1.lora_A": (2, 7), "h.1.lora_B": (3, 2)}


class ToyTask(Task):
    """Training is arithmetic that depends on the batch order's stream, so that a wrong secret shows."""

    trained_sites: list[str]

    def __init__(self) -> None:
        self.spec_ = {n: ParamSpec(s) for n, s in SHAPES.items()}

    @property
    def spec(self):
        return self.spec_

    def initial(self, rng):
        generator = rng.torch_generator()
        return {n: torch.randn(t.shape, generator=generator) * n.endswith("A") for n, t in self.spec_.items()}

    def examples(self, data: Path, split: str, share=None):
        return Example.from_columns([{"mr": "a", "ref": "b"}] * (3 + (share.index if share else 0)))

    def encode(self, examples):
        return examples

    def trainer(self, rows, rng, watch=None, round_=0):
        step = float(torch.rand((), generator=rng.torch_generator()))
        return ToyTrainer(self.spec_, len(rows), step)

    def predict(self, weights, rows, generate=False):
        raise NotImplementedError

    def evaluate(self, weights, examples, generate):
        return {"loss": float(sum(w.sum() for w in weights.values()))}


def use_toy_task(monkeypatch) -> ToyTask:
    task = ToyTask()
    monkeypatch.setattr(tasks, "load_task", lambda config, adapter, device="auto": task)
    return task


Reply = Callable[[Message, Message], Message | None]


def received(message: Message) -> Message:
    """What a node gets: its own copy, as after a network."""
    records = dict(message.content.items())
    records["fedveil"] = ArrayRecord(dict(message.content.array_records["fedveil"].items()))
    copied = Message(
        RecordDict(records),
        message.metadata.dst_node_id,
        message.metadata.message_type,
        group_id=message.metadata.group_id,
    )
    copied.metadata.__dict__["_message_id"] = message.metadata.message_id
    return copied


class LocalGrid(Grid):
    """Nodes by name. `tamper(site)` may replace a reply, drop it (None) or leave it."""

    def __init__(
        self,
        app: ClientApp,
        names: Iterable[str],
        state_dir: Path,
        run_config: Mapping[str, object] | None = None,
        tamper: Mapping[str, Reply] | None = None,
        late: Mapping[str, int] | None = None,
    ) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self.app, self.names, self.state_dir = app, sorted(names), state_dir
        self.run_config, self.tamper, self.late = dict(run_config or {}), dict(tamper or {}), dict(late or {})
        self.replies: dict[str, Message | None] = {}
        self.asked: dict[str, int] = {}
        self.pushed: list[Message] = []
        self.count = 0
        self.node_config: dict[str, dict[str, object]] = {}

    def set_run(self, run) -> None: ...

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def get_node_ids(self):
        return [1000 + i for i in range(len(self.names))]

    def get_nodes(self):
        return [NodeInfo(node_id=1000 + i, name=name) for i, name in enumerate(self.names)][::-1]

    def push_messages(self, messages):
        return [self._push(m) for m in messages]

    def _push(self, message: Message) -> str:
        self.count += 1
        message_id = f"m{self.count}"
        self.pushed.append(message)
        message.metadata.__dict__["_message_id"] = message_id
        site = self.names[message.metadata.dst_node_id - 1000]
        node_config = {
            "site": site,
            "data": "unused",
            "data-set": "toy",
            "state-dir": str(self.state_dir),
            "partition-id": self.names.index(site),
            "num-partitions": len(self.names),
            **self.node_config.get(site, {}),
        }
        # One Flower run for each run that a test drives over this grid.
        flower_run = zlib.crc32(str(message.content.config_records["order"].get("run", "")).encode())
        context = Context(flower_run, message.metadata.dst_node_id, node_config, RecordDict(), self.run_config)
        reply: Message | None = self.app(received(message), context)
        if site in self.tamper:
            reply = self.tamper[site](message, reply)
        self.replies[message_id] = reply
        self.asked[message_id] = -self.late.get(site, 0)
        return message_id

    def pull_messages(self, message_ids):
        out = []
        for message_id in message_ids:
            self.asked[message_id] = self.asked.get(message_id, 0) + 1
            if self.replies.get(message_id) is not None and self.asked[message_id] > 0:
                out.append(self.replies.pop(message_id))
        return out

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))
