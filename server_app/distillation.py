"""Server-side distillation before round 0: a layer-sharing proxy is trained on the hidden states of the server's model.

    loss = mean over layers, tokens and features of (h_l(proxy) - h_l(model))^2,  l = 0 (embeddings) to the last

Neither model uses a prefix, because prefixes are tuned later. The optimizer is AdamW; each step uses one batch.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, final

import torch
from torch import Tensor

from fedveil.adapters.prefix import PrefixAdapter
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import Rows
from fedveil.data import batches
from fedveil.data.batches import TokenBatch
from fedveil.errors import ConfigError, TaskError
from fedveil.rng import RandomStream
from fedveil.tasks.text_generation import TextGeneration


@final
class ServerDistillation:
    """Implements `fedveil.contract.method.Distiller`.

    Args:
        proxy: the proxy's task; its adapter is a prefix with cells.
        model: the model's task; its adapter is a prefix without cells.
        rows: the server's examples.
        rng: shuffles the examples.
    """

    def __init__(self, proxy: TextGeneration, model: TextGeneration, rows: Rows, rng: RandomStream) -> None:
        for task, has_cells in ((proxy, True), (model, False)):
            if not isinstance(task.adapter, PrefixAdapter) or (task.adapter.cells > 0) != has_cells:
                raise ConfigError(f"adapter: it must be a prefix {'with' if has_cells else 'without'} cells")
        if not rows:
            raise TaskError("task.server-data: distillation needs at least one example, found none; add examples")
        self._proxy, self._model, self._rows, self._rng = proxy, model, rows, rng

    def distil(self, weights: Weights, steps: int, learning_rate: float) -> Weights:
        """Return `weights` after `steps` steps. Raises TaskError if the loss is not finite."""
        self._proxy.put(weights)
        parameters = list(self._proxy.trained.values())
        optimiser = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
        optimiser.zero_grad()
        size, generator = self._proxy.config.train.batch_size, self._rng.torch_generator()
        order: list[int] = []
        for step in range(steps):
            if not order:
                order = batches.epoch_order(self._rows, size, generator, False)
            batch = self._proxy.collate([self._rows[i] for i in order[:size]]).to(self._proxy.device)
            order = order[size:]
            loss = self.loss(batch)
            if not math.isfinite(loss.item()):
                raise TaskError(f"distil_rate: the loss is {loss.item()} at step {step}, not finite; lower it")
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            optimiser.zero_grad()
        return {n: p.detach().to("cpu", copy=True) for n, p in self._proxy.trained.items()}

    def loss(self, batch: TokenBatch) -> Tensor:
        """Return the mean squared difference between the hidden states, ignoring padding."""
        with torch.no_grad():
            wanted = _states(self._model, batch)
        proxy_states, there = _states(self._proxy, batch), batch.mask.bool()
        return torch.stack(
            [(f[there] - w[there].to(f.dtype)).square().mean() for f, w in zip(proxy_states, wanted, strict=True)]
        ).mean()


def _states(task: TextGeneration, batch: TokenBatch) -> tuple[Tensor, ...]:
    """Return the hidden states (rows, length, width) of the embeddings and all decoder layers, without a prefix."""
    decoder: Any = task.base.model.base_model
    bf16 = task.config.train.precision == "bf16"
    with torch.autocast(task.device.type, torch.bfloat16) if bf16 else contextlib.nullcontext():
        out = decoder(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False, output_hidden_states=True)
    return tuple(out.hidden_states)
