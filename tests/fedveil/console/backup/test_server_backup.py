"""`fedveil server backup` and `restore`: what is in it, while the server's database and logs are in use."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import tarfile
import threading
from pathlib import Path

import pytest

from fedveil.console.backup.archive import BackupArchive, write_archive
from fedveil.console.backup.server_backup import FederationPlaces, back_up_server, restore_server
from fedveil.console.backup.server_files import is_server_file
from fedveil.console.launch import server
from fedveil.console.main import main
from fedveil.errors import ConfigError, StateError
from fedveil.records import audit_log, process_exit
from fedveil.records.log_rotation import rotate_log


@pytest.fixture
def pilot(tmp_path, capsys) -> Path:
    (tmp_path / "federation.toml").write_text('name = "pilot"\nserver = ["localhost"]\nsites = ["north", "south"]\n')
    assert main(["provision", str(tmp_path / "federation.toml")]) == 0
    capsys.readouterr()
    folder = tmp_path / "pilot"
    with contextlib.closing(sqlite3.connect(folder / "server" / "superlink.db")) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE node (name)")
        database.execute("INSERT INTO node VALUES ('north')")
        database.commit()
    for name in ("one", "two"):
        make_run(folder, name)
    audit_log.append_entry(folder / "server" / "control-log.jsonl", "started", {})
    audit_log.append_entry(folder / "runs" / audit_log.NAME, "accepted", {"site": "north"})
    rotate_log(folder / "runs" / audit_log.NAME)
    for name in ("apps/x/y", "logs/superlink.log", "spool/1/x"):
        (folder / "server" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "server" / name).write_text(name)
    (folder / "server" / "apps" / "link").symlink_to("/")
    return folder


def make_run(pilot: Path, name: str) -> Path:
    folder = pilot / "runs" / name
    for file in (*RUN, "lock", ".reserve"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(file)
    return folder


def names(backup: Path) -> set[str]:
    with BackupArchive.open(backup, "server", is_server_file) as archive:
        return set(archive.files)


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


OWN = {
    "registry/members.json", "registry/operators.json", "ca/ca.crt", "server/ca.crt", "server/server.pem",
    "server/server.key", "server/superexec-secret", "server/compose.yaml", "server/compose.gpu.yaml",
    "server/compose.operators.yaml", "server/control-log.jsonl", "server/superlink.db", "server/flower/config.toml",
    "server/flower/credentials.yaml", "server/instruct/instruction.key", "server/roster/signers.json",
    "kits/north.tar.gz", "kits/south.tar.gz", "runs/audit-log.jsonl", "runs/audit-log-0-0.jsonl",
}  # fmt: skip
RUN = {"id", "status.json", "metrics.jsonl", "checkpoint.safetensors", "tap/00000.0.north.up", "final/card.md",
       "tensorboard/events.out.tfevents.1.host.2.0"}  # fmt: skip


def test_it_comes_back_as_it_was_without_the_keys_that_belong_elsewhere(pilot, tmp_path, capsys):
    target = tmp_path / "backup.tar"
    before = files_of(pilot)
    assert main(["server", "backup", str(pilot), "--to", str(target), "--all-runs"]) == 0
    stdout = capsys.readouterr().out
    assert "left out: ca/ca.key" in stdout
    assert "left out: ca/instruction-standby.key" in stdout
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert names(target) == OWN | {f"runs/{run}/{file}" for run in ("one", "two") for file in RUN}
    assert not list(tmp_path.glob(".fedveil-backup-*"))
    new = tmp_path / "new"
    assert main(["server", "restore", str(target), str(new)]) == 0
    stdout = capsys.readouterr().out
    assert "registered sites: none" in stdout
    assert "operators: owner" in stdout
    assert "revoke again" in stdout
    after = files_of(new)
    database = "server/superlink.db"
    assert {name: data for name, data in after.items() if name != database} == {
        name: before[name] for name in after if name != database
    }
    with contextlib.closing(sqlite3.connect(new / database)) as copy:
        assert copy.execute("SELECT name FROM node").fetchall() == [("north",)]
    assert stat.S_IMODE((new / "server" / "server.key").stat().st_mode) == 0o600
    assert stat.S_IMODE((new / "server" / "server.pem").stat().st_mode) == 0o644
    assert stat.S_IMODE(new.stat().st_mode) == 0o700
    server.resolve_server(new, "127.0.0.1:0")
    audit_log.verify_log(new / "runs" / audit_log.NAME)


def test_runs_are_a_choice_and_one_that_is_running_is_not_copied(pilot, tmp_path, capsys):
    places = FederationPlaces.resolve(pilot)
    assert back_up_server(places, tmp_path / "none.tar", []).left_out[0] == "2 run folders that were not named"
    assert names(tmp_path / "none.tar") == OWN
    back_up_server(places, tmp_path / "one.tar", ["one"])
    assert names(tmp_path / "one.tar") == OWN | {f"runs/one/{file}" for file in RUN}
    with pytest.raises(ConfigError, match="found none named 'three'"):
        back_up_server(places, tmp_path / "x.tar", ["three"])
    lock = process_exit.lock_folder(pilot / "runs" / "one")
    with pytest.raises(ConfigError, match="found one that is running"):
        back_up_server(places, tmp_path / "x.tar", ["one"])
    assert "run one, which is running" in back_up_server(places, tmp_path / "all.tar", None).left_out
    assert names(tmp_path / "all.tar") == OWN | {f"runs/two/{file}" for file in RUN}
    os.close(lock)
    assert not (tmp_path / "x.tar").exists()


def test_state_and_runs_may_be_elsewhere(pilot, tmp_path):
    (tmp_path / "state").mkdir()
    for name in ("superlink.db", "control-log.jsonl"):
        shutil.move(pilot / "server" / name, tmp_path / "state" / name)
    shutil.move(pilot / "runs", tmp_path / "elsewhere")
    where = ["--state-dir", str(tmp_path / "state"), "--runs-dir", str(tmp_path / "elsewhere"), "--run", "two"]
    assert main(["server", "backup", str(pilot), "--to", str(tmp_path / "b.tar"), *where]) == 0
    assert names(tmp_path / "b.tar") == OWN | {f"runs/two/{file}" for file in RUN}


def test_the_database_is_copied_in_one_state_while_a_program_writes_to_it(pilot, tmp_path):
    """Each transaction of the writer moves one unit from one row to the other, so their sum tells a torn copy."""
    writer = sqlite3.connect(
        pilot / "server" / "superlink.db", isolation_level=None, check_same_thread=False, timeout=5
    )
    writer.execute("CREATE TABLE pair (left, right, filling)")
    writer.execute("INSERT INTO pair VALUES (1000000, 0, '')")
    stop, longest = threading.Event(), []

    def write() -> None:
        while not stop.is_set():
            writer.execute("BEGIN IMMEDIATE")
            writer.execute("UPDATE pair SET left = left - 1")
            writer.execute("UPDATE pair SET right = right + 1, filling = ?", ("x" * 20_000,))
            writer.execute("COMMIT")
            longest.append(1)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for number in range(3):
            back_up_server(FederationPlaces.resolve(pilot), tmp_path / f"{number}.tar", [])
    finally:
        stop.set()
        thread.join()
        writer.close()
    assert longest
    for number in range(3):
        restore_server(tmp_path / f"{number}.tar", tmp_path / str(number))
        with contextlib.closing(sqlite3.connect(tmp_path / str(number) / "server" / "superlink.db")) as copy:
            ((left, right),) = copy.execute("SELECT left, right FROM pair").fetchall()
            assert left + right == 1_000_000


def test_a_damaged_database_a_link_and_a_place_inside_are_refused(pilot, tmp_path):
    places, target = FederationPlaces.resolve(pilot), tmp_path / "b.tar"
    with pytest.raises(ConfigError, match="--to: expected a file outside"):
        back_up_server(places, pilot / "b.tar", [])
    link = pilot / "runs" / "one" / "tap" / "link"
    link.symlink_to("/etc/passwd")
    with pytest.raises(StateError, match="found a link, which is not followed"):
        back_up_server(places, target, ["one"])
    link.unlink()
    kept = (pilot / "registry" / "members.json").rename(tmp_path / "members.json")
    (pilot / "registry" / "members.json").symlink_to(kept)
    with pytest.raises(StateError, match="found a link, which is not followed"):
        back_up_server(places, target, [])
    kept.replace(pilot / "registry" / "members.json")
    database = pilot / "server" / "superlink.db"
    database.write_bytes(database.read_bytes()[:4096] + b"\xff" * 4096)
    with pytest.raises(StateError, match="expected Flower's database, found one that cannot be copied"):
        back_up_server(places, target, [])
    assert not target.exists()
    assert not list(tmp_path.glob(".fedveil-backup-*"))


def test_a_restore_replaces_nothing_and_needs_a_registry(pilot, tmp_path):
    target = tmp_path / "b.tar"
    back_up_server(FederationPlaces.resolve(pilot), target, [])
    before = files_of(pilot)
    with pytest.raises(ConfigError, match="expected a new or empty folder"):
        restore_server(target, pilot)
    assert files_of(pilot) == before
    write_archive(tmp_path / "none.tar", "server", {"ca/ca.crt": pilot / "ca" / "ca.crt"})
    with pytest.raises(ConfigError, match="expected a federation's registry"):
        restore_server(tmp_path / "none.tar", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match="a backup of a site"), BackupArchive.open(target, "site", is_server_file):
        pytest.fail("it is read as another kind")


@pytest.mark.parametrize(
    "name",
    ["../x", "runs/one/../../x", "runs/one/./x", "runs/one/..", "runs/../x", "server/logs/x", "ca/ca.key", "/etc/x",
     "registry/x.json", "runs/one/a/b/c/d/e/f", "runs/one/\x1b", "server/superlink.db-wal", "runs/one"],
)  # fmt: skip
def test_other_names_are_not_known(name):
    assert not is_server_file(name)


def test_other_tools_read_it(pilot, tmp_path):
    back_up_server(FederationPlaces.resolve(pilot), tmp_path / "b.tar", ["one"])
    with tarfile.open(tmp_path / "b.tar") as tar:
        assert set(tar.getnames()) == {*names(tmp_path / "b.tar"), "fedveil-backup.json"}
