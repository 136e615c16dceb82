"""In memory up to a bound, beyond it on disk, with the same bits."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from fedveil.contract.method import FederatedState
from fedveil.errors import StateError
from fedveil.federation import client_states
from fedveil.federation.client_states import ClientStateCache
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.records.tensor_state import state_digest
from fedveil.strategies.fedper import FedPer
from tests.contract import test_contract as contract


def state(seed: int, dtype: torch.dtype = torch.float32) -> FederatedState:
    """400 bytes in fp32."""
    values = torch.randn(100, generator=torch.Generator().manual_seed(seed))
    return FederatedState({"w": values.to(dtype)}, {"turns": seed, "factor": "A"})


@pytest.fixture
def scratch(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def files(scratch: Path) -> list[Path]:
    return sorted(scratch.rglob("*.safetensors"))


def test_beyond_the_bound_states_lie_in_files_and_come_back_bit_for_bit(scratch):
    cache = ClientStateCache(900)
    given = {"a/b": state(1), "b": state(2, torch.bfloat16), "c": None, "d": state(3), "e": state(4, torch.bool)}
    for site, each in given.items():
        cache[site] = each
    assert cache.memory_bytes == 400 + 200 + 100
    assert len(files(scratch)) == 1  # of d
    for site, each in given.items():
        cached_state = cache[site]
        assert (cached_state is None) == (each is None)
        if each and cached_state:
            assert state_digest(cached_state.tensors) == state_digest(each.tensors)
            assert cached_state.scalars == each.scalars
    assert list(cache) == list(given)
    assert (scratch / files(scratch)[0].parent.name).stat().st_mode & 0o777 == 0o700


def test_what_is_replaced_frees_its_memory_or_its_file(scratch):
    cache = ClientStateCache(1000)
    for site in "abcd":
        cache[site] = state(1)
    assert (cache.memory_bytes, len(files(scratch))) == (800, 2)
    cache["c"] = None
    cache["a"] = None
    assert (cache.memory_bytes, len(files(scratch))) == (400, 1)
    del cache["d"]
    cache["d"] = state(5)
    assert (cache.memory_bytes, files(scratch)) == (800, [])


def test_the_round_under_way_counts_and_takes_effect_as_a_whole(scratch):
    cache = ClientStateCache(1000)
    cache["a"], cache["b"] = state(1), state(2)
    for site in "abc":
        cache.stage(site, state(7))
    assert (cache.memory_bytes, len(files(scratch))) == (800, 3)
    assert [cache[site].scalars["turns"] for site in "ab"] == [1, 2]
    assert cache.staged("c").scalars["turns"] == 7
    cache.discard()
    assert (cache.memory_bytes, files(scratch), list(cache)) == (800, [], ["a", "b"])
    cache.stage("a", state(8))
    cache.commit()
    assert (cache.memory_bytes, len(files(scratch)), cache["a"].scalars["turns"]) == (400, 1, 8)


@pytest.mark.long
def test_the_folder_goes_with_the_object(scratch):
    cache = ClientStateCache(0)
    cache["a"] = state(1)
    assert len(files(scratch)) == 1
    del cache
    gc.collect()
    assert list(scratch.iterdir()) == []


def test_a_state_that_cannot_be_written_costs_no_other(scratch, monkeypatch):
    cache = ClientStateCache(400)
    cache["a"] = state(1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(client_states, "save_state", full)
    with pytest.raises(StateError, match="a: cannot write its private state to .*No space left on device; free"):
        cache["a"] = state(2)
    assert cache["a"].scalars["turns"] == 1
    assert cache.memory_bytes == 400


def test_a_federation_ends_the_same_whatever_its_bound(scratch):
    exchange = MessageExchange(FedPer(), "fedper", contract.spec_for(FedPer()))
    ended = []
    for bound in (10**9, 0):
        whole = contract.federation(exchange)
        run = InProcessFederation(
            exchange, whole.config, whole.trainer_for, whole.sites, whole.server, private_bytes=bound
        )
        server = run.run()
        assert (run.private.memory_bytes == 0) == (bound == 0)
        states = {
            site: state_digest(client_state.tensors)
            for site, client_state in sorted(run.private.items())
            if client_state
        }
        assert len(states) == len(run.participated) > 1
        ended.append((state_digest(server.tensors), states))
    assert ended[0] == ended[1]
    assert len(files(scratch)) == len(ended[1][1])
