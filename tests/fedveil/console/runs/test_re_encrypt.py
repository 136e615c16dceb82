"""`fedveil site key` and `seal`, and what `site start` and `doctor` say of a key that does not fit."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

import pytest

from fedveil.client_app.state.client_state import SECURE, ClientStateStore, open_ledger
from fedveil.client_app.worker.connection import WorkerRecord
from fedveil.client_app.worker.owner import OwnerProcess
from fedveil.console.doctor import checks
from fedveil.console.main import main
from fedveil.console.runs import re_encrypt
from fedveil.console.runs.workers import WorkerStatus
from fedveil.contract.privacy import Adjacency, PrivacyBudget, Step
from fedveil.encrypted_files import FileSeal, is_sealed, read_seal_header
from fedveil.errors import ConfigError, StateError
from fedveil.privacy.ledger_account import RunTerms
from fedveil.records import audit_log
from fedveil.records.atomic_files import write_atomic
from fedveil.records.tensor_state import state_digest
from tests.fedveil.records.test_tensor_state import STATE

FIRST = "1" * 16
STEP = {Step("gaussian", 0, 0, 1.5): 1}
OWN = PrivacyBudget(math.inf, 1e-5, Adjacency.REPLACE_ONE)


@dataclasses.dataclass
class Home:
    """A site in the clear: two runs of two turns, a ledger, and a half-written state."""

    state: Path
    keys: Path

    def __post_init__(self) -> None:
        for run in ("one", "two"):
            store = ClientStateStore.open(self.state, run, "north")
            store.save(FIRST, "", STATE)
            store.save("2" * 16, FIRST, STATE)
            store.secret(0, "north", False)
            write_atomic(store.folder / SECURE, b"keys of secure aggregation")
        open_ledger(self.state).charge(RunTerms("r", OWN, 3, 9), STEP, OWN)
        (self.state / ".ledger" / "north.key").write_bytes(bytes(48))  # of a ledger of version 3
        (self.state / "one" / "north" / f".turn-{FIRST}.safetensors.5.part").write_bytes(b"half of a state")

    def new_key(self, name: str) -> FileSeal:
        assert main(["site", "key", str(self.keys / name)]) == 0
        return FileSeal.from_key_file(self.keys / name)

    def seal(self, *arguments: str) -> int:
        return main(["site", "seal", "--state-dir", str(self.state), *arguments])

    def files(self) -> list[Path]:
        kinds = ("*/*/*.safetensors", "*/*/secret", f"*/*/{SECURE}", ".ledger/*.json", ".ledger/*.key")
        return sorted(file for kind in kinds for file in self.state.glob(kind))

    def seen(self, seal: FileSeal) -> tuple[object, ...]:
        stores = [ClientStateStore.open(self.state, run, "north", seal) for run in ("one", "two")]
        ledger = open_ledger(self.state, seal)
        secrets = [store.secret(0, "north", False) for store in stores]
        return (
            [state_digest(store.load(FIRST).tensors) for store in stores],
            secrets,
            ledger.read(OWN),
        )


@pytest.fixture
def home(tmp_path) -> Home:
    return Home(tmp_path / "state", tmp_path)


def test_a_site_is_sealed_goes_to_another_key_and_back_and_keeps_everything(home, capsys):
    clear = home.seen(FileSeal())
    first, second = home.new_key("a"), home.new_key("b")
    moment = [file.stat().st_mtime_ns for file in home.files()]
    rows = home.state / ".prepared" / "ward" / "ab" / "tokens.bin"
    rows.parent.mkdir(parents=True)
    rows.write_bytes(b"rows in the clear")
    assert home.seal("--key-file", str(home.keys / "a")) == 0
    assert f"10 files encrypted with key {first.id}" in capsys.readouterr().out
    assert all(read_seal_header(file).key == first.id for file in home.files())
    assert not rows.exists()
    assert home.seen(first) == clear
    assert home.seal("--key-file", str(home.keys / "b"), "--old-key-file", str(home.keys / "a")) == 0
    assert all(read_seal_header(file).key == second.id for file in home.files())
    assert home.seen(second) == clear
    assert home.seal("--old-key-file", str(home.keys / "b")) == 0
    assert not any(is_sealed(file) for file in home.files())
    assert home.seen(FileSeal()) == clear
    assert [file.stat().st_mtime_ns for file in home.files()] == moment  # purge judges by them
    lines = list(audit_log.read_log(home.state / audit_log.NAME))
    assert lines.pop(0)["event"] == "purged"
    assert [(line["event"], line["key"], line["files"]) for line in lines] == [
        ("sealed", first.id, 10), ("sealed", second.id, 10), ("unsealed", "none", 10)
    ]  # fmt: skip


def test_nothing_in_the_clear_is_left_of_an_interrupted_write(home):
    home.new_key("a")
    assert home.seal("--key-file", str(home.keys / "a")) == 0
    assert list(home.state.rglob("*.part")) == []


def test_an_interrupted_rotation_is_repeated(home, monkeypatch):
    clear = home.seen(FileSeal())
    first, second = home.new_key("a"), home.new_key("b")
    re_encrypt.re_encrypt_files(home.state, FileSeal(), first)
    done = []

    def crash(path, data):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(path)
        write_atomic(path, data)

    monkeypatch.setattr(re_encrypt, "write_atomic", crash)
    with pytest.raises(KeyboardInterrupt):
        re_encrypt.re_encrypt_files(home.state, first, second)
    monkeypatch.undo()
    assert {read_seal_header(file).key for file in home.files()} == {first.id, second.id}
    assert len(re_encrypt.re_encrypt_files(home.state, first, second)) == 7
    assert home.seen(second) == clear


def test_sealing_does_not_vouch_for_what_was_changed_or_exchanged(home):
    first, second = home.new_key("a"), home.new_key("b")
    re_encrypt.re_encrypt_files(home.state, FileSeal(), first)
    one, two = (home.state / run / "north" / "secret" for run in ("one", "two"))
    sealed_content = one.read_bytes()
    for bad in (two.read_bytes(), sealed_content[:-1] + bytes([sealed_content[-1] ^ 1])):
        for old, new in ((first, second), (FileSeal(), first)):
            one.write_bytes(bad)
            with pytest.raises(StateError, match=str(one)):
                re_encrypt.re_encrypt_files(home.state, old, new)
            one.write_bytes(sealed_content)
            re_encrypt.re_encrypt_files(home.state, second, first)
    re_encrypt.re_encrypt_files(home.state, first, second)
    with pytest.raises(StateError, match=f"found key {second.id}; give that key's file as --old-key-file"):
        re_encrypt.re_encrypt_files(home.state, FileSeal(), first)


def test_a_site_that_runs_is_not_resealed(home, monkeypatch):
    first = home.new_key("a")
    with (
        ClientStateStore.open(home.state, "two", "north").in_turn(),
        pytest.raises(ConfigError, match="expected no client round in progress, found one in .*two"),
    ):
        re_encrypt.re_encrypt_files(home.state, FileSeal(), first)
    card = WorkerRecord("ab", 41, OwnerProcess.from_pid(os.getpid()), "app", "key", 0.0)
    monkeypatch.setattr(re_encrypt, "list_workers", lambda _: [WorkerStatus("north", card, {})])
    with pytest.raises(ConfigError, match="expected no site running there, found worker 41; stop the site first"):
        re_encrypt.re_encrypt_files(home.state, FileSeal(), first)


def test_a_site_does_not_start_with_a_key_that_does_not_fit_what_is_there(home, capsys, tmp_path):
    home.new_key("a"), home.new_key("b")
    start = ["site", "start", "--superlink", "127.0.0.1:1", "--ca", __file__, "--key", __file__, "--name", "north"]
    start += ["--state-dir", str(home.state), "--permit-everything"]
    assert main([*start, "--key-file", str(home.keys / "none")]) == 2
    assert "--key-file: expected a file, found none at" in capsys.readouterr().err
    assert main([*start, "--key-file", str(home.keys / "a")]) == 2
    assert "not encrypted under key" in capsys.readouterr().err
    assert home.seal("--key-file", str(home.keys / "a")) == 0
    for more, reason in (
        ([], "encrypted, but no key file is set"),
        (["--key-file", str(home.keys / "b")], "encrypted under key"),
    ):
        assert main([*start, *more]) == 2
        assert reason in capsys.readouterr().err
    (home.keys / "a").chmod(0o644)
    assert main([*start, "--key-file", str(home.keys / "a")]) == 2
    assert "readable only by its owner, but has mode 644" in capsys.readouterr().err


def test_doctor_says_how_things_are_kept_also_during_a_turn(home):
    key = home.new_key("a")
    result = checks.key_file("", home.state)
    assert (result.verdict, "unencrypted: the node config names no key-file" in result.text) == ("ok", True)
    assert checks.run_check("key file", lambda: checks.key_file(str(home.keys / "a"), home.state)).verdict == "fail"
    re_encrypt.re_encrypt_files(home.state, FileSeal(), key)
    with ClientStateStore.open(home.state, "one", "north").in_turn():
        result = checks.key_file(str(home.keys / "a"), home.state)
    assert (result.verdict, f"encrypted with key {key.id}" in result.text) == ("ok", True)
    assert checks.run_check("key file", lambda: checks.key_file("", home.state)).verdict == "fail"


def test_one_of_the_two_keys_must_be_named(home, capsys):
    assert home.seal() == 2
    assert "--key-file: expected this option or --old-key-file, found neither" in capsys.readouterr().err
