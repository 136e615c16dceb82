"""`fedveil card`: made again, signed by several, and no byte of the folder changes unseen."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedveil.attacks.audit import card_section
from fedveil.cards import card as cards
from fedveil.cards.signing import dsse, in_toto, keys, verification
from fedveil.console.main import main
from fedveil.errors import StateError
from fedveil.records import audit_log

NAMES = ("server", "north")


def pair(folder: Path, name: str, seed: int, pem: bool = False) -> None:
    key = Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)
    form = serialization.PrivateFormat.PKCS8 if pem else serialization.PrivateFormat.OpenSSH
    (folder / name).write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    encoding, public = (
        (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        if pem
        else (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )
    (folder / f"{name}.pub").write_bytes(key.public_key().public_bytes(encoding, public))


@pytest.fixture
def run(make_run):
    """A run folder with a small model, a log, and keys beside it."""
    folder = make_run()
    (folder / "id").write_text("0a1b2c3d 00\n")
    (folder / "final" / "processor").mkdir(parents=True)
    (folder / "final" / "adapter_config.json").write_text("{}")
    (folder / "final" / "adapter_model.safetensors").write_bytes(bytes(range(40)))
    (folder / "final" / "processor" / "config.json").write_text('{"a": 1}')
    for seed, name in enumerate((*NAMES, "stranger")):
        pair(folder.parent, name, seed + 1, pem=name == "north")
    return folder


def did(capsys, *arguments: object) -> str:
    assert main(["card", *map(str, arguments)]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys, *arguments: object) -> str:
    assert main(["card", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def signed(run: Path, capsys) -> list[str]:
    """Makes and signs the card; returns the arguments that verify it."""
    did(capsys, "make", run)
    for name in NAMES:
        did(capsys, "sign", run, "--key", run.parent / name)
    return ["verify", str(run), *(f"--key={name}={run.parent / name}.pub" for name in NAMES)]


def test_server_and_site_sign_the_same_and_both_are_named(run, capsys):
    verify = signed(run, capsys)
    stdout = did(capsys, *verify)
    assert "6 files, all unchanged since they were signed, and no other files" in stdout
    for name in NAMES:
        assert f"signed by {name} ({keys.key_fingerprint(keys.read_public_key(run.parent / f'{name}.pub'))})" in stdout
    assert "There is NO formal guarantee" in stdout
    shutil.copytree(run / "final", run.parent / "downloaded")
    assert "signed by north.pub" in did(capsys, "verify", run.parent / "downloaded", "--key", run.parent / "north.pub")


def test_the_statement_is_one_of_in_toto_about_every_file(run, capsys):
    signed(run, capsys)
    about = json.loads(verification.read_envelope(run / "final" / in_toto.NAME).content)
    assert about["_type"] == "https://in-toto.io/Statement/v1"
    assert about["predicateType"].startswith("https://")
    assert about["predicate"] == json.loads((run / "final" / "privacy.json").read_text())
    names = [subject["name"] for subject in about["subject"]]
    files = [path.relative_to(run / "final").as_posix() for path in (run / "final").rglob("*") if path.is_file()]
    assert names == sorted(set(files) - {in_toto.NAME})
    assert "processor/config.json" in names


def test_a_key_that_was_not_given_counts_for_nothing(run, capsys):
    signed(run, capsys)
    did(capsys, "sign", run, "--key", run.parent / "stranger")
    stdout = did(capsys, "verify", run, "--key", run.parent / "server.pub")
    assert stdout.count("NOT checked, so it proves nothing") == 2
    assert stdout.count("signed by") == 1


def test_a_key_that_did_not_sign_is_missed(run, capsys):
    verify = signed(run, capsys)
    assert "no signature by SHA256:" in refused(capsys, *verify, "--key", run.parent / "stranger.pub")


def problems(run: Path) -> list[str]:
    """What `verify` finds, or the error."""
    known = [keys.read_public_key(run.parent / f"{name}.pub") for name in NAMES]
    try:
        return verification.verify_model(run / "final", {keys.key_fingerprint(key): key for key in known}).wrong
    except StateError as error:
        return [str(error)]


@pytest.mark.long
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_byte_of_any_file_that_changes_is_found(signed_run, data):
    files = sorted(path for path in (signed_run / "final").rglob("*") if path.is_file())
    file = data.draw(st.sampled_from(files))
    before = file.read_bytes()
    at = data.draw(st.integers(0, len(before) - 1))
    mask = data.draw(st.integers(1, 255))
    file.write_bytes(before[:at] + bytes([before[at] ^ mask]) + before[at + 1 :])
    try:
        assert problems(signed_run), (file.name, at, mask)
    finally:
        file.write_bytes(before)


@pytest.mark.long
def test_every_byte_of_the_small_files_counts(signed_run):
    for name in ("adapter_config.json", "adapter_model.safetensors", "processor/config.json", "README.md"):
        file = signed_run / "final" / name
        before = file.read_bytes()
        for at in range(len(before)):
            file.write_bytes(before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
            assert problems(signed_run) == [f"changed: {name}"]
        file.write_bytes(before)
    assert problems(signed_run) == []


@pytest.fixture
def signed_run(run, capsys):
    signed(run, capsys)
    assert problems(run) == []
    return run


def test_a_file_more_or_less_and_a_link_are_found(signed_run, capsys):
    final = signed_run / "final"
    (final / "processor" / "more.bin").write_bytes(b"")
    assert problems(signed_run) == ["not signed, but present: processor/more.bin"]
    (final / "processor" / "more.bin").unlink()
    (final / "processor" / "config.json").rename(final / "moved.json")
    assert problems(signed_run) == ["missing: processor/config.json", "not signed, but present: moved.json"]
    assert "not signed, but present: moved.json" in refused(
        capsys, "verify", signed_run, "--key", signed_run.parent / "server.pub"
    )
    (final / "moved.json").rename(final / "processor" / "config.json")
    (final / "adapter_config.json").unlink()
    (final / "adapter_config.json").symlink_to("/etc/hostname")
    assert "is not a plain file" in problems(signed_run)[0]


def test_no_envelope_and_no_card_are_errors_in_words(run, capsys):
    assert "write a card with fedveil card make" in refused(capsys, "verify", run, "--key", run.parent / "server.pub")
    did(capsys, "make", run)
    assert "sign the folder with fedveil card sign" in refused(
        capsys, "verify", run, "--key", run.parent / "server.pub"
    )


def test_a_card_is_not_written_over_what_others_signed(signed_run, capsys):
    assert "ask the signers to sign again" in refused(capsys, "make", signed_run)
    assert problems(signed_run) == []


def test_who_signs_later_signs_what_the_others_did_or_nothing(signed_run, capsys):
    (signed_run / "final" / "adapter_config.json").write_text("{ }")
    stderr = refused(capsys, "sign", signed_run, "--key", signed_run.parent / "stranger")
    assert "changed: adapter_config.json" in stderr
    assert problems(signed_run) == ["changed: adapter_config.json"]


def test_a_page_that_says_something_else_than_the_data_is_not_signed(run, capsys):
    did(capsys, "make", run)
    page = run / "final" / "PRIVACY.md"
    page.write_text(page.read_text().replace("NO formal", "a formal"))
    assert "text that the data doesn't support" in refused(capsys, "sign", run, "--key", run.parent / "server")
    assert not (run / "final" / in_toto.NAME).exists()


def test_a_site_signs_only_a_card_that_fits_its_own_log(run, capsys):
    own, server = run.parent / "state" / audit_log.NAME, run.parent / audit_log.NAME
    for event in ("asked", "sent"):
        head = audit_log.append_entry(own, event, {})
    audit_log.append_entry(server, "accepted", {"run": "fedrand-0a1b2c3d", "site": "site-0", "site_log": str(head)})
    audit_log.append_entry(
        server, "accepted", {"run": "fedrand-0a1b2c3d", "site": "site-1", "site_log": f"2:{'0' * 64}"}
    )
    did(capsys, "make", run)
    sign = ["sign", run, "--key", run.parent / "north", "--log", own]
    assert "the log was rewritten" in refused(capsys, *sign, "--site", "site-1")
    assert "do not sign for it" in refused(capsys, *sign, "--site", "site-2")
    assert "expected --log FILE too" in refused(capsys, *sign[:4], "--site", "site-0")
    assert not (run / "final" / in_toto.NAME).exists()
    audit_log.append_entry(own, "later", {})
    did(capsys, *sign, "--site", "site-0")


def test_what_people_state_stays_until_they_state_something_else(run, capsys):
    did(capsys, "make", run, "--curator", "A hospital", "--license", "apache-2.0", "--data-set", "site-0=ab12")
    did(capsys, "make", run, "--use", "Triage", "--data-set", "site-1=cd34")
    declared_facts = cards.read_card(run / "final").stated
    assert (declared_facts.curator, declared_facts.license, declared_facts.use) == (
        "A hospital",
        "apache-2.0",
        "Triage",
    )
    assert declared_facts.data_sets == {"site-0": "ab12", "site-1": "cd34"}
    assert "A hospital" in (run / "final" / "PRIVACY.md").read_text()
    assert "expected short texts" in refused(capsys, "make", run, "--license", "Apache 2.0!")
    assert "expected NAME=VALUE" in refused(capsys, "make", run, "--data-set", "site-1")


INTERVAL = (0.6, 0.5, 0.7)


def finding(model: str, attack: str, verdict: str, auroc=INTERVAL) -> dict:
    rest = {"epsilon_bound": 0.25, "members": 40, "non_members": 40, "verdict": verdict, "p": 0.01}
    return {"model": model, "attack": attack, "auroc": auroc, "tpr_at_1": INTERVAL, "tpr_at_01": INTERVAL, **rest}


def test_an_audit_is_on_the_card_with_both_controls(run, capsys):
    findings = [
        finding("server", "loss", "above"), finding("overfitted FedAvg", "loss", "above"),
        finding("round 0", "loss", "contains"), finding("server", "renyi", "contains"),
        finding("overfitted FedAvg", "renyi", "contains"), finding("round 0", "renyi", "above"),
    ]  # fmt: skip
    notes = ["loss: its controls hold.", "renyi: NOT usable here, because <b>."]
    (run / "audit.json").write_text(json.dumps({"findings": findings, "rebuilt": [], "notes": notes}))
    did(capsys, "make", run)
    audit_section = cards.read_card(run / "final").audited
    assert audit_section.measured
    loss, renyi = audit_section.attacks
    assert (loss.usable, renyi.usable) == (True, False)
    assert [score.model for score in loss.to_win] == ["overfitted FedAvg"]
    assert [score.model for score in loss.to_lose] == ["round 0"]
    assert [(score.model, score.verdict) for score in loss.run] == [("server", "above")]
    page = (run / "final" / "PRIVACY.md").read_text()
    assert "renyi: NOT usable: a control fails or is missing" in page
    assert "Not measured" not in page
    (run / "audit.json").write_text('{"findings": [{}], "notes": []}')
    with pytest.raises(StateError, match="audit the run again"):
        card_section.card_audit_section(run)


def test_keys_of_another_kind_are_refused_in_words(run, capsys):
    did(capsys, "make", run)
    assert "expected an Ed25519 private key" in refused(capsys, "sign", run, "--key", run.parent / "north.pub")
    assert "expected an Ed25519 public key" in refused(capsys, "verify", run, "--key", run / "config.json")
    from cryptography.hazmat.primitives.asymmetric import ec

    other = ec.generate_private_key(ec.SECP384R1()).public_key()
    (run.parent / "p384.pub").write_bytes(
        other.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )
    assert "expected an Ed25519 public key" in refused(capsys, "verify", run, "--key", run.parent / "p384.pub")


def put(run: Path, change) -> list[str]:
    """What is found where the server itself signed another statement."""
    file = run / "final" / in_toto.NAME
    about = change(json.loads(verification.read_envelope(file).content))
    envelope = None
    for name in NAMES:
        payload = json.dumps(about).encode()
        envelope = dsse.sign_payload(in_toto.PAYLOAD_TYPE, payload, keys.read_private_key(run.parent / name), envelope)
    file.write_bytes(envelope.to_bytes())
    return problems(run)


def test_a_statement_about_another_card_is_found_though_its_signatures_hold(signed_run):
    card = json.loads((signed_run / "final" / "privacy.json").read_text())
    other = card | {"stated": card["stated"] | {"curator": "somebody else"}}
    assert put(signed_run, lambda about: about) == []
    assert put(signed_run, lambda about: about | {"predicate": other}) == [
        "privacy.json differs from the card in the statement"
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda about: about | {"subject": [*about["subject"], about["subject"][0]]},
        lambda about: about | {"subject": []},
        lambda about: about | {"predicateType": "https://slsa.dev/provenance/v1"},
        lambda about: about | {"_type": "https://in-toto.io/Statement/v0.1"},
        lambda about: about | {"more": 1},
        lambda about: [about],
    ],
)
def test_a_statement_of_another_form_is_refused_though_its_signatures_hold(signed_run, change):
    assert "expected an in-toto statement about a privacy card" in put(signed_run, change)[0]


@pytest.mark.long
def test_signing_and_checking_import_no_torch():
    code = "import sys, fedveil.console.commands.runs.card; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
