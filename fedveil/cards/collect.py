"""Build a run's card from its folder: config.json, metrics.jsonl, disclosure.jsonl and the audit log.

`collect_card` writes nothing. `write_card` writes privacy.json, PRIVACY.md and README.md to a model's folder: either
all three completely, or none of them.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedveil.cards import digests, disclosure_parties, guarantees, hub_readme, markdown
from fedveil.cards.card import (
    NAME,
    PAGE,
    README,
    AuditSection,
    DeclaredFacts,
    LogAnchors,
    PrivacyCard,
    RunDigests,
    RunFacts,
    SentMessages,
    SiteRows,
    SiteTraffic,
    card_text,
    short_digest,
)
from fedveil.config import RunConfig
from fedveil.contract.method import Method
from fedveil.contract.row_counts import RowCounts
from fedveil.errors import StateError
from fedveil.models import published_name
from fedveil.records import atomic_files, audit_log, disclosure_summary

_IN_PROCESS = (
    "Anything, from the person who made this run: the server and all sites were one process (fedveil.local). No site "
    "had a policy or a ledger of its own, nothing crossed a network, and the bytes exclude keys and shares of secure "
    "aggregation."
)


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """A run as its run folder records it.

    Attributes:
        folder: path of the run folder.
        id: 8 hex digits; "" if the run has none.
        about: the content of config.json.
        attempts: the lines in metrics.jsonl that are attempts at a round, including those before a resume.
        messages: as returned by `fedveil.records.disclosure_ledger.read_messages`.
        rounds: number of rounds that went into the model.
        scores: the last scores of the server's model.
        resumed: how many times the run was resumed.
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
        """Return all sites that were asked to take part or to send their keys."""
        keys = ("cohort", "failed", "unlisted")
        asked = {site for attempt in self.attempts for key in keys for site in attempt.get(key) or []}
        return sorted(asked | {str(message["site"]) for message in self.messages})


def collect_card(
    run: RecordedRun,
    config: RunConfig,
    method: Method,
    stated: DeclaredFacts,
    audited: AuditSection,
    whole: bool = False,
) -> PrivacyCard:
    """Build the card.

    Args:
        stated: facts that people stated.
        audited: results of attacks.
        whole: whether to include values that take seconds per site (mu for subsampled steps); false at the end of a
            run.
    """
    log, app = _log(run)
    in_process = [_IN_PROCESS] if run.about.get("in_process") is True else []
    task, base = config.task.name, config.task.model
    return PrivacyCard(
        fedveil_card=1,
        run=_facts(run, task, base),
        stated=stated,
        parties=disclosure_parties.disclosure_parties(run.messages, run.attempts, config, method),
        sent=_sent(run.messages),
        traffic=[
            SiteTraffic(site=short_digest(site), **dataclasses.asdict(of))
            for site, of in sorted(disclosure_summary.site_traffic(run.messages, run.attempts).items())
        ],
        rows=_rows(run.attempts),
        guarantee=guarantees.formal_guarantees(method, config, run.attempts, run.sites, whole),
        audited=audited,
        not_protected=[*in_process, *guarantees.not_protected(method, config, run.attempts)],
        digests=RunDigests(
            base=digests.digest_base_model(task, base),
            app=app,
            config=digests.digest_config(run.about["config"], run.about["method"]),
        ),
        audit_log=log,
    )


def _facts(run: RecordedRun, task: str, base: str) -> RunFacts:
    method = run.about["method"]
    versions = {name: str(run.about[name]) for name in ("fedveil", "flwr", "torch", "transformers", "peft", "python")
                if name in run.about}  # fmt: skip
    return RunFacts(
        name=short_digest(run.folder.name),
        id=run.id,
        task=short_digest(task),
        method=short_digest(method["name"]),
        version=int(method["version"]),
        fields={short_digest(key): card_text(value) for key, value in method["fields"].items()},
        base=short_digest(published_name.published_name(base, task)),
        rounds=run.rounds,
        started=short_digest(run.about.get("started", "")),
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        resumed=run.resumed,
        scores={short_digest(name): float(value) for name, value in run.scores.items() if math.isfinite(value)},
        versions=versions | {"dp-accounting": importlib.metadata.version("dp-accounting")},
    )


def _sent(messages: Sequence[Mapping[str, Any]]) -> list[SentMessages]:
    return [
        SentMessages(
            direction="up" if kind.direction == "up" else "down",
            variant=short_digest(kind.variant),
            sites={short_digest(site): count for site, count in sorted(kind.sites.items())},
            bytes=kind.total_bytes,
            payload=kind.payload_bytes,
            fields=[(short_digest(name), short_digest(codec), shape, size) for name, codec, shape, size in kind.fields],
        )
        for kind in disclosure_summary.message_kinds(messages)
    ]  # fmt: skip


def _rows(attempts: Sequence[Mapping[str, Any]]) -> list[SiteRows]:
    """Return the row counts that each site reported last."""
    last = {
        str(site): counts
        for attempt in attempts
        for site, report in (attempt.get("reports") or {}).items()
        if (counts := RowCounts.from_report(report)) is not None
    }
    return [
        SiteRows(site=short_digest(site), read=of.read_rows, cut=of.cut_rows, dropped=of.dropped_rows)
        for site, of in sorted(last.items())
    ]


def _log(run: RecordedRun) -> tuple[LogAnchors, str]:
    """Return the ends of the audit logs, and the digest of the most recently started app bundle."""
    file, name = run.folder.parent / audit_log.NAME, f"{run.folder.name}-{run.id}"
    try:
        lines = audit_log.read_log(file)
    except StateError as error:  # the card reports this; nothing else in it depends on the log
        why = str(error).replace(str(file), file.name)
        return LogAnchors(note=card_text(f"The server's audit log cannot be read: {why}")), ""
    head = audit_log.LogHead(lines[-1]["n"] + 1, str(lines[-1]["hash"])) if lines else audit_log.LogHead()
    own = [line for line in lines if line.get("run") == name]
    app = next((str(line.get("app", "")) for line in reversed(own) if line["event"] == "started"), "")
    app = app if re.fullmatch("[0-9a-f]{64}", app) else ""  # a simulation's bundle has none
    site_anchors = {str(line.get("site")): str(line["site_log"]) for line in own if _is_anchor(line.get("site_log"))}
    return LogAnchors(
        server=str(head), sites={short_digest(site): anchor for site, anchor in sorted(site_anchors.items())}
    ), app


def _is_anchor(found: object) -> bool:
    return isinstance(found, str) and bool(re.fullmatch(r"\d{1,18}:[0-9a-f]{64}", found))


def write_card(folder: Path, card: PrivacyCard) -> None:
    """Write the card's three files to the model's folder. Raises OSError, for example on a full disk."""
    names = {file.name for file in folder.iterdir()}
    texts = {
        NAME: card.to_bytes(),
        PAGE: markdown.card_page(card).encode(),
        README: hub_readme.hub_page(card, names).encode(),
    }
    with atomic_files.fill_folder(folder) as scratch:
        for name, data in texts.items():
            (scratch / name).write_bytes(data)
