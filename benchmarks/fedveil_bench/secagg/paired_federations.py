"""The same federation in the clear and under secure aggregation, with the same seeds, and the adversaries' views.

| view | adversary | must |
|---|---|---|
| clear | the server in the clear run | win |
| as seen | the server in the secure run, which takes masked vectors at face value | lose |
| own mask off | the same server, after removing each site's own mask, which it can reconstruct | lose |
| colluders | the same server with all sites but one, after removing the masks that they share with that site | lose |
| every mask off | none: a control that the secure run's vectors are decoded correctly | win |
| lying server | sends all other sites zeros, so that it knows their uploads, and subtracts them from the sum | lose |
| lying server, undefended | the same, if the broadcast is not in the plan's digest: a control | win |
| sum | the server in the secure run, with the sum in place of the site's upload | show what remains |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from fedveil import rng
from fedveil.attacks.base import AdversaryView
from fedveil.attacks.secagg_views import MaskedUploadView, SecureSumView, Turn
from fedveil.config import RunConfig, parse
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import Rows, Task
from fedveil.contract.trainer import Trainer
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation, TrainerFor
from fedveil.testing.lying_broadcast import capture_isolated_uploads
from fedveil.testing.lying_server_search import RULE_REMOVALS
from fedveil.testing.secagg import MaskStream
from fedveil.wire.capture import MessageCapture
from fedveil_bench.common.federations import create_federation

Seen = Literal[
    "clear", "as seen", "own mask off", "colluders", "every mask off", "lying server", "lying server, undefended", "sum"
]
HIDDEN: Sequence[Seen] = ("as seen", "own mask off", "colluders", "lying server")
UNHIDDEN: Sequence[Seen] = ("clear", "every mask off", "lying server, undefended")  # controls to win
SEEN: Sequence[Seen] = ("clear", *HIDDEN, *UNHIDDEN[1:], "sum")


def run_pair(
    exchange: MessageExchange,
    config: RunConfig,
    task: Task,
    rows: Mapping[str, Rows],
    initial: Weights,
    folder: Path,
    guesses: Mapping[str, Rows],
) -> dict[Seen, AdversaryView]:
    """Run both federations, with their captured messages in `folder`; return the views of SEEN.

    `guesses` are the lying server's own examples for each site, with as many of each class as the site has.

    Raises:
        ConfigError: the method's broadcasts do not show the sums.
    """
    clear = create_federation(exchange, config, task, rows, initial, MessageCapture(folder / "clear"))
    clear.run()
    unseen = parse(config.flat() | {"secure.enabled": True})
    tap, own, pairs = MessageCapture(folder / "secure"), dict[Turn, list[MaskStream]](), dict[Turn, list[MaskStream]]()

    def before(site: str, ctx: RoundContext, local: Trainer) -> Trainer:
        assert secure.unseen is not None
        pairs[ctx.round, 0, site] = list(secure.unseen.pair_masks(site).values())
        return local

    def after(running: InProcessFederation, round_: int) -> None:
        assert running.unseen is not None
        assert running.unseen.last is not None
        own.update({(round_, 0, site): [mask] for site, mask in running.unseen.last.own_masks().items()})

    secure = create_federation(exchange, unseen, task, rows, initial, tap, before)
    secure.run(after)
    sums = SecureSumView.from_capture(tap, exchange, secure.models()["server"])
    if sums is None:
        raise ConfigError(f"method: expected one whose broadcasts show the sums, found {exchange.name}; choose another")
    seen = partial(MaskedUploadView.from_capture, tap, exchange, unseen.secure)

    def trainer_on(rows: Mapping[str, Rows]) -> TrainerFor:
        return lambda site, ctx: task.trainer(rows[site], ctx.rng("batches"), round_=ctx.round)

    def isolated(name: str) -> AdversaryView:
        state = exchange.method.init(exchange.spec, initial, rng.initial_stream(config.run.seed, "method init"))
        captured = capture_isolated_uploads(
            exchange, unseen, state, trainer_on(rows), trainer_on(guesses), list(rows), folder / name
        )
        return MaskedUploadView.from_capture(captured, exchange, unseen.secure)

    with RULE_REMOVALS["broadcast not in p"].removed():
        undefended = isolated("undefended")
    return {
        "clear": AdversaryView.server(clear.tap or tap, exchange),
        "as seen": seen(),
        "own mask off": seen(own),
        "colluders": seen({turn: [*mask, *pairs[turn][1:]] for turn, mask in own.items()}),
        "every mask off": seen({turn: [*mask, *pairs[turn]] for turn, mask in own.items()}),
        "lying server": isolated("lying"),
        "lying server, undefended": undefended,
        "sum": sums,
    }
