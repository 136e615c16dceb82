"""The pages of a site: what left it, what was refused, what the ledger holds, what the worker does."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedveil.console.dashboard import bounded
from fedveil.console.dashboard.later import Later
from fedveil.console.dashboard.pages import NotFound, View, digest
from fedveil.console.dashboard.parts import LOG_HEAD, failures, log_rows, rounds_from_1, verdict, when
from fedveil.console.report.page import tag
from fedveil.console.runs.noted import federation, noted
from fedveil.console.runs.spent import Standing, names, standing
from fedveil.console.runs.workers import WorkerStatus, last_failures, workers
from fedveil.contract.budget import stated
from fedveil.errors import FedVeilError
from fedveil.foreign import shown
from fedveil.records import audit_log

LINKS = (("", "This site"), ("log", "Audit log"))
_REFUSALS = ("refused", "withheld", "failed")
_MOST_REFUSALS = 50
_MOST_RUNS = 100
_MOST_NAMES = 20
_POLL = 0.9
_UNBOUNDED = tag("span", "no bound", "tag failed")


@dataclass(frozen=True)
class _Left:
    """What the log says, summed up. `runs`: (run, site) with uploads, bytes up and down, time of the last."""

    runs: dict[tuple[str, str], tuple[int, int, int, str]]
    events: Counter[str]
    refusals: list[dict[str, Any]]


@dataclass
class SiteViews:
    """What is shown of a site's state folder. `policy`, `key_file`: where `fedveil site start` has not noted them."""

    state_dir: Path
    policy: str = ""
    key_file: str = ""
    later: Later = field(default_factory=Later)
    _state: tuple[float, str] = (0.0, "")

    def view(self, path: Sequence[str]) -> View:
        """The page at a path. Raises NotFound, FedVeilError."""
        match list(path):
            case []:
                return self._home()
            case ["log"]:
                return self._whole_log()
        raise NotFound("expected a page that is linked, found none")

    def state(self) -> str:
        """Of everything that the pages show; looked up at most once a second, however many ask."""
        if time.monotonic() - self._state[0] > _POLL:
            does = [_where(worker) for worker in self._workers()[0]]
            files = [self._log, *self._ledgers().values(), *self.state_dir.expanduser().glob("workers/*/turns.jsonl")]
            self._state = (time.monotonic(), digest((does, bounded.stamp(files), self.later.answered)))
        return self._state[1]

    @property
    def _log(self) -> Path:
        return self.state_dir.expanduser() / audit_log.NAME

    def _ledgers(self) -> dict[str, Path]:
        return {name: self.state_dir.expanduser() / ".ledger" / f"{name}.json" for name in names(self.state_dir)}

    def _home(self) -> View:
        stamp = bounded.stamp([self._log])
        left = self.later.ask("left", stamp, lambda: _summed(self._log)) if stamp else None
        found = left.value if left else _Left({}, Counter(), [])
        doing, why = self._workers()
        sites, ledgers = self._names(found), [self._ledger(name, file) for name, file in self._ledgers().items()]
        about: dict[str, Any] = {
            "sites": ", ".join(sites), "federation": self._federation(sites), "folder": str(self.state_dir),
            "verdict": verdict(self.later, self._log) if stamp else None,
            "left": [], "refusals": [], "facts": {}, "known": found is not None,
            "old": f"{left.since}; the lines since are being read." if left and found and not left.is_new else "",
            "why": (left.why or "The log is being read.") if left and found is None else "",
            "ledgers": ledgers, "unbounded": [name for name, *_, left_ in ledgers if left_ == _UNBOUNDED],
            "workers": [_row(worker) for worker in doing], "workers_why": why,
            "failures": last_failures(self.state_dir),
        }  # fmt: skip
        if found is not None:
            newest = sorted(found.runs.items(), key=lambda pair: pair[1][3], reverse=True)[:_MOST_RUNS]
            about["left"] = [[run, site, n, up, down, when(last)] for (run, site), (n, up, down, last) in newest]
            about["refusals"] = [
                [when(line.get("time")), tag("span", line["event"], "tag failed"), shown(line.get("run", ""), 100),
                 rounds_from_1(line.get("round")),
                 "; ".join(shown(line[key]) for key in ("cause", "reason") if line.get(key))]
                for line in found.refusals
            ]  # fmt: skip
            about["facts"] = {
                "uploads that left": found.events["sent"],
                "bytes that left": sum(up for _, up, _, _ in found.runs.values()),
                **{event: failures(found.events[event]) for event in _REFUSALS},
            }  # fmt: skip
        return View("site.html", f"Site {about['sites']}" if sites else "This site", about)

    def _names(self, found: _Left | None) -> list[str]:
        """The sites of this folder: `fedveil site start` notes their settings, the log and the ledger name them too."""
        noted_ = [file.stem for file in self.state_dir.expanduser().glob("*.toml")]
        logged = [site for _, site in found.runs] if found else []
        return [shown(name, 80) for name in sorted({*noted_, *logged, *self._ledgers()} - {""})][:_MOST_NAMES]

    def _federation(self, sites: list[str]) -> str:
        """Of what they are sites: `fedveil site start --kit` notes it."""
        found = {site: federation(self.state_dir, site) or "not known" for site in sites}
        if len(set(found.values())) <= 1:
            return next(iter(found.values()), "not known")
        return ", ".join(f"{of} ({site})" for site, of in found.items())

    def _ledger(self, name: str, file: Path) -> list[object]:
        asked = self.later.ask(
            ("ledger", name), bounded.stamp([file]), lambda: standing(self.state_dir, name, self.policy, self.key_file)
        )
        if asked.value is None:
            return [name, None, None, asked.why or "is being worked out", "", ""]
        rows, spent, *more = _of(asked.value)
        return [name, self._data(name), rows, spent if asked.is_new else f"{spent} ({asked.since})", *more]

    def _data(self, name: str) -> str | None:
        """The site's data as its settings have it now; a ledger holds keyed digests of rows alone."""
        try:
            site = noted(self.state_dir, name)
        except (FedVeilError, OSError, ValueError):
            return None
        return shown(site.data_set or site.data, 200) or None

    def _workers(self) -> tuple[list[WorkerStatus], str]:
        """The living workers; why nothing can be said of them. What a worker says is bundled code's word."""
        try:
            return workers(self.state_dir), ""
        except (ValueError, TypeError, KeyError) as error:
            return [], f"a worker gave an answer that is none: {shown(repr(error))}"

    def _whole_log(self) -> View:
        if not bounded.stamp([self._log]):
            raise NotFound(f"expected an audit log at {self._log}, found none; the first message of a run makes it")
        about = {"verdict": verdict(self.later, self._log), "name": "of this site", "file": str(self._log)}
        return View(
            "log.html", "Audit log of this site", {**about, "head": LOG_HEAD, "rows": log_rows(bounded.tail(self._log))}
        )


def _of(found: Standing) -> tuple[int, str, object, object]:
    """Rows, what is spent, what is permitted and what is left of it, rounded down."""
    about = found.budget.delta, found.budget.neighbours
    spent = stated(found.epsilon, *about)
    if found.own is not None:
        spent += f"; against the server and all other sites together {stated(found.own, *about)}"
    if found.budget.epsilon == math.inf:
        return found.rows, spent, _UNBOUNDED, _UNBOUNDED
    return found.rows, spent, f"epsilon {found.budget.epsilon:g}", f"{math.floor(found.left * 1000) / 1000:g}"


def _summed(file: Path) -> _Left:
    """Reads the whole log and checks it. Raises StateError."""
    bounded.require_bounded(file, file.stat().st_size)
    runs: dict[tuple[str, str], tuple[int, int, int, str]] = {}
    events, refusals = Counter[str](), []
    for line in audit_log.read(file):
        event = str(line["event"])
        events[event] += 1
        if event == "sent":
            key = shown(line.get("run", ""), 100), shown(line.get("site", ""), 80)
            count, up, down, _ = runs.get(key, (0, 0, 0, ""))
            sizes = (_size(line.get("up_bytes")), _size(line.get("down_bytes")))
            runs[key] = (count + 1, up + sizes[0], down + sizes[1], shown(line["time"], 40))
        elif event in _REFUSALS:
            refusals.append(line)
    return _Left(runs, events, refusals[: -_MOST_REFUSALS - 1 : -1])


def _size(value: object) -> int:
    return value if type(value) is int else 0


def _where(worker: WorkerStatus) -> tuple[object, ...]:
    return (worker.card.id, *(shown(worker.says.get(key), 100) for key in ("state", "run", "round", "step")))


def _row(worker: WorkerStatus) -> list[object]:
    says = worker.says
    about: list[object] = [worker.site, str(worker.card.pid), when(worker.card.since), shown(says.get("state"), 80)]
    step = f"{shown(says.get('step'), 20)} of {shown(says.get('steps'), 20)}" if "step" in says else ""
    try:
        return [*about, worker.where, step, worker.pace, worker.holds]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [*about, f"says something else than a worker does: {shown(repr(error), 200)}", step, "", ""]
