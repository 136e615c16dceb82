"""Shapes in signatures are enforced in tests; tiny fixtures that every test may use."""

from __future__ import annotations

import gc
import importlib.util
import os
import pkgutil
import tarfile
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import install_import_hook

import tests.checks  # noqa: F401  # the hook calls it by its name
from tests.own_entry_points import provide_entry_points

ROOT = Path(__file__).parent.parent
provide_entry_points(ROOT / "pyproject.toml")
if importlib.util.find_spec("hypothesis"):  # the tests for a GPU do without
    from hypothesis import HealthCheck, settings

    # Both measure the clock, and a machine that is busy with something else is no fault of the code.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")

# Must come before the first import of these modules. The packages left out have many annotations that name what they
# import under TYPE_CHECKING only.
_UNHOOKED = {"attacks", "client_app", "console", "guard", "relay", "server_app", "testing"}
install_import_hook(
    [
        f"fedveil.{module.name}"
        for module in pkgutil.iter_modules([str(ROOT / "fedveil")])
        if module.name not in _UNHOOKED
    ],
    "tests.checks.checked",
)

from fedveil.contract.method import AcceptedUpload, FederatedState, Method
from fedveil.contract.param_spec import ParamSpec, Spec, Weights, param_specs_of
from fedveil.contract.trainer import (
    BatchIndices,
    ExamplesUsed,
    Frozen,
    PerExampleFeatureGradients,
    PerExampleGradients,
    TrainingResult,
    alternating_sets,
)
from fedveil.federation.exchange import MessageExchange
from fedveil.strategies import fedqsn
from fedveil.training import per_example


def extract(archive: Path, into: Path) -> None:
    """Unpacks a kit as a user's tar would; Python 3.11.2 (Debian 12) has no filters yet."""
    with tarfile.open(archive) as file:
        file.extractall(into, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))


@pytest.fixture(scope="session")
def gpu() -> str:
    """The device of tests marked gpu. `make gpu ARGS=--dry-run` runs them on the CPU, to run their lines."""
    if os.environ.get("FEDVEIL_GPU_TESTS") == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA; FEDVEIL_GPU_TESTS=cpu runs it on the CPU")
    return "cuda"


@pytest.fixture
def same_masks(monkeypatch) -> None:
    """Secure aggregation with the same masks in every run of a test: else one run in many finds something in noise."""
    drawn = np.random.default_rng(271828)
    monkeypatch.setattr(os, "urandom", drawn.bytes)


@dataclass
class ToyTrainer:
    """A client whose training is arithmetic: every tensor moves by `step`, and what it started from is remembered."""

    spec: Spec
    num_examples: int = 3
    step: float = 0.5
    started_from: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def train(self, weights: Weights, frozen: Frozen | None = None, penalty=None) -> TrainingResult:
        self.started_from.append({n: w.clone() for n, w in weights.items()})
        moved = dict(weights)
        for frozen_masks in alternating_sets(frozen):  # a step each
            before, moved = moved, {n: w + self.step for n, w in moved.items()}
            moved |= {n: torch.where(mask, before[n], moved[n]) for n, mask in frozen_masks.items()}
        return TrainingResult(moved, {"steps": 1, "loss_trained": 0.25}, self._looked)

    def gradient(self, weights: Weights) -> TrainingResult:
        """Whose step of rate 1 is the training."""
        self.started_from.append({n: w.clone() for n, w in weights.items()})
        return TrainingResult(
            {n: torch.full_like(w, -self.step) for n, w in weights.items()}, {"loss_received": 0.25}, self._looked
        )

    @property
    def _looked(self) -> ExamplesUsed:
        return ExamplesUsed.from_steps([range(self.num_examples)])

    @property
    def rows(self) -> ToyTrainer:
        """Rows that all say the same."""
        return self

    batch_size = 2
    steps = 2

    def batches(self, sampling, steps, rng, skip=0) -> list[BatchIndices]:
        return per_example.draw_batches(sampling, self.num_examples, self.batch_size, steps, rng, skip)

    def per_sample(self, weights: Weights, batch: BatchIndices) -> PerExampleGradients:
        """Of every row the same."""
        rows = len(batch.rows)
        self.started_from.append({n: w.clone() for n, w in weights.items()})
        return PerExampleGradients(
            {n: torch.full((rows, *w.shape), -self.step) for n, w in weights.items()}, torch.full((rows,), 0.25)
        )

    def feature(self, weights: Weights, batch: BatchIndices) -> PerExampleFeatureGradients:
        """One feature: the sum of all entries, of slope -step in every row."""
        rows = len(batch.rows)
        return PerExampleFeatureGradients(
            torch.full((rows, 1), -self.step),
            torch.ones(rows, 1),
            lambda g: {n: torch.full_like(w, float(g)) for n, w in weights.items()},
        )


def aggregated(
    method: Method, server: FederatedState, uploads: Iterable[AcceptedUpload], spec: Spec | None = None
) -> FederatedState:
    """The server's next state; the spec is that of its weights."""
    if spec is None and "places" in server.scalars:
        spec = fedqsn._spec(server)
    weights = {n: w for n, w in server.tensors.items() if not n.startswith(("adam.", "initial.", "control.", "step."))}
    return MessageExchange(method, "method", spec or param_specs_of(weights)).aggregate(server, uploads)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep modules and tests out of all later garbage collections, of which each would take seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Live federations first: they wait more than they compute, and one that begins last is waited for."""
    items.sort(key=lambda item: "deployment" not in item.path.parts)


@pytest.fixture
def lora_spec() -> Spec:
    """Two modules of different widths, so that a swapped A and B cannot pass."""
    return {
        "h.0.lora_A": ParamSpec((2, 5)),
        "h.0.lora_B": ParamSpec((7, 2)),
        "h.1.lora_A": ParamSpec((2, 7)),
        "h.1.lora_B": ParamSpec((3, 2)),
    }


@pytest.fixture
def lora_weights(lora_spec: Spec) -> dict[str, torch.Tensor]:
    """A random, B zero."""
    generator = torch.Generator().manual_seed(314159)
    return {
        n: torch.randn(t.shape, generator=generator) if n.endswith("A") else torch.zeros(t.shape)
        for n, t in lora_spec.items()
    }


@pytest.fixture
def random_weights() -> Callable[[Spec, int], Mapping[str, torch.Tensor]]:
    """Weights of a spec, by seed."""

    def make(spec: Spec, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {n: torch.randn(t.shape, generator=generator).to(t.dtype) for n, t in spec.items()}

    return make
