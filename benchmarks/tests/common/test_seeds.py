"""A seed in a separate process: its answer, and the handling of its errors."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fedveil.errors import ConfigError
from fedveil_bench.common import seeds
from fedveil_bench.runner import BenchOptions


def test_an_error_of_a_seed_is_one_line(monkeypatch):
    def failing(settings, seed, options):
        raise ConfigError(f"no data for {settings['name']}")

    asked = '{"settings": {"name": "x"}, "seed": 0, "form": "quick", "device": "cpu", "pieces": null, "minutes": null}'
    monkeypatch.setattr("sys.stdin", io.StringIO(asked))
    said = []
    monkeypatch.setattr("sys.stdout", type("Out", (), {"write": said.append, "flush": lambda self: None})())
    seeds.serve_seed(failing)
    assert said == ['{"error": "no data for x"}\n']


@pytest.mark.parametrize(("pieces", "minutes"), [(None, None), ("here/x.pieces.jsonl", 2.5)])
def test_a_process_gets_the_file_and_the_minutes_that_it_was_given(monkeypatch, pieces, minutes):
    asked = {"settings": {}, "seed": 3, "form": "quick", "device": "cpu", "pieces": pieces, "minutes": minutes}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(asked)))
    monkeypatch.setattr("sys.stdout", io.StringIO())
    got = []
    seeds.serve_seed(lambda settings, seed, options: got.append((seed, options.pieces, options.minutes)))
    assert got == [(3, Path(pieces) if pieces else None, minutes)]


@pytest.mark.long
def test_what_every_federation_of_a_seed_warns_of_is_said_once(tmp_path):
    (tmp_path / "warning.py").write_text(
        "import logging\nfrom fedveil_bench.common import seeds\n"
        "log = logging.getLogger('fedveil.data')\n"
        "seeds.serve_seed(lambda *_: [log.warning('%d of %d rows', n, 9) for n in (1, 1, 2, 1)] and 3)\n"
    )
    asked = {"settings": {}, "seed": 0, "form": "quick", "device": "cpu", "pieces": None, "minutes": None}
    command = [sys.executable, tmp_path / "warning.py"]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=True)
    assert done.stdout == '{"result": 3}\n'
    assert done.stderr.splitlines() == ["1 of 9 rows", "2 of 9 rows"]


@pytest.mark.long
@pytest.mark.parametrize("fails", [False, True])
def test_whoever_interrupts_it_alone_ends_the_seeds_processes_too(tmp_path, fails):
    """While it waits for all seeds, and while it waits for the others where one has failed."""
    (tmp_path / "sleeping.py").write_text(
        "import os, time\nfrom fedveil.errors import ConfigError\n"
        "def of_seed(settings, seed, options):\n"
        f"    if seed == 1 and {fails}:\n"
        "        raise ConfigError('no data')\n"
        "    options.say(f'{os.getpid()}')\n"
        "    time.sleep(300)\n"
    )
    (tmp_path / "asking.py").write_text(
        "from fedveil_bench.common import seeds\nfrom fedveil_bench.runner import BenchOptions\n"
        "say = lambda text: print(text, flush=True)\n"
        f"seeds.run_seeds('sleeping', {{'seeds': {1 + fails}}}, BenchOptions(say=say))\n"
    )
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, tmp_path / "asking.py"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | {"PYTHONPATH": paths},
    ) as asking:  # fmt: skip
        seed = int(asking.stdout.readline())
        time.sleep(10 if fails else 0)  # the other one's process has to start, and end, meanwhile
        asking.send_signal(signal.SIGINT)
        assert asking.wait(60) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(seed, 0)


def test_a_text_passes_once_whatever_it_was_made_of():
    once = seeds.SeedProcess()
    records = [logging.makeLogRecord({"msg": text, "args": args}) for text, args in (("a %d", (1,)), ("a 1", ()))]
    assert [once.filter(record) for record in records] == [True, False]


class Measured(list):
    """The seeds that were measured; those in `failing` are cut off."""

    failing = frozenset({2})

    def one(self, module, settings, seed, options, started):
        if seed in self.failing:
            raise ConfigError(f"seed {seed}: cut off")
        self.append(seed)
        return {"seed": seed, "rate": settings["rate"]}


@pytest.fixture
def measured(monkeypatch):
    found = Measured()
    monkeypatch.setattr(seeds, "_one", found.one)
    monkeypatch.setattr(seeds, "measured_commit", lambda: "0123456789ab")
    return found


def cut_off(options, **more):
    """A run of three seeds of which the last fails; the file that is left."""
    with pytest.raises(ConfigError, match="seed 2: cut off"):
        seeds.run_seeds("a.module", {"seeds": 3, "rate": 1.0} | more, options)
    return options.pieces.with_name("x_y.seeds.pieces.jsonl")


def test_a_run_that_was_cut_off_goes_on_and_one_that_ended_is_measured_again(measured, tmp_path):
    options = BenchOptions(pieces=tmp_path / "results" / "x_y.pieces.jsonl")
    kept = cut_off(options)
    assert len(kept.read_text().splitlines()) == 2
    measured.failing = frozenset()
    answers = seeds.run_seeds("a.module", {"seeds": 3, "rate": 1.0}, options)
    assert answers == [{"seed": seed, "rate": 1.0} for seed in range(3)]
    assert sorted(measured) == [0, 1, 2]
    assert not kept.exists()
    seeds.run_seeds("a.module", {"seeds": 3, "rate": 1.0}, options)
    assert sorted(measured) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("other", ["settings", "module", "form", "device", "commit"])
def test_an_answer_to_another_question_is_not_taken(measured, tmp_path, monkeypatch, other):
    options = BenchOptions(pieces=tmp_path / "x_y.pieces.jsonl")
    cut_off(options)
    measured.failing = frozenset()
    settings = {"seeds": 3, "rate": 2.0 if other == "settings" else 1.0}
    if other == "commit":
        monkeypatch.setattr(seeds, "measured_commit", lambda: "ba9876543210")
    changed = {"form": "quick"} if other == "form" else {"device": "cpu"} if other == "device" else {}
    module = "b.module" if other == "module" else "a.module"
    seeds.run_seeds(module, settings, replace(options, **changed))
    assert sorted(measured) == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("commit", ["0123456789ab+", ""])
def test_nothing_is_kept_where_no_commit_says_what_ran(measured, tmp_path, monkeypatch, commit):
    monkeypatch.setattr(seeds, "measured_commit", lambda: commit)
    assert not cut_off(BenchOptions(pieces=tmp_path / "x_y.pieces.jsonl")).exists()


def test_behind_a_seed_that_failed_no_other_is_begun(monkeypatch):
    begun = []

    def one(module, settings, seed, options, started):
        begun.append(seed)
        if seed == 0:
            raise ConfigError("cut off")
        time.sleep(0.2)

    monkeypatch.setattr(seeds, "_one", one)
    with pytest.raises(ConfigError, match="cut off"):
        seeds.run_seeds("a.module", {"seeds": 40}, BenchOptions())
    assert len(begun) < 30


def test_without_a_file_every_seed_is_measured(measured):
    measured.failing = frozenset()
    assert [
        answer["seed"] for answer in seeds.run_seeds("a.module", {"seeds": 2, "rate": 1.0}, BenchOptions(seeds=4))
    ] == [
        0,
        1,
        2,
        3,
    ]


def test_seeds_are_counted_from_the_first_that_the_settings_name(measured):
    measured.failing = frozenset()
    answers = seeds.run_seeds("a.module", {"seeds": 2, "rate": 1.0, "first_seed": 12}, BenchOptions())
    assert [answer["seed"] for answer in answers] == [12, 13]


def test_a_module_in_pieces_gets_their_file_and_what_is_left_of_the_minutes(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(seeds, "_one", lambda module, settings, seed, options, started: given.append(options))
    monkeypatch.setattr(seeds, "measured_commit", lambda: "0123456789ab")
    options = BenchOptions(pieces=tmp_path / "x.pieces.jsonl", minutes=5.0)
    seeds.run_seeds("a.module", {"seeds": 1}, options)
    seeds.run_seeds("a.module", {"seeds": 1}, options, in_pieces=True)
    alone, in_pieces = given
    assert (alone.pieces, alone.minutes) == (None, None)
    assert in_pieces.pieces == options.pieces
    assert 4.9 < in_pieces.minutes <= 5.0
    assert not list(tmp_path.iterdir())


def test_minutes_are_what_is_left_and_never_below_none():
    assert BenchOptions(minutes=3.0).after(60).minutes == 2.0
    assert BenchOptions(minutes=3.0).after(600).minutes == 0.0
    assert BenchOptions().after(600).minutes is None
