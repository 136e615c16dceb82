"""`fedveil doctor` on secure aggregation: at a site, and at the server."""

from __future__ import annotations

import json

import pytest

from fedveil.client_app.node_config import SiteConfig
from fedveil.console.doctor import checks, secagg_checks
from fedveil.console.main import main
from fedveil.console.provisioning.federation_folder import roster_file
from tests.fedveil.console.provisioning.test_provision import enrolled, federation, register  # noqa: F401

KNOWN = f'app-digests = ["{"cd" * 32}"]'
ROSTER = f'roster = "sha256:{"ab" * 32}"'


def test_a_signing_key_must_be_there_and_its_owners_alone(tmp_path):
    file = tmp_path / "signing.key"
    site = SiteConfig(signing_key=str(file))
    assert checks.run_check("", lambda: secagg_checks.signing_key(site, tmp_path / "none")).verdict == "fail"
    file.write_bytes(bytes(range(32)))
    file.chmod(0o640)
    assert "mode 640" in checks.run_check("", lambda: secagg_checks.signing_key(site, tmp_path)).text
    file.chmod(0o600)
    result = secagg_checks.signing_key(site, tmp_path / "none")
    assert (result.verdict, "shows it as 03a1 07bf f3ce 10be" in result.text) == ("ok", True)
    assert secagg_checks.signing_key(SiteConfig(signing_key="/secret/signing.key"), tmp_path).text.startswith(str(file))
    assert secagg_checks.signing_key(SiteConfig(), tmp_path).verdict == "warn"


def test_a_signing_key_must_be_the_requested_one(federation, capsys):  # noqa: F811
    keys = enrolled(federation, capsys)[0] / "keys"
    site = SiteConfig(signing_key=str(keys / "signing.key"))
    assert checks.run_check("", lambda: secagg_checks.signing_key(site, keys)).verdict == "ok"
    (keys / "signing.key").write_bytes(bytes(range(32)))
    result = checks.run_check("", lambda: secagg_checks.signing_key(site, keys))
    assert (result.verdict, "found 03a1 07bf f3ce 10be, with which the server would" in result.text) == ("fail", True)


@pytest.mark.parametrize(
    "policy,verdict,words",
    [
        (None, "warn", "then only the server vouches for the sites' keys"),
        ("", "ok", "then only the server vouches for the sites' keys"),
        ("require-secure = true", "warn", "the policy names no roster"),
        (ROSTER, "warn", "permits unmasked ones"),
        ("min-cohort = 3", "warn", "permits unmasked ones"),
        (
            f"require-secure = true\n{ROSTER}",
            "warn",
            "admits any code, which could ignore it; set app-digests or signers",
        ),
        (
            f"require-secure = true\n{KNOWN}\n{ROSTER}",
            "warn",
            "Without min-cohort, the policy permits cohorts of 2 sites, and sums with 2 honest sites",
        ),
        (
            f"require-secure = true\n{KNOWN}\nmin-colluders = 1\n{ROSTER}",
            "warn",
            "Without min-cohort, the policy permits cohorts of 3 sites, and sums with 2 honest sites",
        ),
        (
            f"require-secure = true\n{KNOWN}\nmin-cohort = 5\nmin-colluders = 1\n{ROSTER}",
            "ok",
            "which must be the same at all other sites. Holds against a server that lies and up to 1 site with it",
        ),
    ],
)
def test_what_holds_against_a_server_that_lies_is_said_in_words(policy, verdict, words, tmp_path):
    if policy is not None:
        (tmp_path / "p.toml").write_text(policy)
    site = SiteConfig(site="north", policy="" if policy is None else str(tmp_path / "p.toml"))
    result = secagg_checks.check_roster(site)
    assert (result.verdict, words in result.text) == (verdict, True), result


def test_a_roster_without_a_site_in_the_node_config_is_warned_of(tmp_path):
    (tmp_path / "p.toml").write_text(f"require-secure = true\n{KNOWN}\nmin-cohort = 5\n{ROSTER}")
    result = secagg_checks.check_roster(SiteConfig(policy=str(tmp_path / "p.toml")))
    assert (result.verdict, "the node config no site" in result.text) == ("warn", True), result
    assert secagg_checks.check_roster(SiteConfig(site="north", policy=str(tmp_path / "p.toml"))).verdict == "ok"


def test_the_servers_roster_must_fit_the_registry(federation, capsys):  # noqa: F811
    assert secagg_checks.check_registered_key(federation).verdict == "ok"  # nobody has a key yet
    kit, fingerprint = enrolled(federation, capsys)
    register(federation, kit, fingerprint)
    assert secagg_checks.check_registered_key(federation).verdict == "warn"
    assert main(["members", "roster", str(federation)]) == 0
    assert secagg_checks.check_registered_key(federation).verdict == "ok"
    kit, fingerprint = enrolled(federation, capsys, "south")
    register(federation, kit, fingerprint)
    result = secagg_checks.check_registered_key(federation)
    assert (result.verdict, "differs from the registry for south" in result.text) == ("fail", True), result
    main(["doctor", "--federation", str(federation)])
    assert "fail  roster " in capsys.readouterr().out
    roster_file(federation).write_text(json.dumps({"signing_keys": {"north": "x"}}))
    assert "run fedveil members roster to rewrite it" in secagg_checks.check_registered_key(federation).text
