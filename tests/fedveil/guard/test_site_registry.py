"""Keys of sites past their expiry date, revoked, replaced or strange; a broken registry; a clock that is set back."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives import serialization
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes

from fedveil.errors import StateError
from fedveil.guard.control_log import ControlLog
from fedveil.guard.flower import RefusalBehavior
from fedveil.guard.registry_files import MonotonicClock
from fedveil.guard.site_registry import SiteKeyChecker
from fedveil.records import audit_log

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def ssh(public) -> str:
    return public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def pem(public) -> bytes:
    return public_key_to_bytes(public)


def write(folder, sites, retired=()) -> None:
    """Whole or not at all, as fedveil members does."""
    folder.mkdir(exist_ok=True)
    partial = folder / "part"
    partial.write_text(json.dumps({"sites": sites, "retired": dict(retired)}))
    partial.chmod(0o600)
    partial.replace(folder / "members.json")


def entry(public, state="registered", until=NOW) -> dict[str, str]:
    return {"state": state, "key": ssh(public), "until": until.isoformat()}


@pytest.fixture
def control(tmp_path):
    log = ControlLog(tmp_path / "log" / "control.jsonl")
    log.clock = MonotonicClock(NOW, wall=lambda: NOW, monotonic=lambda: 0.0)
    return log


def test_a_key_is_served_until_its_last_day_and_not_after(tmp_path, control):
    keys = [generate_key_pairs()[1] for _ in range(6)]
    later = NOW + timedelta(seconds=1)
    sites = {
        "north": entry(keys[0], until=later),
        "south": entry(keys[1], until=NOW),
        "east": entry(keys[2], "revoked", later),
        "west": entry(keys[3], "expired", later),
        "new": {"state": "invited"},
    }
    write(tmp_path / "registry", sites, {ssh(keys[4]): "replaced"})
    members = SiteKeyChecker(tmp_path / "registry", control)
    assert members.refusal(pem(keys[0]), True) is None
    refusals = [members.refusal(pem(key), True) for key in keys[1:]]
    assert {code for code, _ in refusals} == {RefusalBehavior.SAYS_WHY}
    words = [word for _, word in refusals]
    assert "this key expired on 2026-03-01" in words[0]
    assert ["is revoked" in words[1], "is expired" in words[2], "is replaced" in words[3]] == [True] * 3
    assert "is not registered" in words[4]
    assert ["--renew --renew-signing;" in word for word in words] == [False, True, False, False, False]
    assert all(members.refusal(pem(key), True) for key in keys[1:])
    lines = audit_log.read_log(control.file)
    assert [(line["event"], line["site"]) for line in lines] == [
        ("shut-out", "south"), ("shut-out", "east"), ("shut-out", "west"), ("shut-out", ""),
    ]  # fmt: skip


def test_a_change_holds_from_the_next_request_on(tmp_path, control):
    _, public = generate_key_pairs()
    write(tmp_path, {"north": entry(public, until=NOW + timedelta(days=1))})
    members = SiteKeyChecker(tmp_path, control)
    assert members.refusal(pem(public), True) is None
    write(tmp_path, {"north": entry(public, "revoked", NOW + timedelta(days=1))})
    assert "revoked" in members.refusal(pem(public), True)[1]
    write(tmp_path, {"north": entry(public, until=NOW + timedelta(days=2))})
    assert members.refusal(pem(public), True) is None


def test_what_the_registry_says_of_signing_keys_is_none_of_its_business(tmp_path, control):
    """A site must not lose its connection over a key that opens none."""
    _, public = generate_key_pairs()
    sites = {"north": entry(public, until=NOW + timedelta(days=1)) | {"signing": "ab" * 32}}
    write(tmp_path, sites)
    content = json.loads((tmp_path / "members.json").read_text()) | {"retired-signing": {"cd" * 32: "replaced"}}
    (tmp_path / "members.json").write_text(json.dumps(content))
    assert SiteKeyChecker(tmp_path, control).refusal(pem(public), True) is None


BROKEN = {
    "no JSON": "{",
    "no sites": '{"retired": {}}',
    "a site that is text": '{"sites": {"north": "x"}, "retired": {}}',
    "no key": '{"sites": {"north": {"state": "registered"}}, "retired": {}}',
    "no day": '{"sites": {"north": {"state": "registered", "key": KEY}}, "retired": {}}',
    "a day without a zone": '{"sites": {"n": {"state": "expired", "key": KEY, "until": "2026-03-02"}}, "retired": {}}',
    "a key that is none": '{"sites": {"n": {"state": "registered", "key": "x", "until": "2026-03-02"}}, "retired": {}}',
    "a key of an unknown kind": '{"sites": {"n": {"state": "registered", "key": "ssh-new AAAAB3NzaC1uZXc=", '
    '"until": "2026-03-02T00:00:00+00:00"}}, "retired": {}}',
    "a retired key of an unknown kind": '{"sites": {}, "retired": {"sk-ssh-new@x.org AAAAB3NzaC1uZXc=": "replaced"}}',
    "nested without end": "[" * 100_000,
    "too long": " " * (5 << 20),
}


@pytest.mark.parametrize("text", [*BROKEN.values(), None], ids=[*BROKEN, "missing"])
def test_a_broken_registry_lets_nobody_in_and_does_not_send_sites_away(text, tmp_path, control):
    _, public = generate_key_pairs()
    write(tmp_path, {"north": entry(public, until=NOW + timedelta(days=1))})
    members = SiteKeyChecker(tmp_path, control)
    if text is None:
        (tmp_path / "members.json").unlink()
    else:
        (tmp_path / "members.json").write_text(text.replace("KEY", json.dumps(ssh(public))))
    code, words = members.refusal(pem(public), True)
    assert code == RefusalBehavior.ASKS_AGAIN  # a SuperNode asks again
    assert str(tmp_path) not in words
    with pytest.raises(StateError, match="cannot read the file made by fedveil provision"):
        SiteKeyChecker(tmp_path, control)
    write(tmp_path, {"north": entry(public, until=NOW + timedelta(days=1))})
    assert members.refusal(pem(public), True) is None


def test_a_registry_that_everybody_may_write_is_none(tmp_path, control):
    write(tmp_path, {})
    (tmp_path / "members.json").chmod(0o666)
    with pytest.raises(StateError, match="must not be world-writable"):
        SiteKeyChecker(tmp_path, control)


def test_a_supernode_that_is_active_is_ended_and_told_why_when_it_starts_again(tmp_path, control):
    """FAILED_PRECONDITION leaves an active one hanging; at UNAUTHENTICATED it ends and logs no reason."""
    keys = [pem(generate_key_pairs()[1]) for _ in range(2)]
    write(tmp_path, {"north": entry(serialization.load_pem_public_key(keys[0]))})
    members = SiteKeyChecker(tmp_path, control)
    for key in keys:
        assert members.refusal(key, False)[0] == RefusalBehavior.ENDS
        assert members.refusal(key, True)[0] == RefusalBehavior.SAYS_WHY


def test_a_clock_that_is_set_back_makes_no_key_valid_again(tmp_path):
    wall, monotonic = [NOW], [0.0]
    clock = MonotonicClock(NOW - timedelta(days=9), lambda: wall[0], lambda: monotonic[0])
    assert clock.now() == NOW
    wall[0] = NOW - timedelta(days=30)
    monotonic[0] = 60.0
    assert clock.now() == NOW + timedelta(seconds=60)
    wall[0] = NOW + timedelta(days=1)
    assert clock.now() == NOW + timedelta(days=1)


def test_nor_does_a_start_of_the_server_after_it_was_set_back(tmp_path, monkeypatch):
    """What the log holds is a bound; also where lines were written after the clock had gone back."""
    _, public = generate_key_pairs()
    write(tmp_path, {"north": entry(public, until=NOW)})
    first = ControlLog(tmp_path / "control.jsonl")
    first.clock = MonotonicClock(NOW + timedelta(days=900), lambda: NOW, lambda: 0.0)
    assert SiteKeyChecker(tmp_path, first).refusal(pem(public), True) is not None
    back = NOW - timedelta(days=30)
    for _ in range(2):  # each start writes a line by a clock that is behind
        again = ControlLog(tmp_path / "control.jsonl")
        again.clock._wall = lambda: back
        assert again.clock.now() >= NOW + timedelta(days=900)
        assert "expired on" in SiteKeyChecker(tmp_path, again).refusal(pem(public), True)[1]
        again.write("asked", {})


def test_a_shut_out_that_cannot_be_logged_is_one_all_the_same(tmp_path, control):
    _, public = generate_key_pairs()
    write(tmp_path, {"north": entry(public, until=NOW)})
    members = SiteKeyChecker(tmp_path, control)
    control.file.parent.mkdir(exist_ok=True)
    control.file.write_text("torn")
    assert members.refusal(pem(public), True)[0] == RefusalBehavior.ASKS_AGAIN
    os.unlink(control.file)
    assert members.refusal(pem(public), True)[0] == RefusalBehavior.SAYS_WHY


def test_a_site_is_known_by_its_key_while_it_may_be_used(tmp_path, control):
    keys = [generate_key_pairs()[1] for _ in range(4)]
    later = NOW + timedelta(seconds=1)
    sites = {"north": entry(keys[0], until=later), "south": entry(keys[1]), "east": entry(keys[2], "revoked", later)}
    write(tmp_path, sites)
    members = SiteKeyChecker(tmp_path, control)
    assert [members.site_of(pem(key)) for key in keys] == ["north", "", "", ""]
    (tmp_path / "members.json").write_text("{")
    with pytest.raises(StateError):
        members.site_of(pem(keys[0]))
