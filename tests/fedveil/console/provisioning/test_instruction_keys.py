"""Instruction keys: what provisioning, members and the registry do with them, and signers.json."""

from __future__ import annotations

import argparse
import json
import os
import re
import stat
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from fedveil.console.commands.federation import members as members_command
from fedveil.console.flower.instruction_key_files import (
    current_file,
    keys_fingerprint,
    public_key,
    signers_file,
    standby_file,
)
from fedveil.console.main import main
from fedveil.console.provisioning import command_lock, federation_folder, instruction_keys
from fedveil.console.provisioning.federation_folder import SiteRegistry, parse_federation
from fedveil.errors import ConfigError
from fedveil.federation.message_signatures.key_files import InstructionKeys, SiteSigner, SiteSigners
from tests.fedveil.console.provisioning.test_provision import TEXT, enrolled, public_signing, register, unpacked


@pytest.fixture
def federation(tmp_path, capsys) -> Path:
    (tmp_path / "federation.toml").write_text(TEXT)
    assert main(["provision", str(tmp_path / "federation.toml")]) == 0
    capsys.readouterr()
    return tmp_path / "pilot"


def make_old(federation: Path) -> Path:
    """The folder as a release without instruction keys left it."""
    file = federation / "registry" / "members.json"
    content = json.loads(file.read_text())
    del content["federation-id"], content["instruction-keys"], content["federation"]["signatures"]
    content["sites"] = {site: {"state": "invited"} for site in content["sites"]}
    file.write_text(json.dumps(content))
    for path in (current_file(federation), standby_file(federation), signers_file(federation)):
        path.unlink()
    current_file(federation).parent.rmdir()
    return file


def fingerprint(members: SiteRegistry) -> str:
    return keys_fingerprint(members.federation_id, members.instruction_keys)


def signers(federation: Path) -> SiteSigners:
    return SiteSigners.from_json(json.loads(signers_file(federation).read_text()))


def test_a_provisioned_federation_has_an_id_two_keys_and_kits_that_name_them(federation):
    members = SiteRegistry(federation)
    assert re.fullmatch(r"[0-9a-f]{32}", members.federation_id)
    assert members.instruction_keys == (public_key(current_file(federation)), public_key(standby_file(federation)))
    assert len(set(members.instruction_keys)) == 2
    assert stat.S_IMODE(current_file(federation).parent.stat().st_mode) == 0o700
    assert members.sites == {site: {"state": "invited", "signs": True} for site in ("north", "south")}
    for site in members.sites:
        kit = unpacked(federation, site)
        pinned = InstructionKeys.from_file(kit / "instruction-keys.toml")
        assert pinned == InstructionKeys(members.federation_id, members.instruction_keys)
        assert fingerprint(members) not in (kit / "README.md").read_text()  # an attacker would change both
        assert "  instruction-keys.toml\n" in (kit / "SHA256SUMS").read_text()
        for name, path in (
            ("node-config.toml", "instruction-keys.toml"),
            ("containers.toml", "/kit/instruction-keys.toml"),
        ):
            assert tomllib.loads((kit / name).read_text())["instruction-keys"] == path


def test_two_federations_of_one_file_have_different_ids_and_keys(federation, capsys):
    other = federation.with_name("other")
    assert main(["provision", str(federation.parent / "federation.toml"), "--out", str(other)]) == 0
    one, two = SiteRegistry(federation), SiteRegistry(other)
    assert one.federation_id != two.federation_id
    assert not {*one.instruction_keys} & {*two.instruction_keys}
    assert fingerprint(two) in capsys.readouterr().out


def test_the_fingerprint_is_of_the_federation_and_the_keys_in_any_order():
    one, two, own = "ab" * 32, "cd" * 32, "0a" * 16
    expected = keys_fingerprint(own, [one, two])
    assert expected == keys_fingerprint(own, [two, one])
    assert expected not in (keys_fingerprint(own, [one]), keys_fingerprint("0b" * 16, [one, two]))
    assert re.fullmatch(r"SHA256:[A-Za-z0-9+/]{43}", expected)


def test_signatures_are_required_unless_the_file_says_otherwise_and_optional_in_an_old_registry(federation):
    file = federation.parent / "federation.toml"
    assert parse_federation(file).signatures == "required"
    assert SiteRegistry(federation).federation.signatures == "required"
    assert signers(federation).required
    file.write_text(TEXT + 'signatures = "optional"\n')
    assert parse_federation(file).signatures == "optional"
    file.write_text(TEXT + 'signatures = "maybe"\n')
    with pytest.raises(ConfigError, match="signatures: Input should be 'optional' or 'required'"):
        parse_federation(file)
    make_old(federation)
    assert SiteRegistry(federation).federation.signatures == "optional"


def test_signers_json_follows_every_change_of_the_registry(federation, capsys):
    assert signers(federation) == SiteSigners(
        SiteRegistry(federation).federation_id, True,
        {site: SiteSigner("", "", "invited", True) for site in ("north", "south")},
    )  # fmt: skip
    kit, fingerprint = enrolled(federation, capsys)
    assert register(federation, kit, fingerprint) == 0
    members = SiteRegistry(federation)
    members.sites["north"]["node"] = "77"
    members.save()
    signing, until = public_signing(kit), members.sites["north"]["until"]
    assert signers(federation).sites["north"] == SiteSigner("77", signing, "registered", True, until)
    _, renewed = enrolled(federation, capsys, "north", "--renew")
    assert register(federation, kit, renewed) == 0
    until = SiteRegistry(federation).sites["north"]["until"]
    assert signers(federation).sites["north"] == SiteSigner("", signing, "registered", True, until)
    assert main(["members", "revoke", str(federation), "north", "--offline"]) == 0
    assert signers(federation).sites["north"] == SiteSigner("", signing, "revoked", True, until)
    assert main(["members", "add", str(federation), "west"]) == 0
    assert signers(federation).sites["west"] == SiteSigner("", "", "invited", True)
    assert stat.S_IMODE(signers_file(federation).stat().st_mode) == 0o600


def test_an_expired_site_is_said_to_be(federation, capsys):
    kit, fingerprint = enrolled(federation, capsys)
    register(federation, kit, fingerprint)
    members = SiteRegistry(federation)
    members.sites["north"]["until"] = "2020-01-01T00:00:00+00:00"
    members.save()
    assert main(["members", "expire", str(federation), "--offline"]) == 0
    assert signers(federation).sites["north"].state == "expired"


def test_one_unusable_signing_key_of_an_old_registry_leaves_the_other_sites_readable(federation, capsys):
    kit, fingerprint = enrolled(federation, capsys)
    register(federation, kit, fingerprint)
    members = SiteRegistry(federation)
    members.sites["south"]["signing"] = "01" + "00" * 31  # of small order
    members.save()
    assert signers(federation).sites["south"].signing == ""
    assert signers(federation).sites["north"].signing == public_signing(kit)


@pytest.mark.parametrize(
    "changes",
    [
        {"federation-id": "AB" * 16}, {"federation-id": 5}, {"instruction-keys": ["ab" * 32]},
        {"instruction-keys": ["01" + "00" * 31, "ab" * 32]}, {"instruction-keys": "ab" * 32},
    ],
)  # fmt: skip
def test_a_damaged_id_or_key_is_not_taken_for_an_old_registry(federation, changes):
    file = federation / "registry" / "members.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError, match=r"members.json: expected the registry .* found a damaged one"):
        SiteRegistry(federation)


def test_a_kit_of_an_old_folder_gets_keys_and_marks_its_site(federation, capsys):
    make_old(federation)
    old = SiteRegistry(federation)
    assert (old.federation_id, old.instruction_keys) == ("", ())
    assert main(["members", "kit", str(federation), "south"]) == 0
    output = capsys.readouterr().out
    members = SiteRegistry(federation)
    assert members.instruction_keys == (public_key(current_file(federation)), public_key(standby_file(federation)))
    assert fingerprint(members) in output
    assert "south: its replies must be signed from now on" in output
    assert {site: members.signs(site) for site in members.sites} == {"north": False, "south": True}
    found = signers(federation)
    assert not found.required
    assert (found.sites["north"].signs, found.sites["south"].signs) == (False, True)
    keys = InstructionKeys.from_file(unpacked(federation, "south") / "instruction-keys.toml")
    assert keys == instruction_keys.pinned_keys(members)
    assert main(["members", "kit", str(federation), "north"]) == 0
    assert SiteRegistry(federation).instruction_keys == members.instruction_keys
    assert SiteRegistry(federation).federation_id == members.federation_id
    assert main(["members", "kit", str(federation), "south"]) == 0
    assert "must be signed" not in capsys.readouterr().out.partition("south: the start-up kit")[2]
    assert main(["members", "kit", str(federation), "east"]) == 2


def test_the_first_command_that_saves_an_old_registry_draws_its_id_and_no_site_signs(federation, capsys):
    make_old(federation)
    kit, fingerprint = enrolled(federation, capsys)
    assert register(federation, kit, fingerprint) == 2  # its kit names keys that the registry lacks
    (kit / "instruction-keys.toml").unlink()
    assert main(["site", "init", "--kit", str(kit), "--renew"]) == 0
    assert register(federation, kit, "-") == 0
    members = SiteRegistry(federation)
    assert re.fullmatch(r"[0-9a-f]{32}", members.federation_id)
    assert members.instruction_keys == ()
    until = members.sites["north"]["until"]
    assert signers(federation).sites["north"] == SiteSigner("", public_signing(kit), "registered", False, until)
    members.save()
    assert SiteRegistry(federation).federation_id == members.federation_id


def test_a_site_keeps_its_mark_when_it_is_registered_again(federation, capsys):
    kit, fingerprint = enrolled(federation, capsys)
    register(federation, kit, fingerprint)
    _, renewed = enrolled(federation, capsys, "north", "--renew")
    register(federation, kit, renewed)
    assert SiteRegistry(federation).signs("north")


def test_key_files_of_a_registry_restored_from_an_old_backup_are_taken(federation):
    file = federation / "registry" / "members.json"
    before = SiteRegistry(federation).instruction_keys
    content = json.loads(file.read_text())
    del content["instruction-keys"]
    file.write_text(json.dumps(content))
    assert main(["members", "kit", str(federation), "north"]) == 0
    assert SiteRegistry(federation).instruction_keys == before


def test_a_renewal_makes_the_standby_key_the_current_one_and_writes_kits_again(federation, capsys):
    main(["members", "revoke", str(federation), "south", "--offline"])
    old = SiteRegistry(federation)
    lost, standby = old.instruction_keys
    private, kits = standby_file(federation).read_bytes(), federation / "kits"
    south = (kits / "south.tar.gz").read_bytes()
    assert main(["members", "renew-instruction-key", str(federation)]) == 0
    output = capsys.readouterr().out
    members = SiteRegistry(federation)
    assert current_file(federation).read_bytes() == private
    assert members.instruction_keys == (standby, public_key(standby_file(federation)))
    assert lost not in members.instruction_keys
    assert members.federation_id == old.federation_id
    pinned = InstructionKeys.from_file(unpacked(federation) / "instruction-keys.toml")
    assert pinned.keys == members.instruction_keys
    assert f"fedveil site trust NEW-FILE --kit . --fingerprint {fingerprint(members)}" in output
    assert "1 kits rewritten" in output
    assert (kits / "south.tar.gz").read_bytes() == south  # it was revoked
    for file in (current_file(federation), standby_file(federation)):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {file.name for file in (federation / "ca").iterdir()} == {"ca.crt", "ca.key", "instruction-standby.key"}


def test_a_standby_key_from_elsewhere_is_moved_and_another_key_is_refused(federation, capsys, tmp_path):
    away = tmp_path / "safe" / "standby"
    away.parent.mkdir()
    standby_file(federation).rename(away)
    before = SiteRegistry(federation).instruction_keys
    assert main(["members", "renew-instruction-key", str(federation)]) == 2
    assert "--standby-key: cannot read the key file" in capsys.readouterr().err
    wrong = tmp_path / "wrong"
    wrong.write_bytes(os.urandom(32))
    wrong.chmod(0o600)
    assert main(["members", "renew-instruction-key", str(federation), "--standby-key", str(wrong)]) == 2
    assert "expected the standby key that the kits name, found a different key" in capsys.readouterr().err
    away.chmod(0o640)
    assert main(["members", "renew-instruction-key", str(federation), "--standby-key", str(away)]) == 2
    assert "but has mode 640" in capsys.readouterr().err
    away.chmod(0o600)
    assert SiteRegistry(federation).instruction_keys == before
    assert public_key(current_file(federation)) == before[0]
    assert main(["members", "renew-instruction-key", str(federation), "--standby-key", str(away)]) == 0
    assert SiteRegistry(federation).instruction_keys[0] == before[1] == public_key(current_file(federation))
    assert not away.exists()
    assert standby_file(federation).is_file()


def test_the_current_key_is_not_taken_for_the_standby_key(federation, capsys, tmp_path):
    """Also where it is the registered standby key, as after an interrupted renewal: the file would be removed."""
    current, link = current_file(federation), tmp_path / "link"
    current.write_bytes(standby_file(federation).read_bytes())
    link.symlink_to(current)
    hard = tmp_path / "hard"
    hard.hardlink_to(current)
    before = {file: file.read_bytes() for file in federation.rglob("*") if file.is_file() and file.name != ".lock"}
    for path in (current, link, hard, current.parent / ".." / "instruct" / current.name):
        assert main(["members", "renew-instruction-key", str(federation), "--standby-key", str(path)]) == 2
        assert "--standby-key: expected the standby key's file, found the current key's file" in capsys.readouterr().err
        after = {file: file.read_bytes() for file in federation.rglob("*") if file.is_file() and file.name != ".lock"}
        assert after == before


@pytest.mark.parametrize("saved", [False, True], ids=["before the registry", "after the registry"])
def test_an_interrupted_renewal_loses_no_key(federation, monkeypatch, saved):
    members = SiteRegistry(federation)
    _, standby = members.instruction_keys

    save = SiteRegistry.save

    def interrupt(registry: SiteRegistry) -> None:
        if saved:
            save(registry)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(SiteRegistry, "save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            instruction_keys.renew_keys(members)
    between = SiteRegistry(federation)
    assert public_key(current_file(federation)) == standby  # which every kit names
    expected = between.instruction_keys[1]
    keys = instruction_keys.renew_keys(between)
    assert keys.keys == (expected, public_key(standby_file(federation)))
    assert expected == public_key(current_file(federation))
    assert saved == (expected != standby)
    assert len(list((federation / "ca").iterdir())) == 3


def test_a_renewal_in_an_old_folder_draws_keys_and_names_the_sites_that_now_sign(federation, capsys):
    make_old(federation)
    assert main(["members", "renew-instruction-key", str(federation)]) == 0
    output = capsys.readouterr().out
    assert "generated, because this folder had none" in output
    assert "from now on, replies from north, south must be signed" in output
    assert all(site.signs for site in signers(federation).sites.values())
    members = SiteRegistry(federation)
    assert public_key(current_file(federation)) == members.instruction_keys[0]


def test_signatures_are_required_once_every_registered_site_can_sign(federation, capsys):
    command = ["members", "require-signatures", str(federation)]
    make_old(federation)
    for site in ("north", "south"):
        kit, _ = enrolled(federation, capsys, site)
        (kit / "instruction-keys.toml").unlink()
        assert main(["site", "init", "--kit", str(kit), "--renew"]) == 0
        assert register(federation, kit, "-") == 0
    members = SiteRegistry(federation)
    del members.sites["south"]["signing"]
    members.save()
    before = (federation / "registry" / "members.json").read_bytes()
    capsys.readouterr()
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "found 2 that cannot: " in error
    assert f"north: its kit has no instruction keys; run fedveil members kit {federation} north" in error
    assert "south: it has registered no usable signing key; run fedveil site init --renew there" in error
    assert (federation / "registry" / "members.json").read_bytes() == before

    assert main(["members", "kit", str(federation), "north"]) == 0
    assert main(["members", "kit", str(federation), "south"]) == 0
    capsys.readouterr()
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "found 1 that cannot: south" in error
    assert "north" not in error.replace(str(federation), "")
    assert not signers(federation).required

    kit, _ = enrolled(federation, capsys, "south", "--renew")
    assert register(federation, kit, "-") == 0
    assert main(command) == 0
    assert SiteRegistry(federation).federation.signatures == "required"
    assert signers(federation).required
    assert set(signers(federation).sites) == {"north", "south"}


def test_a_site_that_is_not_registered_hinders_no_requirement_and_needs_a_new_kit(federation, capsys):
    make_old(federation)
    kit, _ = enrolled(federation, capsys)
    (kit / "instruction-keys.toml").unlink()
    assert main(["site", "init", "--kit", str(kit), "--renew"]) == 0
    assert main(["members", "revoke", str(federation), "south", "--offline"]) == 0
    capsys.readouterr()
    command = ["members", "require-signatures", str(federation)]
    assert main(command) == 2
    assert "require-signatures: expected instruction keys, found none" in capsys.readouterr().err
    assert main(["members", "add", str(federation), "west"]) == 0
    capsys.readouterr()
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "north: invited; before it registers, it needs a kit from fedveil members kit" in output
    assert "south: revoked; before it registers, it needs a kit from fedveil members kit" in output
    assert "west" not in output
    assert signers(federation).required
    assert register(federation, kit, "-") == 2  # of the old kit
    assert "north: instructions: expected the SHA-256" in capsys.readouterr().err


def test_of_two_commands_at_once_the_second_waits_and_undoes_nothing(federation, monkeypatch, capsys):
    monkeypatch.setattr(command_lock, "_WAIT_SECONDS", 0.1)
    parser = argparse.ArgumentParser()
    members_command.add_arguments(parser)
    args = parser.parse_args(["kit", str(federation), "south"])
    with ThreadPoolExecutor() as pool:
        with SiteRegistry.locked(federation) as members:
            other = pool.submit(args.run, args)
            deadline = time.monotonic() + 20
            while "waiting for another fedveil members command" not in capsys.readouterr().err:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert not other.done()
            members.end("north", "revoked")
        assert other.result(20) == 0
    assert SiteRegistry(federation).sites["north"]["state"] == "revoked"
    assert signers(federation).sites["north"].state == "revoked"


def test_every_command_that_changes_the_registry_locks_it(federation, monkeypatch, capsys):
    class LockedError(Exception):
        pass

    def refuse(descriptor, file, command):
        raise LockedError

    monkeypatch.setattr(command_lock, "_lock", refuse)
    for action in (
        ["add", "FOLDER", "west"], ["kit", "FOLDER", "north"], ["register", "FOLDER", "r.json", "--fingerprint", "-"],
        ["revoke", "FOLDER", "north"], ["expire", "FOLDER"], ["sync", "FOLDER"], ["renew-server", "FOLDER"],
        ["renew-instruction-key", "FOLDER"], ["require-signatures", "FOLDER"],
    ):  # fmt: skip
        with pytest.raises(LockedError):
            main(["members", *[str(federation) if word == "FOLDER" else word for word in action]])
    assert main(["members", "list", str(federation)]) == 0


@pytest.mark.long
def test_commands_of_other_processes_lose_no_site(federation):
    """Each adds a site to what it read."""
    names = [f"site-{i}" for i in range(3)]
    command = "import sys; from fedveil.console.main import main; sys.exit(main(sys.argv[1:]))"
    started = [
        subprocess.Popen([sys.executable, "-c", command, "members", "add", str(federation), name]) for name in names
    ]
    assert [process.wait(120) for process in started] == [0, 0, 0]
    assert set(SiteRegistry(federation).sites) == {"north", "south", *names} == set(signers(federation).sites)


def test_an_interrupted_revocation_leaves_no_site_whose_replies_count(federation, monkeypatch):
    members = SiteRegistry(federation)

    def interrupt(registry: SiteRegistry) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SiteRegistry, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        members.end("north", "revoked")
    assert signers(federation).sites["north"].state == "revoked"
    assert SiteRegistry(federation).sites["north"]["state"] == "invited"


@pytest.mark.parametrize("damage", [None, "{}", "north revoked"])
@pytest.mark.parametrize("action", ["list", "roster"])
def test_commands_that_only_show_write_a_list_of_signers_that_is_missing_or_differs(federation, action, damage):
    expected, file = signers_file(federation).read_bytes(), signers_file(federation)
    stamp = file.stat().st_ino
    main(["members", action, str(federation)])
    assert file.stat().st_ino == stamp  # it was as it should be
    file.unlink()
    if damage is not None:
        file.write_text(damage)
    main(["members", action, str(federation)])
    assert file.read_bytes() == expected


def test_a_registry_of_before_the_ids_has_no_list_of_signers_to_write(federation):
    make_old(federation)
    assert main(["members", "list", str(federation)]) == 0
    assert not signers_file(federation).exists()


def test_a_change_while_the_list_of_signers_is_written_is_in_it(federation, monkeypatch):
    stale = SiteRegistry(federation)
    write = federation_folder.write_atomic

    def revoke_first(path: Path, data: bytes) -> None:
        monkeypatch.setattr(federation_folder, "write_atomic", write)
        SiteRegistry(federation).end("north", "revoked")
        write(path, data)

    signers_file(federation).unlink()
    monkeypatch.setattr(federation_folder, "write_atomic", revoke_first)
    stale.write_signers()
    assert signers(federation).sites["north"].state == "revoked"


@pytest.mark.parametrize("until", ["tomorrow", "2031-01-01T00:00:00", 5])
def test_a_site_whose_last_moment_cannot_be_read_is_past_it(federation, until):
    members = SiteRegistry(federation)
    members.sites["north"]["until"] = until
    members.save()
    assert datetime.fromisoformat(signers(federation).sites["north"].until) < datetime.now(UTC)
    assert signers(federation).sites["south"].until == ""
