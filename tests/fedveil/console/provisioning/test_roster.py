"""`fedveil members roster`: from the sites' keys to what a server's run and a site's policy read."""

from __future__ import annotations

import json
import re

import pytest

from fedveil.client_app.policy.site_policy import SitePolicy
from fedveil.console.main import main
from fedveil.console.provisioning.federation_folder import SiteRegistry, roster_file
from fedveil.errors import ConfigError
from fedveil.federation.secagg.roster import roster_digest
from fedveil.server_app.secure_round import read_roster
from tests.fedveil.console.provisioning.test_provision import enrolled, federation, public_signing, register  # noqa: F401


def listed(folder, capsys, *options: str) -> tuple[int, list[str]]:
    capsys.readouterr()
    return main(["members", "roster", str(folder), *options]), capsys.readouterr().out.splitlines()


def test_it_is_what_the_server_reads_and_a_policy_names(federation, capsys):  # noqa: F811
    kits = [enrolled(federation, capsys, site) for site in ("north", "south")]
    for kit, fingerprint in kits:
        assert register(federation, kit, fingerprint) == 0
    code, lines = listed(federation, capsys)
    keys = {"north": public_signing(kits[0][0]), "south": public_signing(kits[1][0])}
    assert code == 0
    assert read_roster(str(roster_file(federation))) == keys
    assert re.fullmatch(r"north +([0-9a-f]{4} ?){4}", lines[0])
    assert lines[0].split()[1:] == re.findall("....", keys["north"])[:4]
    assert lines[-1] == f'roster = "{roster_digest(keys)}"'
    assert SitePolicy.model_validate({"roster": roster_digest(keys)}).roster == roster_digest(keys)
    assert main(["members", "revoke", str(federation), "south", "--offline"]) == 0
    code, lines = listed(federation, capsys)
    assert read_roster(str(roster_file(federation))) == {"north": keys["north"]}
    assert re.fullmatch("south +is not in the roster: revoked", lines[1])


def test_a_site_without_a_signing_key_is_named_and_so_is_one_that_is_not_registered(federation, capsys, tmp_path):  # noqa: F811
    kit, fingerprint = enrolled(federation, capsys)
    register(federation, kit, fingerprint)
    code, lines = listed(federation, capsys, "--out", str(tmp_path / "r.json"))
    assert code == 0
    assert re.fullmatch("south +is not in the roster: invited", lines[1])
    assert read_roster(str(tmp_path / "r.json")) == {"north": public_signing(kit)}
    assert not roster_file(federation).exists()
    members = SiteRegistry(federation)
    del members.sites["north"]["signing"]  # as a registry of before has it
    members.save()
    assert main(["members", "roster", str(federation)]) == 2
    output = capsys.readouterr()
    assert re.search("north +has NO signing key: run fedveil site init --renew", output.out)
    assert "expected a registered site with a signing key" in output.err


def test_a_registry_of_before_is_read_and_a_broken_key_in_it_is_named(federation, capsys):  # noqa: F811
    kit, fingerprint = enrolled(federation, capsys)
    register(federation, kit, fingerprint)
    file = federation / "registry" / "members.json"
    content = json.loads(file.read_text())
    del content["retired-signing"]
    content["sites"]["north"]["signing"] = "x" * 64
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="north: signing: expected 64 hex digits"):
        _ = SiteRegistry(federation).signing_keys


def test_a_site_that_asks_again_reads_the_same_fingerprint(federation, capsys):  # noqa: F811
    """Whoever has lost it needs no new keys; it is of the keys, and not of what stands in request.json."""
    kit, fingerprint = enrolled(federation, capsys)
    (kit / "keys" / "request.json").write_text("{}")
    (kit / "keys" / "node.key.pub").write_text("another")
    assert main(["site", "init", "--kit", str(kit)]) == 2
    assert f"found one, with fingerprint {fingerprint}; --renew makes a new one" in capsys.readouterr().err
    (kit / "keys" / "node.key").write_text("no key")
    assert main(["site", "init", "--kit", str(kit)]) == 2
    assert "found one; --renew" in capsys.readouterr().err
