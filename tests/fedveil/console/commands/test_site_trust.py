"""`fedveil site trust`, and doctor's check of the instruction keys."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from fedveil.console.doctor import signature_checks
from fedveil.console.flower.instruction_key_files import keys_fingerprint
from fedveil.console.main import main
from fedveil.console.provisioning import kit_reader
from fedveil.console.provisioning.federation_folder import SiteRegistry
from fedveil.federation.message_signatures.key_files import InstructionKeys
from tests.conftest import extract

TEXT = 'name = "pilot"\nserver = ["localhost"]\nsites = ["north"]\n'
SMALL_ORDER = "01" + "00" * 31


@pytest.fixture
def federation(tmp_path, capsys) -> Path:
    (tmp_path / "federation.toml").write_text(TEXT)
    assert main(["provision", str(tmp_path / "federation.toml")]) == 0
    capsys.readouterr()
    return tmp_path / "pilot"


@pytest.fixture
def kit(federation) -> Path:
    extract(federation / "kits" / "north.tar.gz", federation.parent)
    return federation.parent / "pilot-north"


@pytest.fixture
def renewed(federation, kit, capsys) -> Path:
    """The file with the keys of after a renewal, as the operator sends it."""
    assert main(["members", "renew-instruction-key", str(federation)]) == 0
    capsys.readouterr()
    extract(federation / "kits" / "north.tar.gz", federation.parent / "sent")
    return federation.parent / "sent" / "pilot-north" / "instruction-keys.toml"


def trust(file: Path, kit: Path, fingerprint: str) -> int:
    return main(["site", "trust", str(file), "--kit", str(kit), "--fingerprint", fingerprint])


def fingerprint(federation: Path) -> str:
    members = SiteRegistry(federation)
    return keys_fingerprint(members.federation_id, members.instruction_keys)


def test_renewed_keys_are_taken_with_their_fingerprint_alone(federation, kit, renewed, capsys):
    pinned = kit / "instruction-keys.toml"
    before = pinned.read_bytes()
    old, new = InstructionKeys.from_file(pinned), InstructionKeys.from_file(renewed)
    assert old.keys[1] == new.keys[0]  # a site with the old file accepts the new current key
    for wrong in (
        "-",
        "",
        "SHA256:" + "A" * 43,
        keys_fingerprint(old.federation, old.keys),
        fingerprint(federation).lower(),
    ):
        assert trust(renewed, kit, wrong) == 2
        output = capsys.readouterr()
        assert "--fingerprint: expected the fingerprint of the keys in" in output.err
        assert fingerprint(federation) not in output.out + output.err  # it would be copied from here
        assert pinned.read_bytes() == before
    assert trust(renewed, kit, fingerprint(federation)) == 0
    output = capsys.readouterr().out
    for key in (*old.keys, *new.keys):
        assert f"{key[:4]} {key[4:8]}" in output
    assert InstructionKeys.from_file(pinned) == new
    assert stat.S_IMODE(pinned.stat().st_mode) == 0o644
    assert "does not name this file" not in output


def test_keys_of_another_federation_and_keys_that_are_none_are_refused(federation, kit, renewed, capsys):
    new = InstructionKeys.from_file(renewed)
    before = (kit / "instruction-keys.toml").read_bytes()
    renewed.write_text(InstructionKeys("ab" * 16, new.keys).to_toml())
    assert trust(renewed, kit, fingerprint(federation)) == 2
    assert f"federation: expected {new.federation}" in capsys.readouterr().err
    for keys in ((SMALL_ORDER, new.keys[1]), ("no key",), ()):
        renewed.write_text(InstructionKeys(new.federation, keys).to_toml())
        assert trust(renewed, kit, keys_fingerprint(new.federation, keys)) == 2
        assert "cannot read the server's instruction keys" in capsys.readouterr().err
    assert trust(kit / "missing.toml", kit, fingerprint(federation)) == 2
    assert trust(renewed, kit.parent, fingerprint(federation)) == 2
    assert (kit / "instruction-keys.toml").read_bytes() == before


def test_an_old_kit_gets_the_file_and_is_told_what_else_it_lacks(federation, kit, renewed, capsys):
    (kit / "instruction-keys.toml").unlink()
    for name in ("node-config.toml", "containers.toml"):
        lines = (kit / name).read_text().splitlines(keepends=True)
        (kit / name).write_text("".join(line for line in lines if "instruction-keys" not in line))
    assert trust(renewed, kit, fingerprint(federation)) == 0
    output = capsys.readouterr().out
    assert "pinned now: no keys" in output
    assert output.count("does not name this file, so nothing is verified") == 2
    assert InstructionKeys.from_file(kit / "instruction-keys.toml") == InstructionKeys.from_file(renewed)


@pytest.mark.parametrize(("policy", "verdict", "words"), [
    ("require-signed-instructions = true\n", "ok", "SHA256:"), ("", "ok", "SHA256:"),
    ("require-signed-instructions = false\n", "warn", "but the policy permits unsigned instructions"),
    ("require-signed-instructions = 3\n", "ok", "SHA256:"),  # the policy's own check says so
])  # fmt: skip
def test_doctor_shows_the_pinned_keys_and_the_federation(federation, kit, policy, verdict, words):
    (kit / "site-policy.toml").write_text(policy)
    for name in ("node-config.toml", "containers.toml"):  # of containers it runs on the host, too
        site = kit_reader.node_config(kit, kit / name)
        site = site.model_copy(update={"policy": str(kit / "site-policy.toml")})
        result = signature_checks.check_instruction_keys(site, kit)
        assert (result.verdict, words in result.text) == (verdict, True)
        assert SiteRegistry(federation).federation_id in result.text
        assert fingerprint(federation) in result.text


@pytest.mark.parametrize(("policy", "verdict", "words"), [
    ("require-signed-instructions = true\n", "fail", "every run is refused"), ("", "warn", "not verified"),
])  # fmt: skip
def test_doctor_warns_of_a_site_that_pins_none(kit, policy, verdict, words):
    (kit / "site-policy.toml").write_text(policy)
    site = kit_reader.node_config(kit).model_copy(update={"instruction_keys": ""})
    result = signature_checks.check_instruction_keys(site, kit)
    assert (result.verdict, words in result.text) == (verdict, True)


def test_doctor_fails_a_file_that_cannot_be_used(kit, capsys):
    (kit / "instruction-keys.toml").write_text(InstructionKeys("ab" * 16, (SMALL_ORDER,)).to_toml())
    main(["doctor", "--kit", str(kit)])
    line = next(line for line in capsys.readouterr().out.splitlines() if line[6:].startswith("instruction keys"))
    assert line.startswith("fail")
    assert "a key has small order" in line
