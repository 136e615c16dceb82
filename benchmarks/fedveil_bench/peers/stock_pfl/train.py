"""pfl-research's simulator on the work in `peers/simulated`: `python train.py <folder>`, in a separate environment.

The folder has task.json, rows.safetensors (each row's pixels, label and site), initial.safetensors, and the model's
config.json; weights.safetensors and noted.json are written to it. No FedVeil code is imported.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import ViTConfig, ViTForImageClassification


class Model(torch.nn.Module):
    """The model, with the loss and metrics methods that pfl requires."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.vit = ViTForImageClassification(ViTConfig.from_pretrained(folder))
        self.vit.load_state_dict(load_file(folder / "initial.safetensors"))

    def loss(self, pixels: torch.Tensor, labels: torch.Tensor, eval: bool = False) -> torch.Tensor:
        """Return the mean cross entropy of a batch."""
        self.train(not eval)
        return functional.cross_entropy(self.vit(pixel_values=pixels).logits, labels)

    @torch.no_grad()
    def metrics(self, pixels: torch.Tensor, labels: torch.Tensor, eval: bool = False) -> dict[str, Any]:
        """Return the loss on a user's rows. pfl calls this before the first round, which is not timed."""
        return {"loss": Weighted(self.loss(pixels, labels, True).item() * len(labels), len(labels))}


class Clock(TrainingProcessCallback):
    """The seconds of each round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._before = 0.0

    def on_train_begin(self, *, model: object) -> Metrics:
        """Start timing the rounds."""
        self._before = time.perf_counter()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # type: ignore[no-untyped-def]
        """Record the time of the round that just ended."""
        now = time.perf_counter()
        self.seconds.append(now - self._before)
        self._before = now
        return False, Metrics()


def main(folder: Path) -> None:
    """One run."""
    task = json.loads((folder / "task.json").read_text())
    torch.set_num_threads(1)
    np.random.seed(task["seed"])
    torch.manual_seed(task["seed"])
    rows = load_file(folder / "rows.safetensors")
    sites = [torch.nonzero(rows["site"] == site).flatten() for site in range(task["sites"])]
    users = {
        str(i): PyTorchTensorDataset((rows["pixels"][at], rows["labels"][at]), user_id=str(i))
        for i, at in enumerate(sites)
    }
    sampler = get_user_sampler("minimize_reuse", list(users))
    data = FederatedDataset(users.__getitem__, sampler)
    model = Model(folder)
    wrapped = PyTorchModel(
        model,
        partial(torch.optim.AdamW, weight_decay=task["weight_decay"]),
        torch.optim.SGD(model.parameters(), lr=1.0),
    )
    clock = Clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=task["rounds"], evaluation_frequency=task["rounds"] + 1,
            train_cohort_size=task["sites"], val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=wrapped,
        model_train_params=NNTrainHyperParams(
            local_batch_size=task["batch_size"], local_num_epochs=task["epochs"],
            local_learning_rate=task["learning_rate"], local_max_grad_norm=None,
        ),
        callbacks=[clock],
    )  # fmt: skip
    save_file({n: t.contiguous() for n, t in model.vit.state_dict().items()}, folder / "weights.safetensors")
    (folder / "noted.json").write_text(json.dumps({"seconds": clock.seconds}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
