"""What goes between the sites: round trips, and nothing but WireError for whatever else comes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import WireError
from fedveil.federation.secagg.membership import EncryptedShares, PrekeyBundle, RoundPrekey, RunMember, RunMembership
from fedveil.federation.secagg.messages import (
    AttemptPlan,
    MembershipRequest,
    PrekeyRequest,
    UnmaskRequest,
    UnmaskResponse,
    UploadAttachment,
)
from fedveil.federation.secagg.state import SiteSecAggState
from tests.fedveil.federation.secagg.sites import drawn, masked, names, question, run

KINDS = [
    UploadAttachment,
    PrekeyBundle,
    MembershipRequest,
    SiteSecAggState,
    RunMember,
    RunMembership,
    UnmaskResponse,
    AttemptPlan,
    RoundPrekey,
    PrekeyRequest,
    EncryptedShares,
    UnmaskRequest,
]
HEX64, HEX32, HEX88, HEX128 = ("ab" * n for n in (32, 16, 44, 64))

name = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
number = st.integers(0, (1 << 53) - 1)


def hexes(digits: int):
    return st.text("0123456789abcdef", min_size=digits, max_size=digits)


@pytest.fixture(scope="module")
def said():
    """One genuine statement of each kind, from a round of four."""
    sites = names(4)
    local = run(sites)
    attempt = local.begin(0, 0, sites)
    uploads = masked(local, attempt, {s: drawn(2, i) for i, s in enumerate(sites[:3])})
    asked = question(attempt.plan, attempt, "s01", sites[:3], uploads)
    site, attached = local.sites["s01"], uploads["s01"][1]
    opened = site.unmask(asked)
    setup = local.coordinator.settle_on(sites)
    statements = [
        attached,
        attached.next,
        attached.shares,
        attached.next.prekey,
        local.coordinator.hello(),
        opened,
        asked,
    ]
    statements += [setup, setup.membership, setup.membership.members[0], attempt.plan, site.store.load()]
    return {type(statement): statement for statement in statements}


@pytest.mark.parametrize("kind", KINDS)
def test_a_statement_comes_back_and_its_digest_with_it(said, kind):
    statement = said[kind]
    again = kind.from_bytes(statement.to_bytes())
    assert again == statement
    assert again.to_bytes() == statement.to_bytes()
    assert again.digest == statement.digest
    assert kind.from_bytes(memoryview(statement.to_bytes())) == statement


@settings(max_examples=40, deadline=None)
@given(
    prekey=st.builds(RoundPrekey, site=name, number=number, key=hexes(64), shares=hexes(64), signature=hexes(128)),
    closed=st.dictionaries(name, hexes(88), max_size=4),
    bound=st.floats(1e-300, 1e9, exclude_min=True),
)
def test_any_value_of_the_form_comes_back(prekey, closed, bound):
    bundle = PrekeyBundle(
        prekey=prekey, shares=EncryptedShares(closed=closed, digests=dict.fromkeys(closed, "ab" * 16))
    )
    plan = AttemptPlan(run="r", round=0, attempt=1, membership=HEX64, bits=32, most_weight=1, bound=bound, least=1,
                prekeys=(prekey,))  # fmt: skip
    for statement in (bundle, plan):
        again = type(statement).from_bytes(statement.to_bytes())
        assert again == statement
        assert again.digest == statement.digest


ODD = [
    b"",
    b"null",
    b"[]",
    b"0",
    b'"',
    b"{",
    b"{}" * 2,
    b"\xff\xfe",
    b'{"kind": "hello", "run": "\xff"}',
    b'{"kind": "hello", "run": "\\ud800"}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"run":' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"number": ' + b"9" * 100_000 + b"}",
    b'{"number": 1e400, "bound": NaN}',
    b'{"bound": Infinity}',
    b"\x00" * 4096,
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", ODD, ids=range(len(ODD)))
def test_what_is_no_statement_is_refused(kind, data):
    with pytest.raises(WireError):
        kind.from_bytes(data)


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=200), kind=st.sampled_from(KINDS))
def test_random_bytes_are_refused(data, kind):
    with pytest.raises(WireError):
        kind.from_bytes(data)


WRONG = [
    None,
    True,
    -1,
    0.5,
    1 << 53,
    1 << 70,
    "",
    "x" * 100_000,
    "ü",
    "a\n",
    "s00\n",
    "../s00",
    [],
    {},
    [[]],
    {"a": {}},
]


def spots(value, path=()):
    """Every place in a statement."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from spots(inner, (*path, key))


def replaced(value, path, by):
    if not path:
        return by
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], by)
    return copy


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_value_anywhere_is_refused_or_is_another_statement(said, kind):
    """Of lists, the first two entries."""
    whole = json.loads(said[kind].to_bytes())
    refused = 0
    for path in spots(whole):
        if any(isinstance(key, int) and key > 1 for key in path):
            continue
        for wrong in WRONG:
            data = json.dumps(replaced(whole, path, wrong)).encode()
            try:
                statement = kind.from_bytes(data)
            except WireError:
                refused += 1
                continue
            assert kind.from_bytes(statement.to_bytes()) == statement
            assert statement != said[kind] or json.loads(data) == whole
    assert refused > 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_too_many_or_too_few_is_refused(said, kind):
    whole = json.loads(said[kind].to_bytes())
    with pytest.raises(WireError, match="extra"):
        kind.from_bytes(json.dumps(whole | {"patients": 1}).encode())
    defaults = {"kind", "prekeys", "seed", "membership", "answered"} if kind is SiteSecAggState else {"kind"}
    for field in whole.keys() - defaults:
        with pytest.raises(WireError):
            kind.from_bytes(json.dumps({k: v for k, v in whole.items() if k != field}).encode())


def test_of_a_key_said_twice_the_last_one_counts_and_it_is_what_the_digest_is_of():
    """So no two readers of a statement can read it as two: only what was read is digested."""
    twice = MembershipRequest.from_bytes(b'{"kind": "hello", "run": "a", "run": "b"}')
    assert twice == MembershipRequest(run="b")
    assert twice.digest == MembershipRequest(run="b").digest
    closed = EncryptedShares.from_bytes(
        f'{{"closed": {{"a": "{HEX88}", "a": "{"cd" * 44}"}}, "digests": {{}}}}'.encode()
    )
    assert closed.closed == {"a": "cd" * 44}


def test_a_statement_larger_than_any_is_refused_before_it_is_read():
    with pytest.raises(WireError, match="expected at most"):
        MembershipRequest.from_bytes(bytes((64 << 20) + 1))


def member(site: str, key: str = HEX64) -> dict:
    return {"name": site, "signing_key": key, "run_key": key, "signature": HEX128}


@pytest.mark.parametrize(
    "update",
    [
        {"members": [member("b"), member("a"), member("c")]},
        {"members": [member("a"), member("a"), member("c")]},
        {"members": []},
        {"neighbours": 1},
        {"neighbours": 4},
        {"neighbours": -2},
        {"threshold": 4},
        {"threshold": 0},
        {"neighbours": 2, "threshold": 3},
    ],
)
def test_a_membership_that_cannot_be(update):
    whole = {"run": "r", "neighbours": 0, "threshold": 2, "members": [member(s) for s in "abc"]}
    assert RunMembership.from_bytes(json.dumps(whole).encode()).count == 3
    with pytest.raises(WireError):
        RunMembership.from_bytes(json.dumps(whole | update).encode())


def test_a_plan_names_each_site_once_in_order(said):
    whole = json.loads(said[AttemptPlan].to_bytes())
    first, second, *others = whole["prekeys"]
    for prekeys in ([second, first, *others], [first, first], []):
        with pytest.raises(WireError):
            AttemptPlan.from_bytes(json.dumps(whole | {"prekeys": prekeys}).encode())


def test_the_context_of_a_question_is_its_plan_and_its_sum_in_any_order(said):
    asked = said[UnmaskRequest]

    def context(**update):
        return UnmaskRequest.from_bytes(json.dumps(json.loads(asked.to_bytes()) | update).encode()).context

    assert context() == context(in_sum=list(reversed(asked.in_sum)))
    others = {context(in_sum=["s00"]), context(in_sum=["s00", "s02"]), context(in_sum=["s00s01"])}
    others.add(context(plan=json.loads(asked.plan.to_bytes()) | {"attempt": 5}))
    assert len({context(), *others}) == 5
