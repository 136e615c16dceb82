"""The parts of `make gpu`: child processes in sequence, each with a time limit after which it is killed."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_MARK = "FEDVEIL_GPU_PART"  # inherited by all of a part's processes, even in other sessions, such as Flower's
_GRACE = 8.0  # seconds between SIGTERM, which lets a federation stop what it started, and SIGKILL
_LEAST = 5.0  # minimum seconds left to make it worthwhile to start a part
_OWN = {"fedveil", "fedveil_bench", "tests", "tools"}

CONSOLE = ("cryptography", "psutil", "pydantic", "rich", "typing-extensions", "xxhash")

Result = Literal["passed", "failed", "over time", "not run"]


@dataclass(frozen=True)
class Part:
    """The tests or a preset.

    Attributes:
        name: "tests", or the preset's name.
        seconds: its share of the time.
        needs: required distributions, by their names in pyproject.toml.
        quick: whether to run the preset's quick form even on a GPU.
        data: the folder under $FEDVEIL_DATA that it reads.
    """

    name: str
    seconds: float
    needs: tuple[str, ...]
    quick: bool = False
    data: str = ""


@dataclass(frozen=True)
class Row:
    """A line in the table; `detail` says what passed, or why the part did not pass."""

    name: str
    result: Result
    detail: str = ""
    seconds: float = 0.0
    file: str = ""
    verdicts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ended:
    """The result of a child process; if code is None, it was killed after a timeout."""

    code: int | None
    seconds: float


@dataclass(frozen=True)
class Place:
    """The environment for the parts: repository, results folder, device, and whether presets run in quick form."""

    root: Path
    out: Path
    device: str
    is_quick: bool

    def environment(self, token: str) -> dict[str, str]:
        """Return a child's environment: FedVeil from this repository, and no requests to an unavailable network."""
        own = [str(self.root), str(self.root / "benchmarks")]  # so that our packages need not be installed
        path = os.pathsep.join(filter(None, [*own, os.environ.get("PYTHONPATH", "")]))
        offline = {"HF_HUB_OFFLINE": "1", "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        waiting = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}  # spinning threads make a busy machine slow
        variables = {**waiting, **os.environ, **offline, "PYTHONPATH": path, _MARK: token}
        if self.device == "cpu":  # also on a machine that has a GPU
            variables |= {"CUDA_VISIBLE_DEVICES": "", "FEDVEIL_GPU_TESTS": "cpu"}
        return variables

    def child(self, command: Sequence[str], log: Path, seconds: float, threads: int = 0) -> Ended:
        """Run `command` with all output in `log`. No child process is left running, however the command ends.

        `threads` is the number of OpenMP threads; 0: torch's default.
        """
        started, token = time.monotonic(), secrets.token_hex(8)
        env = self.environment(token) | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=self.root, env=env, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
        finally:
            kill_marked(token)
            process.wait()
        return Ended(code, time.monotonic() - started)


def kill_marked(token: str) -> None:
    """Send SIGKILL to every process that inherited the token, until none is left."""
    mark = f"{_MARK}={token}".encode()
    for _ in range(20):
        alive = [int(path.name) for path in Path("/proc").glob("[0-9]*") if _carries(path, mark)]
        if not alive:
            return
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _carries(process: Path, mark: bytes) -> bool:
    """Return whether the process has the mark in its environment.

    Returns False for another user's process and for one that has just ended.
    """
    try:
        return mark in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def run_part(part: Part, place: Place, seconds: float, lacks: Mapping[str, str]) -> list[Row]:
    """Return the part's rows for the table: one, and for the tests another for each reason why some were not run."""
    if missing := [f"{name} ({lacks[name]})" for name in part.needs if name in lacks]:
        return [Row(part.name, "not run", f"misses {', '.join(missing)}")]
    if part.data and (why := _no_data(part.data)):
        return [Row(part.name, "not run", f"misses {why}")]
    if seconds - _GRACE < _LEAST:
        return [Row(part.name, "not run", "no time was left for it; give it more with --seconds")]
    work = _tests if part.name == "tests" else _preset
    return work(part, place, seconds - _GRACE)


def _no_data(name: str) -> str:
    base = os.environ.get("FEDVEIL_DATA", "")
    if base and (Path(base) / name).is_dir():
        return ""
    return f"the data set {name}: expected a folder $FEDVEIL_DATA/{name}, FEDVEIL_DATA is {base or 'not set'}"


def preset_command(part: Part, place: Place, file: Path) -> list[str]:
    """Return the command that runs a preset."""
    bench = [sys.executable, "-m", "fedveil_bench", part.name, "--device", place.device]
    return [*bench, "--out", str(file), *(["--quick"] if part.quick or place.is_quick else [])]


def _preset(part: Part, place: Place, seconds: float) -> list[Row]:
    file = place.out / f"{part.name.replace('/', '_')}.json"
    log = file.with_suffix(".log")
    file.unlink(missing_ok=True)  # an older result must not be mistaken for this run's
    command = preset_command(part, place, file)
    form = "quick" if "--quick" in command else "full"
    print(f"{part.name} ({form}), at most {seconds:.0f} s; its log: {log}", flush=True)
    ended = place.child(command, log, seconds)
    log_text = log.read_text(errors="replace")
    if ended.code is None:
        over = f"{form}, killed after {seconds:.0f} s; give it more with --seconds, or use --quick"
        return [Row(part.name, "over time", over, ended.seconds, log.name)]
    if ended.code != 0 and (module := missing_module(log_text)):
        return [Row(part.name, "not run", f"misses the module {module}", ended.seconds, log.name)]
    if ended.code != 0:
        return [Row(part.name, "failed", f"exit code {ended.code}: {_last(log_text)}", ended.seconds, log.name)]
    try:
        result: dict[str, Any] = json.loads(file.read_text())
        gpu, rows, verdicts = result["environment"]["gpu"], result["rows"], tuple(result["verdicts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"expected a result in {file.name}, found {type(error).__name__}: {error}"
        return [Row(part.name, "failed", why, ended.seconds, log.name)]
    if not rows or (place.device == "cuda" and not gpu):
        why = f"expected rows of a GPU in {file.name}, found {len(rows)} rows and gpu = {gpu}"
        return [Row(part.name, "failed", why, ended.seconds, log.name)]
    missed = sum(verdict.count("NOT HELD") for verdict in verdicts)
    bounds = sum(verdict.count("asked: ") for verdict in verdicts)
    detail = f"{form}; bounds: {bounds - missed} held, {missed} NOT HELD" if bounds else form
    return [Row(part.name, "passed", detail, ended.seconds, file.name, verdicts)]


def missing_module(said: str) -> str:
    """Return the third-party module that could not be imported; "" for any other error."""
    modules: list[str] = re.findall(r"ModuleNotFoundError: No module named '([\w.]+)'", said)
    return modules[-1] if modules and modules[-1].partition(".")[0] not in _OWN else ""


def _last(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


def marked_files(root: Path) -> list[str]:
    """Return the test files that have a test marked gpu. Others are left out, because they may need missing modules."""
    files = sorted((root / "tests").rglob("test_*.py"))
    return [str(file.relative_to(root)) for file in files if re.search(r"^@pytest\.mark\.gpu", file.read_text(), re.M)]


def tests_command(place: Place, report: Path) -> list[str]:
    """Return the command that runs the tests, without plugins and so without pyproject's plugin options.

    The project's own test runs, with pinned versions, turn warnings into errors. Here a different torch version may
    warn.
    """
    flags = ["-m", "gpu", "-q", "-rs", "-p", "no:cacheprovider", "-W", "default", "--continue-on-collection-errors"]
    plain = ["-o", "addopts=--strict-markers --import-mode=importlib", f"--junitxml={report}"]
    return [sys.executable, "-m", "pytest", *flags, *plain, *marked_files(place.root)]


def _tests(part: Part, place: Place, seconds: float) -> list[Row]:
    log, report = place.out / "tests.log", place.out / "tests.xml"
    report.unlink(missing_ok=True)
    print(f"tests marked gpu, at most {seconds:.0f} s; their log: {log}", flush=True)
    ended = place.child(tests_command(place, report), log, seconds, threads=1)
    if ended.code is None:
        return [Row(part.name, "over time", f"killed after {seconds:.0f} s", ended.seconds, log.name)]
    log_text = log.read_text(errors="replace")
    if not report.is_file():
        if module := missing_module(log_text):
            return [Row(part.name, "not run", f"misses the module {module}", ended.seconds, log.name)]
        return [Row(part.name, "failed", f"exit code {ended.code}: {_last(log_text)}", ended.seconds, log.name)]
    passed, failed, left_out = outcomes(report)
    if failed or (ended.code != 0 and not left_out):
        why = f"{len(failed)} of {passed + len(failed)}: {', '.join(failed[:5])}; exit code {ended.code}"
        first = Row(part.name, "failed", why, ended.seconds, log.name)
    elif not passed:
        first = Row(part.name, "not run", "none of them could run", ended.seconds, log.name)
    else:
        first = Row(part.name, "passed", f"{passed} tests", ended.seconds, log.name)
    return [first, *_by_reason(left_out)]


def _by_reason(left_out: Mapping[str, str]) -> list[Row]:
    """Return one row per reason, because a single missing module may skip many tests."""
    names: dict[str, list[str]] = {}
    for name, why in left_out.items():
        names.setdefault(why, []).append(name)
    return [
        Row(f"tests: {len(of)} of them", "not run", f"{why}: {', '.join(of[:3])}{', ...' if len(of) > 3 else ''}")
        for why, of in names.items()
    ]


def outcomes(report: Path) -> tuple[int, list[str], dict[str, str]]:
    """Read pytest's JUnit XML; return the number of passed tests, the failed ones, and the skipped with reasons."""
    passed, failed, left_out = 0, [], {}
    for case in ET.parse(report).iter("testcase"):
        name = "::".join(filter(None, [case.get("classname", ""), case.get("name", "")]))
        trouble = [child for child in case if child.tag in ("failure", "error")]
        skipped = case.find("skipped")
        if trouble:
            text = " ".join(f"{child.get('message', '')} {child.text or ''}" for child in trouble)
            if module := missing_module(text):
                left_out[name] = f"misses the module {module}"
            else:
                failed.append(name)
        elif skipped is not None:
            left_out[name] = skipped.get("message", "skipped")
        else:
            passed += 1
    return passed, failed, left_out
