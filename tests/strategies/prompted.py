"""A client whose loss is the distance of the context from its own target: real gradients without a model."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fedveil import rng
from fedveil.adapters import prompt_tensors
from fedveil.adapters.prompt import PromptAdapter
from fedveil.contract.method import AcceptedUpload, RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.contract.trainer import TrainingResult
from fedveil.federation.exchange import MessageExchange

WIDTH = 6


@dataclass
class Drawn:
    """Ten steps of gradient descent on |contexts - target|^2."""

    adapter: PromptAdapter
    target: float
    num_examples: int = 3
    started_from: list = field(default_factory=list)

    @property
    def spec(self):
        return {name: ParamSpec(shape) for name, shape in self.adapter.shapes(WIDTH).items()}

    def train(self, weights, frozen=None, penalty=None) -> TrainingResult:
        self.started_from.append({n: w.clone() for n, w in weights.items()})
        now = {n: w.clone().requires_grad_() for n, w in weights.items()}
        for _ in range(10):
            loss = (prompt_tensors.context_vectors(self.adapter, now) - self.target).square().sum()
            grown = torch.autograd.grad(loss, list(now.values()))
            now = {n: (w - 0.02 * g).detach().requires_grad_() for (n, w), g in zip(now.items(), grown, strict=True)}
        return TrainingResult({n: w.detach() for n, w in now.items()}, {"steps": 10})


class Run:
    """Sites with targets of their own, every byte over the wire."""

    def __init__(self, method, name: str, targets=(1.0, -2.0, 3.0), counts=(3, 8, 1)):
        self.locals = {s: Drawn(method.adapter, t, n) for s, t, n in zip("xyz", targets, counts, strict=False)}
        spec = self.locals["x"].spec
        self.exchange = MessageExchange(method, name, spec)
        initial = method.adapter.draw({n: t.shape for n, t in spec.items()}, rng.initial_stream(0, "weights"), {})
        self.server = method.init(spec, initial, rng.initial_stream(0, "method init"))
        self.private, self.bytes, self.uploads = {}, b"", []

    def round(self, number: int, sites: str = "xyz"):
        """One round; the uploads are kept."""
        self.uploads = []
        for site in sites:
            ctx = RoundContext(number, site, site not in self.private, bytes(32))
            down = self.exchange.broadcast(self.server, ctx)
            own = RoundContext(number, site, site not in self.private, site.encode() * 32)
            self.private[site], parts = self.exchange.participate(down, self.private.get(site), self.locals[site], own)
            up = b"".join(parts)
            self.bytes += down + up
            message = self.exchange.receive(up, number)
            self.uploads.append(AcceptedUpload(message.payload, message.num_examples, ctx))
        self.server = self.exchange.aggregate(self.server, iter(self.uploads))
        return self
