"""Dashboard pages for a federation's operator: members, runs, sites and audit logs."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedveil.console.runs import disclosure, per_site, privacy_statements
from fedveil.console.runs.run_reader import RunView
from fedveil.console.runs.summary import may_claim_privacy, metric_names, protection, run_label
from fedveil.console.web import safe_files, server_metrics
from fedveil.console.web.background import BackgroundQueries
from fedveil.console.web.components import (
    DRAWING,
    LOG_HEAD,
    STATES,
    chart_with_table,
    failure_count,
    format_duration,
    format_time,
    log_rows,
    log_verdict,
    page_link,
    plain_number,
    round_progress,
    state_badge,
)
from fedveil.console.web.federations import DashboardFederations
from fedveil.console.web.metrics import GaugeSample, join_groups
from fedveil.console.web.pages import PageNotFound, PageView, page_digest
from fedveil.console.web.report import audit_section, disclosure_section, run_page
from fedveil.console.web.safe_files import RunLocation
from fedveil.errors import FedVeilError
from fedveil.sanitize import sanitize

LINKS = (("", "Runs"), ("sites", "Sites"), ("logs", "Audit logs"))
_MOST_KEPT = 64  # cached runs
_SUMMED = 50  # runs counted on the Sites page and in the metrics
_CURVES = 12
_POLL = 0.9
_NOT_IN_LOG = "not in the log"


@dataclass
class ServerViews:
    """Pages about runs in folders and about federations made by `fedveil provision`.

    Attributes:
        runs: run folders by federation, which is "" if there is only one or if it is unknown.
        federations: folders by federation name.
        base: the prefix of every path.
    """

    runs: Mapping[str, Path]
    federations: Mapping[str, Path]
    base: str
    later: BackgroundQueries = field(default_factory=BackgroundQueries)
    _kept: OrderedDict[str, tuple[object, RunView]] = field(default_factory=OrderedDict)
    _lock: Any = field(default_factory=threading.Lock)
    _state: tuple[float, str] = (0.0, "")

    def __post_init__(self) -> None:
        self._members = DashboardFederations(self.federations, self.later)

    def view(self, path: Sequence[str]) -> PageView:
        """Return the page at a path. Raises PageNotFound or FedVeilError."""
        match list(path):
            case []:
                return self._home()
            case ["sites"]:
                return self._sites()
            case ["logs"]:
                return self._logs()
            case ["logs", name]:
                return self._log(name)
            case ["runs", key]:
                return self._run(self._place(key))
            case ["runs", key, "report"]:
                run = self._loaded(self._place(key))
                with DRAWING:
                    return PageView("whole.html", f"Report of {run.name}", {"whole": run_page.run_page_body([run])})
        raise PageNotFound("no such page; use the links above")

    def state(self) -> str:
        """Return a digest of all page content, updated at most once a second regardless of the number of requests."""
        if time.monotonic() - self._state[0] > _POLL:
            places = safe_files.find_runs(self.runs)
            files = safe_files.file_stamps(
                file for _, file in safe_files.find_logs(self.runs, places.values()).values()
            )
            seen = [safe_files.run_stamp(place) for place in places.values()], files, self.later.answered
            self._state = (time.monotonic(), page_digest((seen, self._members.seen())))
        return self._state[1]

    def metrics(self) -> Iterator[GaugeSample]:
        """Yield the metrics of all federations, runs, disks and logs."""
        yield from join_groups(self._metric_groups())

    def _metric_groups(self) -> Iterator[Iterator[GaugeSample]]:
        yield from self._members.metric_groups()
        yield self._run_samples()
        for name, folder in self.federations.items():
            yield server_metrics.disk_samples(name, {"server": folder / "server"})
        for name, folder in self.runs.items():
            yield server_metrics.disk_samples(self._members.whose(name), {"runs": folder})
        yield self._log_samples()

    def _run_samples(self) -> Iterator[GaugeSample]:
        loaded_runs, broken = self._read(list(safe_files.find_runs(self.runs).values())[:_SUMMED])
        named = [(replace(place, federation=self._members.whose(place.federation)), run) for place, run in loaded_runs]
        yield from server_metrics.run_samples(named, len(broken), [self._members.whose(name) for name in self.runs])

    def _log_samples(self) -> Iterator[GaugeSample]:
        yield from server_metrics.log_samples(self._log_files())

    def _place(self, key: str) -> RunLocation:
        places = safe_files.find_runs(self.runs)
        if key not in places:
            raise PageNotFound(f'no run is named "{sanitize(key, 80)}"; the Runs page lists all {len(places)}')
        return places[key]

    def _loaded(self, place: RunLocation) -> RunView:
        """Return the run, reloading it if one of its files has changed. Raises StateError."""
        stamp = safe_files.run_stamp(place)
        with self._lock:
            cache_entry = self._kept.get(place.key)
        if cache_entry is None or cache_entry[0] != stamp:
            cache_entry = (stamp, safe_files.find_run(place))
            with self._lock:
                self._kept[place.key] = cache_entry
                while len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
        return safe_files.with_status(place, cache_entry[1])

    def _read(self, places: Sequence[RunLocation]) -> tuple[list[tuple[RunLocation, RunView]], list[tuple[str, str]]]:
        """Return the readable runs, and the name and error for each unreadable run."""
        loaded_runs, broken = [], []
        for place in places:
            try:
                loaded_runs.append((place, self._loaded(place)))
            except (FedVeilError, OSError) as error:
                broken.append((place.key, sanitize(error)))
        return loaded_runs, broken

    def _home(self) -> PageView:
        places = list(safe_files.find_runs(self.runs).values())
        loaded_runs, broken = self._read(places)
        rows, states = [], Counter[str]()
        for place, run in loaded_runs:
            word = sanitize(run.status.get("state", "unknown"), 20)
            states[word] += 1
            rows.append([
                *self._federation(place), page_link(self.base, ("runs", place.key), place.name),
                f"{run.method}; {how}" if (how := protection(run)) != "none" else run.method,
                state_badge(word, _left(run, word)),
                f"{run.rounds_done} of {plain_number(run.status.get('rounds', '?'))}",
                run.final.get("loss"), len(run.sites), run.upload_bytes, format_time(run.config.get("started", "")),
                format_duration(run.config.get("started"), run.status.get("ended")),
                _now(run, word) or sanitize(run.status.get("reason") or "", 300)])  # fmt: skip
        starting = self._starting(places)
        rows = [*starting, *rows]
        states["running"] += len(starting)
        head = [*self._column(), "run", "method; protection", "state", "rounds", "test loss", "sites", "upload bytes",
                "started (UTC)", "lasted", "status or reason"]  # fmt: skip
        about = {
            "head": head, "rows": rows, "broken": broken, "folder": ", ".join(map(str, self.runs.values())),
            "is_full": len(places) >= safe_files.MOST_RUNS,
            "facts": {"runs": len(places) + len(starting), "running": states["running"],
                      "completed": states["completed"], "stopped": states["stopped"],
                      "failed or died": sum(n for word, n in states.items() if word not in STATES)},
            "federations": self._members.all(),
            "logs": [(name, log_verdict(self.later, file)) for name, file in self._log_files().items()],
        }  # fmt: skip
        return PageView("home.html", "Runs", about)

    def _starting(self, places: Sequence[RunLocation]) -> list[list[object]]:
        """Return a row for each run that Flower lists but that has not written a folder yet."""
        known = {(self._members.whose(place.federation), safe_files.flower_number(place)) for place in places}
        return [
            [*([federation] if self._column() else []), f"number {number}", None, state_badge("starting"),
             *([None] * 6), f"Flower lists it as {status}; it has not written a run folder here yet"]
            for (federation, number), status in self._members.unfinished_runs().items()
            if (federation, number) not in known
        ]  # fmt: skip

    def _column(self) -> list[str]:
        """Return the heading for the federation column if there are several federations; otherwise []."""
        return ["federation"] if len(self.federations) > 1 else []

    def _federation(self, place: RunLocation) -> list[str]:
        return [self._members.whose(place.federation) or "not known"] if self._column() else []

    def _log_files(self) -> dict[str, Path]:
        files = safe_files.find_logs(self.runs, safe_files.find_runs(self.runs).values())
        return {name: file for name, (_, file) in files.items()} | self._members.logs()

    def _sites(self) -> PageView:
        places = list(safe_files.find_runs(self.runs).values())[:_SUMMED]
        loaded_runs, broken = self._read(places)
        last, online = self._last_uploads(), self._members.online()
        sums: dict[tuple[str, str], list[int]] = {}
        why: dict[tuple[str, str], tuple[str, str]] = {}
        for place, run in loaded_runs:
            for site in per_site.records_by_site(run):
                of = self._members.whose(place.federation), site.name
                figures = (1, site.asked, site.accepted, site.unsigned, len(site.failures), site.up, site.down)
                sums[of] = [a + b for a, b in zip(sums.get(of, [0] * 7), figures, strict=True)]
                if site.failures:
                    round_, reason = site.failures[-1]
                    why.setdefault(of, (f"{place.key}, round {round_ + 1}", sanitize(reason)))
        rows = [
            [*([of[0] or "not known"] if self._column() else []), of[1],
             *([online.get(of, "not known")] if self.federations else []),
             format_time(last[of]) if of in last else _NOT_IN_LOG if figures[2] else None,
             *figures[:4], failure_count(figures[4]), *figures[5:],
             ": ".join(why.get(of, ()))]
            for of, figures in sorted(sums.items())
        ]  # fmt: skip
        head = [*self._column(), "site", *(["online"] if self.federations else []), "last upload (UTC)", "runs",
                "asked", "accepted", "unsigned", "refused or failed", "upload bytes", "download bytes",
                "last reason"]  # fmt: skip
        spent = [(place.key, self._privacy(place, run)) for place, run in loaded_runs if may_claim_privacy(run)]
        about = {
            "head": head,
            "rows": rows,
            "broken": broken,
            "count": "the newest run" if len(loaded_runs) == 1 else f"the newest {len(loaded_runs)} runs",
            "spent": spent,
        }
        return PageView("sites.html", "Sites", about)

    def _last_uploads(self) -> dict[tuple[str, str], str]:
        """Return the time of the last upload from each (federation, site), from the ends of the logs."""
        upload_times: dict[tuple[str, str], str] = {}
        places = safe_files.find_runs(self.runs)
        for federation, file in safe_files.find_logs(self.runs, places.values()).values():
            for line in safe_files.tail_log(file, safe_files.MOST_BYTES):
                if line.get("event") == "accepted" and isinstance(line.get("site"), str):
                    of = self._members.whose(federation), line["site"]
                    upload_times[of] = max(upload_times.get(of, ""), sanitize(line.get("time", ""), 40))
        return upload_times

    def _privacy(self, place: RunLocation, run: RunView) -> list[str]:
        """Return the run's privacy cost for its sites' records, which takes seconds to compute."""
        answer = self.later.ask(
            ("privacy", place.key), safe_files.run_stamp(place), lambda: privacy_statements.privacy_statements(run)
        )
        if answer.value is None:
            return [answer.why or "Computing."]
        return [*answer.value, *([] if answer.is_new else [f"{answer.since}; newer rounds are being computed."])]

    def _logs(self) -> PageView:
        files = self._log_files()
        log_entries = [
            (page_link(self.base, ("logs", name), name), log_verdict(self.later, file)) for name, file in files.items()
        ]
        return PageView("logs.html", "Audit logs", {"found": log_entries})

    def _log(self, name: str) -> PageView:
        files = self._log_files()
        if name not in files:
            raise PageNotFound(f'no log is named "{sanitize(name, 80)}"; the Audit logs page lists all {len(files)}')
        about = {
            "verdict": log_verdict(self.later, files[name]),
            "name": name,
            "file": str(files[name]),
            "head": LOG_HEAD,
        }
        title = "Audit log of the runs" if name == "runs" else f"Audit log of {name}"
        return PageView("log.html", title, {**about, "rows": log_rows(safe_files.tail_log(files[name]))})

    def _run(self, place: RunLocation) -> PageView:
        run = self._loaded(place)
        status, config = run.status, run.config.get("config", {})
        sites, word = per_site.records_by_site(run), sanitize(status.get("state", "unknown"), 20)
        names = [(n, sanitize(run_label(n), 40)) for n in metric_names([run])[:_CURVES]]
        charts = [chart_with_table(f"{label[:1].upper()}{label[1:]} by round", "rounds done", label, run.curve(n),
                                   run.name) for n, label in names]  # fmt: skip
        at_sites = [] if names or run.before else per_site.site_losses(run)
        charts.append(chart_with_table("Training loss at the sites", "rounds done", "loss", at_sites, run.name))
        if run.upload_bytes:
            sent = [(x, y / 1e6) for x, y in run.uploaded]
            charts.append(chart_with_table("Uploaded so far", "rounds done", "MB, all sites", sent, run.name))
        every = sorted((round_ + 1, s.name, sanitize(why)) for s in sites for round_, why in s.failures)
        failed = [[site, round_, why] for round_, site, why in every]
        total = status.get("rounds") if type(status.get("rounds")) is int else 0
        about = {
            "run": run, "place": place, "state": state_badge(word, _left(run, word)), "underway": _now(run, word),
            "word": word if word in STATES else "failed",
            "last": per_site.last_attempt(run), "last_table": disclosure_section.last_attempt(run),
            "reason": sanitize(status.get("reason") or "", 1000), "total": total,
            "task": config.get("task.name", "unknown task"), "model": config.get("task.model", "?"),
            "attacked": audit_section.findings_in_words(place.folder),
            "report": page_link(self.base, ("runs", place.key, "report"), "Full report of this run"),
            "facts": {"protection": protection(run),
                      "rounds done": f"{run.rounds_done} of {plain_number(status.get('rounds', '?'))}",
                      "test loss": run.final.get("loss"), "upload bytes": run.upload_bytes,
                      "download bytes": run.download_bytes, "seconds in rounds": round(run.seconds, 1)},
            "charts": [one for one in charts if one],
            "at_sites": run_page.SITES_NOTE if at_sites else "", "held_out": disclosure_section.held_out(run, sites),
            "failures": failed[:: -1][: safe_files.MOST_LINES],
            "sites": [[s.name, s.asked, s.accepted, s.unsigned, failure_count(len(s.failures)),
                       s.rows.words if s.rows else None, s.loss_trained,
                       s.train_seconds, s.up, s.down] for s in sites],
            "unsigned": disclosure_section.UNSIGNED_NOTE if any(s.unsigned for s in sites) else "",
            "disclosed": disclosure_section.exchange_section(run), "words": disclosure.what_was_learned(run),
            "symbols": disclosure.SYMBOLS,
            "reported": [sanitize(name, 80) for name in disclosure.reported_metrics(run)],
            "privacy": self._privacy(place, run),
        }  # fmt: skip
        return PageView("run.html", f"Run {place.key}", about)


def _left(run: RunView, word: str) -> str:
    """Return how many sites remain in a running or completed run; "" if all do."""
    return per_site.sites_left(run) if word in ("running", "completed") else ""


def _now(run: RunView, word: str) -> str:
    """Return the state of a running run's round; "" for other runs."""
    return round_progress(run.folder) if word == "running" else ""
