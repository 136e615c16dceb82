"""Image tasks on a GPU: training and scores agree with the CPU, and so does each row's gradient."""

from __future__ import annotations

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value

from fedveil import config as run_config
from fedveil import rng
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.adapters.prompt import PromptAdapter
from fedveil.contract.adapter import Adapter
from fedveil.tasks import load_task
from fedveil.training import per_example
from tests.fedveil.tasks.test_image_classification import NAMES, picture
from tests.fedveil.training.small import apart

# A learning rate with which three steps change the scores.
TASKS: dict[str, tuple[str, Adapter, dict[str, object]]] = {
    "ViT": ("image-classification", AllWeightsAdapter(), {"task.from-scratch": True, "task.num-classes": 3}),
    "ViT, LoRA": ("image-classification", LoraAdapter(rank=2), {"task.from-scratch": True, "task.num-classes": 3}),
    "CLIP": ("clip-prompt", PromptAdapter(4), {"train.learning-rate": 0.02}),
    "captions": ("vision-language", LoraAdapter(rank=2), {"task.target-column": "caption"}),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Twelve pictures of three classes, each with a caption."""
    at = tmp_path_factory.mktemp("pictures")
    features = Features({"image": Image(), "label": ClassLabel(names=NAMES), "caption": Value("string")})
    rows = [
        {"image": {"bytes": picture(i), "path": None}, "label": i % 3, "caption": f"A {NAMES[i % 3]}."}
        for i in range(12)
    ]
    Dataset.from_list(rows, features=features).to_parquet(str(at / "train.parquet"))
    return at


def made(name: str, device: str):
    kind, adapter, keys = TASKS[name]
    flat = {"task.name": kind, "task.target-column": "label", "train.batch-size": 4, "train.max-steps": 3} | keys
    if kind != "vision-language":
        flat |= {"task.label-column": "label"}
    return load_task(run_config.parse(flat), adapter, device)


def start(task) -> dict[str, torch.Tensor]:
    """Beside the task's own start: with B = 0 the gradient of A is 0, and an error in it would not show."""
    generator = torch.Generator().manual_seed(271828)
    first = task.initial(rng.initial_stream(0, "weights"))
    return {n: w + 0.02 * torch.randn(w.shape, generator=generator) for n, w in first.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("name", TASKS)
def test_a_turn_with_images_ends_as_on_the_cpu(gpu, data, name):
    ended, scored, since = [], [], start(made(name, "cpu"))
    for device in ("cpu", gpu):
        task = made(name, device)
        rows = task.examples(data, "train")
        result = task.trainer(task.encode(rows), rng.initial_stream(0, "batches")).train(since)
        assert {w.device.type for w in result.weights.values()} == {"cpu"}
        ended.append(result)
        scored.append(task.evaluate(result.weights, rows, False)["loss"])
    assert apart(ended[0].weights, ended[1].weights, since) < 0.05
    assert ended[1].report["loss_trained"] == pytest.approx(ended[0].report["loss_trained"], rel=1e-3)
    assert scored[1] == pytest.approx(scored[0], rel=1e-3)
    assert scored[0] != pytest.approx(made(name, "cpu").evaluate(since, rows, False)["loss"], rel=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ViT", "CLIP"])
def test_each_rows_gradient_of_a_model_is_that_of_the_cpu(gpu, data, name):
    """Relative to a row's own norm: that is what is clipped."""
    results, since = [], start(made(name, "cpu"))
    for device in ("cpu", gpu):
        task = made(name, device)
        rows = task.encode(task.examples(data, "train"))[:5]
        results.append(per_example.per_example_gradients(task, task.spec, rows, since))
    for row in range(5):
        here, there = ({n: g[row] for n, g in of.gradients.items()} for of in results)
        assert apart(here, there, {n: torch.zeros_like(g) for n, g in here.items()}) < 0.01
    torch.testing.assert_close(results[1].losses.cpu(), results[0].losses.cpu(), rtol=1e-3, atol=1e-4)
