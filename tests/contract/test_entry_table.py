"""The table of senders per entry: its text, its checks, and the number of senders that an entry needs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.contract.entry_table import MAX_TABLE_CHARACTERS, EntryTable, fewest_senders, slice_name
from fedveil.errors import PolicyError, QuorumError, WireError
from fedveil.federation.secagg.plan import quorum_of

SITES = list("abcdefghij")  # q = 7, so that three may be silent and an entry needs six
BLOCKS = {"w": tuple("abcdef"), "v[0:2]": tuple(SITES), "v[2:5]": tuple("efghij"), "u": ()}


def table(blocks=BLOCKS, fewest: int = 6) -> EntryTable:
    return EntryTable(blocks=blocks, fewest=fewest)


def seeds(sites=SITES, fewest: int = 6) -> EntryTable:
    return EntryTable(seeds=dict.fromkeys(sites, f"{1:064x}"), common_seed="0" * 64, fewest=fewest)


@pytest.mark.parametrize("one", [table(), seeds()])
def test_the_text_is_canonical_and_read_back(one):
    text = one.to_text()
    assert EntryTable.from_text(text) == one
    assert EntryTable.from_text(text).digest == one.digest
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    for other in (text + " ", json.dumps(json.loads(text)), text.replace('"fewest":6', '"fewest":5,"fewest":6')):
        with pytest.raises(WireError, match="canonical JSON"):
            EntryTable.from_text(other)


def test_a_table_of_another_content_has_another_digest():
    other = [table(fewest=7), table({**BLOCKS, "u": tuple("abcdef")}), seeds(), seeds(SITES[:-1])]
    assert len({one.digest for one in (table(), *other)}) == 5


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "null", "[" * 100_000, '{"blocks":' * 50_000,
        '{"blocks":{"w":["b","a"]},"common_seed":"","fewest":3,"seeds":{}}',
        '{"blocks":{"w":["a","a"]},"common_seed":"","fewest":3,"seeds":{}}',
        '{"blocks":{"w":["../a"]},"common_seed":"","fewest":3,"seeds":{}}',
        '{"blocks":{"w\\n":["a"]},"common_seed":"","fewest":3,"seeds":{}}',
        '{"blocks":{"w":["a"]},"common_seed":"","fewest":"3","seeds":{}}',
        '{"blocks":{"w":["a"]},"common_seed":"","fewest":0,"seeds":{}}',
        '{"blocks":{"w":["a"]},"common_seed":"","fewest":3,"seeds":{},"more":1}',
        '{"blocks":{},"common_seed":"","fewest":3,"seeds":{}}',
        '{"blocks":{},"common_seed":"","fewest":3,"seeds":{"a":"' + "0" * 64 + '"}}',
        '{"blocks":{"w":["a"]},"common_seed":"' + "0" * 64 + '","fewest":3,"seeds":{"a":"' + "0" * 64 + '"}}',
        '{"blocks":{},"common_seed":"' + "0" * 64 + '","fewest":3,"seeds":{"a":"' + "g" * 64 + '"}}',
    ],
)  # fmt: skip
def test_any_other_text_is_refused(text):
    with pytest.raises(WireError, match="entries: "):
        EntryTable.from_text(text)


def test_a_text_that_is_too_long_is_refused_before_it_is_read():
    with pytest.raises(WireError, match="at most"):
        EntryTable.from_text(" " * (MAX_TABLE_CHARACTERS + 1))


@pytest.mark.parametrize(
    "names", [("w", "w[0:2]"), ("w[0:2]", "w[1:3]"), ("w[0:9]", "w[2:3]"), ("w[2:2]",), ("w[3:2]", "w[5:6]")]
)
def test_blocks_that_overlap_are_refused(names):
    text = json.dumps(
        {"blocks": {name: ["a", "b", "c"] for name in names}, "common_seed": "", "fewest": 3, "seeds": {}},
        sort_keys=True,
        separators=(",", ":"),
    )
    with pytest.raises(WireError, match="entries: "):
        EntryTable.from_text(text)


def test_a_site_sends_the_names_of_its_blocks_and_its_first_ranks():
    assert table().names_of("a") == {"w", "v"}
    assert table().names_of("j") == {"v"}
    assert table().names_of("z") == frozenset()
    assert seeds().names_of("a") is None
    assert [table().first_ranks("v", site) for site in ("a", "e", "z")] == [2, 5, 0]
    with pytest.raises(WireError, match="first ranks"):
        table({slice_name("v", 0, 2): tuple("abcdef"), slice_name("v", 2, 5): tuple("efghij")}).first_ranks("v", "j")


@pytest.mark.parametrize("one", [table(), seeds()])
def test_a_cohort_is_summed_by_a_table_in_which_each_entry_has_enough_senders(one):
    one.require_cohort(SITES, 3, 7, 1)
    with pytest.raises(PolicyError, match="2 may collude with the server, a sum needs at least 4 sites"):
        one.require_cohort(SITES, 3, 7, 2)
    with pytest.raises(PolicyError, match="at least 7 of the 10 sites"):
        one.require_cohort(SITES, 3, 6, 1)
    with pytest.raises(PolicyError, match="at least 7 of the 10 sites"):
        one.require_cohort(SITES, 4, 7, 1)


def test_a_table_of_too_few_senders_or_of_other_sites_is_refused():
    for blocks in ({"w": tuple("abcde")}, {"w": ("a",)}, {"w": tuple(SITES), "v[0:2]": tuple("abcde")}):
        with pytest.raises(PolicyError, match="none or at least 6 sites"):
            table(blocks).require_cohort(SITES, 3, 7, 1)
    with pytest.raises(PolicyError, match="names sites outside the cohort"):
        table({"w": tuple("abcdexyz")}).require_cohort(SITES, 3, 7, 1)
    for other in (SITES[:-1], [*SITES, "k"], [*SITES[:-1], "k"]):
        with pytest.raises(PolicyError, match="the seeds are not those of the cohort's sites"):
            seeds(other).require_cohort(SITES, 3, 7, 1)
    several = seeds().model_copy(update={"seeds": {site: f"{i % 2:064x}" for i, site in enumerate(SITES)}})
    with pytest.raises(PolicyError, match="expected one seed for all 10 sites, found several"):
        several.require_cohort(SITES, 3, 7, 1)


def test_a_sum_has_enough_sites_behind_each_entry_or_is_not_opened():
    for silent in ("", "abc", "hij", "efg"):
        in_sum = [site for site in SITES if site not in silent]
        table().require_sum(SITES, in_sum, 3)
        seeds().require_sum(SITES, in_sum, 3)
    with pytest.raises(QuorumError, match=r"w: .* found 2"):
        table().require_sum(SITES, set(SITES) - set("abcd"), 3)
    table().require_sum(SITES, set(SITES) - set("abcdef"), 3)  # nobody sends w then
    with pytest.raises(QuorumError, match="at most 3 sites may be silent, but 4 are"):
        seeds().require_sum(SITES, set(SITES) - set("abcd"), 3)


@given(st.integers(2, 40), st.integers(2, 10), st.integers(1, 40), st.data())
def test_whoever_is_silent_enough_senders_stay_in_the_sum(cohort, least, quorum, data):
    """The number is tight: with one sender less, some sites could be silent so that too few stay."""
    if cohort < max(least, quorum):
        return
    fewest = fewest_senders(cohort, least, quorum)
    silent = cohort - max(quorum, least)
    assert fewest <= cohort
    assert fewest - silent == least
    sites = [f"s{i:02}" for i in range(cohort)]
    senders = tuple(sorted(data.draw(st.permutations(sites))[: data.draw(st.integers(fewest, cohort))]))
    one = EntryTable(blocks={"w": senders}, fewest=fewest)
    one.require_cohort(sites, least, quorum, least - 2)
    gone = data.draw(st.permutations(sites))[:silent]
    one.require_sum(sites, set(sites) - set(gone), least)


def test_a_quorum_is_more_than_half_of_the_cohort_and_its_colluders():
    assert [quorum_of(0, m, 1) for m in (3, 4, 5, 8, 10, 30)] == [3, 3, 4, 6, 7, 21]
    assert quorum_of(6, 10, 1) == 6
    for colluders in range(9):
        quorum = quorum_of(0, 10, colluders)
        assert 2 * quorum > 10 + colluders
        assert quorum == 7 or 2 * (quorum - 1) <= 10 + colluders
