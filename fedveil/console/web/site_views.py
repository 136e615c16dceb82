"""Dashboard pages for a site: uploads, refusals, the privacy ledger, and worker activity."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedveil.console.runs.ledger_summary import (
    LedgerStanding,
    bound_of,
    if_planned,
    ledger_files,
    ledger_standing,
)
from fedveil.console.runs.site_notes import noted_federation
from fedveil.console.runs.site_permissions import read_permissions
from fedveil.console.runs.workers import WorkerStatus, last_failures, last_readings, last_row_counts, list_workers
from fedveil.console.web import safe_files, server_metrics, site_metrics
from fedveil.console.web.background import BackgroundQueries, CachedAnswer
from fedveil.console.web.components import LOG_HEAD, failure_count, format_time, log_rows, log_verdict, rounds_from_1
from fedveil.console.web.metrics import GaugeSample, join_groups
from fedveil.console.web.pages import PageNotFound, PageQuery, PageView, page_digest
from fedveil.console.web.report.html import html_tag
from fedveil.contract.privacy import UNTIMED
from fedveil.guard import last_heartbeat
from fedveil.records import audit_log
from fedveil.sanitize import sanitize

LINKS = (("", "This site"), ("log", "Audit log"))
_REFUSALS = ("refused", "withheld", "failed")
_MOST_REFUSALS = 50
_MOST_RUNS = 100
_MOST_NAMES = 20
_MOST_EVENTS = 10_000  # log lines that the metrics count
_POLL = 0.9
_UNBOUNDED = html_tag("span", "no bound", "tag failed")


@dataclass(frozen=True)
class _Left:
    """A summary of the audit log. `runs`: uploads, bytes up, bytes down and last upload time, by (run, site)."""

    runs: dict[tuple[str, str], tuple[int, int, int, str]]
    events: Counter[str]
    refusals: list[dict[str, Any]]


@dataclass
class SiteViews:
    """Pages about a site's state folder. Set `policy` and `key_file` if `fedveil site start` has not saved them.

    `ca`: the federation's ca.crt, for the metrics; None if it is not known.
    """

    state_dir: Path
    policy: str = ""
    key_file: str = ""
    ca: Path | None = None
    later: BackgroundQueries = field(default_factory=BackgroundQueries)
    _state: tuple[float, str] = (0.0, "")

    def view(self, path: Sequence[str], query: PageQuery) -> PageView:
        """Return the page at a path; these pages have no query. Raises PageNotFound or FedVeilError."""
        match list(path):
            case []:
                return self._home()
            case ["log"]:
                return self._whole_log()
        raise PageNotFound("no such page; use the links above")

    def state(self) -> str:
        """Return a digest of all page content, updated at most once a second regardless of the number of requests."""
        if time.monotonic() - self._state[0] > _POLL:
            # Include whether the server hears the site, not when: otherwise, every heartbeat would refresh the page.
            silent = [name for name, said in self._heartbeats().items() if said.startswith("not")]
            does = [*(_where(worker) for worker in self._workers()[0]), *silent]
            turns = self.state_dir.expanduser().glob("workers/*/turns.jsonl")
            files = [self._log, *ledger_files(self.state_dir), *turns]
            seen = safe_files.file_stamps(files), self.later.answered, read_permissions(self.state_dir, self.policy)
            self._state = (time.monotonic(), page_digest((does, seen)))
        return self._state[1]

    def metrics(self) -> Iterator[GaugeSample]:
        """Yield the metrics of the site's connection, ledger, workers, disk and log."""
        yield from join_groups(
            [self._connection_samples(), self._log_samples(), self._worker_samples(), self._ledger_samples()]
        )

    def _connection_samples(self) -> Iterator[GaugeSample]:
        folder = self.state_dir.expanduser()
        hearts = sorted(folder.glob(f"*{last_heartbeat.SUFFIX}"))[:_MOST_NAMES]
        of = {file.stem: noted_federation(self.state_dir, file.stem) for file in hearts}
        yield from site_metrics.heartbeat_samples({(of[file.stem], file.stem): file for file in hearts})
        federation = next(iter(of.values()), "")
        if self.ca is not None:
            yield from server_metrics.certificate_samples(federation, {"ca.crt": self.ca})
        yield from server_metrics.disk_samples(federation, {"state": folder})

    def _log_samples(self) -> Iterator[GaugeSample]:
        if safe_files.file_stamps([self._log]):
            yield from server_metrics.log_samples({"site": self._log})
            yield from site_metrics.event_samples(safe_files.tail_log(self._log, _MOST_EVENTS))

    def _worker_samples(self) -> Iterator[GaugeSample]:
        workers, why = self._workers()
        if not why:
            yield GaugeSample("fedveil_site_workers", len(workers))

    def _ledger_samples(self) -> Iterator[GaugeSample]:
        if (standing := self._standing()) is not None and (standing.value is not None or standing.why):
            yield from site_metrics.ledger_samples(standing.value)

    @property
    def _log(self) -> Path:
        return self.state_dir.expanduser() / audit_log.NAME

    def _heartbeats(self) -> dict[str, str]:
        return {sanitize(name, 80): said for name, said in last_heartbeat.describe_sites(self.state_dir).items()}

    def _home(self) -> PageView:
        stamp = safe_files.file_stamps([self._log])
        left = self.later.ask("left", stamp, lambda: _summed(self._log)) if stamp else None
        log_summary = left.value if left else _Left({}, Counter(), [])
        doing, why = self._workers()
        sites, standing = self._names(log_summary), self._standing()
        ledger = standing.value if standing else None
        about: dict[str, Any] = {
            "sites": ", ".join(sites), "federation": self._federation(sites), "folder": str(self.state_dir),
            "verdict": log_verdict(self.later, self._log) if stamp else None,
            "left": [], "refusals": [], "facts": {}, "known": log_summary is not None,
            "old": f"{left.since}; newer lines are being read." if left and log_summary and not left.is_new else "",
            "why": (left.why or "Reading the log.") if left and log_summary is None else "",
            "has_ledger": standing is not None, "ledger": _rows(ledger) if ledger else [],
            "ledger_why": _ledger_note(standing) if standing else "",
            "untimed": UNTIMED if ledger and ledger.poisson else "",
            "unbounded": ledger is not None and ledger.budget.epsilon == math.inf,
            "heard": self._heartbeats(), "permitted": read_permissions(self.state_dir, self.policy),
            "workers": [_row(worker) for worker in doing], "workers_why": why,
            "failures": last_failures(self.state_dir),
            "rows": [*last_row_counts(self.state_dir), *last_readings(self.state_dir)],
        }  # fmt: skip
        if log_summary is not None:
            newest = sorted(log_summary.runs.items(), key=lambda pair: pair[1][3], reverse=True)[:_MOST_RUNS]
            about["left"] = [[run, site, n, up, down, format_time(last)] for (run, site), (n, up, down, last) in newest]
            about["refusals"] = [
                [format_time(line.get("time")), html_tag("span", line["event"], "tag failed"),
                 sanitize(line.get("run", ""), 100), rounds_from_1(line.get("round")),
                 "; ".join(sanitize(line[key]) for key in ("cause", "reason") if line.get(key))]
                for line in log_summary.refusals
            ]  # fmt: skip
            about["facts"] = {
                "uploads sent": log_summary.events["sent"],
                "bytes sent": sum(up for _, up, _, _ in log_summary.runs.values()),
                **{event: failure_count(log_summary.events[event]) for event in _REFUSALS},
            }  # fmt: skip
        return PageView("site.html", f"Site {about['sites']}" if sites else "This site", about)

    def _names(self, found: _Left | None) -> list[str]:
        """Return this folder's sites, from the settings saved by `fedveil site start` and from the log."""
        noted_ = [file.stem for file in self.state_dir.expanduser().glob("*.toml")]
        logged = [site for _, site in found.runs] if found else []
        return [sanitize(name, 80) for name in sorted({*noted_, *logged} - {""})][:_MOST_NAMES]

    def _federation(self, sites: list[str]) -> str:
        """Return the sites' federation, as saved by `fedveil site start --kit`."""
        federations = {site: noted_federation(self.state_dir, site) or "not known" for site in sites}
        if len(set(federations.values())) <= 1:
            return next(iter(federations.values()), "not known")
        return ", ".join(f"{of} ({site})" for site, of in federations.items())

    def _standing(self) -> CachedAnswer[LedgerStanding] | None:
        """Return the ledger's standing; None if the folder has no ledger."""
        if not (files := ledger_files(self.state_dir)):
            return None
        return self.later.ask(
            "ledger",
            safe_files.file_stamps(files),
            lambda: ledger_standing(self.state_dir, self.policy, self.key_file),
        )

    def _workers(self) -> tuple[list[WorkerStatus], str]:
        """Return the running workers, or [] and the reason why they are unknown. A worker's report is untrusted,
        because a worker runs bundled code."""
        try:
            return list_workers(self.state_dir), ""
        except (ValueError, TypeError, KeyError) as error:
            return [], f"a worker gave an invalid answer: {sanitize(repr(error))}"

    def _whole_log(self) -> PageView:
        if not safe_files.file_stamps([self._log]):
            raise PageNotFound(f"expected an audit log at {self._log}, found none; a run's first message creates it")
        about = {"verdict": log_verdict(self.later, self._log), "name": "of this site", "file": str(self._log)}
        return PageView(
            "log.html",
            "Audit log of this site",
            {**about, "head": LOG_HEAD, "rows": log_rows(safe_files.tail_log(self._log))},
        )


def _rows(ledger: LedgerStanding) -> list[list[object]]:
    """Return a row for each party: the guarantee over all runs, the remaining epsilon, and the composed figure."""
    budget = ledger.budget
    left = _UNBOUNDED if budget.epsilon == math.inf else f"{math.floor(ledger.left * 1000) / 1000:g}"
    return [[one.party.value, bound_of(one, budget), left, if_planned(one, budget)] for one in ledger.parties]


def _ledger_note(standing: CachedAnswer[LedgerStanding]) -> str:
    """Return why the ledger is missing, or its problem, or the age of an outdated answer; "" if all is well."""
    if standing.value is None:
        return standing.why or "computing"
    return standing.value.problem or ("" if standing.is_new else standing.since)


def _summed(file: Path) -> _Left:
    """Read and verify the whole log. Raises StateError."""
    safe_files.require_bounded(file, audit_log.log_bytes(file))
    runs: dict[tuple[str, str], tuple[int, int, int, str]] = {}
    events, refusals = Counter[str](), []
    for line in audit_log.read_log(file):
        event = str(line["event"])
        events[event] += 1
        if event == "sent":
            key = sanitize(line.get("run", ""), 100), sanitize(line.get("site", ""), 80)
            count, up, down, _ = runs.get(key, (0, 0, 0, ""))
            sizes = (_size(line.get("up_bytes")), _size(line.get("down_bytes")))
            runs[key] = (count + 1, up + sizes[0], down + sizes[1], sanitize(line["time"], 40))
        elif event in _REFUSALS:
            refusals.append(line)
    return _Left(runs, events, refusals[: -_MOST_REFUSALS - 1 : -1])


def _size(value: object) -> int:
    return value if type(value) is int else 0


def _where(worker: WorkerStatus) -> tuple[object, ...]:
    return (worker.card.id, *(sanitize(worker.says.get(key), 100) for key in ("state", "run", "round", "step")))


def _row(worker: WorkerStatus) -> list[object]:
    says = worker.says
    about: list[object] = [
        worker.site,
        str(worker.card.pid),
        format_time(worker.card.since),
        sanitize(says.get("state"), 80),
    ]
    step = f"{sanitize(says.get('step'), 20)} of {sanitize(says.get('steps'), 20)}" if "step" in says else ""
    try:
        return [*about, worker.where, step, worker.pace, worker.holds]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [*about, f"unexpected status: {sanitize(repr(error), 200)}", step, "", ""]
