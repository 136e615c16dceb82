"""The two trained controls, both without defenses.

| control | model | an attack |
|---|---|---|
| `train_overfitted_control` | has memorized some members | must succeed, or it measures nothing |
| `train_control` | trained as well as the run's model, on members that are not scored | must fail |

Training on examples from one source lowers the loss on all examples from that source. If the non-members come from
another source, an attack mistakes this for membership. An untrained model does not show this effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedveil import rng, strategies
from fedveil.attacks.base import AdversaryView
from fedveil.config import CohortConfig, RunConfig, parse
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

KNOWN_BY_HEART = 0.1  # fraction of the initial loss
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
    "cohort.buffer-size": 0,  # a control has two sites, and each round waits for both
    "cohort.max-staleness": CohortConfig().max_staleness,
    "run.deterministic": True,
    "client.worker": False,
}
_SCORED = 64  # number of examples per client whose loss decides when training ends
_DEFENCES = ("dp.", "secure.", "aggregate.")  # these keep their defaults, which switch them off


@dataclass(frozen=True)
class TrainedControl:
    """A trained control.

    Attributes:
        weights: the server's model.
        rounds: number of rounds.
        loss_share: final loss on the training examples divided by the initial loss, over at most
            _SCORED examples of each client.
        task, members: the task, and the training examples. Client "a" has every other
            example, starting with the first.
        view: the server's view of the control's messages.
    """

    weights: Weights
    rounds: int
    loss_share: float
    task: Task
    members: Rows
    view: AdversaryView


def control_config(config: RunConfig) -> RunConfig:
    """Return the controls' config: the run's config with FedAvg, all sites in every round, and a higher learning rate.

    The rate is three times the run's, and at least 3e-3. A paged optimizer, which this machine may not support,
    becomes an unpaged one.
    """
    rate = max(3 * config.train.learning_rate, 3e-3)
    unpaged = {"train.optimizer": config.train.optimizer.removeprefix("paged-")}
    undefended = {key: value for key, value in config.flat().items() if not key.startswith(_DEFENCES)}
    return parse(
        {**undefended, **_SETTINGS, **unpaged}
        | {"train.learning-rate": rate, "train.batch-size": 8, "train.received-loss-examples": 0}
    )


def gentle_config(config: RunConfig) -> RunConfig:
    """Return the config for `train_control` from `control_config`'s: one epoch per round, so that it can stop early."""
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
    """Train FedAvg with two clients on `members`.

    Training ends when their loss falls to KNOWN_BY_HEART of the initial loss, or after `rounds`.

    Args:
        task: loaded with `config`.
        config: the result of `control_config`.
        tap: captures the messages.
        say: called with the progress after each round.
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
    """Train FedAvg with two clients on `members`, which no attack may score.

    Training ends when their loss falls to `loss_share` of the initial loss, or after `rounds`.

    Args:
        task: loaded with `config`.
        config: the result of `gentle_config`.
        tap: captures the messages.
        loss_share: final loss of the attacked model's members divided by their initial loss.
        say: called with the progress after each round.
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
        raise TypeError(f"task.trainer: {type(trainer).__name__} cannot score examples, because it has no mean_loss")
    return trainer.mean_loss(weights, rows)
