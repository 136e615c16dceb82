"""Dashboard pages for a federation's operator: members, runs, sites and audit logs."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from fedveil.attacks.audit.findings import AuditReport
from fedveil.attacks.audit.verdict import audit_verdict
from fedveil.cards.card import read_card
from fedveil.console.runs import per_site, privacy_statements
from fedveil.console.runs.privacy_statements import PrivacyFigure
from fedveil.console.runs.run_reader import RunView, progress_of
from fedveil.console.runs.summary import may_claim_privacy, metric_names, protection
from fedveil.console.web import attention, card_page, compare_page, run_parts, runs_page, safe_files, server_metrics
from fedveil.console.web.background import BackgroundQueries, CachedAnswer
from fedveil.console.web.compare_page import ComparedRun
from fedveil.console.web.components import (
    DRAWING,
    LOG_HEAD,
    STATES,
    LogVerdict,
    fact_tiles,
    failure_count,
    format_time,
    log_rows,
    log_verdict,
    page_link,
    round_progress,
    state_badge,
)
from fedveil.console.web.federations import DashboardFederations
from fedveil.console.web.metrics import GaugeSample, join_groups
from fedveil.console.web.pages import PageNotFound, PageQuery, PageView, page_digest
from fedveil.console.web.report import disclosure_section, run_page
from fedveil.console.web.report.key_figures import attack_figure
from fedveil.console.web.run_summaries import RunSummaries, RunSummary, SummariesRead, summarize_run
from fedveil.console.web.runs_page import RunsQuery
from fedveil.console.web.safe_files import RunLocation
from fedveil.errors import FedVeilError, StateError
from fedveil.sanitize import sanitize

T = TypeVar("T")
LINKS = (("", "Runs"), ("compare", "Compare"), ("sites", "Sites"), ("logs", "Audit logs"))
_MOST_KEPT = 64  # cached runs
_SUMMED = 50  # runs counted on the Sites page and in the metrics
_MOST_DRAWN = 32  # cached parts of pages with charts
_MOST_CARDS = 12  # runs in progress at the top of the Runs page
_MOST_CHOICES = 50  # runs that the Compare page offers
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
    _drawn: OrderedDict[object, Any] = field(default_factory=OrderedDict)
    _lock: Any = field(default_factory=threading.Lock)
    _state: tuple[float, str] = (0.0, "")

    def __post_init__(self) -> None:
        self._members = DashboardFederations(self.federations, self.later)
        self._summaries = RunSummaries(self.later)

    def view(self, path: Sequence[str], query: PageQuery) -> PageView:
        """Return the page at a path with a query. Raises PageNotFound or FedVeilError."""
        match list(path):
            case []:
                return self._home(query)
            case ["compare"]:
                return self._compare(query)
            case ["sites"]:
                return self._sites()
            case ["logs"]:
                return self._logs()
            case ["logs", name]:
                return self._log(name)
            case ["runs", key]:
                return self._run(self._place(key))
            case ["runs", key, "card"]:
                return self._card(self._place(key))
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

    def _home(self, query: PageQuery) -> PageView:
        asked = RunsQuery.from_query(query)
        places = list(safe_files.find_runs(self.runs).values())
        read = self._summaries.read(places)
        running = [run for run in read.runs if run.state == "running"]
        chosen = runs_page.select_runs(read.runs, asked)
        begin, logs = (asked.page - 1) * runs_page.PER_PAGE, self._log_verdicts()
        if begin and begin >= len(chosen):
            raise PageNotFound(f"page {asked.page} of the runs does not exist: {len(chosen)} runs match")
        end, federations = min(begin + runs_page.PER_PAGE, len(chosen)), self._members.all()
        about = {
            "running": [runs_page.running_card(run, self.base) for run in running[:_MOST_CARDS]],
            "starting": self._starting(places), "starting_badge": state_badge("starting"),
            **self._needs(read, federations, logs),
            "unread": runs_page.reading_row(len(read.unread)), "count": len(read.runs), "asked": asked,
            "states": runs_page.state_links(read.runs, asked, self.base), "options": runs_page.sort_options(asked),
            "shown": end - begin,
            "rows": runs_page.runs_table(chosen, asked, self.base, self._whose if self._column() else None),
            "range": f"Runs {begin + 1} to {end} of {len(chosen)}." if len(chosen) > runs_page.PER_PAGE else "",
            "pages": runs_page.page_links(asked, len(chosen), self.base),
            "folder": ", ".join(map(str, self.runs.values())), "is_full": len(places) >= safe_files.MOST_RUNS,
            "federations": federations, "logs": logs,
        }  # fmt: skip
        return PageView("home.html", "Runs", about)

    def _whose(self, run: RunSummary) -> str:
        return self._members.whose(run.place.federation) or "not known"

    def _log_verdicts(self) -> list[tuple[str, LogVerdict]]:
        return [(name, log_verdict(self.later, file)) for name, file in self._log_files().items()]

    def _needs(
        self,
        read: SummariesRead,
        federations: Sequence[Mapping[str, Any]],
        logs: Sequence[tuple[str, LogVerdict]],
    ) -> dict[str, Any]:
        """Return what needs a person, what was checked, and what is still being checked."""
        link = lambda run: page_link(self.base, ("runs", run.place.key), run.place.key)  # noqa: E731
        needs = attention.run_needs(read.runs, read.broken, link)
        needs += [need for federation in federations for need in federation["needs"]]
        needs += attention.log_needs(logs, lambda name: page_link(self.base, ("logs", name), f"Audit log {name}"))
        sites, unknown = (sum(f[key] for f in federations) for key in ("of", "unknown"))
        unchecked = sum(verdict.kind == "wait" for _, verdict in logs)
        checked = [f"runs of the last {attention.RECENT_DAYS} days"]
        checked += [f"{sites - unknown} of {sites} sites and their keys"] if sites else []
        checked += [f"{len(logs) - unchecked} of {len(logs)} audit logs"] if logs else []
        open_checks = {"run": len(read.unread), "site": unknown, "audit log": unchecked}
        waits = [f"{count} {name}{'s' * (count > 1)}" for name, count in open_checks.items() if count]
        return {"needs": needs, "checked": ", ".join(checked), "waits": waits}

    def _starting(self, places: Sequence[RunLocation]) -> list[tuple[str, str, str]]:
        """Return number, status and federation of each run that Flower lists but that has written no folder yet."""
        unfinished = self._members.unfinished_runs()
        if not unfinished:
            return []
        known = {(self._members.whose(place.federation), safe_files.flower_number(place)) for place in places}
        return [
            (number, status, federation if self._column() else "")
            for (federation, number), status in unfinished.items()
            if (federation, number) not in known
        ][:_MOST_CARDS]

    def _compare(self, query: PageQuery) -> PageView:
        places, keys, notes = safe_files.find_runs(self.runs), compare_page.chosen_keys(query), list[str]()
        chosen = list[ComparedRun]()
        for key in keys[: runs_page.MOST_COMPARED]:
            if key not in places:
                notes.append(f'No run is named "{sanitize(key, 80)}".')
                continue
            try:
                chosen.append(ComparedRun.from_run(places[key], self._loaded(places[key])))
            except (FedVeilError, OSError) as error:
                notes.append(f"{sanitize(key, 80)} cannot be read: {sanitize(error, 300)}")
        if len(keys) > runs_page.MOST_COMPARED:
            notes.append(f"Only the first {runs_page.MOST_COMPARED} of {len(keys)} runs are compared.")
        if keys and len(chosen) < 2:
            notes.append("A comparison needs at least two runs. Tick them below.")
        ticked = {one.place.key for one in chosen}
        listed = [*ticked, *(key for key in places if key not in ticked)][:_MOST_CHOICES]
        about = {
            "notes": notes, "names": [one.name for one in chosen], "table_of": "",
            "choices": [
                (runs_page.tick_box(key, key in ticked), page_link(self.base, ("runs", key), key),
                 format_time(places[key].changed))
                for key in sorted(listed, key=list(places).index)
            ],
        }  # fmt: skip
        if len(chosen) >= 2:
            stamps = tuple((safe_files.run_stamp(one.place), str(one.run.status.get("state"))) for one in chosen)
            about |= self._drawn_once(("compare", stamps), lambda: compare_page.compare_about(chosen, self.base))
        return PageView("compare.html", "Compare runs", about)

    def _drawn_once(self, key: object, draw: Callable[[], T]) -> T:
        """Return what `draw` returns, from the last pages if it is there: charts take seconds on a busy machine."""
        with self._lock:
            if key in self._drawn:
                self._drawn.move_to_end(key)
                return self._drawn[key]  # type: ignore[no-any-return]
        value = draw()
        with self._lock:
            self._drawn[key] = value
            while len(self._drawn) > _MOST_DRAWN:
                self._drawn.popitem(last=False)
        return value

    def _card(self, place: RunLocation) -> PageView:
        folder = safe_files.model_folder(place)
        if folder is None:
            raise PageNotFound("this run has no model yet, and so no card; a run writes both when it ends")
        words = run_parts.card_tile(place, self.base, "")[2]
        about = {
            **card_page.card_about(read_card(folder)), "key": place.key,
            "signed": str(words)[:1].upper() + str(words)[1:] + ".",
            "back": page_link(self.base, ("runs", place.key), "Back to the run"),
        }  # fmt: skip
        return PageView("card.html", f"Privacy card of {place.key}", about)

    def _column(self) -> list[str]:
        """Return the heading for the federation column if there are several federations; otherwise []."""
        return ["federation"] if len(self.federations) > 1 else []

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
        spent = [
            (place.key, _privacy_words(self._privacy_answer(place, run)))
            for place, run in loaded_runs
            if may_claim_privacy(run)
        ]
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

    def _privacy_answer(self, place: RunLocation, run: RunView) -> CachedAnswer[tuple[list[str], PrivacyFigure]]:
        """Return the run's privacy cost for its sites' records, which takes seconds to compute."""
        return self.later.ask(
            ("privacy", place.key),
            safe_files.run_stamp(place),
            lambda: (privacy_statements.privacy_statements(run), privacy_statements.privacy_figure(run)),
        )

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
        every = sorted((round_ + 1, s.name, sanitize(why)) for s in sites for round_, why in s.failures)
        failed = [[site, round_, why] for round_, site, why in every]
        summary, quality = (
            summarize_run(place, run),
            self._drawn_once(("quality", place.key, safe_files.run_stamp(place)), lambda: run_parts.quality_part(run)),
        )
        audit, attacked = _audit_of(place)
        answer = self._privacy_answer(place, run)
        card = run_parts.card_tile(place, self.base, word)
        left = runs_page.describe_time_left(summary, progress_of(place.folder)) if word == "running" else ""
        about = {
            "run": run, "place": place, "state": state_badge(word, _left(run, word)), "underway": _now(run, word),
            "word": word if word in STATES else "failed", "protection": protection(run),
            "last": per_site.last_attempt(run), "last_table": disclosure_section.last_attempt(run),
            "reason": sanitize(status.get("reason") or "", 1000), "total": summary.rounds or 0,
            "task": config.get("task.name", "unknown task"), "model": config.get("task.model", "?"),
            "report": page_link(self.base, ("runs", place.key, "report"), "Full report of this run"),
            "next": run_parts.next_steps(run, place, self._federation_folder(place), audit is not None),
            "progress": fact_tiles(run_parts.progress_tiles(run, left)),
            "quality": quality, "scored": bool(metric_names([run]) or run.before or quality["at_sites"]),
            "held_out": disclosure_section.held_out(run, sites),
            "failures": failed[:: -1][: safe_files.MOST_LINES],
            "sites": [[s.name, s.asked, s.accepted, s.unsigned, failure_count(len(s.failures)),
                       s.rows.words if s.rows else None, s.loss_trained,
                       s.train_seconds, s.up, s.down] for s in sites],
            "unsigned": disclosure_section.UNSIGNED_NOTE if any(s.unsigned for s in sites) else "",
            "tiles": fact_tiles(run_parts.given_away_tiles(run, answer.value[1] if answer.value else None,
                                                           attack_figure(audit), card)),
            "given": run_parts.given_away_part(run), "disclosed": disclosure_section.exchange_section(run),
            "attacked": attacked, "attacks": run_parts.attack_rows(audit.findings) if audit else [],
            "privacy": _privacy_words(answer),
            "config": run_parts.config_part(run),
            "model_folder": str(place.folder / "final"), "card": card[1] if card[1] != "none" else "",
            "model_files": [[name, size] for name, size in safe_files.model_files(place).items()],
        }  # fmt: skip
        return PageView("run.html", f"Run {place.key}", about)

    def _federation_folder(self, place: RunLocation) -> str:
        """Return the folder of the run's federation; "" if it is not known."""
        name = self._members.whose(place.federation)
        return str(self.federations[name]) if name in self.federations else ""


def _audit_of(place: RunLocation) -> tuple[AuditReport | None, str]:
    """Return a run's audit and its verdict in words; None and the reason for an unreadable audit, or "" without one."""
    try:
        audit = AuditReport.read(place.folder)
    except StateError as error:
        return None, sanitize(error, 300)
    return audit, audit_verdict(audit.findings) if audit else ""


def _privacy_words(answer: CachedAnswer[tuple[list[str], PrivacyFigure]]) -> list[str]:
    """Return sentences on the run's privacy cost, or why there are none yet."""
    if answer.value is None:
        return [answer.why or "Computing."]
    return [*answer.value[0], *([] if answer.is_new else [f"{answer.since}; newer rounds are being computed."])]


def _left(run: RunView, word: str) -> str:
    """Return how many sites remain in a running or completed run; "" if all do."""
    return per_site.sites_left(run) if word in ("running", "completed") else ""


def _now(run: RunView, word: str) -> str:
    """Return the state of a running run's round; "" for other runs."""
    return round_progress(run.folder) if word == "running" else ""
