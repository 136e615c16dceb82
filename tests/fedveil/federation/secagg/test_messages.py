"""What goes between the sites: round trips, and nothing but WireError for whatever else comes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import WireError
from fedveil.federation.secagg.messages import (
    AgreeRequest,
    AgreeResponse,
    KeysRequest,
    KeysResponse,
    OpenRequest,
    OpenResponse,
    UploadAttachment,
    parse_request,
)
from fedveil.federation.secagg.plan import AttemptPlan, Prekey, list_digest
from fedveil.federation.secagg.roster import SigningKeyRoster
from fedveil.federation.secagg.state import Fence, LivePlan, SiteSecAggState, UnspentPrekey
from tests.fedveil.federation.secagg.sites import agree_request, agreed, drawn, masked, names, open_request, run

KINDS = [
    UploadAttachment,
    Prekey,
    KeysRequest,
    KeysResponse,
    SiteSecAggState,
    LivePlan,
    AgreeRequest,
    AgreeResponse,
    OpenRequest,
    OpenResponse,
    AttemptPlan,
    SigningKeyRoster,
]
HEX32, HEX64, HEX88, HEX128 = ("ab" * n for n in (16, 32, 44, 64))

name = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
number = st.integers(0, (1 << 53) - 1)


def hexes(digits: int):
    return st.text("0123456789abcdef", min_size=digits, max_size=digits)


@pytest.fixture(scope="module")
def said():
    """One genuine statement of each kind, from a round of four; the last one is silent."""
    sites = names(4)
    local = run(sites)
    attempt = local.begin(0, 0, sites)
    uploads = masked(local, attempt, {s: drawn(2, i) for i, s in enumerate(sites[:3])})
    plan, in_sum, site = attempt.plan, sites[:3], local.sites["s01"]
    asked = agree_request(plan, in_sum)
    wanted = open_request(plan, "s01", in_sum, uploads, agreed(local, plan, in_sum))
    opened = site.open(wanted)
    state = site.store.load()
    keys = local.coordinator.request()
    statements = [
        uploads["s01"][1], plan, plan.members[0], keys, site.ready(keys), asked, site.agree(asked), wanted, opened,
        state, state.live, SigningKeyRoster.from_bytes(local.roster.encode()),
    ]  # fmt: skip
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
    prekey=st.builds(Prekey, site=name, signing_key=hexes(64), number=number, key=hexes(64), signature=hexes(128)),
    rows=st.dictionaries(name, hexes(88), max_size=4),
    position=st.none() | st.tuples(number, number),
    bound=st.floats(1e-300, 1e9, exclude_min=True),
)
def test_any_value_of_the_form_comes_back(prekey, rows, position, bound):
    attached = UploadAttachment(
        plan=HEX64, own=HEX64, pairs=dict.fromkeys(rows, HEX64), rows=rows, shares=dict.fromkeys(rows, (HEX32,)),
        vector=HEX64, next=prekey, signature=HEX128,
    )  # fmt: skip
    plan = AttemptPlan(
        run="r", round=0, attempt=1, roster="", app="", config=HEX64, broadcast="", entries="", bits=32, most_weight=1,
        bound=bound, noise="site", least=1, colluding=0, quorum=1, threshold=1, neighbours=0, members=(prekey,),
    )  # fmt: skip
    state = SiteSecAggState(
        next=UnspentPrekey(number=3, private=HEX64), number=4, fence=Fence(masked=position, signed=None, kept=True)
    )
    for statement in (attached, plan, state):
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
    b'{"kind": "keys", "run": "\xff"}',
    b'{"kind": "keys", "run": "\\ud800"}',
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
    defaults = {"next", "number", "live", "fence", "last_sum"} if kind is SiteSecAggState else {"kind"}
    for field in whole.keys() - defaults:
        with pytest.raises(WireError):
            kind.from_bytes(json.dumps({k: v for k, v in whole.items() if k != field}).encode())


def test_of_a_key_said_twice_the_last_one_counts_and_it_is_what_the_digest_is_of():
    """So no two readers of a statement can read it as two: only what was read is digested."""
    twice = KeysRequest.from_bytes(b'{"kind": "keys", "run": "a", "run": "b"}')
    assert twice == KeysRequest(run="b")
    assert twice.digest == KeysRequest(run="b").digest
    roster = SigningKeyRoster.from_bytes(f'{{"signing_keys": {{"a": "{HEX64}", "a": "{"cd" * 32}"}}}}'.encode())
    assert roster.signing_keys == {"a": "cd" * 32}


def test_a_number_of_another_form_is_digested_as_it_is_written_again(said):
    plan = said[AttemptPlan]
    whole = plan.to_bytes()
    assert b'"bound":64.0' in whole
    assert AttemptPlan.from_bytes(whole.replace(b'"bound":64.0', b'"bound": 64')).digest == plan.digest


def test_a_statement_larger_than_any_is_refused_before_it_is_read():
    for parse in (KeysRequest.from_bytes, parse_request):
        with pytest.raises(WireError, match="expected at most"):
            parse(bytes((64 << 20) + 1))


def test_a_request_is_read_by_its_kind_and_nothing_else_is_one(said):
    for kind in (KeysRequest, AgreeRequest, OpenRequest):
        assert parse_request(said[kind].to_bytes()) == said[kind]
    for other in (said[OpenResponse].to_bytes(), said[AttemptPlan].to_bytes(), *ODD):
        with pytest.raises(WireError):
            parse_request(other)


@pytest.mark.parametrize(
    "update",
    [
        {"neighbours": 1},
        {"neighbours": 3},
        {"neighbours": 4},
        {"neighbours": -2},
        {"neighbours": 256},
        {"threshold": 0},
        {"quorum": 0},
        {"colluding": -1},
        {"most_weight": 0},
        {"bound": 0.0},
        {"roster": "ab" * 32},
        {"config": ""},
        {"noise": "both"},
    ],
)
def test_a_plan_that_cannot_be(said, update):
    whole = json.loads(said[AttemptPlan].to_bytes())
    assert len(AttemptPlan.from_bytes(json.dumps(whole).encode()).members) == 4
    with pytest.raises(WireError):
        AttemptPlan.from_bytes(json.dumps(whole | update).encode())


def test_a_plan_names_each_site_once_in_order(said):
    whole = json.loads(said[AttemptPlan].to_bytes())
    first, second, *others = whole["members"]
    for members in ([second, first, *others], [first, first], []):
        with pytest.raises(WireError):
            AttemptPlan.from_bytes(json.dumps(whole | {"members": members}).encode())


def test_the_digest_of_a_list_is_of_its_plan_and_its_sites_in_any_order():
    listed = list_digest(HEX64, ["s00", "s01"])
    assert listed == list_digest(HEX64, ["s01", "s00"])
    others = {list_digest(HEX64, of) for of in (["s00"], ["s00", "s02"], ["s00s01"], ["s00,s01"], [])}
    assert len({listed, list_digest("cd" * 32, ["s00", "s01"]), *others}) == 7


def test_a_copy_has_a_digest_of_its_own():
    request = KeysRequest(run="a")
    before = request.digest
    assert request.model_copy(update={"run": "another"}).digest == KeysRequest(run="another").digest != before
    assert request.digest == before
