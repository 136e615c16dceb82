"""Training on a GPU: the same as on the CPU, without waits, and all memory freed. A dry run uses the CPU for both."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedveil import config as run_config
from fedveil.contract.trainer import BatchIndices
from fedveil.rng import RandomStream
from fedveil.training import optimizers, per_example
from tests.fedveil.training.small import KEY, apart, make
from tests.prompt_toy import PromptTask, examples


@pytest.mark.gpu
@pytest.mark.parametrize(
    "keys",
    [{}, {"train__bucketing": True, "train__gradient_accumulation_steps": 2}, {"train__gradient_checkpointing": True}],
)
def test_a_gpu_trains_as_the_cpu_does(gpu, rows, start, keys):
    here = make(train__batch_size=4, **keys).trainer(rows, RandomStream(KEY)).train(start)
    there = make(gpu, train__batch_size=4, **keys).trainer(rows, RandomStream(KEY)).train(start)
    assert {w.device.type for w in there.weights.values()} == {"cpu"}
    assert there.report["tokens"] == here.report["tokens"]
    assert there.report["loss_trained"] == pytest.approx(here.report["loss_trained"], rel=1e-3)
    assert apart(here.weights, there.weights, start) < 0.05


@pytest.mark.gpu
def test_bf16_trains_as_fp32_does(gpu, rows, start):
    """Weights and their changes stay fp32; a loss of bf16 has three digits."""
    plain = make(gpu, train__batch_size=4).trainer(rows, RandomStream(KEY)).train(start)
    short = make(gpu, train__batch_size=4, train__precision="bf16").trainer(rows, RandomStream(KEY)).train(start)
    assert {w.dtype for w in short.weights.values()} == {torch.float32}
    assert short.report["loss_trained"] == pytest.approx(plain.report["loss_trained"], rel=2e-2)
    assert short.report["loss_trained"] != plain.report["loss_trained"]
    assert short.report["loss_trained"] < short.report["loss_received"]


@pytest.mark.gpu
@pytest.mark.parametrize("quantised,bound", [("4bit", 0.05), ("8bit", 0.2)])
def test_a_quantised_base_trains_as_on_the_cpu(gpu, rows, start, quantised, bound):
    """Of 8 bits, bitsandbytes' kernels for CUDA multiply in fp16 and those for the CPU do not; both learn."""
    keys = {"train__batch_size": 4, "train__quantized_base": quantised}
    here = make(**keys).trainer(rows, RandomStream(KEY)).train(start)
    task = make(gpu, **keys)
    assert {type(m).__name__ for m in task.base.model.modules()} & {"Linear4bit", "Linear8bitLt"}
    there = task.trainer(rows, RandomStream(KEY)).train(start)
    assert there.report["loss_trained"] < there.report["loss_received"]
    assert there.report["loss_trained"] == pytest.approx(here.report["loss_trained"], rel=1e-2)
    assert apart(here.weights, there.weights, start) < bound


def held(device: str) -> int:
    """Bytes on the device; on the CPU, of the tensors that Python still knows."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    return sum(obj.nbytes for obj in gc.get_objects() if issubclass(type(obj), torch.Tensor))


@pytest.mark.gpu
def test_a_training_gives_its_memory_back(gpu, rows, start):
    """The second training leaves what the first one left: the base, and what libraries set up once."""
    task = make(gpu, train__batch_size=4, train__max_steps=3)
    after = []
    for _ in range(3):
        result = task.trainer(rows, RandomStream(KEY)).train(start)
        del result
        after.append(held(gpu))
    assert after[0] > 0
    assert after[1:] == [after[0]] * 2


@pytest.mark.gpu
def test_a_task_that_is_gone_gives_its_memory_back(gpu, rows, start):
    """Beside what the first one left, for libraries keep a workspace of theirs."""
    left, bases = [], []
    for _ in range(2):
        before = held(gpu)
        task = make(gpu, train__batch_size=4, train__max_steps=2)
        task.trainer(rows, RandomStream(KEY)).train(start)
        bases.append(held(gpu) - before)
        del task
        left.append(held(gpu))
    assert bases[1] > 1_000_000  # the tiny base's weights
    assert left[1] == left[0]


class Reads(TorchDispatchMode):
    """Counts values that are read back, for which a GPU would be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += str(func).startswith(("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select"))
        return func(*args, **(kwargs or {}))


@contextmanager
def waits(device: str) -> Iterator[list[int]]:
    """How often what is inside waits for the device, as its only entry afterwards."""
    counted: list[int] = []
    if device == "cpu":
        with Reads() as reads:
            yield counted
        counted.append(reads.count)
        return
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counted
        finally:
            torch.cuda.set_sync_debug_mode("default")
    counted.append(sum("called a synchronizing" in str(w.message) for w in caught_warnings))


@pytest.mark.gpu
def test_the_loss_and_its_gradient_wait_for_the_gpu_no_more_than_the_library(gpu, rows):
    """The library looks at the attention mask once a forward pass; nothing else may synchronise."""
    task = make(gpu)
    batch = task.collate(rows[:6]).to(task.device)
    (task.loss_sum(batch) / batch.terms).backward()  # one-time setup
    with waits(gpu) as library:
        task.base.model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)
    with waits(gpu) as ours:
        (task.loss_sum(batch) / batch.terms).backward()
    with waits(gpu) as reading:
        batch.ids.sum().item()
    assert ours[0] <= library[0]
    assert reading[0] == 1


@pytest.mark.gpu
def test_adamw_is_fused_there_too(gpu):
    parameter = torch.nn.Parameter(torch.ones(3, device=gpu))
    optimiser = optimizers.create([parameter], run_config.parse({}).train)
    assert optimiser.param_groups[0]["fused"]
    parameter.sum().backward()
    optimiser.step()
    assert float(parameter.detach().max()) < 1


class There:
    """A toy task whose rows lie on the device, as a model's do."""

    def __init__(self, task: PromptTask, device: str) -> None:
        self._task, self._device = task, device
        self.spec, self.config = task.spec, task.config
        self.sample_loss = task.sample_loss

    def samples(self, rows):
        return tuple(t.to(self._device) for t in self._task.samples(rows))


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["cpu", "gpu"])
@pytest.mark.parametrize("chosen", [(4, 0, 6, 6), ()])
def test_each_rows_gradient_is_that_of_the_cpu(gpu, home, chosen):
    """The weights may lie on either; the gradients come back to them."""
    task = PromptTask()
    all_rows = task.encode(examples(7, scale=0.7))
    weights = {"prompt": torch.randn(6, 5, generator=torch.Generator().manual_seed(9))}
    picked = [all_rows[i] for i in BatchIndices(chosen).rows]
    here = per_example.per_example_gradients(task, task.spec, picked, weights)
    at = gpu if home == "gpu" else "cpu"
    there = per_example.per_example_gradients(
        There(task, gpu), task.spec, picked, {n: w.to(at) for n, w in weights.items()}
    )
    assert there.gradients["prompt"].device.type == at
    assert there.gradients["prompt"].shape == (len(chosen), 6, 5)
    torch.testing.assert_close(there.gradients["prompt"].cpu(), here.gradients["prompt"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(there.losses.cpu(), here.losses, rtol=1e-4, atol=1e-5)
