"""In memory up to a bound, beyond it on disk, with the same bits."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from fedveil.contract.method import State
from fedveil.errors import StateError
from fedveil.federation import private_states
from fedveil.federation.exchange import Exchange
from fedveil.federation.inprocess import Federation
from fedveil.federation.private_states import PrivateStates
from fedveil.records.state import digest
from fedveil.strategies.fedper import FedPer
from tests.contract import test_contract as contract


def state(seed: int, dtype: torch.dtype = torch.float32) -> State:
    """400 bytes in fp32."""
    values = torch.randn(100, generator=torch.Generator().manual_seed(seed))
    return State({"w": values.to(dtype)}, {"turns": seed, "factor": "A"})


@pytest.fixture
def scratch(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def files(scratch: Path) -> list[Path]:
    return sorted(scratch.rglob("*.safetensors"))


def test_beyond_the_bound_states_lie_in_files_and_come_back_bit_for_bit(scratch):
    kept = PrivateStates(900)
    given = {"a/b": state(1), "b": state(2, torch.bfloat16), "c": None, "d": state(3), "e": state(4, torch.bool)}
    for site, each in given.items():
        kept[site] = each
    assert kept.memory_bytes == 400 + 200 + 100
    assert len(files(scratch)) == 1  # of d
    for site, each in given.items():
        found = kept[site]
        assert (found is None) == (each is None)
        if each and found:
            assert digest(found.tensors) == digest(each.tensors)
            assert found.scalars == each.scalars
    assert list(kept) == list(given)
    assert (scratch / files(scratch)[0].parent.name).stat().st_mode & 0o777 == 0o700


def test_what_is_replaced_frees_its_memory_or_its_file(scratch):
    kept = PrivateStates(1000)
    for site in "abcd":
        kept[site] = state(1)
    assert (kept.memory_bytes, len(files(scratch))) == (800, 2)
    kept["c"] = None
    kept["a"] = None
    assert (kept.memory_bytes, len(files(scratch))) == (400, 1)
    del kept["d"]
    kept["d"] = state(5)
    assert (kept.memory_bytes, files(scratch)) == (800, [])


def test_the_round_under_way_counts_and_takes_effect_as_a_whole(scratch):
    kept = PrivateStates(1000)
    kept["a"], kept["b"] = state(1), state(2)
    for site in "abc":
        kept.stage(site, state(7))
    assert (kept.memory_bytes, len(files(scratch))) == (800, 3)
    assert [kept[site].scalars["turns"] for site in "ab"] == [1, 2]
    assert kept.staged("c").scalars["turns"] == 7
    kept.discard()
    assert (kept.memory_bytes, files(scratch), list(kept)) == (800, [], ["a", "b"])
    kept.stage("a", state(8))
    kept.commit()
    assert (kept.memory_bytes, len(files(scratch)), kept["a"].scalars["turns"]) == (400, 1, 8)


def test_the_folder_goes_with_the_object(scratch):
    kept = PrivateStates(0)
    kept["a"] = state(1)
    assert len(files(scratch)) == 1
    del kept
    gc.collect()
    assert list(scratch.iterdir()) == []


def test_a_state_that_cannot_be_written_costs_no_other(scratch, monkeypatch):
    kept = PrivateStates(400)
    kept["a"] = state(1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(private_states, "save_state", full)
    with pytest.raises(StateError, match="a: expected to write its private state to .*No space left on device; free"):
        kept["a"] = state(2)
    assert kept["a"].scalars["turns"] == 1
    assert kept.memory_bytes == 400


def test_a_federation_ends_the_same_whatever_its_bound(scratch):
    exchange = Exchange(FedPer(), "fedper", contract.spec_for(FedPer()))
    ended = []
    for bound in (10**9, 0):
        whole = contract.federation(exchange)
        run = Federation(exchange, whole.config, whole.trainer_for, whole.sites, whole.server, private_bytes=bound)
        server = run.run()
        assert (run.private.memory_bytes == 0) == (bound == 0)
        states = {site: digest(kept.tensors) for site, kept in sorted(run.private.items()) if kept}
        assert len(states) == len(run.participated) > 1
        ended.append((digest(server.tensors), states))
    assert ended[0] == ended[1]
    assert len(files(scratch)) == len(ended[1][1])
