"""A server that presents the same rows under other names, and the mark that binds a data folder to one ledger."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch
from PIL import Image

from fedveil import rng, strategies, tasks
from fedveil.client_app import client_session
from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.state import data_sets, overlapping_data
from fedveil.client_app.state.client_state import open_ledger
from fedveil.client_app.state.data_sets import ID_FILE, FolderWitness, SiteDataset, remove_outdated, shelf_of
from fedveil.config import parse
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import RoundContext, hyperparameters_of
from fedveil.contract.privacy import Adjacency, PrivacyBudget, Step
from fedveil.errors import BudgetError, ConfigError, StateError
from fedveil.federation.exchange import MessageExchange
from fedveil.privacy import accounting
from fedveil.privacy.ledger import WitnessMark
from fedveil.privacy.ledger_account import RunTerms

ONE_TURN = {Step("poisson", 8, 4, 1.0): 1}  # of 8 rows in batches of 4; noise_local and noise_global share z = 1
NAMES = [
    {},
    {"task.class-names": "dog,cat"},
    {"task.target-column": "species"},
    {"task.image-column": "photograph"},
    {"task.label-column": "ward"},
    {"task.class-names": "cat,dog,wolf", "task.target-column": "kind"},
]


@cache
def one_turn_budget() -> float:
    """An epsilon that suffices for one turn and no more: computed on demand, as the accountant loads slowly."""
    return accounting.compute_epsilon(ONE_TURN, 1e-5, Adjacency.REPLACE_ONE) * 1.001


@pytest.fixture
def pictures(tmp_path):
    """Four pictures of a cat and four of a dog."""
    generator = torch.Generator().manual_seed(5)
    for name in ("cat", "dog"):
        (tmp_path / "data" / "train" / name).mkdir(parents=True)
        for i in range(4):
            pixels = torch.randint(0, 255, (32, 32, 3), generator=generator).to(torch.uint8)
            Image.fromarray(pixels.numpy()).save(tmp_path / "data" / "train" / name / f"{i}.png")
    return tmp_path / "data"


def private_turn(data, state, **config):
    """What a server gets for a turn of DP-FPL that may cost `one_turn_budget`, under this run config."""
    flat = {
        "method.name": "dp_fpl",
        "method.params": f"epsilon = {one_turn_budget()}\nnoise_local = {2**0.5}\nnoise_global = {2**0.5}",
        "task.name": "clip-prompt", "task.target-column": "label", "task.class-names": "cat,dog",
        "train.batch-size": 4, "task.data": str(data), **config,
    }  # fmt: skip
    parsed = parse(flat)
    method = strategies.create_method("dp_fpl", flat["method.params"])
    exchange = MessageExchange(method, "dp_fpl", tasks.load_task(parsed, method.adapter, "cpu").spec)
    weights = {name: torch.zeros(tensor.shape) for name, tensor in exchange.spec.items()}
    down = exchange.broadcast(method.init(exchange.spec, weights, rng.initial_stream(0, "m")), CTX)
    fields = json.dumps(hyperparameters_of(method))
    order = {"round": 0, "is-new": True, "site": "s", "run": "r", "method": "dp_fpl", "fields": fields}
    reply = client_session.ClientSession().run_round(
        lambda: down, ClientAssignment.from_instruction(order, flat, {"site": "s", "state-dir": str(state)})
    )
    return b"".join(reply.parts)


CTX = RoundContext(0, "s", True, bytes(32), address=MessageAddress("r"))


@pytest.mark.long
def test_another_name_for_the_same_rows_is_no_other_budget(pictures, tmp_path):
    """The run config names columns, classes and, where the site does not, the folder: it may write each as it likes."""
    (tmp_path / "link").symlink_to(pictures)
    elsewhere = [pictures / ".." / pictures.name, tmp_path / "link", pictures / "train" / "cat" / ".." / ".."]
    tries = [(pictures, config) for config in NAMES] + [(path, {}) for path in elsewhere]
    served = 0
    for data, config in tries:
        try:
            private_turn(data, tmp_path / "state", **config)
            served += 1
        except BudgetError:
            continue
    assert served == 1


def test_a_data_set_has_one_id_by_every_path_and_keeps_it(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data")
    (tmp_path / "data" / "train.jsonl").write_text("{}")
    (tmp_path / "file.jsonl").symlink_to("data/train.jsonl")
    first = SiteDataset.from_folder(tmp_path / "data")
    for path in ("data", "data/../data", "link", "data/train.jsonl", "link/train.jsonl", "file.jsonl"):
        assert SiteDataset.from_folder(tmp_path / path).id == first.id
        assert FolderWitness.open(tmp_path / path, "").folder == tmp_path / "data"
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [ID_FILE, "train.jsonl"]
    (tmp_path / "other").mkdir()
    assert SiteDataset.from_folder(tmp_path / "other").id != first.id
    assert (
        SiteDataset.from_folder(tmp_path / "other", "ward-7").id
        == SiteDataset.from_folder(tmp_path / "data", "ward-7").id
        == "ward-7"
    )


def test_a_folder_that_cannot_keep_an_id_needs_a_name(tmp_path, monkeypatch):
    def refused(*args, **kwargs):
        raise PermissionError(13, "read-only")

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(ConfigError, match="set data-set in the node config"):
        SiteDataset.from_folder(tmp_path)
    assert SiteDataset.from_folder(tmp_path, "ward-7").id == "ward-7"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", f'{{"fedveil-data-set": 3, "id": "{"a" * 32}"}}',
     f'{{"fedveil-data-set": 2, "id": "{"a" * 32}", "ledger": {{"tag": "{"b" * 32}"}}}}',
     f'{{"fedveil-data-set": 2, "id": "{"a" * 32}", "ledger": 5}}',
     f'{{"fedveil-data-set": 2, "id": "{"a" * 32}", "ledger": '
     f'{{"tag": "{"b" * 32}", "changes": 0, "entries": 1, "head": "{"c" * 16}"}}}}',
     '{"fedveil-data-set": 1, "id": "short"}',
     '{"fedveil-data-set": 1, "id": 5}'],
)  # fmt: skip
def test_a_damaged_id_is_not_replaced(text, tmp_path):
    (tmp_path / ID_FILE).write_text(text)
    with pytest.raises(StateError, match="restore it from a backup"):
        SiteDataset.from_folder(tmp_path)
    assert (tmp_path / ID_FILE).read_text() == text


def mark_of(**changes) -> WitnessMark:
    return WitnessMark(**{"tag": "b" * 32, "changes": 3, "entries": "d" * 16, "head": "c" * 16, **changes})


def test_a_witness_keeps_the_id_and_is_read_again(tmp_path):
    name = SiteDataset.from_folder(tmp_path).id
    witness = FolderWitness.open(tmp_path, "ward-7")
    assert witness.read() is None
    witness.write(mark_of())
    witness.write(mark_of(changes=4))
    assert FolderWitness.find(tmp_path).read() == mark_of(changes=4)
    assert SiteDataset.from_folder(tmp_path).id == name
    assert [path.name for path in tmp_path.iterdir()] == [ID_FILE]


def test_a_witness_with_a_number_of_entries_does_not_say_which_they_were(tmp_path):
    ledger = {"tag": "b" * 32, "changes": 3, "entries": 2, "head": "c" * 16}
    (tmp_path / ID_FILE).write_text(json.dumps({"fedveil-data-set": 2, "id": "a" * 32, "ledger": ledger}))
    assert FolderWitness.find(tmp_path).read() == mark_of(entries="")


def test_only_one_of_two_state_folders_that_begin_on_the_data_at_once_gets_it(tmp_path, monkeypatch):
    """Each reads the mark before the other has written its own, unless the file is locked meanwhile."""
    (tmp_path / "data").mkdir()
    both_have_read, read = threading.Barrier(2, timeout=1), FolderWitness.read

    def slow(witness):
        mark = read(witness)
        with contextlib.suppress(threading.BrokenBarrierError):
            both_have_read.wait()
        return mark

    monkeypatch.setattr(FolderWitness, "read", slow)
    with ThreadPoolExecutor(2) as pool:
        first, second = sorted(
            pool.map(charge, (tmp_path / "north", tmp_path / "south"), [tmp_path / "data"] * 2),
            key=lambda result: result != "charged",
        )
    assert first == "charged"
    assert "site ledger adopt" in second
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [ID_FILE]


def charge(state, data, given: str = "", siblings=()) -> str:
    """Charge a state folder's ledger for one client round on the data; return "charged" or the refusal."""
    ledger, claim = open_ledger(state), PrivacyBudget(math.inf, 1e-5, Adjacency.REPLACE_ONE)
    try:
        ledger.charge(RunTerms("r", claim, 5, 5), ONE_TURN, claim, FolderWitness.open(data, given, siblings))
    except StateError as error:
        return str(error)
    return "charged"


@pytest.mark.parametrize("first, second", [("data", "data/ward"), ("data/ward", "data"), ("data/a/b", "data")])
@pytest.mark.parametrize("is_read_only", [False, True])
def test_a_data_folder_in_another_is_no_second_data_set(first, second, is_read_only, tmp_path, monkeypatch):
    (tmp_path / "data" / "ward").mkdir(parents=True)
    (tmp_path / "data" / "a" / "b").mkdir(parents=True)
    assert charge(tmp_path / "north", tmp_path / first) == "charged"
    assert charge(tmp_path / "north", tmp_path / second) == "charged"  # one ledger counts for both
    (tmp_path / second / ID_FILE).unlink()  # as if only the first had been charged
    if is_read_only:
        access = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / second and access(path, mode))
    refused = charge(tmp_path / "south", tmp_path / second, "ward-7")
    assert f"site ledger adopt on {tmp_path / first}, or move the two data sets apart" in refused
    assert not (tmp_path / second / ID_FILE).exists() or FolderWitness.find(tmp_path / second).read() is None
    open_run = FolderWitness.find(tmp_path / second)
    with pytest.raises(StateError, match="site ledger adopt"):
        open_ledger(tmp_path / "south").note_open(
            "plain", "no claim", PrivacyBudget(math.inf, 1e-5, Adjacency.REPLACE_ONE), open_run
        )


def test_data_folders_beside_each_other_are_two_data_sets(tmp_path):
    for name in ("north", "south"):
        (tmp_path / "data" / name).mkdir(parents=True)
        assert charge(tmp_path / f"{name}-state", tmp_path / "data" / name) == "charged"
    assert FolderWitness.open(tmp_path / "data" / "north", "").limits == []


def test_a_data_file_counts_as_its_whole_folder(tmp_path):
    """The file next to it may be an edited copy with the same rows, which no hash of a file tells."""
    files = {name: tmp_path / "data" / name for name in ("north.jsonl", "south.jsonl", "north-2.jsonl")}
    (tmp_path / "data").mkdir()
    for name, file in files.items():
        file.write_text("{}\n" * (2 if name == "north-2.jsonl" else 1))
    assert charge(tmp_path / "north", files["north.jsonl"]) == "charged"
    for name in ("south.jsonl", "north-2.jsonl"):
        refused = charge(tmp_path / "south", files[name])
        assert f"{tmp_path / 'data' / ID_FILE}: expected the tag" in refused
        assert refused.endswith("move this site's data to a folder outside of it")
    for folder, result in (("data/south", "site ledger adopt"), ("south-data", "charged")):
        (tmp_path / folder).mkdir()
        files["south.jsonl"] = files["south.jsonl"].rename(tmp_path / folder / "south.jsonl")
        assert result in charge(tmp_path / "south", files["south.jsonl"])
    assert charge(tmp_path / "north", files["north-2.jsonl"]) == "charged"  # to the same account


@pytest.mark.parametrize("link", ["train.jsonl", "train"])
def test_a_link_to_charged_data_is_no_second_data_set(link, tmp_path):
    for name in ("data", "other"):
        (tmp_path / name / "train").mkdir(parents=True)
    (tmp_path / "data" / "train.jsonl").write_text("{}")
    if link == "train":
        (tmp_path / "other" / "train").rmdir()
    (tmp_path / "other" / link).symlink_to(tmp_path / "data" / link)
    assert charge(tmp_path / "north", tmp_path / "data") == "charged"
    assert "or a link leads there" in charge(tmp_path / "south", tmp_path / "other")
    assert charge(tmp_path / "north", tmp_path / "other") == "charged"


def test_links_to_data_that_nobody_has_charged_are_said(tmp_path):
    for name in ("data", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / "train.jsonl").symlink_to(tmp_path / "data" / "train.jsonl")
    (tmp_path / "other" / "inside.jsonl").symlink_to(tmp_path / "other" / "rows.jsonl")
    assert "1 links in it lead to other folders" in FolderWitness.open(tmp_path / "other", "").limits[0]
    assert FolderWitness.open(tmp_path / "data", "").limits == []


def test_an_older_ledger_is_found_by_the_mark_of_a_folder_around_the_data(tmp_path):
    (tmp_path / "data" / "ward").mkdir(parents=True)
    assert charge(tmp_path / "north", tmp_path / "data" / "ward") == "charged"
    ledger = tmp_path / "north" / ".ledger" / "ledger.json"
    backup = ledger.read_bytes()
    assert charge(tmp_path / "north", tmp_path / "data") == "charged"
    ledger.write_bytes(backup)
    assert f"{tmp_path / 'data' / ID_FILE} has recorded change" in charge(
        tmp_path / "north", tmp_path / "data" / "ward"
    )


def test_an_older_ledger_is_found_by_the_mark_of_the_sites_other_data_set(tmp_path):
    """A server chooses the data set, so it could choose the one with the older mark."""
    icu, ct = tmp_path / "icu", tmp_path / "ct"
    for folder in (icu, ct, tmp_path / "new"):
        folder.mkdir()
    assert charge(tmp_path / "north", icu, siblings=[ct]) == "charged"
    ledger = tmp_path / "north" / ".ledger" / "ledger.json"
    backup = ledger.read_bytes()
    assert charge(tmp_path / "north", ct, siblings=[icu]) == "charged"
    ledger.write_bytes(backup)
    assert f"{ct / ID_FILE} has recorded change" in charge(tmp_path / "north", icu, siblings=[ct])
    assert charge(tmp_path / "north", icu) == "charged"  # what the siblings are for
    assert charge(tmp_path / "south", tmp_path / "new", siblings=[tmp_path / "unmounted"]) == "charged"


def test_another_ledgers_mark_in_the_sites_other_data_set_is_refused(tmp_path):
    for name in ("icu", "ct"):
        (tmp_path / name).mkdir()
    assert charge(tmp_path / "south", tmp_path / "ct") == "charged"
    assert charge(tmp_path / "north", tmp_path / "icu", siblings=[tmp_path / "ct"]) != "charged"


def test_a_folder_with_too_many_entries_is_said_not_to_be_searched(tmp_path, monkeypatch):
    for module in (data_sets, overlapping_data):
        monkeypatch.setattr(module, "MAX_ENTRIES", 3)
    for name in ("1", "2", "3"):
        (tmp_path / name).write_text("")
    assert FolderWitness.open(tmp_path, "").limits == []
    (tmp_path / "4").write_text("")
    assert FolderWitness.open(tmp_path, "").limits == [
        "it has more than 3 entries, so some were not searched for the marks of others' data sets"
    ]


def test_of_two_state_folders_that_begin_in_each_other_at_once_one_gets_the_data(tmp_path, monkeypatch):
    """Neither folder has an id file when both begin; each looks for the other's before either has a mark."""
    (tmp_path / "data" / "ward").mkdir(parents=True)
    both_have_looked, look = threading.Barrier(2, timeout=1), data_sets.find_id_files

    def slow(*args):
        paths = look(*args)
        with contextlib.suppress(threading.BrokenBarrierError):
            both_have_looked.wait()
        return paths

    monkeypatch.setattr(data_sets, "find_id_files", slow)
    with ThreadPoolExecutor(2) as pool:
        results = list(
            pool.map(charge, (tmp_path / "north", tmp_path / "south"), (tmp_path / "data", tmp_path / "data" / "ward"))
        )
    assert sorted(result == "charged" for result in results) == [False, True]
    assert "site ledger adopt" in max(results, key=lambda result: result != "charged")


def test_an_id_file_that_cannot_be_locked_stops_the_site(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    refused = pytest.raises(StateError, match="cannot be locked to keep other state folders out")
    with refused, FolderWitness.open(tmp_path, "").lock():
        raise AssertionError("not locked")


@contextlib.contextmanager
def another_process(code: str, path):
    """Run Python code on a path in another process, which prints a line when it is ready."""
    command = [sys.executable, "-c", f"import fcntl, os, sys, time; path = sys.argv[1]\n{code}", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


HOLD = "file = open(path); fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
TRY_AS_ANOTHER_USER = """
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    fcntl.flock(open(path), fcntl.LOCK_EX | fcntl.LOCK_NB); print('taken', flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
"""


def test_a_lock_that_another_process_holds_stops_the_site_with_a_sentence(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(data_sets, "_QUIET_SECONDS", 0.1)
    monkeypatch.setattr(data_sets, "_LOCK_SECONDS", 0.3)
    SiteDataset.from_folder(tmp_path)
    ledger, claim = open_ledger(tmp_path / "state"), PrivacyBudget(math.inf, 1e-5, Adjacency.REPLACE_ONE)
    witness, began = FolderWitness.open(tmp_path, ""), time.monotonic()
    with another_process(HOLD, tmp_path / ID_FILE) as ready:
        assert ready == "held"
        with pytest.raises(StateError, match=rf"{ID_FILE}: another process has held its lock for 0.3 seconds.*lslocks"):
            ledger.charge(RunTerms("r", claim, 5, 5), ONE_TURN, claim, witness)
    assert time.monotonic() - began < 10
    assert f"waiting for the lock of {tmp_path / ID_FILE}" in caplog.text
    assert not ledger.read(claim).account.entries
    ledger.charge(RunTerms("r", claim, 5, 5), ONE_TURN, claim, witness)  # the process has ended
    assert [entry.run for entry in ledger.read(claim).account.entries] == ["r"]


def test_a_lock_that_is_released_in_time_is_waited_for(tmp_path):
    SiteDataset.from_folder(tmp_path)
    code = HOLD.replace("time.sleep(60)", "time.sleep(0.2)")
    with another_process(code, tmp_path / ID_FILE) as ready:
        assert ready == "held"
        began = time.monotonic()
        with FolderWitness.open(tmp_path, "").lock():
            assert time.monotonic() - began < 10


def test_an_id_file_is_readable_only_by_its_owner(tmp_path):
    def mode() -> int:
        return (tmp_path / ID_FILE).stat().st_mode & 0o777

    SiteDataset.from_folder(tmp_path)
    assert mode() == 0o600
    (tmp_path / ID_FILE).chmod(0o644)  # as earlier builds wrote it
    with FolderWitness.open(tmp_path, "").lock():
        assert mode() == 0o600
    (tmp_path / ID_FILE).chmod(0o644)
    FolderWitness.open(tmp_path, "").write(mark_of())
    assert mode() == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start another user's process")
def test_another_user_can_not_take_the_lock():
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        data.chmod(0o755)
        SiteDataset.from_folder(data)
        with another_process(TRY_AS_ANOTHER_USER, data / ID_FILE) as result:
            assert result == "PermissionError"
        (data / ID_FILE).chmod(0o644)
        with another_process(TRY_AS_ANOTHER_USER, data / ID_FILE) as result:
            assert result == "taken"  # the control: so it was before
        with FolderWitness.open(data, "").lock():
            pass
        with another_process(TRY_AS_ANOTHER_USER, data / ID_FILE) as result:
            assert result == "PermissionError"


def test_an_id_file_of_another_user_is_said_to_be_one(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    FolderWitness.open(tmp_path, "").write(mark_of())
    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(StateError, match=r"belongs to another user.*Run this site as the file's owner"):
        FolderWitness.find(tmp_path).read()


def test_a_pipe_in_place_of_the_id_file_does_not_block(tmp_path):
    os.mkfifo(tmp_path / ID_FILE)
    with pytest.raises(StateError, match="restore it from a backup"):
        FolderWitness.find(tmp_path).read()


def test_an_id_of_version_1_gets_the_ledger_s_tag(tmp_path):
    (tmp_path / ID_FILE).write_text(json.dumps({"fedveil-data-set": 1, "id": "a" * 32}))
    witness = FolderWitness.open(tmp_path, "")
    assert witness.read() is None
    witness.write(mark_of())
    assert (SiteDataset.from_folder(tmp_path).id, witness.read()) == ("a" * 32, mark_of())


def test_a_folder_that_cannot_be_written_holds_no_witness_and_needs_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="set data-set in the node config"):
        FolderWitness.open(tmp_path, "")
    FolderWitness.open(tmp_path, "ward-7").write(mark_of())
    assert list(tmp_path.iterdir()) == []
    assert FolderWitness.find(tmp_path) is None


def test_a_witness_that_is_damaged_stops_the_site(tmp_path):
    (tmp_path / ID_FILE).write_text("{")
    with pytest.raises(StateError, match="restore it from a backup"):
        FolderWitness.find(tmp_path).read()


def test_prepared_examples_of_files_that_changed_are_removed(tmp_path):
    """A deleted row must not stay in a prepared set."""
    shelf, files = shelf_of(tmp_path / "state", tmp_path), (("train.jsonl", 10, 1),)
    assert not remove_outdated(shelf, files)  # nothing is prepared yet
    (shelf / "set").mkdir(parents=True)
    (shelf / "set" / "ids.bin").write_bytes(b"rows")
    other = shelf.with_name("other")
    other.mkdir()
    assert not remove_outdated(shelf, files)
    assert (shelf / "set" / "ids.bin").exists()
    assert remove_outdated(shelf, (("train.jsonl", 9, 2),))
    assert not shelf.exists()
    assert other.exists()
    assert not remove_outdated(shelf, (("train.jsonl", 9, 2),))


def test_prepared_examples_of_unknown_files_are_removed(tmp_path):
    """Those of a version that did not note the files."""
    shelf = shelf_of(tmp_path / "state", tmp_path)
    (shelf / "set").mkdir(parents=True)
    assert remove_outdated(shelf, ())
    assert not shelf.exists()
