"""What a server or a site sends, where a person reads it: a terminal, a page, an audit log."""

from __future__ import annotations

import io
import json
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from fedveil.config import parse
from fedveil.console.commands.runs import status
from fedveil.console.main import main
from fedveil.console.runs import workers
from fedveil.console.runs.progress_bar import RunProgress
from fedveil.console.runs.run_follower import until_ended
from fedveil.console.runs.run_reader import load_run
from fedveil.console.runs.workers import WorkerStatus
from fedveil.console.terminal import make_console
from fedveil.console.web.report import html as page
from fedveil.console.web.report import run_page
from fedveil.errors import ConfigError, StateError
from fedveil.records import audit_log
from tests.fedveil.console.commands.test_site import CARD, TRAINING

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[31m"
FORGED = "fine\n    7 2026-01-02T03:04:05.000+00:00 admitted  run=forged"
WORDS = "[/red] [link=https://example.org]click[/link] :bomb:"
HOSTILE = f"{ESCAPES}{FORGED}{WORDS} \u202egnp.exe"


def is_text(out: str) -> None:
    """No escape code, no line of theirs, no turned writing; the words stand there as they came."""
    assert not set("\x1b\x07\u202e") & set(out)
    assert not any(line.strip().startswith("7 2026") for line in out.splitlines())
    assert "\\x1b]0;owned" in out
    assert WORDS in out


def test_log_show(tmp_path, capsys):
    file = tmp_path / "audit-log.jsonl"
    audit_log.append_entry(file, "refused", {"run": HOSTILE, "reason": f"PolicyError: {HOSTILE}", HOSTILE: "x"})
    assert main(["log", "show", str(file)]) == 0
    out = capsys.readouterr().out
    is_text(out)
    assert out.count("\n") == 1


def test_a_run_name_of_twenty_megabytes_does_not_make_the_log_slow(tmp_path):
    file = tmp_path / "audit-log.jsonl"
    about = {"run": "x" * 20_000_000, "fields": [["a", 1]] * 100_000, "of": {"a": ["b" * 5000]}}
    audit_log.append_entry(file, "refused", about)
    assert file.stat().st_size < 100_000
    line = audit_log.read_log(file)[0]
    assert line["run"] == "x" * 1000 + "... (20000000 characters)"
    assert line["fields"][-1] == "... (100000 entries)"
    assert len(line["fields"]) == 4097
    assert line["of"] == {"a": ["b" * 1000 + "... (5000 characters)"]}
    audit_log.append_entry(file, "next", {})
    assert audit_log.verify_log(file).lines == 2


def test_a_log_that_holds_such_a_line_already_is_continued_at_once(tmp_path, monkeypatch):
    file, reads = tmp_path / "audit-log.jsonl", []
    with monkeypatch.context() as old:
        old.setattr(audit_log, "_cut", lambda value: value)
        old.setattr(audit_log, "_LONGEST_LINE", 1 << 30)
        audit_log.append_entry(file, "first", {})
        audit_log.append_entry(file, "refused", {"run": "x" * 20_000_000})
    monkeypatch.setattr(audit_log.os, "fdopen", lambda fd, *a, **k: Counting(io.FileIO(fd, "r+b"), reads))
    audit_log.append_entry(file, "next", {})
    assert len(reads) < 12
    assert audit_log.verify_log(file).lines == 3


class Counting:
    """A file that notes how much is read at a time."""

    def __init__(self, file, reads) -> None:
        self._file, self._reads = file, reads

    def __enter__(self):
        return self

    def __exit__(self, *args) -> None:
        self._file.close()

    def read(self, count: int) -> bytes:
        self._reads.append(count)
        return self._file.read(count)

    def __getattr__(self, name: str):
        return getattr(self._file, name)


@pytest.mark.long
def test_no_line_is_longer_than_eight_megabytes_and_nothing_is_half_written(tmp_path):
    file = tmp_path / "audit-log.jsonl"
    audit_log.append_entry(file, "first", {})
    with pytest.raises(StateError, match="a line may have at most 8388608 bytes"):
        audit_log.append_entry(file, "second", {"fields": [["x" * 1000] * 1000] * 100})
    assert audit_log.verify_log(file).lines == 1


def test_status_and_the_end_of_a_run(make_run):
    folder = make_run(state="failed")
    run_status = {"state": "failed", "round": 1, "rounds": HOSTILE, "reason": HOSTILE}
    (folder / "status.json").write_text(json.dumps(run_status))
    lines, well = status.runs_table(folder.parent)
    is_text("\n".join(lines))
    assert (well, len(lines)) == (False, 1)
    code, words = until_ended(lambda: load_run(folder).status, lambda: "", 1.0)
    is_text(words)
    assert code == 1
    _, words = until_ended(lambda: {"state": "running", "reason": HOSTILE}, lambda: "", 0.001, sleep=time.sleep)
    assert "\x1b" not in words


@pytest.mark.parametrize("on_a_terminal", [True, False])
def test_watch(make_run, on_a_terminal):
    folder, out, console = make_run(), io.StringIO(), make_console()
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[1]) | {"failed": {HOSTILE: HOSTILE}}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    console.file, console.width, console._force_terminal = out, 2000, on_a_terminal
    with RunProgress(console, folder, HOSTILE, 5) as progress:
        progress.tick({"state": "running"})
    output = out.getvalue()
    assert "\\x1b]0;owned" in output
    assert "\x1b]0;" not in output
    assert "\x1b[2J" not in output
    assert WORDS in output


def test_the_words_of_a_worker(monkeypatch):
    class Link:
        def __enter__(self):
            return self

        def __exit__(self, *args):
            pass

        def unary_unary(self, name):
            return lambda data, timeout: json.dumps({**TRAINING, "run": HOSTILE, "model": HOSTILE * 10}).encode()

    says = workers._ask(SimpleNamespace(open_channel=Link))
    described = workers.describe_worker(WorkerStatus("north", CARD, says))
    assert not set("\x1b\x07\u202e") & set(described)
    assert len(described) < 1000
    out, ticks = io.StringIO(), iter([False, True])
    monkeypatch.setattr(workers, "list_workers", lambda at: [WorkerStatus("north", CARD, {**says, "run": "a[/b]c"})])
    monkeypatch.setattr(workers, "_POLL_SECONDS", 0.0)
    workers.follow_worker(Console(file=out, force_terminal=True, width=300), None, lambda: next(ticks))
    assert "a[/b]c" in out.getvalue()


def test_an_error_of_a_file(tmp_path, capsys):
    (tmp_path / "status.json").write_text("\x1b" + HOSTILE)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "x.html")]) == 2
    error = capsys.readouterr().err
    assert "\x1b" not in error
    assert error.count("\n") == 1


def test_the_page(make_run):
    folder = make_run(state="failed")
    hostile = "<script>alert(1)</script>" + HOSTILE + "x" * 100_000
    (folder / "status.json").write_text(json.dumps({"state": "failed", "round": 1, "rounds": 5, "reason": hostile}))
    html = run_page.run_page_html([load_run(folder)])
    assert "<script" not in html
    assert not set("\x1b\x07\u202e") & set(html)
    assert "x" * 5001 not in html
    policy = html.index('http-equiv="Content-Security-Policy"')
    assert html.index("charset") < policy < html.index("<style")
    assert "default-src 'none'" in page._PERMITTED
    assert "script" not in page._PERMITTED


@pytest.mark.parametrize("name", ["long", "x" * 56, "a/b", "..", "-x", "a b", "x\n", "\x1b[2J"])
def test_a_runs_name_is_a_plain_and_short_one(name):
    with pytest.raises(ConfigError, match=r"run\.name: ") as caught:
        parse({"run.name": "x" * 20_000_000 if name == "long" else name})
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()
    assert parse({"run.name": "x" * 55}).run.name == "x" * 55
