"""make gpu never counts a check as passed that fails, exceeds its time or misses a requirement."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tools import gpu, gpu_parts
from tools.gpu_parts import Part, Place, Row

RESULT = {"environment": {"gpu": "a GPU"}, "rows": [{"name": "x"}], "verdicts": ["1.0: reached"]}


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(ROOT, tmp_path, "cpu", True)


def instead(monkeypatch, code: str) -> None:
    """Runs `code` in place of a preset; FILE is where its result belongs."""
    monkeypatch.setattr(
        gpu_parts, "preset_command", lambda part, place, file: [sys.executable, "-c", f"FILE = {str(file)!r}\n{code}"]
    )


def written(result: object = RESULT) -> str:
    return f"open(FILE, 'w').write({json.dumps(result)!r})"


def runs(pid: int) -> bool:
    """A process that has ended stays listed until somebody asks for its exit code, which an orphan's init may not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.is_file() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_preset_that_writes_its_result_has_passed(monkeypatch, place):
    instead(monkeypatch, written())
    rows = gpu.run_all([Part("x/y", 1, ())], place, 60, {})
    assert [(row.name, row.result, row.file) for row in rows] == [("x/y", "passed", "x_y.json")]
    assert rows[0].verdicts == ("1.0: reached",)
    assert gpu.exit_code(rows) == 0


@pytest.mark.parametrize(
    ("verdicts", "detail"),
    [
        ([], "full"),
        (["a copy runs at 3 GB/s"], "full"),
        (["2.0 copies (asked: at most 3: held)", "4 (asked: at most 3: NOT HELD)", "1 (asked: 2: held)"],
         "full; bounds: 2 held, 1 NOT HELD"),
    ],
)  # fmt: skip
def test_the_table_says_how_many_bounds_held(monkeypatch, place, verdicts, detail):
    instead(monkeypatch, written({**RESULT, "verdicts": verdicts}))
    (row,) = gpu.run_all([Part("x/y", 1, ())], place, 60, {})
    assert (row.result, row.detail, row.verdicts) == ("passed", detail, tuple(verdicts))


@pytest.mark.parametrize(
    ("code", "device", "why"),
    [
        ("print('error: no luck'); raise SystemExit(3)", "cpu", "exit code 3: error: no luck"),
        ("pass", "cpu", "expected a result in x_y.json, found FileNotFoundError"),
        (written({"rows": []}), "cpu", "found KeyError"),
        (written({**RESULT, "rows": []}), "cpu", "found 0 rows"),
        (written({**RESULT, "environment": {"gpu": None}}), "cuda", "gpu = None"),
        ("raise ModuleNotFoundError(\"No module named 'fedveil.x'\", name='fedveil.x')", "cpu", "exit code 1"),
    ],
)
def test_a_child_that_fails_gives_exit_1(monkeypatch, tmp_path, code, device, why):
    """So does one without a result of its own: an older file is none."""
    (tmp_path / "x_y.json").write_text(json.dumps(RESULT))
    instead(monkeypatch, code)
    rows = gpu.run_all([Part("x/y", 1, ())], Place(ROOT, tmp_path, device, True), 60, {})
    assert rows[0].result == "failed"
    assert why in rows[0].detail
    assert gpu.exit_code(rows) == 1


@pytest.mark.long
def test_a_child_over_its_time_is_killed_and_named_with_all_that_it_started(monkeypatch, place):
    """Also what is in a session of its own, and does not listen to SIGTERM."""
    monkeypatch.setattr(gpu_parts, "_GRACE", 1.0)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    starts = f"child = subprocess.Popen([sys.executable, '-c', {deaf!r}], start_new_session=True)"
    instead(monkeypatch, f"import subprocess, sys; {starts}; print('pid', child.pid, flush=True)\n{deaf}")
    started = time.monotonic()
    rows = gpu.run_all([Part("x/y", 1, ())], place, 7, {})
    assert time.monotonic() - started < 30
    assert [(row.name, row.result) for row in rows] == [("x/y", "over time")]
    assert gpu.exit_code(rows) == 1
    log_text = (place.out / "x_y.log").read_text()
    pid = int(log_text.split("pid ")[1].split()[0])
    assert not runs(pid)


@pytest.mark.parametrize(
    ("part", "lacks", "why"),
    [
        (Part("x/y", 1, ("flwr", "numpy")), {"flwr": "missing"}, "misses flwr (missing)"),
        (Part("x/y", 1, ("peft",)), {"peft": "0.20.0, expected >=0.21"}, "misses peft (0.20.0, expected >=0.21)"),
        (Part("x/y", 1, (), data="nowhere"), {}, "misses the data set nowhere"),
    ],
)
def test_what_misses_something_is_not_run_and_not_passed(monkeypatch, place, part, lacks, why):
    instead(monkeypatch, written())
    rows = gpu.run_all([part, Part("z/z", 1, ())], place, 60, lacks)
    assert [row.result for row in rows] == ["not run", "passed"]
    assert why in rows[0].detail
    assert gpu.exit_code(rows) == 3
    assert gpu.exit_code(rows[:1]) == 3


def test_a_module_that_only_shows_when_it_runs_is_missing_too(monkeypatch, place):
    instead(monkeypatch, "import no_such_module_of_anybody")
    (row,) = gpu.run_all([Part("x/y", 1, ())], place, 60, {})
    assert (row.result, row.detail) == ("not run", "misses the module no_such_module_of_anybody")


def test_without_time_nothing_is_started_and_what_one_leaves_the_next_has(monkeypatch, place):
    given = []
    monkeypatch.setattr(
        gpu, "run_part", lambda part, place, seconds, lacks: given.append(seconds) or [Row(part.name, "passed")]
    )
    gpu.run_all(gpu.PARTS, place, 560, {})
    assert given[0] == pytest.approx(gpu.PARTS[0].seconds, abs=1)
    assert given[-1] == pytest.approx(560, abs=1)  # no part took any time
    monkeypatch.undo()
    instead(monkeypatch, written())
    (row,) = gpu.run_all([Part("x/y", 1, ())], place, 9, {})
    assert (row.result, row.detail.partition(";")[0]) == ("not run", "no time was left for it")


def test_all_shares_together_are_below_ten_minutes():
    assert sum(part.seconds for part in gpu.PARTS) <= gpu._SECONDS <= 570


def test_what_was_run_is_on_disk_when_a_later_part_is_cut_off(monkeypatch, tmp_path):
    seen = []

    def cut(part, place, seconds, lacks):
        if seen:
            seen.append(json.loads((tmp_path / "summary.json").read_text()))
            raise KeyboardInterrupt
        seen.append(part.name)
        return [Row(part.name, "passed")]

    monkeypatch.setattr(gpu, "run_part", cut)
    monkeypatch.setattr(gpu, "about_machine", lambda place: {"device": "one", "torch": "0"})
    with pytest.raises(KeyboardInterrupt):
        gpu.main(["--out", str(tmp_path)])
    assert [row["name"] for row in seen[1]["rows"]] == [gpu.PARTS[0].name]
    assert seen[1]["exit_code"] == 3  # the others did not run


JUNIT = """<testsuites><testsuite>
<testcase classname="t" name="good"/>
<testcase classname="t" name="bad"><failure message="assert 1 == 2">E assert 1 == 2</failure></testcase>
<testcase classname="" name="t.b"><error message="collection failure">E ModuleNotFoundError: No module named
'hypothesis'</error></testcase>
<testcase classname="t" name="skipped"><skipped message="needs CUDA"/></testcase>
</testsuite></testsuites>""".replace("named\n'", "named '")


def test_outcomes_of_tests_by_hand(tmp_path):
    (tmp_path / "x.xml").write_text(JUNIT)
    assert gpu_parts.outcomes(tmp_path / "x.xml") == (
        1, ["t::bad"], {"t.b": "misses the module hypothesis", "t::skipped": "needs CUDA"},
    )  # fmt: skip


def rows_of(tmp_path: Path, **files: str) -> list[Row]:
    """The row of the tests in a repository that has these files."""
    (tmp_path / "tests").mkdir()
    for name, text in files.items():
        (tmp_path / "tests" / f"{name}.py").write_text(text)
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = "--strict-config"\nmarkers = ["gpu: x"]\ntimeout_of_nobody = 3\n'
    )
    (tmp_path / "out").mkdir()
    return gpu.run_all([Part("tests", 1, ())], Place(tmp_path, tmp_path / "out", "cpu", True), 120, {})


GOOD = "import pytest\n@pytest.mark.gpu\ndef test_good(): pass\n"


@pytest.mark.long
def test_files_that_cannot_be_imported_are_left_out_and_named(tmp_path):
    rows = rows_of(tmp_path, test_a=GOOD, test_b="import no_such_module_of_anybody\n" + GOOD, test_c="import 1")
    assert [(row.name, row.result, row.detail) for row in rows] == [
        ("tests", "passed", "1 tests"),
        ("tests: 1 of them", "not run", "misses the module no_such_module_of_anybody: tests.test_b"),
    ]
    assert gpu.exit_code(rows) == 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("files", "result", "detail"),
    [
        ({"test_a": GOOD + "@pytest.mark.gpu\ndef test_bad(): assert False\n"}, "failed", "1 of 2: tests.test_a::"),
        ({"test_a": GOOD, "conftest": "import no_such_module_of_anybody"}, "not run", "no_such_module_of_anybody"),
        ({"test_a": GOOD.replace("pass", "pytest.skip('no')")}, "not run", "none of them could run"),
        ({"test_a": GOOD, "conftest": "1 / 0"}, "failed", "exit code 4"),
    ],
)  # fmt: skip
def test_tests_that_fail_or_cannot_run_have_not_passed(tmp_path, files, result, detail):
    row = rows_of(tmp_path, **files)[0]
    assert row.result == result
    assert detail in row.detail


def test_every_test_marked_gpu_asks_for_the_device():
    """Else a dry run would not run it. These are all files: the parts read no other."""
    marked = gpu_parts.marked_files(ROOT)
    assert marked
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        if path.parent.name != "tools":
            assert ("mark.gpu" in text) == (str(path.relative_to(ROOT)) in marked)
            asking = re.findall(r"^def test_\w+\(gpu\b", text, re.MULTILINE)
            assert len(asking) == len(re.findall(r"^@pytest\.mark\.gpu$", text, re.MULTILINE)), path


@pytest.mark.long
def test_a_bare_python_says_what_it_misses_and_passes_nothing(tmp_path):
    """Without site-packages: what starts needs nothing but Python."""
    command = [sys.executable, "-S", "-m", "tools.gpu", "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 3, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {row["result"] for row in summary["rows"]} == {"not run"}
    assert [row["name"] for row in summary["rows"]] == [part.name for part in gpu.PARTS]
    assert "flwr: missing; carry flwr==1.39" in done.stdout
    assert "torch: missing; comes with the machine's CUDA" in done.stdout
    assert "--no-index" in done.stdout
    assert "flwr==1.39" in (tmp_path / "wheels.txt").read_text()


@pytest.mark.long
@pytest.mark.parametrize("args", [[], ["--only", "nothing"], ["--seconds", "0"]])
def test_no_gpu_and_wrong_arguments_are_errors(tmp_path, args):
    command = [sys.executable, "-m", "tools.gpu", "--out", str(tmp_path), *args]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, timeout=100)
    assert done.returncode == 2
    assert "expected" in done.stderr or "invalid choice" in done.stderr


@pytest.mark.long
def test_ended_from_outside_it_leaves_nothing(tmp_path):
    command = [sys.executable, "-m", "tools.gpu", "--dry-run", "--only", "random_binary/speed", "--out", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        ends = time.monotonic() + 100
        while not (tmp_path / "random_binary_speed.log").is_file() and time.monotonic() < ends:
            time.sleep(0.1)
        time.sleep(1)  # the child itself
        named = str(tmp_path).encode()
        assert [pid for pid in children(named) if pid != process.pid]
        process.terminate()
        assert process.wait(60) == 143
    assert children(named) == []


def children(named: bytes) -> list[int]:
    """Processes with this text in their command line."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if named in (path / "cmdline").read_bytes():
                pids.append(int(path.name))
    return pids
