"""One client round, as requested by the server. Used by the client process, the worker, and rounds without a worker."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedveil.client_app.node_config import SiteConfig, parse_site
from fedveil.client_app.site_columns import apply_site_columns
from fedveil.client_app.state.client_state import safe_file_name
from fedveil.config import RunConfig, parse
from fedveil.contract.message_address import MessageAddress
from fedveil.errors import ConfigError, WireError
from fedveil.sanitize import sanitize
from fedveil.wire.header import TURN

_MOST_SECONDS = 30 * 86_400.0
_LONGEST = 100_000  # characters of the method parameters, which may contain lists
_LONGEST_PLAN = 8 << 20  # characters of a plan, a roster or an entry table, which name every site


@dataclass(frozen=True)
class TrainInstruction:
    """The server's instruction to a site, sent along with the message itself.

    Attributes:
        round: round number, 0-based.
        is_new: the server has not yet accepted an upload from this site, or the site's last client round
            failed.
        site: the name under which the server knows this site.
        run: name of the run; private state is stored under it.
        method: the method's file name.
        fields: the method's hyperparameters as JSON.
        log: anchor of the server's audit log, which this site records in its own log.
        attempt: number of the attempt at the round, from 0.
        last: the client round of this site's last upload in the server's state. This client round continues
            from that round's private state. "" for none, or if the method keeps no private state.
        secure: the plan for a sum of masked uploads (fedveil/federation/secagg/plan.py), as text; "" if uploads are not
            masked.
        roster: the signing keys of all sites that the plan refers to, as text; "" for none.
        entries: the table that assigns the entries of the sum to sites (fedveil/contract/entry_table.py), as text; ""
            for none.
        seconds: time after which the server stops waiting for the upload; the client round then ends too.
        signing_key: ID of the key with which the server verifies this site's replies
            (fedveil/federation/message_signatures); the guard compares it with the site's own key. "" if the
            instruction is not signed.
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
    roster: str = ""
    entries: str = ""
    signing_key: str = ""

    @property
    def address(self) -> MessageAddress:
        """Return the address of the client round's messages."""
        return MessageAddress(self.run, self.attempt, self.site)


@dataclass(frozen=True)
class ClientAssignment:
    """An instruction, the run's config, and the site that must follow the instruction.

    Attributes:
        flower_run: id of the Flower run that delivered the instruction; 0 outside Flower.
        app: SHA-256 of the bundle as determined by the site's guard; "" if it was not determined.
    """

    order: TrainInstruction
    config: RunConfig
    site: SiteConfig
    flower_run: int = 0
    app: str = ""

    @classmethod
    def from_instruction(
        cls,
        order: Mapping[str, Any],
        config: Mapping[str, Any],
        node: Mapping[str, Any],
        flower_run: int = 0,
        app: str = "",
    ) -> ClientAssignment:
        """Parse the assignment from Flower's records.

        Raises:
            WireError: the instruction has a different version, or one of its values has the wrong type or form.
            ConfigError: the run config or the node config has an invalid key.
        """
        try:
            asked = TrainInstruction(**{key.replace("-", "_"): value for key, value in order.items()})
        except TypeError as error:
            raise WireError(
                "message: the instruction is not in the format of this version "
                f"({sanitize(error)}); use the same version at the server and the site"
            ) from None
        _require_form(asked)
        parsed, site = parse(config), parse_site(node)
        if site.has_data(parsed.task.data_set):  # if not, check_run says so, after what the policy permits
            site = site.choose_data(parsed.task.data_set)
        return cls(asked, parsed, site, flower_run, app)

    @property
    def name(self) -> str:
        """Return the site's name from its node config, otherwise the name that the server uses."""
        return self.site.site or self.order.site

    @property
    def data(self) -> str:
        """Return the data folder from the node config, otherwise from the run config; "" if neither names one.

        Raises ConfigError if the site does not have the data set that the run names.
        """
        return self.site.choose_data(self.config.task.data_set).data or self.config.task.data

    @cached_property
    def site_config(self) -> RunConfig:
        """Return the run's config with this site's column names. Raises ConfigError, see `apply_site_columns`."""
        return apply_site_columns(self.config, self.site.columns)

    def described(self) -> dict[str, Any]:
        """Return the run, round, method, task, model and data set, for status and logs."""
        order, config = self.order, self.config
        about: dict[str, Any] = {
            "run": order.run,
            "round": order.round,
            "rounds": config.run.rounds,
            "method": order.method,
        }
        about |= {"task": config.task.name, "model": config.task.model}
        return about | ({"data_set": config.task.data_set} if config.task.data_set else {})

    def to_json(self) -> str:
        """Return the assignment as text; `from_json` returns an equal one."""
        site = self.site.model_dump(mode="json", by_alias=True)
        parts = {"order": dataclasses.asdict(self.order), "config": self.config.flat(), "site": site}
        return json.dumps({**parts, "flower-run": self.flower_run, "app": self.app})

    @classmethod
    def from_json(cls, text: str) -> ClientAssignment:
        """Return the assignment from the output of `to_json`."""
        parts = json.loads(text)
        return cls.from_instruction(parts["order"], parts["config"], parts["site"], parts["flower-run"], parts["app"])


def _require_form(order: TrainInstruction) -> None:
    """Check the instruction before its values are used in names, logs or paths. Raises WireError."""
    for field in dataclasses.fields(TrainInstruction):
        value, kind = (
            getattr(order, field.name),
            {"int": int, "bool": bool, "str": str, "float": float}[str(field.type)],
        )
        most = _LONGEST_PLAN if field.name in ("secure", "roster", "entries") else _LONGEST
        if type(value) is not kind or (isinstance(value, str) and len(value) > most):
            raise WireError(
                f"order: {field.name}: expected {field.type} of at most {most} characters, found {sanitize(value, 80)}"
            )
    try:
        for key in ("site", "run", "method"):
            safe_file_name(key, getattr(order, key))
    except ConfigError as error:
        raise WireError(f"order: {error}") from None
    if not re.fullmatch(r"(\d{1,18}:[0-9a-f]{64})?", order.log):
        raise WireError(f'order: log: expected an anchor "LINES:HASH" or nothing, found {sanitize(order.log, 80)}')
    if not 0 < order.seconds <= _MOST_SECONDS:
        raise WireError(
            f"order: seconds: expected a number above 0 and at most {_MOST_SECONDS:g}, found {order.seconds!r}"
        )
    if not TURN.fullmatch(order.last):
        raise WireError(f"order: last: expected 16 hex digits or nothing, found {sanitize(order.last, 80)}")
