"""A server that broadcasts what no run would, and a site that looks before it trains."""

from __future__ import annotations

import base64
import json
import math
import tomllib
from dataclasses import replace

import pytest
import torch

from fedveil.client_app.app import public_reason
from fedveil.client_app.guards.broadcast_guard import (
    BroadcastGuard,
    BroadcastReference,
    BroadcastReferenceStore,
    weights_norm,
)
from fedveil.client_app.node_config import SiteConfig
from fedveil.client_app.policy import decisions
from fedveil.client_app.policy.site_policy import SitePolicy, load_policy
from fedveil.client_app.state.client_state import ClientStateStore
from fedveil.contract.method import FederatedState
from fedveil.contract.param_spec import ParamSpec
from fedveil.contract.trainer import BatchIndices
from fedveil.contract.trainer_wrappers import WrappedGradientSource
from fedveil.errors import PolicyError, StateError, WireError
from fedveil.records.atomic_files import write_checksummed
from tests.client_app.one_site import Server
from tests.conftest import ToyTrainer

GRADIENT = {"method.name": "random_binary", "method.params": 'rate = 0.0\nadapter = {kind = "lora"}'}
ROWS = {"method.name": "fedavg", "dp.clip-norm": 1.0, "dp.noise-multiplier": 0.0, "train.max-steps": 1}


def times(weights, factor: float) -> dict:
    return {name: factor * w for name, w in weights.items()}


@pytest.mark.long
def test_the_first_broadcast_is_judged_against_what_the_seed_says(tmp_path):
    server = Server(tmp_path, "max-broadcast-change = 0.01")
    assert server.send(server.initial)
    (tmp_path / "other").mkdir()
    other = Server(tmp_path / "other", "max-broadcast-change = 0.01")
    with pytest.raises(PolicyError, match="broadcast: this site permits a change of at most 0.01 .* found more"):
        other.send(times(other.initial, 1.1))
    assert (other.looked, other.kept) == (0, None)
    assert not list(ClientStateStore.open(other.at, "r", "s").folder.glob("turn-*"))


@pytest.mark.long
@pytest.mark.parametrize("config", [{}, GRADIENT, ROWS, {"method.name": "fedrand"}])
def test_whatever_asks_for_the_rows_the_weights_are_judged_before(config, tmp_path):
    server = Server(tmp_path, **config)
    with pytest.raises(PolicyError, match="max-broadcast-change"):
        server.send(times(server.initial, 1e3))
    assert server.looked == 0
    assert server.send(server.initial)


@pytest.mark.long
def test_a_later_broadcast_is_judged_against_the_last_that_was_trained_from(tmp_path):
    server = Server(tmp_path, "max-broadcast-change = 0.3")
    for round_, factor in enumerate((1.0, 1.2, 1.45)):
        assert server.send(times(server.initial, factor), round_)
    with pytest.raises(PolicyError, match="change"):
        server.send(times(server.initial, 2.5), 3)
    assert server.send(times(server.initial, 1.75), 3)  # what was refused does not count
    norm = sum(float(w.square().sum()) for w in server.initial.values()) ** 0.5
    assert sum(t.norm**2 for t in server.kept.last.values()) ** 0.5 == pytest.approx(1.75 * norm)
    assert sum(t.norm**2 for t in server.kept.first.values()) ** 0.5 == pytest.approx(norm)


def test_one_layer_among_many_does_not_drown(tmp_path):
    """The change of one B among 32 tensors: a sixth of the norm of all together."""
    server = Server(tmp_path, "max-broadcast-change = 1.0")
    name = next(n for n in server.initial if n.endswith("lora_B"))
    hostile = {**server.initial, name: torch.zeros_like(server.initial[name])}
    hostile[name][0, 0] = 1.0
    assert sum(float(w.square().sum()) for w in server.initial.values()) > 36.0
    with pytest.raises(PolicyError, match="change"):
        server.send({**hostile, name: hostile[name].index_fill(0, torch.arange(3), 0.8)})
    assert server.send(server.initial)


def test_zeros_in_between_do_not_open_the_bound(tmp_path):
    server = Server(tmp_path, "max-broadcast-change = 2.0")
    assert server.send(server.initial)
    assert server.send(times(server.initial, 0.0), 1)
    with pytest.raises(PolicyError, match="max-broadcast-change"):
        server.send(times(server.initial, 5.0), 2)


@pytest.mark.long
def test_a_norm_is_bounded_where_the_site_says_so(tmp_path):
    server = Server(tmp_path, "max-broadcast-norm = 3.0")
    with pytest.raises(PolicyError, match="a norm of at most 3 .max-broadcast-norm., found more"):
        server.send(server.initial)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_value_that_is_not_finite_is_refused(value, tmp_path):
    server = Server(tmp_path)
    name = next(iter(server.initial))
    bad = {**server.initial, name: torch.full_like(server.initial[name], value)}
    with pytest.raises((WireError, PolicyError), match="NaN or infinity|change") as caught:
        server.send(bad)
    assert server.looked == 0
    assert public_reason(caught.value).startswith(("WireError", "PolicyError"))


def test_the_server_learns_neither_norm_nor_change(tmp_path):
    server = Server(tmp_path)
    with pytest.raises(PolicyError) as caught:
        server.send(times(server.initial, 1234.5))
    assert "123" not in str(caught.value)


def test_a_turn_that_fails_afterwards_leaves_the_reference(tmp_path):
    server = Server(tmp_path, "min-examples = 100")
    with pytest.raises(PolicyError, match="examples"):
        server.send(server.initial)
    assert server.kept is None


GOOD = [1.0, 5, base64.b64encode(bytes(8 * 64)).decode()]


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[]",
        {"first": {}, "last": {}},
        {"key": "00", "first": {}, "last": {}},
        {"key": "0g" * 32, "first": {}, "last": {}},
        {"key": "00" * 32, "last": {"a": GOOD}},
        {"key": "00" * 32, "first": {"a": GOOD}},
        {"key": "00" * 32, "first": {"a": GOOD}, "last": {"b": GOOD}},
        {"key": "00" * 32, "first": {"a": GOOD}, "last": []},
        {"key": "00" * 32, "first": {"a": GOOD}, "last": {"a": [1.0, 5, "AAAA"]}},
        {"key": "00" * 32, "first": {"a": GOOD}, "last": {"a": [float("nan"), *GOOD[1:]]}},
        {"key": "00" * 32, "first": {"a": [float("inf"), *GOOD[1:]]}, "last": {"a": GOOD}},
        {"key": "00" * 32, "first": {"a": GOOD}, "last": {"a": GOOD[:2]}},
        {"key": "00" * 32, "first": {"a": GOOD}, "last": {"a": [*GOOD[:2], base64.b64encode(b"\xff" * 512).decode()]}},
    ],
)
def test_a_damaged_file_refuses(damage, tmp_path):
    data = damage.encode() if isinstance(damage, str) else b"[]" if damage == [] else write_checksummed(damage)
    (tmp_path / "received.json").write_bytes(data)
    with pytest.raises(StateError, match="restore it from a backup"):
        BroadcastReferenceStore(tmp_path).load()


def test_a_file_without_a_checksum_refuses(tmp_path):
    good = {"key": "00" * 32, "first": {"a": GOOD}, "last": {"a": GOOD}}
    (tmp_path / "received.json").write_bytes(write_checksummed(good))
    assert BroadcastReferenceStore(tmp_path).load().last["a"].norm == 1.0
    (tmp_path / "received.json").write_text(json.dumps(good))
    with pytest.raises(StateError, match="checksum"):
        BroadcastReferenceStore(tmp_path).load()


def test_every_changed_byte_of_the_file_is_found(tmp_path):
    """Without a checksum, 926 of 1,514 such changes loaded as another reference."""
    store = BroadcastReferenceStore(tmp_path)
    store.save(BroadcastReference.from_weights({"a": torch.arange(5.0)}, bytes(32)))
    data = (tmp_path / "received.json").read_bytes()
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        (tmp_path / "received.json").write_bytes(changed)
        with pytest.raises(StateError, match="restore it from a backup"):
            store.load()


@pytest.mark.parametrize("part", ["norm", "sketch", "other"])
@pytest.mark.parametrize("names", ["ab", "ba"])
def test_a_distance_that_is_not_a_number_is_refused(part, names):
    """`max([0.0, nan])` is 0.0, so a comparison that ignores NaN would permit any weights."""
    nan = float("nan")
    reference = BroadcastReference.from_weights({name: one(1.0) for name in names}, bytes(32))
    bad = reference.last["a"]
    if part != "other":
        bad = replace(bad, **{part: nan if part == "norm" else bad.sketch * nan})
    reference = replace(reference, last={**reference.last, "a": bad})
    weights = {name: one(nan if part == "other" and name == "a" else 1.0) for name in names}  # the others do not move
    change, _ = reference.distances(weights)
    with pytest.raises(PolicyError, match="max-broadcast-change"):
        decisions.check_broadcast(SitePolicy(**{"max-broadcast-change": 2.0}), 1.0, change, 0.0)


def test_a_damaged_file_refuses_the_client_round(tmp_path):
    server = Server(tmp_path)
    file = tmp_path / "r" / "s" / "received.json"
    file.parent.mkdir(parents=True)
    file.write_text("{")
    with pytest.raises(StateError, match="restore it from a backup"):
        server.send(server.initial)
    assert server.looked == 0


def test_the_reference_is_kept_as_it_was(tmp_path):
    weights = FederatedState({"a": torch.arange(5.0)}).tensors
    made = BroadcastReference.from_weights(weights).then(times(weights, 0.5))
    store = BroadcastReferenceStore(tmp_path / "r" / "s")
    store.save(made)
    reference = store.load()
    assert reference.key == made.key
    for part, other in ((reference.first["a"], made.first["a"]), (reference.last["a"], made.last["a"])):
        assert (part.norm, part.entries) == (other.norm, 5)
        assert torch.equal(part.sketch, other.sketch)
    assert not torch.equal(reference.first["a"].sketch, reference.last["a"].sketch)
    assert reference.last["a"].norm == reference.first["a"].norm  # the largest so far
    assert (tmp_path / "r" / "s" / "received.json").stat().st_mode & 0o077 == 0
    assert (tmp_path / "r" / "s" / "received.json").stat().st_size < 12_000


# The numbers themselves. A sketch is exact for a difference in one entry, so every expected value here is.


def one(value: float, entries: int = 4) -> torch.Tensor:
    """A tensor with one entry that is not 0."""
    return torch.tensor([value] + [0.0] * (entries - 1))


FIRST = {"a": torch.tensor([3.0, 4.0, 0.0, 0.0]), "b": torch.zeros(12)}  # rms of a 2.5, of all 5 / 4


def moved(name: str, by: float, weights=FIRST) -> dict[str, torch.Tensor]:
    """The weights with one entry of a tensor moved."""
    return {**weights, name: weights[name] + by * torch.eye(weights[name].numel())[1]}


@pytest.mark.parametrize(
    ("name", "by", "expected"),
    [("a", 1.0, 0.2), ("a", -1.0, 0.2), ("a", 7.0, 1.4), ("b", 1.0, 12**-0.5 / 1.25), ("b", -5.0, 5 * 12**-0.5 / 1.25)],
)
def test_a_distance_is_by_the_formula(name, by, expected):
    """A tensor is measured by its own rms, a smaller one by that of all together."""
    assert BroadcastReference.from_weights(FIRST).distances(moved(name, by)) == pytest.approx((expected, expected))


def test_a_distance_is_that_of_the_tensor_that_moved_most():
    reference = BroadcastReference.from_weights(FIRST)
    assert reference.distances(moved("b", 1.0, moved("a", 7.0)))[0] == pytest.approx(1.4)
    assert reference.distances(moved("b", 9.0, moved("a", 1.0)))[0] == pytest.approx(9 * 12**-0.5 / 1.25)


def test_a_change_is_by_the_largest_norm_so_far_and_a_drift_by_the_first():
    reference = BroadcastReference.from_weights({"a": one(1.0)})
    for now, change, drift in ((2.0, 1.0, 1.0), (4.0, 1.0, 3.0), (1.0, 0.75, 0.0), (3.0, 0.5, 2.0), (8.0, 1.25, 7.0)):
        assert reference.distances({"a": one(now)}) == pytest.approx((change, drift))
        reference = reference.then({"a": one(now)})


def test_what_was_zero_everywhere_measures_nothing_until_something_was_not():
    reference = BroadcastReference.from_weights({"a": torch.zeros(4), "b": torch.zeros(2)})
    assert reference.distances({"a": one(5.0), "b": one(5.0, 2)}) == (0.0, 0.0)
    reference = reference.then({"a": one(5.0), "b": torch.zeros(2)})
    assert reference.distances({"a": one(6.0), "b": torch.zeros(2)}) == pytest.approx((0.2, 0.0))
    of_all = 5 / 6**0.5
    assert reference.distances({"a": one(5.0), "b": one(3.0, 2)}) == pytest.approx((3 / 2**0.5 / of_all, 0.0))


@pytest.mark.parametrize("at", [0, 1])
def test_a_value_that_is_no_number_gives_no_number_whichever_tensor_has_it(at):
    weights = {name: w.clone() for name, w in FIRST.items()}
    weights["ab"[at]][0] = float("nan")
    assert all(map(math.isnan, BroadcastReference.from_weights(FIRST).distances(weights)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool])
def test_tensors_of_any_type_have_a_norm_and_a_distance(dtype):
    first, now = torch.tensor([1, 0, 0, 0], dtype=dtype), torch.tensor([1, 1, 0, 0], dtype=dtype)
    assert weights_norm({"a": now}) == pytest.approx(2**0.5)
    assert BroadcastReference.from_weights({"a": first}).distances({"a": now}) == pytest.approx((1.0, 1.0))


def test_tensors_without_entries_do_not_move():
    empty = {"a": torch.zeros(0), "b": one(2.0)}
    reference = BroadcastReference.from_weights(empty)
    assert reference.distances(empty) == (0.0, 0.0)
    assert reference.distances({**empty, "b": one(3.0)}) == pytest.approx((0.5, 0.5))
    assert BroadcastReference.from_weights({}).distances({}) == (0.0, 0.0)
    assert BroadcastReference.from_weights({"a": torch.zeros(0)}).distances({"a": torch.zeros(0)}) == (0.0, 0.0)


# The bounds, through the guard.


def judge(folder, weights, text: str = "", first=None) -> BroadcastGuard:
    """A client round from `weights`, in a process of its own."""
    policy = SitePolicy.model_validate(tomllib.loads(text))
    trainer = ToyTrainer({name: ParamSpec(tuple(w.shape)) for name, w in weights.items()})
    guard = BroadcastGuard(trainer, policy, BroadcastReferenceStore(folder), lambda: first or {"a": one(1.0)})
    guard.judge(weights)
    guard.keep()
    return guard


UNBOUNDED = {"max-broadcast-norm": 1e9, "max-broadcast-change": 1e9, "max-broadcast-drift": 1e9}


# Rounds that reach exactly 1.5 in the named number; those before it are the way there.
@pytest.mark.parametrize(
    ("key", "before", "weights"),
    [
        ("max-broadcast-norm", [], 1.5),
        ("max-broadcast-norm", [1.2], 1.5),
        ("max-broadcast-change", [], 2.5),
        ("max-broadcast-change", [], -0.5),
        ("max-broadcast-change", [4.0], 10.0),
        ("max-broadcast-change", [4.0, 2.0], 8.0),
        ("max-broadcast-drift", [], 2.5),
        ("max-broadcast-drift", [2.0], 2.5),
        ("max-broadcast-drift", [2.0, 0.5], -0.5),
        ("max-broadcast-drift", [9.0, -9.0], 2.5),
    ],
)
def test_each_bound_holds_just_below_and_just_above(key, before, weights, tmp_path):
    def policy(bound: float) -> str:
        return "\n".join(f"{k} = {v}" for k, v in (UNBOUNDED | {key: bound}).items())

    for value in before:
        judge(tmp_path, {"a": one(value)}, policy(1e9))
    with pytest.raises(PolicyError, match=key):
        judge(tmp_path, {"a": one(weights)}, policy(1.4999))
    judge(tmp_path, {"a": one(weights)}, policy(1.5001))


@pytest.mark.parametrize("key", ["norm", "change", "drift"])
def test_a_bound_itself_is_permitted_and_what_is_no_number_is_not(key):
    policy = SitePolicy.model_validate({f"max-broadcast-{key}": 1.5})
    figures = {"norm": 0.0, "change": 0.0, "drift": 0.0}
    decisions.check_broadcast(policy, **figures | {key: 1.5})
    for value in (math.nextafter(1.5, 2), math.inf, math.nan):
        with pytest.raises(PolicyError, match=f"max-broadcast-{key}|finite values"):
            decisions.check_broadcast(policy, **figures | {key: value})


def test_the_defaults_are_2_of_change_and_of_drift_and_no_norm(tmp_path):
    for name, values in {"change": [0.01, 2.02], "drift": [2.0, 3.02]}.items():
        *before, over = values
        for value in before:
            judge(tmp_path / name, {"a": one(value)})
        with pytest.raises(PolicyError, match=f"at most 2 .max-broadcast-{name}."):
            judge(tmp_path / name, {"a": one(over)})
        judge(tmp_path / name, {"a": one(over - 0.04)})
    assert SitePolicy().max_broadcast_norm is None


def test_a_site_without_a_policy_has_wide_bounds_and_one_with_a_policy_the_defaults(tmp_path):
    (tmp_path / "policy.toml").write_text("")
    for text, bound in (("", 10.0), (str(tmp_path / "policy.toml"), 2.0)):
        policy = load_policy(SiteConfig(policy=text))
        assert (policy.max_broadcast_change, policy.max_broadcast_drift) == (bound, bound)


def test_steps_below_the_bound_of_a_change_do_not_add_up(tmp_path):
    """Each step is a process of its own, as after a restart."""
    text = "max-broadcast-change = 1.0\nmax-broadcast-drift = 1.5"
    for part in range(1, 7):
        judge(tmp_path, {"a": one(1.0 + 0.25 * part)}, text)
    with pytest.raises(PolicyError, match="max-broadcast-drift"):
        judge(tmp_path, {"a": one(2.75)}, text)
    judge(tmp_path, {"a": one(2.5)}, text)


def test_a_lost_file_widens_no_bound(tmp_path):
    text = "max-broadcast-change = 1.0\nmax-broadcast-drift = 1.5"
    for value in (1.5, 2.25):
        judge(tmp_path, {"a": one(value)}, text)
    (tmp_path / "received.json").unlink()
    with pytest.raises(PolicyError, match="max-broadcast-change"):
        judge(tmp_path, {"a": one(2.5)}, text)
    judge(tmp_path, {"a": one(2.0)}, text)
    with pytest.raises(PolicyError, match="max-broadcast-drift"):
        judge(tmp_path, {"a": one(2.75)}, text)


def test_another_seed_in_a_later_round_does_not_move_the_first_weights(tmp_path):
    judge(tmp_path, {"a": one(1.0)})
    with pytest.raises(PolicyError, match="max-broadcast-drift"):
        judge(tmp_path, {"a": one(3.5)}, "max-broadcast-change = 9", first={"a": one(3.5)})


def test_each_run_has_first_weights_of_its_own(tmp_path):
    text = "max-broadcast-drift = 0.5\nmax-broadcast-change = 9"
    judge(tmp_path / "one", {"a": one(1.4)}, text)
    with pytest.raises(PolicyError, match="drift"):
        judge(tmp_path / "one", {"a": one(4.0)}, text)
    judge(tmp_path / "two", {"a": one(4.0)}, text, first={"a": one(4.0)})
    with pytest.raises(PolicyError, match="drift"):
        judge(tmp_path / "two", {"a": one(1.4)}, text, first={"a": one(4.0)})


@pytest.mark.parametrize("other", [{"a": one(4.0, 6)}, {"b": one(4.0)}, {"a": one(4.0), "b": one(0.0)}])
def test_other_tensors_than_the_last_time_are_judged_from_the_first_weights(other, tmp_path):
    judge(tmp_path, {"a": one(1.0)})
    first = {name: one(1.0 if name == min(other) else 0.0, w.numel()) for name, w in other.items()}
    with pytest.raises(PolicyError, match="max-broadcast-change"):
        judge(tmp_path, other, first=first)
    judge(tmp_path, first, first=first)


@pytest.mark.parametrize("other", [{}, {"b": one(1.0)}, {"a": one(1.0), "b": one(0.0)}, {"a": one(1.0, 5)}])
def test_tensors_that_the_run_does_not_train_are_refused(other, tmp_path):
    with pytest.raises(PolicyError, match="the weights do not match the 1 tensors"):
        judge(tmp_path, other)
    assert not (tmp_path / "received.json").exists()


def test_only_the_first_weights_of_a_client_round_are_judged(tmp_path):
    guard = judge(tmp_path, {"a": one(1.0)})
    guard.judge({"a": one(1e6)})
    guard.keep()
    assert BroadcastReferenceStore(tmp_path).load().last["a"].norm == 1.0


@pytest.mark.parametrize("call", ["train", "gradient", "per_sample", "feature"])
def test_every_way_to_the_examples_is_judged_before_they_are_read(call, tmp_path):
    class Read(Exception):
        """The examples are read."""

    def read(self, *_):
        raise Read

    rows = type("Rows", (WrappedGradientSource,), {"per_sample": read, "feature": read})
    trains = type("Trains", (ToyTrainer,), {"rows": rows(None), "train": read, "gradient": read})

    def ask(value: float) -> None:
        trainer, store = trains({"a": ParamSpec((4,))}), BroadcastReferenceStore(tmp_path)
        guard = BroadcastGuard(trainer, SitePolicy(), store, lambda: {"a": one(1.0)})
        if call in ("train", "gradient"):
            getattr(guard, call)({"a": one(value)})
        getattr(guard.rows, call)({"a": one(value)}, BatchIndices((0,)))

    with pytest.raises(PolicyError, match="max-broadcast-change"):
        ask(9.0)
    with pytest.raises(Read):
        ask(2.0)
