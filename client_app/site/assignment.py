"""One turn of a site, as the server asked for it. The client process, the worker and a turn without worker share it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedveil.client_app.site.node_config import Site, parse_site
from fedveil.client_app.site.private import safe
from fedveil.config import RunConfig, parse
from fedveil.contract.address import Address
from fedveil.errors import ConfigError, WireError
from fedveil.foreign import shown
from fedveil.wire.header import TURN

_MOST_SECONDS = 30 * 86_400.0
_LONGEST = 100_000  # characters of a method's fields, which hold lists at times
_LONGEST_PLAN = 8 << 20  # of a plan, which names every site of the cohort


@dataclass(frozen=True)
class Order:
    """What the server asks of this site, beside the message itself.

    Attributes:
        round: 0-based.
        is_new: the server has accepted no upload of this site yet, or the site's last turn failed.
        site: the name under which the server knows this site.
        run: name of the run, for private state.
        method: the method's file name.
        fields: the method's hyper-parameters as JSON.
        log: anchor of the server's audit log, which this site records in its own.
        attempt: at the round, from 0.
        last: the turn of this site's last upload that is in the server's state, whose private state this turn goes on
            from; "" for none, or where the method keeps none.
        secure: the plan of a sum that nobody sees a single upload of (fedveil/federation/secure/statements.py), as its
            text; "" where uploads are added up in the clear.
        seconds: after which the server does not wait for the upload; the turn then ends too.
    """

    round: int
    is_new: bool
    site: str
    run: str
    method: str
    fields: str
    log: str = ""
    attempt: int = 0
    last: str = ""
    seconds: float = 86_400.0
    secure: str = ""

    @property
    def address(self) -> Address:
        """What the turn's messages belong to."""
        return Address(self.run, self.attempt, self.site)


@dataclass(frozen=True)
class Assignment:
    """An order, the run's config, and the site that the order is for."""

    order: Order
    config: RunConfig
    site: Site

    @classmethod
    def of(cls, order: Mapping[str, Any], config: Mapping[str, Any], node: Mapping[str, Any]) -> Assignment:
        """The assignment from Flower's records.

        Raises:
            WireError: the order is of another version, or a value of it has another type or form.
            ConfigError: the run config or the node config has a bad key.
        """
        try:
            asked = Order(**{key.replace("-", "_"): value for key, value in order.items()})
        except TypeError as error:
            raise WireError(f"message: expected an order of this version, found another ({shown(error)})") from None
        _require_form(asked)
        return cls(asked, parse(config), parse_site(node))

    @property
    def name(self) -> str:
        """The site's name from its node config, or else the one that the server knows."""
        return self.site.site or self.order.site

    @property
    def data(self) -> str:
        """The folder of the rows, from the node config or else the run config; "" if neither names one."""
        return self.site.data or self.config.task.data

    def described(self) -> dict[str, Any]:
        """Run, round, method, task and model, for status and logs."""
        order, config = self.order, self.config
        about: dict[str, Any] = {
            "run": order.run,
            "round": order.round,
            "rounds": config.run.rounds,
            "method": order.method,
        }
        return {**about, "task": config.task.name, "model": config.task.model}

    def to_json(self) -> str:
        """The assignment as text; `from_json` gives an equal one."""
        site = self.site.model_dump(mode="json", by_alias=True)
        return json.dumps({"order": dataclasses.asdict(self.order), "config": self.config.flat(), "site": site})

    @classmethod
    def from_json(cls, text: str) -> Assignment:
        """The assignment that `to_json` wrote."""
        parts = json.loads(text)
        return cls.of(parts["order"], parts["config"], parts["site"])


def _require_form(order: Order) -> None:
    """Before anything is named, logged or opened by what the server says. Raises WireError."""
    for field in dataclasses.fields(Order):
        value, kind = (
            getattr(order, field.name),
            {"int": int, "bool": bool, "str": str, "float": float}[str(field.type)],
        )
        most = _LONGEST_PLAN if field.name == "secure" else _LONGEST
        if type(value) is not kind or (isinstance(value, str) and len(value) > most):
            raise WireError(
                f"order: {field.name}: expected {field.type} of at most {most} characters, found {shown(value, 80)}"
            )
    try:
        for key in ("site", "run", "method"):
            safe(key, getattr(order, key))
    except ConfigError as error:
        raise WireError(f"order: {error}") from None
    if not re.fullmatch(r"(\d{1,18}:[0-9a-f]{64})?", order.log):
        raise WireError(f'order: log: expected an anchor "LINES:HASH" or nothing, found {shown(order.log, 80)}')
    if not 0 < order.seconds <= _MOST_SECONDS:
        raise WireError(f"order: seconds: expected above 0 and at most {_MOST_SECONDS:g}, found {order.seconds!r}")
    if not TURN.fullmatch(order.last):
        raise WireError(f"order: last: expected 16 hex digits or nothing, found {shown(order.last, 80)}")
