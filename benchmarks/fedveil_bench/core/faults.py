"""Kill one process in a real run at a random point, resume the run, and compare it with an undisturbed run.

Every point is a separate run over gRPC (killer.py determines the victim and the time). Processes that ended for good
are restarted.

| compared | in a deterministic run | in a run with differential privacy |
|---|---|---|
| weights after the last round, private states | bit-identical | -: the noise comes from the operating system |
| fields of every accepted upload, including masks and draws | bit-identical, except in secure aggregation, whose keys
  come from the operating system; there, the weights show that the sum is the same | - |
| ledger | not charged | as in the undisturbed run, plus one more charge for each repeated client round |
| rounds and sites with recorded uploads | equal | equal |
| the server's audit log | unbroken | unbroken |

The benchmark runs in pieces: points in the pieces file are not run again, except those that ended differently at
another commit. The table reports the number of points per commit. Several instances can run at once; each works on
different points.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedveil import resources
from fedveil.errors import ConfigError, FedVeilError
from fedveil.records import audit_log
from fedveil.testing.messages import header_of_slices
from fedveil.wire.capture import MessageCapture
from fedveil_bench.common import resumable_rows
from fedveil_bench.common.pictures import write_colored_pictures
from fedveil_bench.core.killer import PROGRAMS, ROUNDS, SITES, VICTIMS, KillPoint, ProcessKiller, draw_kill_point
from fedveil_bench.provenance import measured_commit
from fedveil_bench.runner import BenchOptions, BenchOutcome

_SECONDS = 300.0
_MASKED = ("sum", "attached")  # fields with masks and keys, which are regenerated each time
_RESUMED = 5
_REASON_CHARACTERS = 400  # maximum length of the reason for a point that did not end
_PAUSE_SECONDS = 8.0  # between two starts of a site, as in compose: each start costs several CPU seconds


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return a row per case and victim: the points, how many ended equal, and a description of each that did not.

    Raises:
        ConfigError: there is no launcher.
    """
    if options.launch is None:
        raise ConfigError("core/faults: expected a launcher, found none; run it as `fedveil bench core/faults`")
    cases = sorted(settings["cases"])
    found, most = _kept(options.pieces), options.seeds or settings["points"]
    with tempfile.TemporaryDirectory() as scratch:
        pictures = write_colored_pictures(Path(scratch) / "pictures", ("cat", "dog", "ox"), 12)
        named = [options.launch.LocalSite(site) for site in SITES]
        with options.launch.LocalDeployment(named, Path(scratch) / "federation", database=True) as federation:
            bench = _Bench(federation, Path(scratch) / "runs", pictures, settings)
            for number in range(settings["points"]):
                with resumable_rows.lock_piece(options.pieces, number) as mine:
                    found |= _kept(options.pieces)
                    if not mine or number in found or not most:
                        continue
                    most -= 1
                    point = draw_kill_point(number, cases)
                    found[number] = {**asdict(point), **bench.tried(point), "commit": measured_commit()}
                    options.say(json.dumps(found[number]))
                    resumable_rows.append_piece(options.pieces, found[number])
    return _outcome([found[number] for number in sorted(found)])


def _kept(file: Path | None) -> dict[int, dict[str, Any]]:
    now = measured_commit()
    counts = (point for point in resumable_rows.read_pieces(file) if point["end"] == "equal" or point["commit"] == now)
    return {point["number"]: point for point in counts}


def _outcome(points: list[dict[str, Any]]) -> BenchOutcome:
    rows = []
    for case in sorted({point["case"] for point in points}):
        for victim in VICTIMS:
            of = [point for point in points if (point["case"], point["victim"]) == (case, victim)]
            ends = Counter(point["end"] for point in of)
            metrics = {
                "points": len(of),
                "equal": ends["equal"],
                "different": len(of) - ends["equal"],
                "resumed": sum(point["resumed"] for point in of),
                "killed": sum(point["killed"] for point in of),
            }
            shown = {name: {"mean": n, "low": n, "high": n, "n": 1} for name, n in metrics.items()}
            rows += [{"name": f"{case}: {victim}", "metrics": shown}] if of else []
    other = [f"point {p['number']} ({p['case']}, {p['victim']}): {p['end']}" for p in points if p["end"] != "equal"]
    equal = sum(point["end"] == "equal" for point in points)
    killed = sum(point["killed"] for point in points)
    commits = ", ".join(f"{n} of {name}" for name, n in Counter(point["commit"] for point in points).items())
    return BenchOutcome(
        rows,
        [
            f"{equal} of {len(points)} points ended as the undisturbed run does; in {killed} a process was killed.",
            f"By commit: {commits}.",
            *other,
        ],
    )


class _Bench:
    """A federation that runs the points; a case's undisturbed run is done on first use."""

    def __init__(self, federation: Any, runs: Path, pictures: Path, settings: dict[str, Any]) -> None:
        self._federation, self._runs, self._settings = federation, runs, settings
        self._data = {"text": resources.data_folder("e2e"), "pictures": pictures}
        self._whole: dict[str, dict[str, Any]] = {}
        self._started: dict[str, float] = {}  # ended sites, and when

    def tried(self, point: KillPoint) -> dict[str, Any]:
        """Run one point; return how it ended, whether a process was killed, the number of resumes, and the seconds."""
        if point.case not in self._whole:
            spent = self._charged()
            self._ended(point.case, f"whole-{point.case}")
            self._whole[point.case] = self._facts(f"whole-{point.case}", spent)
        name, began = f"point-{point.number}", time.monotonic()
        spent = self._charged()
        killer = ProcessKiller(point, self._victims(point), self._places(point, name))
        killer.start()
        try:
            resumed, end = self._ended(point.case, name, killer), ""
        except FedVeilError as error:
            resumed, end = _RESUMED, f"did not end: {str(error)[:_REASON_CHARACTERS]}"
        killer.over()
        self._restored(killer)
        again = point.site if point.victim == "worker" and killer.killed else ""
        end = end or _compared(self._whole[point.case], self._facts(name, spent), again)
        seconds = round(time.monotonic() - began, 1)
        return {"end": end, "killed": killer.killed, "resumed": resumed, "seconds": seconds}

    def _ended(self, case: str, name: str, killer: ProcessKiller | None = None) -> int:
        """Run to completion, restarting killed processes and resuming the run. Return the number of resumes."""
        config = dict(self._settings["config"]) | self._settings["cases"][case]
        config["task.data"] = config["task.evaluation"] = str(self._data[str(config.pop("data"))])

        def restore(status: Mapping[str, Any]) -> None:
            self._restored(killer)

        config |= {"run.dir": str(self._runs), "run.name": name, "run.rounds": ROUNDS, "run.capture-messages": True}
        reasons = []
        for resumed in range(_RESUMED):
            try:
                run = self._federation.run(None, config | {"run.resume": resumed > 0})
                ended = self._federation.wait(run, _SECONDS, restore)
            except FedVeilError as error:  # the SuperLink died
                if killer is None or not killer.killed:
                    raise
                reasons.append(str(error))
                self._restored(killer)
                continue
            if ended.completed:
                return resumed
            reasons.append(ended.reason)
            if killer is None:
                break
        raise ConfigError(f"{name}: expected a completed run, found: {'; then '.join(reasons)}")

    def _restored(self, killer: ProcessKiller | None) -> None:
        """Restart ended processes: the server's machine if it was killed, and any site.

        A site is restarted whenever its SuperNode ends, as in compose: until a heartbeat is missed, the SuperLink
        considers the dead SuperNode online and rejects the new one. This may last until the next run has begun.
        """
        for site in SITES:
            since = time.monotonic() - self._started.get(site, -math.inf)
            if since > _PAUSE_SECONDS and self._federation.processes.ended(site) is not None:
                self._started[site] = time.monotonic()
                self._federation.kill_site(site)  # its child processes
                self._federation.start_site(site)
        if killer and killer.killed and not killer.restored and killer.point.victim == "superlink":
            self._federation.processes.kill("superlink")
            self._federation.start_superlink()
            killer.restored = True

    def _victims(self, point: KillPoint) -> Callable[[], list[int]]:
        whose = "superlink" if point.victim in ("serverapp", "superlink") else point.site
        program = PROGRAMS.get(point.victim, "")

        def found() -> list[int]:
            pids = []
            for process in self._federation.processes.alive(whose):
                with suppress(Exception):  # the process may end in the meantime
                    pids += [process.pid] if program in " ".join([process.name(), *process.cmdline()]) else []
            return pids

        return found

    def _places(self, point: KillPoint, name: str) -> Callable[[], Iterator[Path]]:
        sites, run = self._federation.folder / "sites", self._runs / name
        files = {
            "sent": (run, "disclosure.jsonl"),
            "checkpoint": (run, "checkpoint.safetensors"),
            "recorded": (run, "metrics.jsonl"),
            "counted": (sites / point.site, f"{name}-*/{point.site}/served.json"),
            "kept": (sites / point.site, f"{name}-*/{point.site}/turn-*.safetensors"),
            "charged": (sites / point.site, ".ledger/ledger.json"),
        }
        folder, pattern = files[point.event]
        return lambda: folder.glob(pattern)

    def _charged(self) -> dict[str, int]:
        """Return the steps charged so far at every site."""
        found = {}
        for file in self._federation.folder.glob("sites/*/.ledger/ledger.json"):
            entries = json.loads(file.read_text())["entries"]
            found[file.parent.parent.name] = sum(used for entry in entries for *_, used in entry["steps"])
        return found

    def _facts(self, name: str, spent: Mapping[str, int]) -> dict[str, Any]:
        """Return the facts to compare. `spent`: steps charged before the run."""
        run = self._runs / name
        audit_log.verify_log(self._runs / audit_log.NAME)
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        tap = MessageCapture(run / "tap")
        uploads = {}
        for seen in tap.messages():
            if seen.direction == "up" and seen.accepted:
                fields = header_of_slices([tap.read(seen)])["fields"]
                uploads[f"{seen.round} {seen.site}"] = [field for field in fields if field[0] not in _MASKED]
        states = {}
        for site in SITES:
            found = (self._federation.folder / "sites" / site).glob(f"{name}-*/{site}/turn-{ROUNDS - 1:016x}.*")
            states[site] = [file.read_bytes() for file in found]
        accepted = {m["round"]: sorted(m["accepted"]) for m in metrics if len(m.get("accepted", [])) == len(SITES)}
        weights = [m["weights"] for m in metrics if m.get("weights")][-1]
        charged = {site: steps - spent.get(site, 0) for site, steps in self._charged().items()}
        lines = [
            line for line in audit_log.read_log(self._runs / audit_log.NAME) if str(line["run"]).startswith(f"{name}-")
        ]
        orders = Counter(str(line["site"]) for line in lines if line["event"] == "sent")
        return {
            "weights": weights, "private states": states, "uploads": uploads, "rounds": accepted, "charged": charged,
            "orders": dict(orders),
        }  # fmt: skip


def _compared(whole: Mapping[str, Any], found: Mapping[str, Any], again: str = "") -> str:
    """Return "equal" or the differences. `again`: the site whose worker was killed, so its client repeats the round."""
    keys = ["rounds", *(["weights", "private states", "uploads"] if not any(whole["charged"].values()) else [])]
    for key in keys:
        if whole[key] != found[key]:
            return f"different {key}"
    for site, steps in whole["charged"].items():
        a_turn, turns = steps // ROUNDS, found["orders"][site] + (site == again)
        charged = found["charged"].get(site, 0)
        if steps and not (charged % a_turn == 0 and steps <= charged <= a_turn * turns):
            return f"different ledger of {site}: {charged} steps charged, {turns} turns of {a_turn} asked for"
    return "equal"
