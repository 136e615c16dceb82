"""Estimate the floating-point operations in a site's training, and its duration at a given speed.

    forward, per token    2 (N + n) + 4 L t w   N: the base's weights that the token is multiplied with, in L layers of
                                                width w; n: the adapter's; t: tokens in its example (attention)
    backward, per token   as many again, plus 2 for each trained weight
    checkpointing         a second forward pass

So a token costs 6 N if all weights are trained, slightly more than 4 N with an adapter, and 2 N more with checkpointing
(Kaplan et al. 2020, section 2.1, for 2 N and 4 N). Norms, the softmax, the optimizer, dequantizing layers, and all
waiting are not counted.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from fedveil.config import RunConfig
from fedveil.contract.adapter import Adapter
from fedveil.contract.param_spec import movable_names
from fedveil.models.planning import meta_model
from fedveil.models.planning.model_config import ModelConfig

_WIDTH, _LONGEST = 1024, 1.0  # width of the multiplied matrices, and seconds


@dataclass(frozen=True)
class TrainingFlops:
    """Floating-point operations of one participation, padded to task.max-tokens.

    Attributes:
        training: operations of all steps.
        scoring: operations to score the received weights.
        rows: examples trained on, counted again in every epoch.
    """

    training: int
    scoring: int
    rows: int

    def seconds(self, flops: float, gpus: int = 1, is_split: bool = False) -> float:
        """Return the seconds at `flops` operations per second on each of `gpus` GPUs, split evenly without overhead.

        Only the first GPU scores, unless the base is sharded.
        """
        return (self.training / gpus + self.scoring / (gpus if is_split else 1)) / flops


def training_flops(settings: ModelConfig, config: RunConfig, adapter: Adapter, rows: int) -> TrainingFlops:
    """Count the operations of a site with `rows` examples. Raises ConfigError if the adapter fits no layer."""
    train, tokens = config.train, config.task.max_tokens
    shape, spec = meta_model.build_meta_model(settings), meta_model.param_specs(settings, adapter)
    multiplied, trained = shape.multiplied, shape.multiplied
    if not adapter.trains_base:
        attached = sum(math.prod(tensor.shape) for tensor in spec.values())
        trained = sum(math.prod(spec[name].shape) for name in movable_names(spec))
        if adapter.kind == "hadamard-lora":  # the change is a matrix as large as the layer's own
            trained = attached = sum(layer.entries for layer in shape.small)
        multiplied += attached
    heads = int(settings.values.get("head_dim") or settings.width // settings.heads) * settings.heads
    forward = 2 * multiplied + 4 * settings.layers * tokens * heads
    a_token = (3 if train.gradient_checkpointing else 2) * forward + 4 * settings.layers * tokens * heads + 2 * trained
    step = train.batch_size * train.gradient_accumulation_steps
    passes = train.epochs * rows
    if train.max_steps:
        passes = min(passes, train.max_steps * step)
    return TrainingFlops(passes * tokens * a_token, min(rows, train.received_loss_examples) * tokens * forward, passes)


def measure_flops(bf16: bool) -> float:
    """Measure the operations per second of a matrix product on this machine's GPU, or else on one thread per CPU core.

    This takes about a second. Training is slower, because it is partly memory-bound.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    left, right = (torch.ones(_WIDTH, _WIDTH, device=device, dtype=torch.bfloat16 if bf16 else None) for _ in "lr")
    _wait(left @ right)
    count, started = 0, time.perf_counter()
    while (seconds := time.perf_counter() - started) < _LONGEST:
        _wait(left @ right)
        count += 1
    return 2 * _WIDTH**3 * count / seconds


def _wait(product: torch.Tensor) -> None:
    if product.is_cuda:
        torch.cuda.synchronize()
