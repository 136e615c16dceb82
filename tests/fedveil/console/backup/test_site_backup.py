"""`fedveil site backup` and `restore`: what is in it, and that no sequence of them makes the ledger forget a charge."""

from __future__ import annotations

import json
import math
import shutil
import stat
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.client_app.policy.policy_copies import keep_copy
from fedveil.client_app.state.client_state import SECURE, ClientStateStore, open_ledger
from fedveil.client_app.state.data_sets import ID_FILE, FolderWitness
from fedveil.client_app.state.replay_guard import ReplayGuard
from fedveil.client_app.state.withdrawn_units import WithdrawalRecord
from fedveil.client_app.worker.connection import WorkerRecord
from fedveil.client_app.worker.owner import OwnerProcess
from fedveil.console.backup import site_backup
from fedveil.console.backup.archive import write_archive
from fedveil.console.backup.site_backup import RestoreChecks, back_up_site, restore_site
from fedveil.console.flower.processes import ProcessGroup
from fedveil.console.launch import site as site_start
from fedveil.console.launch import site_lock
from fedveil.console.main import main
from fedveil.console.runs.workers import WorkerStatus
from fedveil.contract.privacy import Adjacency, PrivacyBudget, Step
from fedveil.encrypted_files import FileSeal, make_key
from fedveil.errors import BudgetError, ConfigError, PolicyError, StateError
from fedveil.privacy.ledger import PrivacyLedger
from fedveil.privacy.ledger_account import Party, RunTerms
from fedveil.records import audit_log
from fedveil.records.audit_log import LogHead

STEP = Step("gaussian", 0, 0, 10.0)
OWN = PrivacyBudget(math.inf, 1e-5, Adjacency.REPLACE_ONE)
MOST = 6


@dataclass
class Site:
    """A site's state and data folder, and what its runs have really released."""

    folder: Path
    seal: FileSeal = FileSeal()
    true: dict[str, int] = field(default_factory=dict)
    backups: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.data.mkdir(parents=True)
        self.fill()

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def log(self) -> Path:
        return self.state / audit_log.NAME

    def fill(self) -> None:
        """Lay a run's files, and what must not be in a backup."""
        self.state.mkdir(mode=0o700)
        ReplayGuard(self.state / "pilot-1" / "north").count(2, 9, 3)
        for name in ("secret", f"turn-{'1' * 16}.safetensors", "received.json", SECURE, "tap/x"):
            (self.state / "pilot-1" / "north" / name).parent.mkdir(exist_ok=True)
            (self.state / "pilot-1" / "north" / name).write_text(name)
        for name in (".prepared/ward/tokens", "logs/north.log", "flower/x", "guard/y", "north.superexec", "own.txt"):
            (self.state / name).parent.mkdir(parents=True, exist_ok=True)
            (self.state / name).write_text(name)
        (self.state / "north.toml").write_text('site = "north"\n')
        (self.state / "north.federation").write_text("pilot")
        WithdrawalRecord.open(self.state, self.seal).add("7", "patient")
        audit_log.append_entry(self.log, "admitted", {"round": 0})

    def charge(self, run: str, to: Path | None = None) -> None:
        ledger = open_ledger(to or self.state, self.seal)
        ledger.charge(RunTerms(run, OWN, MOST, MOST), {STEP: 1}, OWN, FolderWitness.open(self.data, ""))
        self.true[run] = self.true.get(run, 0) + 1
        audit_log.append_entry((to or self.state) / audit_log.NAME, "sent", {"run": run})

    def covers(self) -> bool:
        """Whether the ledger counts at least what was released: in steps of each run, or as open against everyone."""
        entries = open_ledger(self.state, self.seal).read(OWN).account.entries
        if any(entry.open == frozenset(Party) for entry in entries):
            return True
        used = dict.fromkeys(self.true, 0)
        for entry in entries:
            used[entry.run] = used.get(entry.run, 0) + sum(step.used for step in entry.steps)
        return all(used[run] >= steps for run, steps in self.true.items())

    def back_up(self) -> Path:
        file = self.folder / f"backup-{len(self.backups)}.tar"
        back_up_site(self.state, file)
        self.backups.append(file)
        return file

    def restore(self, number: int = -1, **checks) -> site_backup.RestoredSite:
        return restore_site(self.backups[number], self.state, RestoreChecks(self.seal, **checks))

    def recover(self, *more: str) -> int:
        policy = self.folder / "policy.toml"
        policy.write_text("")
        where = ["--state-dir", str(self.state), "--policy", str(policy)]
        return main(["site", "ledger", "recover", str(self.data), *where, *more])


@pytest.fixture
def site(tmp_path) -> Site:
    return Site(tmp_path)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != site_lock.RESTORE_LOCK)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_it_has_the_state_and_says_what_it_leaves_out(site, capsys):
    site.charge("a")
    policy = site.folder / "site-policy.toml"
    policy.write_text("min-examples = 20\n")
    digest = keep_copy(site.state, str(policy))
    (site.state / ".signing").mkdir()
    (site.state / ".signing" / "north.key").write_bytes(b"k" * 32)
    before = contents(site.state)
    target = site.folder / "backup.tar"
    assert main(["site", "backup", "--state-dir", str(site.state), "--to", str(target)]) == 0
    stdout = capsys.readouterr().out
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert "secure.json: a restored copy could sign a list twice" in stdout
    assert "left out: keys, key file, policy and kit" in stdout
    assert "left out: signing key STATE/.signing/north.key: copy it apart" in stdout
    assert "not a site's: own.txt, pilot-1/north/tap/x" in stdout
    shutil.rmtree(site.state)
    assert main(["site", "restore", str(target), "--state-dir", str(site.state)]) == 0
    assert "next: fedveil site ledger recover DATA" in (stdout := capsys.readouterr().out)
    assert "withdraw again" in stdout
    assert "rotate audit-log.jsonl --after" in stdout
    after = contents(site.state)
    run = "pilot-1/north"
    marks = {".ledger/restored", ".ledger/restored-runs", "audit-log.unchecked"}
    there = {
        "audit-log.jsonl", ".ledger/ledger.json", ".withdrawn/units.json", f".policies/{digest}.toml", "north.toml",
        "north.federation", f"{run}/secret", f"{run}/served.json", f"{run}/received.json",
        f"{run}/turn-{'1' * 16}.safetensors",
    }  # fmt: skip
    assert {name for name in after if name not in marks} == there
    assert {name: after[name] for name in there} == {name: before[name] for name in there}
    assert stat.S_IMODE((site.state / run / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(site.state.stat().st_mode) == 0o700


def test_a_site_restored_on_an_empty_machine_trains_in_no_run_until_its_person_has_spoken(site, monkeypatch):
    site.charge("a")
    site.back_up()
    site.charge("a")
    shutil.rmtree(site.state)
    assert site.restore(anchor=LogHead()).must_recover
    for run in ("a", "b"):
        with pytest.raises(StateError, match="site ledger recover DATA"):
            site.charge(run)
    with pytest.raises(StateError, match="site ledger recover DATA"):
        open_ledger(site.state).note_open("c", "no claim", OWN)
    node = site_start.parse_site({"state-dir": str(site.state)})
    starting = site_start.SiteLauncher("s:1", site.data, site.data, node, 1.0)
    monkeypatch.setattr(site_start, "require_usable", lambda start: pytest.fail("it goes on"))
    with pytest.raises(StateError, match="site ledger recover DATA"):
        site_start.run(starting)
    assert site.recover("--nothing-lost") == 2  # the data folder has seen the second charge
    assert site.recover() == 0
    assert site.covers()
    with pytest.raises(BudgetError):
        site.charge("a")
    site.charge("b")
    with pytest.raises(PolicyError, match=r"run\.name: this site restored its record"):
        ReplayGuard(site.state / "pilot-1" / "north").check(5, 9, 3)
    lines = audit_log.read_log(site.log)
    assert [(line["event"], line.get("lost")) for line in lines][-2:] == [("recovered", "unknown"), ("sent", None)]


def test_a_planned_move_costs_nothing_if_the_data_folder_confirms_it(site):
    ReplayGuard(site.state / "pilot-2" / "north").count(2, 9, 3)
    site.charge("a")
    site.back_up()
    shutil.rmtree(site.state)
    site.restore(data=site.data, anchor=LogHead())
    assert site.recover("--nothing-lost") == 0
    entries = open_ledger(site.state).read(OWN).account.entries
    assert [(entry.run, [step.used for step in entry.steps]) for entry in entries] == [("a", [1])]
    site.charge("a")
    ReplayGuard(site.state / "pilot-2" / "north").check(5, 9, 3)
    with pytest.raises(PolicyError, match="restored its record"):  # its secure.json is gone
        ReplayGuard(site.state / "pilot-1" / "north").check(5, 9, 3)
    assert site.recover("--nothing-lost") == 2  # nothing was restored


def test_nothing_lost_needs_a_mark(site):
    site.charge("a")
    site.back_up()
    shutil.rmtree(site.state)
    (site.data / ID_FILE).unlink()
    site.restore()
    assert site.recover("--nothing-lost") == 2
    assert site.recover() == 0
    assert site.covers()


def test_a_backup_from_before_the_first_charge_needs_adopt(site, capsys):
    """It has no ledger, so the data folder's mark is of a lost one."""
    site.back_up()
    site.charge("a")
    shutil.rmtree(site.state)
    with pytest.raises(ConfigError, match="with --older, after which fedveil site ledger adopt DATA --lost"):
        site.restore(data=site.data)
    where = ["--state-dir", str(site.state), "--data", str(site.data), "--older"]
    assert main(["site", "restore", str(site.backups[0]), *where]) == 0
    assert "instead, if DATA was charged since: fedveil site ledger adopt DATA --lost" in capsys.readouterr().out
    assert site.recover() == 2
    assert site.recover("--nothing-lost") == 2
    with pytest.raises(StateError, match="recover DATA"):
        site.charge("a")
    policy = site.folder / "policy.toml"
    where = ["--state-dir", str(site.state), "--policy", str(policy)]
    assert main(["site", "ledger", "adopt", str(site.data), "--lost", *where]) == 0
    assert site.covers()
    site.charge("b")
    with pytest.raises(PolicyError, match="restored its record"):
        ReplayGuard(site.state / "pilot-1" / "north").check(5, 9, 3)
    assert not (site.state / ".ledger" / "restored-runs").exists()


def test_a_newer_ledger_and_log_at_the_site_stay(site):
    site.charge("a")
    site.back_up()
    site.charge("a")
    (site.state / "pilot-1" / "north" / "secret").unlink()
    before = contents(site.state)
    done = site.restore()
    assert not done.must_recover
    assert set(done.written) == {"pilot-1/north/secret"}
    assert {".ledger/ledger.json", audit_log.NAME, "pilot-1/north/served.json"} <= set(done.kept)
    after = contents(site.state)
    assert after["pilot-1/north/secret"] == b"secret"
    assert audit_log.read_log(site.log)[-1]["event"] == "restored"
    for changed in (audit_log.NAME, "north.running", "pilot-1/north/secret"):
        before.pop(changed, None)
        after.pop(changed, None)
    assert before == after
    site.charge("a")
    assert site.covers()


def test_a_run_whose_served_rounds_were_lost_is_closed_at_once(site):
    site.charge("a")
    site.back_up()
    (site.state / "pilot-1" / "north" / "served.json").unlink()
    assert not site.restore().must_recover
    with pytest.raises(PolicyError, match="restored its record"):
        ReplayGuard(site.state / "pilot-1" / "north").check(5, 9, 3)


def test_the_longer_list_of_withdrawn_units_stays_or_is_taken(site):
    units = site.state / ".withdrawn" / "units.json"
    monday = units.read_bytes()
    older = site.back_up()
    WithdrawalRecord.open(site.state).add("8", "patient")
    site.back_up()
    tuesday = units.read_bytes()
    units.write_bytes(monday)  # rolled back
    assert ".withdrawn/units.json" in site.restore().written
    assert units.read_bytes() == tuesday
    done = restore_site(older, site.state, RestoreChecks())
    assert ".withdrawn/units.json" in done.kept
    assert units.read_bytes() == tuesday
    units.write_bytes(monday)
    WithdrawalRecord.open(site.state).add("9", "patient")  # neither list contains the other
    own = units.read_bytes()
    for content in (own, b"damaged"):
        units.write_bytes(content)
        with pytest.raises(StateError, match="withdraw again"):
            site.restore()
        assert units.read_bytes() == content
    units.unlink()
    WithdrawalRecord.open(site.state).add("7", "patient")  # another key: no entry can be compared
    with pytest.raises(StateError, match="withdraw again"):
        site.restore()
    assert not (site.state / ".restoring").exists()


@pytest.mark.parametrize("is_rolled_back", [True, False])
def test_a_run_whose_served_rounds_differ_is_closed_and_what_is_not_compared_is_named(site, capsys, is_rolled_back):
    site.charge("a")
    ledger, served = site.state / ".ledger" / "ledger.json", ReplayGuard(site.state / "pilot-2" / "north")
    served.count(2, 9, 3)
    monday, monday_ledger = (served.folder / "served.json").read_bytes(), ledger.read_bytes()
    served.count(3, 9, 3)
    site.charge("a")
    target = site.back_up()
    (served.folder / "served.json").write_bytes(monday)
    (site.state / "pilot-1" / "north" / "secret").write_text("another")
    if is_rolled_back:
        ledger.write_bytes(monday_ledger)
    assert main(["site", "restore", str(target), "--state-dir", str(site.state)]) == 0
    stdout = capsys.readouterr().out
    assert "kept, not compared, although the backup's are different: pilot-1/north/secret, pilot-2/north/s" in stdout
    if is_rolled_back:
        assert "recover closes, because later rounds may have been served: pilot-1/north, pilot-2/north" in stdout
        assert site.recover("--nothing-lost") == 0  # the rounds of Monday are not the backup's
    else:
        assert "closed at this site, because later rounds may have been served: pilot-2/north" in stdout
    with pytest.raises(PolicyError, match="restored its record"):
        served.check(3, 9, 3)


def test_a_run_that_has_ended_is_closed_too(site):
    """A resume may extend it, and without its secure.json the site could serve its last round again."""
    ended = ReplayGuard(site.state / "pilot-1" / "north")
    ended.count(8, 9, 3)
    assert ended.ended
    site.charge("a")
    site.back_up()
    shutil.rmtree(site.state)
    site.restore()
    assert site.recover("--nothing-lost") == 0
    with pytest.raises(PolicyError, match="restored its record"):
        ended.check(9, 20, 3)


@pytest.mark.parametrize("places", range(5))
def test_an_interrupted_restore_permits_nothing_until_it_is_run_again(site, monkeypatch, capsys, places):
    site.charge("a")
    site.back_up()
    shutil.rmtree(site.state)
    replace, count = site_backup.os.replace, 0

    def die(source, target):
        nonlocal count
        if ".restoring" in str(source) and not Path(source).name.endswith(".part"):
            count += 1
            if count > places:
                raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(site_backup.os, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            site.restore()
    assert (site.state / ".withdrawn" / "units.json").exists() == (places > 0)
    assert not (site.state / ".ledger" / "ledger.json").exists()
    for words in (("site", "ledger", "adopt", str(site.data), "--lost"), ("site", "purge", "--older-than", "0"),
                  ("site", "backup", "--to", str(site.folder / "other.tar")),
                  ("site", "seal", "--key-file", str(site.folder / "key"))):  # fmt: skip
        (site.folder / "key").unlink(missing_ok=True)
        make_key(site.folder / "key")
        assert main([*words, "--state-dir", str(site.state)]) == 2
        assert "a restore is in progress or was interrupted" in capsys.readouterr().err
    assert site.recover() == 2
    assert site.recover("--nothing-lost") == 2
    with pytest.raises(StateError, match="interrupted"):
        site.charge("b")
    other = site.folder / "other.tar"
    write_archive(other, "site", {".ledger/ledger.json": site.folder / "key"})
    with pytest.raises((StateError, ConfigError)):  # it does not clear the mark of the first one
        restore_site(other, site.state, RestoreChecks(data=site.data))
    assert (site.state / ".restoring").exists()
    assert site.restore().must_recover
    assert not (site.state / ".restoring").exists()
    assert WithdrawalRecord.open(site.state).read().covers("patient", "7")
    assert site.recover() == 0
    assert site.covers()


def test_a_restore_writes_through_no_link_in_place_of_its_own_folder(site, tmp_path):
    site.back_up()
    (tmp_path / "elsewhere").mkdir()
    (site.state / ".restoring").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StateError, match="found a link"):
        site.restore()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    with pytest.raises(StateError, match="interrupted"):
        site.back_up()


def test_a_restored_ledger_is_neither_adopted_nor_backed_up_before_it_is_recovered(site, tmp_path):
    site.charge("a")
    site.back_up()
    site.charge("a")
    shutil.rmtree(site.state)
    site.restore()
    with pytest.raises(StateError, match="site ledger recover DATA"):
        site.back_up()
    (site.data / ID_FILE).unlink()
    witness = FolderWitness.open(site.data, "")
    witness.write(open_ledger(site.state).read(OWN).mark)
    new = open_ledger(tmp_path / "new")
    with pytest.raises(StateError, match="site ledger recover DATA"):
        new.adopt(OWN, witness, open_ledger(site.state))
    assert site.recover() == 0
    assert new.adopt(OWN, witness, open_ledger(site.state)) == 2
    site.back_up()


def test_one_restore_at_a_time_and_none_beside_a_site(site, monkeypatch):
    site.back_up()
    placing = site_backup._continue_log

    def meanwhile(*arguments):
        with pytest.raises(ConfigError, match="another restore"):
            site.restore()
        with pytest.raises(StateError, match="a restore is in progress"):
            site_start.run(starting)
        with monkeypatch.context() as looked_before:
            looked_before.setattr(PrivacyLedger, "require_recovered", lambda ledger: None)
            with pytest.raises(ConfigError, match="a restore in progress"):
                site_start.run(starting)
        return placing(*arguments)

    def restore_first(start):
        site.restore()

    node = site_start.parse_site({"state-dir": str(site.state)})
    starting = site_start.SiteLauncher("s:1", site.data, site.data, node, 1.0)
    monkeypatch.setattr(site_start, "require_usable", lambda start: None)
    monkeypatch.setattr(site_start, "_taken", lambda *arguments: pytest.fail("it goes on"))
    with monkeypatch.context() as patched:
        patched.setattr(site_backup, "_continue_log", meanwhile)
        site.restore()
    shutil.rmtree(site.state)
    monkeypatch.setattr(site_start, "require_usable", restore_first)
    with pytest.raises(StateError, match="site ledger recover DATA"):
        site_start.run(starting)
    with site_lock.hold_folder(site.state, to_restore=False):
        with site_lock.hold_folder(site.state, to_restore=False):
            pass  # another site in the same folder
        with pytest.raises(ConfigError, match="a running site"):
            site.restore()


@pytest.mark.parametrize("way", ["rotate", "restore"])
def test_recover_leaves_a_log_alone_that_the_servers_anchor_may_contradict(site, capsys, way):
    site.charge("a")
    site.back_up()
    site.charge("a")
    anchor = audit_log.log_head(site.log)
    shutil.rmtree(site.state)
    site.restore()
    before = site.log.read_bytes()
    assert site.recover() == 0
    assert "not recorded in the audit log" in capsys.readouterr().out
    assert site.log.read_bytes() == before
    site.restore()
    assert site.log.read_bytes() == before
    if way == "rotate":
        assert main(["log", "rotate", str(site.log), "--after", str(anchor)]) == 0
    else:
        site.restore(anchor=anchor, accepts_older=True)
    audit_log.verify_log(site.log, [anchor])
    assert not (site.state / "audit-log.unchecked").exists()


def test_an_older_ledger_at_the_site_is_replaced_and_another_one_is_refused(site, tmp_path):
    site.charge("a")
    old = contents(site.state)[".ledger/ledger.json"]
    site.charge("a")
    site.back_up()
    (site.state / ".ledger" / "ledger.json").write_bytes(old)
    assert site.restore().must_recover
    with pytest.raises(StateError, match="recover"):
        site.charge("a")
    other = Site(tmp_path / "other")
    other.charge("a")
    before = contents(other.state)
    with pytest.raises(StateError, match="expected the backup's ledger or one that continues it"):
        restore_site(site.backups[0], other.state, RestoreChecks())
    (other.state / ".ledger" / "ledger.json").write_bytes(b"damaged")
    with pytest.raises(StateError, match="not a readable privacy ledger"):
        restore_site(site.backups[0], other.state, RestoreChecks())
    after = contents(other.state)
    assert after.pop(".ledger/ledger.json") == b"damaged"
    assert {name: before[name] for name in after if name in before} == {n: after[n] for n in after if n in before}


def test_two_histories_of_one_ledger_are_refused(site):
    site.charge("a")
    old = contents(site.state)[".ledger/ledger.json"]
    site.charge("b")
    site.back_up()
    (site.state / ".ledger" / "ledger.json").write_bytes(old)
    (site.data / ID_FILE).unlink()
    site.charge("c")
    before = contents(site.state)[".ledger/ledger.json"]
    with pytest.raises(StateError, match="expected the backup's ledger or one that continues it"):
        site.restore()
    assert contents(site.state)[".ledger/ledger.json"] == before


def test_the_data_folder_and_the_servers_anchor_are_witnesses(site):
    site.charge("a")
    site.back_up()
    site.charge("a")
    anchor = audit_log.log_head(site.log)
    shutil.rmtree(site.state)
    with pytest.raises(ConfigError, match="--data: expected a backup with change 2 of the ledger"):
        site.restore(data=site.data)
    with pytest.raises(ConfigError, match="--anchor: expected a backup with 3 lines"):
        site.restore(anchor=anchor)
    assert contents(site.state) == {}
    done = site.restore(data=site.data, anchor=anchor, accepts_older=True)
    assert done.must_recover
    assert "1 lines are missing" in done.log
    assert audit_log.verify_log(site.log, [anchor]).lines == 5  # the file's first line, and that it was restored
    assert site.recover() == 0
    assert site.covers()


def test_another_history_of_the_log_is_refused(site):
    site.back_up()
    shutil.rmtree(site.state)
    site.fill()
    with pytest.raises(StateError, match="two histories"):
        site.restore()
    shutil.rmtree(site.state)
    with pytest.raises(StateError, match="two histories"):
        site.restore(anchor=LogHead(1, "0" * 64))


def test_an_encrypted_state_stays_encrypted(tmp_path):
    site = Site(tmp_path / "site", make_key(tmp_path / "key"))
    site.charge("a")
    ClientStateStore.open(site.state, "two", "north", site.seal).secret(0, "north", False)
    data = site.back_up().read_bytes()
    sealed = (site.state / ".ledger" / "ledger.json").read_bytes()
    assert sealed in data
    assert b'"entries"' not in data
    site.charge("a")
    with pytest.raises(StateError, match="key"):
        restore_site(site.backups[0], site.state, RestoreChecks())  # it cannot know which ledger is newer
    assert not site.restore().must_recover
    assert site.covers()


def test_it_is_refused_while_the_site_runs_and_for_links(site, tmp_path):
    target, running = tmp_path / "backup.tar", ProcessGroup(tmp_path)
    with pytest.raises(ConfigError, match="already running"), site_lock.hold_site_lock(site.state, "north", running):
        back_up_site(site.state, target)
    round_ = ClientStateStore(site.state / "pilot-1" / "north")
    with pytest.raises(ConfigError, match="no client round in progress, found one"), round_.in_turn():
        back_up_site(site.state, target)
    with pytest.raises(ConfigError, match="outside of the state folder"):
        back_up_site(site.state, site.state / "backup.tar")
    assert not target.exists()
    back_up_site(site.state, target)
    with pytest.raises(ConfigError, match="already running"), site_lock.hold_site_lock(site.state, "north", running):
        restore_site(target, site.state, RestoreChecks())
    (site.state / "pilot-1" / "south").symlink_to(tmp_path)
    with pytest.raises(StateError, match="found a link"):
        back_up_site(site.state, tmp_path / "other.tar")
    with pytest.raises(StateError, match="found a link"):
        restore_site(target, site.state, RestoreChecks())
    assert not (tmp_path / "other.tar").exists()


def test_a_worker_and_a_full_disk_and_files_in_the_way_are_named(site, tmp_path, monkeypatch):
    target = site.back_up()
    owner = OwnerProcess(1, 0.0)
    worker = WorkerStatus("north", WorkerRecord("1", 77, owner, "", "", 0.0), {"state": "idle"})
    with monkeypatch.context() as patched:
        patched.setattr(site_backup, "list_workers", lambda state: [worker])
        with pytest.raises(ConfigError, match="found worker 77"):
            back_up_site(site.state, tmp_path / "other.tar")
    free = shutil._ntuple_diskusage(10, 9, 1)  # type: ignore[attr-defined]
    with monkeypatch.context() as patched:
        patched.setattr(site_backup.shutil, "disk_usage", lambda path: free)
        with pytest.raises(ConfigError, match="free bytes for the backup, found 1"):
            restore_site(target, tmp_path / "new", RestoreChecks())
    assert not (tmp_path / "new").exists()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "pilot-1").write_text("a file")
    with pytest.raises(StateError, match="expected a folder, found a file"):
        restore_site(target, tmp_path / "new", RestoreChecks())
    assert contents(tmp_path / "new") == {"pilot-1": b"a file"}


def test_a_damaged_log_is_continued_before_a_backup(site, tmp_path):
    site.log.write_bytes(site.log.read_bytes() + b"{")
    with pytest.raises(StateError, match="fedveil log rotate"):
        back_up_site(site.state, tmp_path / "backup.tar")
    assert main(["log", "rotate", str(site.log)]) == 0
    back_up_site(site.state, tmp_path / "backup.tar")


def test_a_node_config_that_is_none_is_refused(site, tmp_path):
    (tmp_path / "north.toml").write_text('nonsense = "/etc/passwd"\n')
    write_archive(tmp_path / "backup.tar", "site", {"north.toml": tmp_path / "north.toml"})
    with pytest.raises(ConfigError, match=r"north\.toml: expected a site's node config"):
        restore_site(tmp_path / "backup.tar", tmp_path / "new", RestoreChecks())
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", [".ledger/ledger.json", ".ledger/old.key", ".withdrawn/units.json"])
def test_a_ledger_too_large_to_be_one_is_refused(tmp_path, name):
    with (tmp_path / "large").open("wb") as file:
        file.truncate((8 << 20) + 1)
    write_archive(tmp_path / "backup.tar", "site", {name: tmp_path / "large"})
    with pytest.raises(ConfigError, match="expected at most 8,388,608 bytes"):
        restore_site(tmp_path / "backup.tar", tmp_path / "new", RestoreChecks())
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "name", ["../../north/secure.json", "pilot-1/north/secret", "secure.json", "guard/x/secure.json"]
)
def test_a_list_of_other_files_left_out_is_refused(site, tmp_path, name):
    write_archive(tmp_path / "backup.tar", "site", {"north.toml": site.state / "north.toml"}, [name])
    with pytest.raises(ConfigError, match=r"expected paths of secure\.json in its list"):
        restore_site(tmp_path / "backup.tar", tmp_path / "new", RestoreChecks())
    assert not (tmp_path / "new").exists()


OPERATIONS = ("charge a", "charge b", "back up", "restore", "restore with data", "lose", "lose all", "recover",
              "confirm", "adopt", "lose ledger", "old ledger")  # fmt: skip


SEQUENCES = {
    "an older one": [("charge a", 0), ("back up", 0), ("charge a", 0), ("lose", 0), ("restore", 0), ("charge a", 0)],
    "nothing is known": [
        ("charge a", 0), ("back up", 0), ("charge b", 0), ("lose all", 0), ("charge b", 0), ("confirm", 0),
        ("charge b", 0),
    ],
    "back by hand": [
        ("charge a", 0), ("old ledger", 0), ("charge a", 0), ("back up", 0), ("old ledger", 1), ("restore", 0),
        ("charge a", 0),
    ],
    "two backups": [
        ("charge a", 0), ("back up", 0), ("charge b", 0), ("back up", 0), ("charge a", 0), ("lose", 0), ("restore", 1),
        ("restore", 0), ("recover", 0), ("charge b", 0), ("restore", 3), ("charge a", 0), ("charge b", 0),
    ],
    "without a ledger": [
        ("back up", 0), ("charge a", 0), ("lose all", 0), ("charge a", 0), ("recover", 0), ("charge a", 0),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", list(SEQUENCES))
def test_these_sequences_do_not_make_the_ledger_forget_a_charge(tmp_path, name):
    _follow(Site(tmp_path), SEQUENCES[name])


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 3)), max_size=16))
def test_no_sequence_of_backups_and_restores_makes_the_ledger_forget_a_charge(tmp_path_factory, operations):
    _follow(Site(tmp_path_factory.mktemp("site")), operations)


def _follow(site: Site, operations: list[tuple[str, int]]) -> None:
    older: list[bytes] = []
    for operation, number in operations:
        before = dict(site.true)
        try:
            _apply(site, operation, number, older)
        except (StateError, ConfigError, BudgetError):
            assert site.true == before
            continue
        if site.true != before:  # it was charged, so nothing stopped it
            assert site.covers(), json.dumps(operations)


def _apply(site: Site, operation: str, number: int, older: list[bytes]) -> None:
    ledger, file = open_ledger(site.state), site.state / ".ledger" / "ledger.json"
    match operation:
        case "charge a" | "charge b":
            site.charge(operation[-1])
        case "back up" if site.state.exists():
            site.back_up()
        case "restore" | "restore with data" if site.backups:
            data = site.data if operation.endswith("data") else None
            site.restore(number % len(site.backups), data=data, accepts_older=number > 1)
        case "lose" | "lose ledger" if FolderWitness.open(site.data, "").read() is None:
            pass  # without a mark and without a restore, nothing is left that could know: not a matter of backups
        case "lose":
            shutil.rmtree(site.state, ignore_errors=True)
        case "lose ledger":
            shutil.rmtree(site.state / ".ledger", ignore_errors=True)
        case "lose all" if site.backups:  # with the data folder's mark: only what a restore leaves behind is known then
            shutil.rmtree(site.state, ignore_errors=True)
            (site.data / ID_FILE).unlink(missing_ok=True)
            site.restore(number % len(site.backups))
        case "old ledger":  # kept by hand, and put back by hand
            if number == 0 and file.exists():
                older.append(file.read_bytes())
            elif older and file.exists():
                file.write_bytes(older[number % len(older)])
        case "recover":
            ledger.recover(OWN, FolderWitness.open(site.data, ""))
        case "confirm":
            ledger.confirm_complete(OWN, FolderWitness.open(site.data, ""))
        case "adopt":
            ledger.adopt(OWN, FolderWitness.open(site.data, ""), None)
