"""The card of a run from its folder: config.json, metrics.jsonl, disclosure.jsonl, the audit log. Writes nothing."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedveil.cards import digests, guarantees, parties
from fedveil.cards.card import Anchors, Audited, Card, Digests, RunFacts, Sent, Stated, Traffic, short, text
from fedveil.config import RunConfig
from fedveil.contract.method import Method
from fedveil.errors import StateError
from fedveil.models import named
from fedveil.records import audit_log, disclosed


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What a run folder says of its run.

    Attributes:
        folder: where it lies.
        id: 8 hex digits; "" where it has none.
        about: config.json.
        attempts: the lines of metrics.jsonl that are attempts at a round, those before a resume too.
        messages: as `fedveil.records.disclosure.messages` gives them.
        rounds: that are in the model.
        scores: last ones of the server's model.
        resumed: how often.
    """

    folder: Path
    id: str
    about: Mapping[str, Any]
    attempts: Sequence[Mapping[str, Any]]
    messages: Sequence[Mapping[str, Any]]
    rounds: int
    scores: Mapping[str, float]
    resumed: int

    @property
    def sites(self) -> list[str]:
        """Every site that was asked to take part, or for its keys."""
        keys = ("cohort", "failed", "unlisted")
        asked = {site for attempt in self.attempts for key in keys for site in attempt.get(key) or []}
        return sorted(asked | {str(message["site"]) for message in self.messages})


def card(
    run: Recorded, config: RunConfig, method: Method, stated: Stated, audited: Audited, whole: bool = False
) -> Card:
    """The card.

    Args:
        stated: what people said.
        audited: what attacks found.
        whole: with figures that take seconds a site (mu of subsampled steps); a run's end does without.
    """
    log, app = _log(run)
    task, base = config.task.name, config.task.model
    return Card(
        fedveil_card=1,
        run=_facts(run, task, base),
        stated=stated,
        parties=parties.of(run.messages, run.attempts, config, str(run.about["method"]["name"])),
        sent=_sent(run.messages),
        traffic=[
            Traffic(site=short(site), **dataclasses.asdict(of))
            for site, of in sorted(disclosed.traffic(run.messages, run.attempts).items())
        ],
        guarantee=guarantees.of(method, config, run.attempts, run.sites, whole),
        audited=audited,
        not_protected=guarantees.not_protected(method, config),
        digests=Digests(
            base=digests.of_base(task, base),
            app=app,
            config=digests.of_config(run.about["config"], run.about["method"]),
        ),
        audit_log=log,
    )


def _facts(run: Recorded, task: str, base: str) -> RunFacts:
    method = run.about["method"]
    versions = {name: str(run.about[name]) for name in ("fedveil", "flwr", "torch", "transformers", "peft", "python")
                if name in run.about}  # fmt: skip
    return RunFacts(
        name=short(run.folder.name),
        id=run.id,
        task=short(task),
        method=short(method["name"]),
        version=int(method["version"]),
        fields={short(key): text(value) for key, value in method["fields"].items()},
        base=short(named.published(base, task)),
        rounds=run.rounds,
        started=short(run.about.get("started", "")),
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        resumed=run.resumed,
        scores={short(name): float(value) for name, value in run.scores.items() if math.isfinite(value)},
        versions=versions | {"dp-accounting": importlib.metadata.version("dp-accounting")},
    )


def _sent(messages: Sequence[Mapping[str, Any]]) -> list[Sent]:
    return [
        Sent(
            direction="up" if kind.direction == "up" else "down",
            variant=short(kind.variant),
            sites={short(site): count for site, count in sorted(kind.sites.items())},
            bytes=kind.total_bytes,
            payload=kind.payload_bytes,
            fields=[(short(name), short(codec), shape, size) for name, codec, shape, size in kind.fields],
        )
        for kind in disclosed.kinds(messages)
    ]  # fmt: skip


def _log(run: Recorded) -> tuple[Anchors, str]:
    """Ends of the audit logs, and the digest of the bundle that the log says was started last."""
    file, name = run.folder.parent / audit_log.NAME, f"{run.folder.name}-{run.id}"
    try:
        lines = audit_log.read(file)
    except StateError as error:  # the card says so: nothing else of it rests on the log
        why = str(error).replace(str(file), file.name)
        return Anchors(note=text(f"The server's audit log cannot be read: {why}")), ""
    head = audit_log.Head(len(lines), str(lines[-1]["hash"])) if lines else audit_log.Head()
    own = [line for line in lines if line.get("run") == name]
    app = next((str(line.get("app", "")) for line in reversed(own) if line["event"] == "started"), "")
    app = app if re.fullmatch("[0-9a-f]{64}", app) else ""  # a simulation's bundle has none
    told = {str(line.get("site")): str(line["site_log"]) for line in own if _is_anchor(line.get("site_log"))}
    return Anchors(server=str(head), sites={short(site): anchor for site, anchor in sorted(told.items())}), app


def _is_anchor(found: object) -> bool:
    return isinstance(found, str) and bool(re.fullmatch(r"\d{1,18}:[0-9a-f]{64}", found))
