"""The pages of whoever operates a federation: its members, its runs, its sites, its audit logs."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedveil.console.dashboard import bounded
from fedveil.console.dashboard.bounded import Place
from fedveil.console.dashboard.federations import Federations
from fedveil.console.dashboard.later import Later
from fedveil.console.dashboard.pages import NotFound, View, digest
from fedveil.console.dashboard.parts import (
    DRAWING,
    LOG_HEAD,
    STATES,
    chart,
    failures,
    link,
    log_rows,
    plain,
    state,
    underway,
    verdict,
    when,
)
from fedveil.console.report import disclosed, findings, privacy, run_page
from fedveil.console.runs import by_site, disclosure
from fedveil.console.runs.folder import Run
from fedveil.console.runs.summary import label, metric_names
from fedveil.errors import FedVeilError
from fedveil.foreign import shown

LINKS = (("", "Runs"), ("sites", "Sites"), ("logs", "Audit logs"))
_MOST_KEPT = 64  # runs in memory
_SUMMED = 50  # runs that the page of sites counts
_CURVES = 12
_POLL = 0.9
_NOT_IN_LOG = "not in the log"


@dataclass
class ServerViews:
    """What is shown of the runs in folders, and of federations as `fedveil provision` made them.

    Attributes:
        runs: folders by federation; "" where there is one, or whose runs they are is not known.
        federations: folders by what they are called.
        base: what every path begins with.
    """

    runs: Mapping[str, Path]
    federations: Mapping[str, Path]
    base: str
    later: Later = field(default_factory=Later)
    _kept: OrderedDict[str, tuple[object, Run]] = field(default_factory=OrderedDict)
    _lock: Any = field(default_factory=threading.Lock)
    _state: tuple[float, str] = (0.0, "")

    def __post_init__(self) -> None:
        self._members = Federations(self.federations, self.later)

    def view(self, path: Sequence[str]) -> View:
        """The page at a path. Raises NotFound, FedVeilError."""
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
                found = self._loaded(self._place(key))
                with DRAWING:
                    return View("whole.html", f"Report of {found.name}", {"whole": run_page.body([found])})
        raise NotFound("expected a page that is linked, found none")

    def state(self) -> str:
        """Of everything that the pages show; looked up at most once a second, however many ask."""
        if time.monotonic() - self._state[0] > _POLL:
            places = bounded.runs(self.runs)
            files = bounded.stamp(file for _, file in bounded.logs(self.runs, places.values()).values())
            seen = [bounded.stamp_of(place) for place in places.values()], files, self.later.answered
            self._state = (time.monotonic(), digest((seen, self._members.seen())))
        return self._state[1]

    def _place(self, key: str) -> Place:
        places = bounded.runs(self.runs)
        if key not in places:
            raise NotFound(f'no run is called "{shown(key, 80)}"; the page Runs lists all {len(places)}')
        return places[key]

    def _loaded(self, place: Place) -> Run:
        """The run, read again where a file of it has changed. Raises StateError."""
        stamp = bounded.stamp_of(place)
        with self._lock:
            kept = self._kept.get(place.key)
        if kept is None or kept[0] != stamp:
            kept = (stamp, bounded.run(place))
            with self._lock:
                self._kept[place.key] = kept
                while len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
        return bounded.with_status(place, kept[1])

    def _read(self, places: Sequence[Place]) -> tuple[list[tuple[Place, Run]], list[tuple[str, str]]]:
        """The runs that can be read; of the others name and reason."""
        found, broken = [], []
        for place in places:
            try:
                found.append((place, self._loaded(place)))
            except (FedVeilError, OSError) as error:
                broken.append((place.key, shown(error)))
        return found, broken

    def _home(self) -> View:
        places = list(bounded.runs(self.runs).values())
        found, broken = self._read(places)
        rows, states = [], Counter[str]()
        for place, run in found:
            word = shown(run.status.get("state", "unknown"), 20)
            states[word] += 1
            rows.append([
                *self._federation(place), link(self.base, ("runs", place.key), place.name), _protected(run),
                state(word), f"{run.rounds_done} of {plain(run.status.get('rounds', '?'))}", run.final.get("loss"),
                len(run.sites), run.upload_bytes, when(run.config.get("started", "")),
                when(run.status.get("ended", "")),
                _now(run, word) or shown(run.status.get("reason") or "", 300)])  # fmt: skip
        head = [*self._column(), "run", "method", "state", "rounds", "test loss", "sites", "upload bytes",
                "started (UTC)", "ended (UTC)", "now, or why"]  # fmt: skip
        about = {
            "head": head, "rows": rows, "broken": broken, "folder": ", ".join(map(str, self.runs.values())),
            "is_full": len(places) >= bounded.MOST_RUNS,
            "facts": {"runs": len(places), "running": states["running"], "completed": states["completed"],
                      "stopped": states["stopped"],
                      "failed or died": sum(n for word, n in states.items() if word not in STATES)},
            "federations": self._members.all(),
            "logs": [(name, verdict(self.later, file)) for name, file in self._log_files().items()],
        }  # fmt: skip
        return View("home.html", "Runs", about)

    def _column(self) -> list[str]:
        """The federation's, where there are several."""
        return ["federation"] if len(self.federations) > 1 else []

    def _federation(self, place: Place) -> list[str]:
        return [self._members.whose(place.federation) or "not known"] if self._column() else []

    def _log_files(self) -> dict[str, Path]:
        files = bounded.logs(self.runs, bounded.runs(self.runs).values())
        return {name: file for name, (_, file) in files.items()} | self._members.logs()

    def _sites(self) -> View:
        places = list(bounded.runs(self.runs).values())[:_SUMMED]
        found, broken = self._read(places)
        last, online = self._last_uploads(), self._members.online()
        sums: dict[tuple[str, str], list[int]] = {}
        why: dict[tuple[str, str], tuple[str, str]] = {}
        for place, run in found:
            for site in by_site.of(run):
                of = self._members.whose(place.federation), site.name
                figures = (1, site.asked, site.accepted, len(site.failures), site.up, site.down)
                sums[of] = [a + b for a, b in zip(sums.get(of, [0] * 6), figures, strict=True)]
                if site.failures:
                    round_, reason = site.failures[-1]
                    why.setdefault(of, (f"{place.key}, round {round_ + 1}", shown(reason)))
        rows = [
            [*([of[0] or "not known"] if self._column() else []), of[1],
             *([online.get(of, "not known")] if self.federations else []),
             when(last[of]) if of in last else _NOT_IN_LOG if figures[2] else None,
             *figures[:3], failures(figures[3]), *figures[4:],
             ": ".join(why.get(of, ()))]
            for of, figures in sorted(sums.items())
        ]  # fmt: skip
        head = [*self._column(), "site", *(["online"] if self.federations else []), "last upload (UTC)", "runs",
                "asked", "accepted", "refused or failed", "upload bytes", "download bytes", "last reason"]  # fmt: skip
        spent = [(place.key, self._privacy(place, run)) for place, run in found if _claims(run)]
        about = {
            "head": head,
            "rows": rows,
            "broken": broken,
            "count": "the newest run" if len(found) == 1 else f"the newest {len(found)} runs",
            "spent": spent,
        }
        return View("sites.html", "Sites", about)

    def _last_uploads(self) -> dict[tuple[str, str], str]:
        """The time of the last upload of each (federation, site) that the ends of the logs tell of."""
        found: dict[tuple[str, str], str] = {}
        places = bounded.runs(self.runs)
        for federation, file in bounded.logs(self.runs, places.values()).values():
            for line in bounded.tail(file, bounded.MOST_BYTES):
                if line.get("event") == "accepted" and isinstance(line.get("site"), str):
                    of = self._members.whose(federation), line["site"]
                    found[of] = max(found.get(of, ""), shown(line.get("time", ""), 40))
        return found

    def _privacy(self, place: Place, run: Run) -> list[str]:
        """What the run cost its sites' rows: some seconds of accounting."""
        found = self.later.ask(("privacy", place.key), bounded.stamp_of(place), lambda: privacy.statements(run))
        if found.value is None:
            return [found.why or "Is being worked out."]
        return [*found.value, *([] if found.is_new else [f"{found.since}; the rounds since are being worked out."])]

    def _logs(self) -> View:
        files = self._log_files()
        found = [(link(self.base, ("logs", name), name), verdict(self.later, file)) for name, file in files.items()]
        return View("logs.html", "Audit logs", {"found": found})

    def _log(self, name: str) -> View:
        files = self._log_files()
        if name not in files:
            raise NotFound(f'no log is called "{shown(name, 80)}"; the page Audit logs lists all {len(files)}')
        about = {"verdict": verdict(self.later, files[name]), "name": name, "file": str(files[name]), "head": LOG_HEAD}
        title = "Audit log of the runs" if name == "runs" else f"Audit log of {name}"
        return View("log.html", title, {**about, "rows": log_rows(bounded.tail(files[name]))})

    def _run(self, place: Place) -> View:
        run = self._loaded(place)
        status, config = run.status, run.config.get("config", {})
        sites, word = by_site.of(run), shown(status.get("state", "unknown"), 20)
        names = [(n, shown(label(n), 40)) for n in metric_names([run])[:_CURVES]]
        charts = [chart(f"{said[:1].upper()}{said[1:]} by round", "rounds done", said, run.curve(n), run.name)
                  for n, said in names]  # fmt: skip
        at_sites = [] if names or run.before else by_site.losses(run)
        charts.append(chart("Training loss at the sites", "rounds done", "loss", at_sites, run.name))
        if run.upload_bytes:
            sent = [(x, y / 1e6) for x, y in run.uploaded]
            charts.append(chart("Uploaded so far", "rounds done", "MB, all sites", sent, run.name))
        every = sorted((round_ + 1, s.name, shown(why)) for s in sites for round_, why in s.failures)
        failed = [[site, round_, why] for round_, site, why in every]
        total = status.get("rounds") if type(status.get("rounds")) is int else 0
        about = {
            "run": run, "place": place, "state": state(word), "underway": _now(run, word),
            "word": word if word in STATES else "failed",
            "last": by_site.last_attempt(run), "last_table": disclosed.last_attempt(run),
            "reason": shown(status.get("reason") or "", 1000), "total": total,
            "task": config.get("task.name", "unknown task"), "model": config.get("task.model", "?"),
            "attacked": findings.in_words(place.folder),
            "report": link(self.base, ("runs", place.key, "report"), "The whole report of this run"),
            "facts": {"rounds done": f"{run.rounds_done} of {plain(status.get('rounds', '?'))}",
                      "test loss": run.final.get("loss"), "upload bytes": run.upload_bytes,
                      "download bytes": run.download_bytes, "seconds in rounds": round(run.seconds, 1)},
            "charts": [one for one in charts if one],
            "at_sites": run_page.SITES_NOTE if at_sites else "", "held_out": disclosed.held_out(run, sites),
            "failures": failed[:: -1][: bounded.MOST_LINES],
            "sites": [[s.name, s.asked, s.accepted, failures(len(s.failures)), s.loss_trained, s.train_seconds, s.up,
                       s.down] for s in sites],
            "disclosed": disclosed.exchanged(run), "words": disclosure.learned(run),
            "symbols": disclosure.SYMBOLS,
            "reported": [shown(name, 80) for name in disclosure.reported(run)],
            "privacy": self._privacy(place, run), "bound": config.get("dp.epsilon") or None,
        }  # fmt: skip
        return View("run.html", f"Run {place.key}", about)


def _claims(run: Run) -> bool:
    """Whether the run may have a claim of differential privacy, of which there is something to say."""
    config = run.config.get("config", {})
    fields = str(run.config.get("method", {}).get("fields"))
    return bool(config.get("dp.noise") or config.get("dp.epsilon") or "epsilon" in fields)


def _now(run: Run, word: str) -> str:
    """Where the round of a run that goes on is; "" of another run."""
    return underway(run.folder) if word == "running" else ""


def _protected(run: Run) -> str:
    """The method, and what stands beside it."""
    config = run.config.get("config", {})
    beside = [" + secure aggregation"] * bool(config.get("secure.enabled")) + [" + noise"] * bool(
        config.get("dp.noise")
    )
    return run.method + "".join(beside)
