"""The files of pinned keys and of the sites' signing keys."""

from __future__ import annotations

import json

import pytest

from fedveil.errors import ConfigError
from fedveil.federation.message_signatures.key_files import InstructionKeys, SiteSigner, SiteSigners
from fedveil.federation.secagg import crypto

KEYS = tuple(crypto.verifying_key(bytes([i]) * 32).hex() for i in (1, 2))
FEDERATION = "0a" * 16
SIGNERS = SiteSigners(
    FEDERATION,
    True,
    {
        "north": SiteSigner("7", KEYS[0], "registered", True, "2031-01-01T00:00:00+00:00"),
        "south": SiteSigner("", "", "invited", False),
    },
)


def test_pinned_keys_are_read_as_they_were_written(tmp_path):
    file = tmp_path / "instruction-keys.toml"
    file.write_text(InstructionKeys(FEDERATION, KEYS).to_toml())
    assert InstructionKeys.from_file(file) == InstructionKeys(FEDERATION, KEYS)


@pytest.mark.parametrize(
    "text",
    [
        "", "keys = []", f'federation = "{FEDERATION}"\nkeys = []', f'federation = "{FEDERATION}"\nkeys = ["00"]',
        f'federation = "x"\nkeys = ["{KEYS[0]}"]', f'federation = "{FEDERATION}"\nkeys = "{KEYS[0]}"',
        f'federation = "{FEDERATION}"\nkeys = ["{KEYS[0]}"]\nmore = 1',
        f'federation = "{FEDERATION}"\nkeys = ["01{"00" * 31}"]',  # of small order
        f'federation = "{FEDERATION}"\nkeys = ["01{"00" * 30}80"]',  # the same with the other sign
        f'federation = "{FEDERATION}"\nkeys = {json.dumps([KEYS[0]] * 5)}', "a = " + "[" * 3000, "\xff",
    ],
)  # fmt: skip
def test_another_file_of_pinned_keys_is_refused_with_what_to_do(tmp_path, text):
    file = tmp_path / "instruction-keys.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="extract instruction-keys.toml"):
        InstructionKeys.from_file(file)


def test_a_missing_file_of_pinned_keys_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the server's instruction keys"):
        InstructionKeys.from_file(tmp_path / "none.toml")


def test_signers_are_read_as_they_were_written():
    assert SiteSigners.from_json(json.loads(SIGNERS.to_bytes())) == SIGNERS


@pytest.mark.parametrize(
    "change",
    [
        {"federation": "x"}, {"signatures": "maybe"}, {"signatures": True}, {"sites": []}, {"sites": {"north": {}}},
        {"sites": {"north": {"node": "7", "signing": "00" * 32, "state": "registered", "signs": True}}},
        {"sites": {"north": {"node": "7", "signing": "xyz", "state": "registered", "signs": True}}},
    ],
)  # fmt: skip
def test_another_list_of_signers_is_refused(change):
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        SiteSigners.from_json(json.loads(SIGNERS.to_bytes()) | change)


@pytest.mark.parametrize("signs", [1, "true", None])
def test_a_site_signs_only_where_the_list_says_true(signs):
    content = json.loads(SIGNERS.to_bytes())
    content["sites"]["north"]["signs"] = signs
    assert not SiteSigners.from_json(content).sites["north"].signs


def test_a_list_of_an_earlier_release_has_no_last_moments():
    content = json.loads(SIGNERS.to_bytes())
    del content["sites"]["north"]["until"]
    assert SiteSigners.from_json(content).sites["north"].until == ""


@pytest.mark.parametrize("until", [None, 5, False, [], "tomorrow", "2031-01-01T00:00:00", "2031-01-01"])
def test_a_last_moment_is_a_time_with_a_zone(until):
    content = json.loads(SIGNERS.to_bytes())
    content["sites"]["north"]["until"] = until
    with pytest.raises(ValueError, match=r"until|isoformat"):
        SiteSigners.from_json(content)
