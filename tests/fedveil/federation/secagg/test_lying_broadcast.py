"""The attacker of `secure/attacks`: it has one site's upload where the plan does not name the broadcast, else noise."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fedveil import strategies
from fedveil.attacks.secagg_views import MaskedUploadView
from fedveil.config import parse
from fedveil.contract.method import FederatedState
from fedveil.contract.trainer import TrainingResult
from fedveil.federation.exchange import MessageExchange
from fedveil.testing.lying_broadcast import capture_isolated_uploads
from fedveil.testing.lying_server_search import RULE_REMOVALS
from tests.conftest import ToyTrainer
from tests.contract.test_contract import spec_for, start

SITES = ["a", "b", "c"]
CONFIG = {"secure.enabled": True, "secure.clip-bound": 16.0, "run.deterministic": True}


@dataclass
class ScalingTrainer(ToyTrainer):
    """Training that multiplies every tensor by `step`: from zeros it ends with zeros, whatever `step` is."""

    def train(self, weights, frozen=None, penalty=None):
        return TrainingResult({n: w * self.step for n, w in weights.items()}, {}, self._looked)


def attacked(folder) -> dict[str, dict[str, torch.Tensor]]:
    """What the server has in place of each site's upload, and what each site would have sent."""
    method = strategies.create_method("fedavg", "")
    exchange = MessageExchange(method, "fedavg", spec_for(method))
    config = parse(CONFIG)
    state = FederatedState(
        {n: torch.linspace(0.5, 1.0, w.numel()).view(w.shape) for n, w in start(exchange).tensors.items()}
    )
    own = {site: 1.0 + i for i, site in enumerate(SITES)}
    capture = capture_isolated_uploads(
        exchange, config, state, lambda site, ctx: ScalingTrainer(exchange.spec, 3, own[site]),
        lambda site, ctx: ScalingTrainer(exchange.spec, 3, 9.0), SITES, folder,
    )  # fmt: skip
    view = MaskedUploadView.from_capture(capture, exchange, config.secure)
    found = {upload.site: dict(upload.payload.fields) for upload in view.uploads()}
    return {
        site: {name: found[site][name] - own[site] * value for name, value in state.tensors.items()} for site in SITES
    }


@pytest.mark.parametrize("is_bound", [False, True])
def test_the_server_has_single_uploads_where_the_plan_does_not_name_the_broadcast(is_bound, tmp_path):
    if is_bound:
        errors = attacked(tmp_path)
    else:
        with RULE_REMOVALS["broadcast not in p"].removed():
            errors = attacked(tmp_path)
    for site in SITES:
        largest = max(float(error.abs().max()) for error in errors[site].values())
        assert (largest < 1e-4) == (not is_bound), (site, largest)
