"""Controls that are trained, both undefended.

| control | what it is | what an attack does there |
|---|---|---|
| `train_overfitted_control` | knows some members by heart | it wins, or it measures nothing |
| `train_control` | was taught members as well as the run's model, and is asked about others | it loses, or rows differ
  |

Training on rows of one source lowers the loss of all rows of that source, and an attack takes that for membership where
the non-members are of another one. A model of before any training does not show it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedveil import rng, strategies
from fedveil.attacks.base import AdversaryView
from fedveil.config import RunConfig, parse
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import Rows, Task
from fedveil.contract.trainer import ScoresExamples, Trainer
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.wire.capture import MessageCapture

__all__ = [
    "KNOWN_BY_HEART",
    "TrainedControl",
    "control_config",
    "gentle_config",
    "train_control",
    "train_overfitted_control",
]

KNOWN_BY_HEART = 0.1  # of the loss at the start
_SETTINGS: Mapping[str, object] = {
    "method.name": "fedavg",
    "method.params": "",
    "train.epochs": 8,
    "train.max-steps": 0,
    "train.gradient-accumulation-steps": 1,
    "train.lr-schedule": "constant",
    "train.warmup-ratio": 0.0,
    "train.max-grad-norm": 0.0,
    "cohort.fraction": 1.0,
    "run.deterministic": True,
    "client.worker": False,
}
_SCORED = 64  # rows of a client, whose loss tells when the training ends
_DEFENCES = ("dp.", "secure.", "aggregate.")  # left at their defaults, which are none


@dataclass(frozen=True)
class TrainedControl:
    """A control after its training.

    Attributes:
        weights: of the server's model.
        rounds: how many there were.
        loss_share: the loss of the rows that it was trained on at the end, as a part of that at the start; of
            _SCORED of each client's at most.
        task, members: what it was trained with, and the rows it was trained on. Client "a" has every other
            one, from the first on.
        view: the server's, of the control's messages.
    """

    weights: Weights
    rounds: int
    loss_share: float
    task: Task
    members: Rows
    view: AdversaryView


def control_config(config: RunConfig) -> RunConfig:
    """The controls' config: the run's, with FedAvg of every site in every round and a higher learning rate.

    The rate is three times the run's, and 3e-3 at least. Pages, which this machine may not have, become plain memory.
    """
    rate = max(3 * config.train.learning_rate, 3e-3)
    unpaged = {"train.optimizer": config.train.optimizer.removeprefix("paged-")}
    undefended = {key: value for key, value in config.flat().items() if not key.startswith(_DEFENCES)}
    return parse(
        {**undefended, **_SETTINGS, **unpaged}
        | {"train.learning-rate": rate, "train.batch-size": 8, "train.received-loss-examples": 0}
    )


def gentle_config(config: RunConfig) -> RunConfig:
    """The config of the control `train_control`, from that of `control_config`: rounds of one epoch, so that it ends in
    time.
    """
    return parse({**config.flat(), "train.epochs": 1})


def _silent(text: str) -> None:
    """Discard a progress message."""


def train_overfitted_control(
    task: Task,
    members: Rows,
    config: RunConfig,
    tap: MessageCapture,
    rounds: int = 8,
    say: Callable[[str], None] = _silent,
) -> TrainedControl:
    """Trains FedAvg of two clients on `members`.

    It ends when their loss is KNOWN_BY_HEART of what it was at the start, and after `rounds` at the latest.

    Args:
        task: loaded with `config`.
        config: as `control_config` made it.
        tap: records the messages.
        say: told after each round how far it is.
    """
    return _trained(task, members, config, tap, rounds, KNOWN_BY_HEART, say)


def train_control(
    task: Task,
    rows: Rows,
    config: RunConfig,
    tap: MessageCapture,
    loss_share: float,
    rounds: int = 16,
    say: Callable[[str], None] = _silent,
) -> TrainedControl:
    """Trains FedAvg of two clients on `rows`, which no attack is to be asked about.

    It ends when their loss is that share of what it was at the start, and after `rounds` at the latest.

    Args:
        task: loaded with `config`.
        config: as `gentle_config` made it.
        tap: records the messages.
        loss_share: the share that the model under attack has left of its members' loss.
        say: told after each round how far it is.
    """
    return _trained(task, rows, config, tap, rounds, loss_share, say)


def _trained(
    task: Task,
    members: Rows,
    config: RunConfig,
    tap: MessageCapture,
    rounds: int,
    until: float,
    say: Callable[[str], None],
) -> TrainedControl:
    exchange = MessageExchange(strategies.create_method("fedavg"), "fedavg", task.spec)
    initial = task.initial(rng.initial_stream(config.run.seed, "weights"))
    parts = {"a": members[::2], "b": members[1::2]} if len(members) > 1 else {"a": members}

    def trainer_for(site: str, ctx: RoundContext) -> Trainer:
        return task.trainer(parts[site], ctx.rng("batches"), round_=ctx.round)

    def loss() -> float:
        ctx = RoundContext(0, "a", False, bytes(32))
        weights = federation.models()["server"]
        each = (_scored(trainer_for(site, ctx), weights, rows[:_SCORED]) for site, rows in parts.items())
        return sum(each) / len(parts)

    state = exchange.method.init(exchange.spec, initial, rng.initial_stream(config.run.seed, "method init"))
    federation = InProcessFederation(exchange, config, trainer_for, list(parts), state, tap=tap)
    first, share, done, began = loss(), 1.0, 0, time.monotonic()
    while not done or (share > until and done < rounds):
        federation.round(done)
        share, done = loss() / first, done + 1
        more = (rounds - done) * (time.monotonic() - began) / done
        about = f"; at most {f'{more / 60:.0f} min' if more > 99 else f'{more:.0f} s'} more" if share > until else ""
        left = f"{100 * share:.0f} % of the loss is left, the target is {100 * until:.0f} %"
        say(f"  round {done} of at most {rounds}: {left}{about}")
    return TrainedControl(
        federation.models()["server"], done, share, task, members, AdversaryView.server(tap, exchange)
    )


def _scored(trainer: Trainer, weights: Weights, rows: Rows) -> float:
    if not isinstance(trainer, ScoresExamples):
        raise TypeError(
            f"task.trainer: expected a trainer that scores rows (mean_loss), found {type(trainer).__name__}"
        )
    return trainer.mean_loss(weights, rows)
