"""`fedveil doctor` on secure aggregation: at a site, and at the server."""

from __future__ import annotations

import json

import pytest

from fedveil.client_app.site.node_config import Site
from fedveil.console.main import main
from fedveil.console.provisioning import checks, secure_checks
from fedveil.console.provisioning.federation import roster_file
from tests.console.provisioning.test_provision import enrolled, federation, register  # noqa: F401

ROSTER = f'roster = "sha256:{"ab" * 32}"'


def test_a_signing_key_must_be_there_and_its_owners_alone(tmp_path):
    file = tmp_path / "signing.key"
    site = Site(signing_key=str(file))
    assert checks.guarded("", lambda: secure_checks.signing_key(site, tmp_path / "none")).verdict == "fail"
    file.write_bytes(bytes(range(32)))
    file.chmod(0o640)
    assert "mode 640" in checks.guarded("", lambda: secure_checks.signing_key(site, tmp_path)).text
    file.chmod(0o600)
    found = secure_checks.signing_key(site, tmp_path / "none")
    assert (found.verdict, "shows it as 03a1 07bf f3ce 10be" in found.text) == ("ok", True)
    assert secure_checks.signing_key(Site(signing_key="/secret/signing.key"), tmp_path).text.startswith(str(file))
    assert secure_checks.signing_key(Site(), tmp_path).verdict == "warn"


@pytest.mark.parametrize(
    "policy,verdict,words",
    [
        (None, "warn", "honest but curious server alone"),
        ("", "ok", "honest but curious server alone"),
        ("require-secure = true", "warn", "the policy names none"),
        (ROSTER, "warn", "lets runs in the clear pass"),
        ("min-cohort = 3", "warn", "lets runs in the clear pass"),
        (f"require-secure = true\n{ROSTER}", "ok", "of which the other sites must say the same"),
    ],
)
def test_the_weaker_claim_is_said_in_words(policy, verdict, words, tmp_path):
    if policy is not None:
        (tmp_path / "p.toml").write_text(policy)
    found = secure_checks.roster(Site(policy="" if policy is None else str(tmp_path / "p.toml")))
    assert (found.verdict, words in found.text) == (verdict, True), found


def test_the_servers_roster_must_fit_the_registry(federation, capsys):  # noqa: F811
    assert secure_checks.registered(federation).verdict == "ok"  # nobody has a key yet
    kit, fingerprint = enrolled(federation, capsys)
    register(federation, kit, fingerprint)
    assert secure_checks.registered(federation).verdict == "warn"
    assert main(["members", "roster", str(federation)]) == 0
    assert secure_checks.registered(federation).verdict == "ok"
    kit, fingerprint = enrolled(federation, capsys, "south")
    register(federation, kit, fingerprint)
    found = secure_checks.registered(federation)
    assert (found.verdict, "not what the registry says of south" in found.text) == ("fail", True), found
    main(["doctor", "--federation", str(federation)])
    assert "fail  roster " in capsys.readouterr().out
    roster_file(federation).write_text(json.dumps({"signing_keys": {"north": "x"}}))
    assert "fedveil members roster writes it anew" in secure_checks.registered(federation).text
