from __future__ import annotations

import os
import stat
import tracemalloc

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedveil.client_app.state.client_state import ClientStateStore
from fedveil.contract.method import FederatedState
from fedveil.encrypted_files import FileSeal
from fedveil.errors import ConfigError, StateError
from fedveil.records.atomic_files import write_atomic
from fedveil.records.tensor_state import _parts, load_state, save_state, state_digest

STATE = FederatedState(
    {"w": torch.arange(6.0).reshape(2, 3), "h": torch.ones(2, dtype=torch.bfloat16)}, {"round": 3, "who": ["a"]}
)


def test_round_trip_keeps_dtypes_and_scalars(tmp_path):
    save_state(STATE, tmp_path / "deep" / "s.safetensors")
    loaded = load_state(tmp_path / "deep" / "s.safetensors")
    assert state_digest(loaded.tensors) == state_digest(STATE.tensors)
    assert loaded.scalars == STATE.scalars
    assert stat.S_IMODE(os.stat(tmp_path / "deep" / "s.safetensors").st_mode) == 0o600


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "s"
    write_atomic(path, b"old")

    def crash(fd):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, b"new and longer")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("damage", [lambda d: d[: len(d) // 2], lambda d: b"", lambda d: b"\xff" * 40])
def test_a_damaged_file_is_refused(tmp_path, damage):
    path = tmp_path / "s"
    save_state(STATE, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StateError, match="cannot read a state file"):
        load_state(path)


def test_digest_sees_every_difference():
    other = [
        {"w": torch.zeros(2, 2)},
        {"w": torch.zeros(4)},
        {"v": torch.zeros(2, 2)},
        {"w": torch.zeros(2, 2, dtype=torch.int32)},
        {"w": torch.tensor([[0.0, 0.0], [0.0, -0.0]])},
        {},
    ]
    assert len({state_digest(w) for w in other}) == len(other)
    assert state_digest({"a": torch.ones(1), "b": torch.zeros(1)}) == state_digest(
        {"b": torch.zeros(1), "a": torch.ones(1)}
    )


def test_private_store_belongs_to_one_run_and_site(tmp_path):
    first, other = ClientStateStore.open(tmp_path, "run-1", "a"), ClientStateStore.open(tmp_path, "run-1", "b")
    first.save("1" * 16, "", STATE)
    state = ClientStateStore.open(tmp_path, "run-1", "a").load("1" * 16)
    assert (state_digest(state.tensors), state.scalars) == (state_digest(STATE.tensors), STATE.scalars)
    for store in (other, ClientStateStore.open(tmp_path, "run-2", "a")):
        assert store.load("1" * 16, is_new=True) is None
        with pytest.raises(
            StateError, match="private state: expected that of client round 1111111111111111 .*, found none"
        ):
            store.load("1" * 16)


def test_a_turn_goes_on_from_the_state_that_is_named_and_what_came_after_it_is_dropped(tmp_path):
    store = ClientStateStore.open(tmp_path, "r", "a")
    turns = [f"{n:016x}" for n in range(5)]

    def kept() -> list[str]:
        return [turn for turn in turns if (store.folder / f"turn-{turn}.safetensors").exists()]

    def state(value: float) -> FederatedState:
        return FederatedState({"w": torch.full((2,), value)}, {"n": value})

    store.save(turns[0], "", state(0.0))
    store.save(turns[1], turns[0], state(1.0))  # the server never takes it
    store.save(turns[2], turns[0], state(2.0))
    assert kept() == [turns[0], turns[2]]
    store.save(turns[3], turns[2], state(3.0))
    store.save(turns[4], turns[3], state(4.0))
    assert kept() == turns[2:]  # the one named last, the one before it, the newest
    assert store.load(turns[3]).scalars == {"n": 3.0}
    store.save(turns[4], turns[2], state(0.0))  # the server lost its last checkpoint
    assert kept() == [turns[2], turns[4]]
    store.save(turns[1], turns[2], None)
    assert kept() == [turns[2]]
    assert store.load("") is None


def test_client_secret_is_kept_unless_deterministic(tmp_path):
    store, other = ClientStateStore.open(tmp_path, "r", "a"), ClientStateStore.open(tmp_path, "r", "b")
    assert store.secret(0, "a", False) == store.secret(0, "a", False) != other.secret(0, "b", False)
    assert store.secret(0, "a", True) == other.secret(0, "a", True) != store.secret(0, "a", False)
    (store.folder / "secret").write_bytes(b"short")
    with pytest.raises(StateError, match="5 bytes: its checksum does not match its bytes.; restore"):
        store.secret(0, "a", False)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "x" * 65, "a b"])
def test_names_that_are_no_file_names_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="run.name: expected at most 64"):
        ClientStateStore.open(tmp_path, name, "a")
    with pytest.raises(ConfigError, match="site: expected at most 64"):
        ClientStateStore.open(tmp_path, "a", name)


def test_safetensors_itself_reads_what_is_written_whatever_the_dtype_and_shape(tmp_path):
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
    dtypes += [torch.int8, torch.uint8, torch.bool]
    tensors = {f"{i}": torch.arange(5 + i).to(d).reshape(1, -1).T for i, d in enumerate(dtypes)}
    tensors |= {"ä": torch.zeros(3, 0), "one": torch.tensor(2.5), "part": torch.arange(12.0).reshape(3, 4)[:, 1]}
    save_state(FederatedState(tensors, {"n": 1}), tmp_path / "s")
    loaded_tensors = load_file(tmp_path / "s")
    assert {n: (t.dtype, t.shape) for n, t in loaded_tensors.items()} == {
        n: (t.dtype, t.shape) for n, t in tensors.items()
    }
    assert all(torch.equal(loaded_tensors[n], tensors[n]) for n in tensors)
    assert state_digest(load_state(tmp_path / "s").tensors) == state_digest(tensors)


@pytest.mark.parametrize("seal", [FileSeal(), FileSeal(bytes(32))], ids=["clear", "encrypted"])
def test_a_large_state_is_written_from_its_own_memory_and_read_at_twice_its_size(tmp_path, seal):
    size = 32 << 20
    state, path = FederatedState({"a": torch.rand(size // 8), "b": torch.rand(size // 8)}), tmp_path / "s"
    tracemalloc.start()
    try:
        save_state(state, path, seal, "r")
        assert tracemalloc.get_traced_memory()[1] < size / 4
        tracemalloc.reset_peak()
        assert state_digest(load_state(path, seal, "r").tensors) == state_digest(state.tensors)
        assert tracemalloc.get_traced_memory()[1] < 2.2 * size
    finally:
        tracemalloc.stop()


def test_a_state_is_written_without_a_copy_of_it():
    tensors = {"a": torch.randn(1000), "b": torch.randn(10, 10)}
    parts = list(_parts(FederatedState(tensors)))[1:]
    assert [np.frombuffer(part).ctypes.data for part in parts] == [tensors[n].data_ptr() for n in "ab"]
