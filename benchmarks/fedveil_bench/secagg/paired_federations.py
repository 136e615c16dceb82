"""The same federation in the clear and under secure aggregation, with the same seeds, and the views of adversaries.

| view | adversary | must |
|---|---|---|
| clear | the server of the run in the clear | win |
| as seen | the server of the secure run: masked vectors at face value | lose |
| own mask off | the same server, after it removed each site's own mask, which it can reconstruct | lose |
| colluders | the same server with all sites but one: they remove the masks that they share with that one | lose |
| every mask off | none: a control that the secure run's vectors are decoded correctly | win |
| sum | the same server: the sum in place of the site's upload | show what remains |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from fedveil.attacks.base import AdversaryView
from fedveil.attacks.secagg_views import MaskedUploadView, SecureSumView, Turn
from fedveil.config import RunConfig, parse
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import Rows, Task
from fedveil.contract.trainer import Trainer
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.testing.secagg import MaskStream
from fedveil.wire.capture import MessageCapture
from fedveil_bench.common.federations import create_federation

Seen = Literal["clear", "as seen", "own mask off", "colluders", "every mask off", "sum"]
HIDDEN: Sequence[Seen] = ("as seen", "own mask off", "colluders")
SEEN: Sequence[Seen] = ("clear", *HIDDEN, "every mask off", "sum")


def run_pair(
    exchange: MessageExchange, config: RunConfig, task: Task, rows: Mapping[str, Rows], initial: Weights, folder: Path
) -> dict[Seen, AdversaryView]:
    """Run both federations, with their captured messages in `folder`; return the views of SEEN.

    Raises:
        ConfigError: broadcasts do not show the sums of the method.
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
    return {
        "clear": AdversaryView.server(clear.tap or tap, exchange),
        "as seen": seen(),
        "own mask off": seen(own),
        "colluders": seen({turn: [*mask, *pairs[turn][1:]] for turn, mask in own.items()}),
        "every mask off": seen({turn: [*mask, *pairs[turn]] for turn, mask in own.items()}),
        "sum": sums,
    }
