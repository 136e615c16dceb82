"""Keys of an end: made once, private, and the other end's are what they say."""

from __future__ import annotations

import pytest

from fedveil.errors import ConfigError
from fedveil.relay import keys
from tests.fedveil.relay.two import SERVER, SITE


def test_an_end_makes_its_keys_once_and_the_other_reads_the_public_half(tmp_path):
    made = keys.make_keys(tmp_path / "keys")
    secret = tmp_path / "keys" / "relay.key"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert keys.read_public(tmp_path / "keys" / "relay.pub") == made == keys.EndpointSecret.from_file(secret).public
    assert secret.read_bytes().hex() not in (tmp_path / "keys" / "relay.pub").read_text()
    with pytest.raises(ConfigError, match="a key already exists"):
        keys.make_keys(tmp_path / "keys")


def test_a_secret_that_others_can_read_is_refused(tmp_path):
    keys.make_keys(tmp_path)
    (tmp_path / "relay.key").chmod(0o640)
    with pytest.raises(ConfigError, match="readable only by its owner"):
        keys.EndpointSecret.from_file(tmp_path / "relay.key")


def test_ends_differ_in_id_and_fingerprint_and_a_secret_is_not_shown():
    assert SERVER.public.id != SITE.public.id
    assert SERVER.public.fingerprint.startswith("SHA256:")
    assert SERVER.public.fingerprint != SITE.public.fingerprint
    assert SERVER.signing != SERVER.opening != SERVER.key
    assert "01" * 4 not in repr(SERVER)


@pytest.mark.parametrize(
    "text",
    ["", "fedveil-relay-1", f"fedveil-relay-2 {'ab' * 32} {'cd' * 32}", f"fedveil-relay-1 {'ab' * 32}",
     f"{SITE.public}\n{SITE.public}", str(SITE.public).upper(), f"fedveil-relay-1 {'ab' * 32} {'00' * 32}"],
    ids=["empty", "no keys", "another version", "one key", "two ends", "upper case", "a point of low order"],
)  # fmt: skip
def test_what_is_no_public_half_is_refused_in_words(text, tmp_path):
    (tmp_path / "peer.pub").write_text(text)
    with pytest.raises(ConfigError, match=r"--peer: .* copy the other end's relay.pub again"):
        keys.read_public(tmp_path / "peer.pub")


def test_a_missing_public_half_says_where_it_is_made(tmp_path):
    with pytest.raises(ConfigError, match="make it there with fedveil relay init"):
        keys.read_public(tmp_path / "peer.pub")
