"""The lines that an honest site writes to its audit log, and two sites' logs that show a server that lied."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedveil.errors import PolicyError, StateError
from fedveil.federation.secagg.log_conflicts import count_common_plans, find_conflicts
from fedveil.federation.secagg.messages import KeysRequest
from fedveil.federation.secagg.plan import list_digest
from tests.fedveil.federation.secagg.sites import (
    add,
    agree_request,
    agreed,
    changed,
    drawn,
    masked,
    names,
    open_request,
    run,
)  # fmt: skip

SITES = names(6)


class Logged:
    """Six sites of which each has an audit log, and the server's attempts."""

    def __init__(self) -> None:
        self.local = run(SITES)
        self.logs: dict[str, list[dict[str, object]]] = {site: [] for site in SITES}
        for name, site in self.local.sites.items():
            self.local.sites[name] = replace(site, audit_log=self.writer(name))

    def writer(self, name: str):
        return lambda event, about: self.logs[name].append({**about, "event": event})

    def mask(self, round_: int = 0):
        """Begin a round for which all sites mask."""
        attempt = self.local.begin(round_, 0, SITES)
        uploads = masked(self.local, attempt, {s: drawn(5, i) for i, s in enumerate(SITES)})
        return attempt, uploads

    def open_sum(self, round_: int, in_sum) -> None:
        """Sign and open the sum of these sites."""
        attempt, uploads = self.mask(round_)
        signatures = agreed(self.local, attempt.plan, in_sum)
        for site in in_sum:
            self.local.sites[site].open(open_request(attempt.plan, site, in_sum, uploads, signatures))
        add(attempt, uploads)
        for site, (_, attached) in uploads.items():
            self.local.coordinator.keep(site, attempt.plan, attached.next)

    def events(self, site: str) -> list[str]:
        return [str(line["event"]) for line in self.logs[site]]


@pytest.fixture
def logged() -> Logged:
    return Logged()


def test_a_round_has_a_line_for_each_answer(logged):
    attempt, uploads = logged.mask(round_=3)
    plan, in_sum, site = attempt.plan, SITES[:5], logged.local.sites["s01"]
    about = {"run": plan.run, "site": "s01", "round": 3, "attempt": 0, "plan": plan.digest}
    assert logged.logs["s01"] == [
        {
            **about, "event": "masked", "cohort": 6, "quorum": 5, "threshold": 5, "colluding": 1, "honest": 4,
            "roster": plan.roster, "config": plan.config, "app": "", "broadcast": "", "entries": "",
        }
    ]  # fmt: skip
    signatures = agreed(logged.local, plan, in_sum)
    about |= {"list": list_digest(plan.digest, in_sum), "summed": 5, "missing": ["s05"]}
    assert logged.logs["s01"][1:] == [{**about, "event": "signed"}]
    asked = open_request(plan, "s01", in_sum, uploads, signatures | {"s00": "0" * 128, "s05": "0" * 128})
    asked = changed(asked, rows={**asked.rows, "s02": asked.rows["s03"]})
    with pytest.raises(PolicyError):
        site.open(asked)  # a forged signature does not count, and the line names the rule
    signatures["s05"] = "0" * 128
    site.open(changed(asked, agreed=signatures))
    refused, opened = logged.logs["s01"][2:]
    assert (refused["event"], refused["request"], refused["rule"]) == ("sum-refused", "open", "O3")
    del signatures["s05"]
    assert opened == {
        **about, "event": "opened", "signatures": signatures, "unread": ("s02",), "distance": None,
    }  # fmt: skip


def test_a_repeated_answer_has_a_line_too(logged):
    attempt, uploads = logged.mask()
    plan, site = attempt.plan, logged.local.sites["s01"]
    for _ in range(2):
        site.agree(agree_request(plan, SITES))
        site.open(open_request(plan, "s01", SITES, uploads))
    assert logged.events("s01") == ["masked", "signed", "opened", "signed", "opened"]
    first, second = logged.logs["s01"][2], logged.logs["s01"][4]
    assert first["signatures"] == {}  # the whole cohort's list is opened without
    assert "repeated" not in first
    assert second["repeated"] is True
    assert second["list"] == first["list"]


def test_the_distance_to_the_last_sum_counts_the_sites_by_which_they_differ(logged, caplog):
    """h = 4: a difference of one site is close to its update, and so is warned of; none, or enough, is not."""
    for round_, in_sum in enumerate((SITES[:5], SITES[:5], SITES, [s for s in SITES if s != "s01"])):
        logged.open_sum(round_, in_sum)
    opened = [line["distance"] for line in logged.logs["s00"] if line["event"] == "opened"]
    assert opened == [None, 0, 1, 1]
    opened = [line["distance"] for line in logged.logs["s05"] if line["event"] == "opened"]
    assert opened == [None, 1]  # of the sums that this site opened
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert {text.split(":")[0] for text in warned} == {"this sum's sites differ from the last sum's by 1, fewer than 4"}
    assert len(warned) == 10  # five sites opened the third sum after the second, and five the fourth after the third


def test_keys_of_another_run_are_refused_with_a_line(logged):
    with pytest.raises(PolicyError):
        logged.local.sites["s01"].ready(KeysRequest(run="another-run"))
    (line,) = logged.logs["s01"]
    assert (line["event"], line["request"], line["rule"]) == ("sum-refused", "keys", "K1")


def test_a_boot_id_that_cannot_be_read_is_refused_with_a_line(logged):
    def fails() -> str:
        raise StateError("no boot id")

    attempt = logged.local.begin(0, 0, SITES)
    site = replace(logged.local.sites["s01"], boot=fails)
    with pytest.raises(StateError):
        site.begin(attempt.plan, logged.local.terms(attempt.plan))
    (line,) = logged.logs["s01"]
    assert (line["event"], line["rule"], line["reason"]) == ("sum-refused", "T9", "StateError: no boot id")


@pytest.mark.parametrize("event", ["masked", "signed", "opened"])
def test_a_line_that_cannot_be_written_lets_no_answer_leave(logged, event):
    def full(found: str, about) -> None:
        if found == event:
            raise StateError("a full disk")

    name = "s01"
    honest = logged.local.sites[name]
    logged.local.sites[name] = replace(honest, audit_log=full)
    attempt = logged.local.begin(0, 0, SITES)
    vector = drawn(5, 1)
    if event == "masked":
        with pytest.raises(StateError, match="a full disk"):
            logged.local.mask(name, attempt.plan, vector)
        assert vector.tolist() == drawn(5, 1).tolist()
        return
    uploads = masked(logged.local, attempt, {s: drawn(5, i) for i, s in enumerate(SITES)})
    site = logged.local.sites[name]
    ask = {
        "signed": lambda: site.agree(agree_request(attempt.plan, SITES)),
        "opened": lambda: site.open(open_request(attempt.plan, name, SITES, uploads)),
    }
    with pytest.raises(StateError, match="a full disk"):
        ask[event]()


def test_two_logs_of_an_honest_server_agree(logged):
    for round_ in range(2):
        logged.open_sum(round_, SITES[:5])
    first, second = logged.logs["s00"], logged.logs["s01"]
    assert count_common_plans(first, second) == 2
    assert find_conflicts([*first, *second]) == []


def test_two_logs_show_two_plans_of_one_attempt(logged):
    attempt = logged.local.begin(2, 0, SITES)
    decoy = changed(attempt.plan, config="ab" * 32)
    logged.local.mask("s00", attempt.plan, drawn(5, 0))
    terms = replace(logged.local.terms(decoy), config="ab" * 32)
    logged.local.sites["s01"].mask(decoy, terms, drawn(5, 0))
    (conflict,) = find_conflicts([*logged.logs["s00"], *logged.logs["s01"]])
    assert conflict.startswith(f"{attempt.plan.run}, round 3, attempt 1: the sites masked for 2 plans: ")
    assert f"plan {attempt.plan.digest} at s00; plan {decoy.digest} at s01" in conflict


def test_two_logs_show_two_lists_of_one_plan_and_who_signed_both(logged):
    """s05 works with the server and signs twice; s01 to s04 have signed the longer list."""
    attempt, uploads = logged.mask()
    plan, long, short = attempt.plan, SITES, SITES[1:]
    logged.local.sites["s00"].agree(agree_request(plan, long))
    fresh = logged.local.sites["s05"].store.load()
    signatures = {"s05": logged.local.sites["s05"].agree(agree_request(plan, long)).signature}
    logged.local.sites["s05"].store.save(fresh)
    signatures = agreed(logged.local, plan, short)
    logged.local.sites["s01"].open(open_request(plan, "s01", short, uploads, signatures))
    (conflict,) = find_conflicts([*logged.logs["s00"], *logged.logs["s01"]])
    assert conflict.startswith(f"plan {plan.digest}: sites signed 2 lists of its sum: ")
    assert "signed more than one" not in conflict
    (conflict,) = find_conflicts([*logged.logs["s05"][:2], *logged.logs["s01"]])  # s01's line names its signature
    assert conflict.endswith(". s05 signed more than one: it lied, or was rolled back")
