"""Input for every peer as plain files: the same rows per site, initial LoRA factors and settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from fedveil import resources, rng, strategies
from fedveil.adapters.lora import LoraAdapter
from fedveil.config import RunConfig, parse
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import DatasetShard
from fedveil.errors import ConfigError, StateError
from fedveil.tasks.text_generation import TextGeneration
from fedveil_bench.common import data
from fedveil_bench.common.federations import task_of
from fedveil_bench.runner import BenchOptions

# The keys in the train section that the peers' training also supports. All other keys must have their defaults.
_TAKEN = {"batch_size", "learning_rate", "max_steps", "weight_decay", "received_loss_examples"}
_BEFORE, _AFTER = "base_model.model.", ".weight"  # around FedVeil's name of a factor in PEFT's name


class SharedInputs:
    """The task for one seed.

    Args:
        settings: the preset's settings.
        seed: the run seed, which partitions the rows and draws the factors.
        options: only the device is used, for scoring.

    Attributes:
        data: the folder with the rows.
        flat: FedAvg's run config.

    Raises:
        ConfigError: there is no data, or a peer's training does not support the settings.
    """

    def __init__(self, settings: Mapping[str, Any], seed: int, options: BenchOptions) -> None:
        self.data = data.find_data_folder(settings["data"])
        self.flat = data.with_model(settings["config"]) | {"run.seed": seed, "method.name": "fedavg"}
        self._config, self._sites, self._options = parse(self.flat), settings["sites"], options
        self._peers = of_peers(self._config)

    def write(self, folder: Path) -> None:
        """Write the files that a peer's training reads; see stock_flower/tuned/training.py."""
        folder.mkdir()
        (folder / "task.json").write_text(json.dumps(self._peers | {"padding": self._task.base.tokenizer.eos_token_id}))
        initial = self._task.initial(rng.initial_stream(self._config.run.seed, "weights"))
        save_file(
            {to_peft(name): tensor.contiguous() for name, tensor in initial.items()}, folder / "initial.safetensors"
        )
        for site in range(self._sites):
            rows = self._task.encode(self._task.examples(self.data, "train", DatasetShard(site, self._sites)))
            lines = [json.dumps({"ids": row.ids, "start": row.start}) for row in rows]
            (folder / f"site-{site}.jsonl").write_text("".join(f"{line}\n" for line in lines))

    def loss(self, weights: Weights) -> float:
        """Return the loss on the test rows, in nats per token: FedVeil's own evaluation, for every peer."""
        return self._task.evaluate(weights, self._test, generate=False)["loss"]

    def read(self, file: Path) -> dict[str, Tensor]:
        """Return the factors from a peer's server, under FedVeil's names. Raises StateError on a mismatch."""
        found = {from_peft(name): tensor for name, tensor in load_file(file).items()}
        if set(found) != set(self._task.spec):
            raise StateError(
                f"{file.name}: expected the {len(self._task.spec)} factors of the task, found {len(found)} tensors, "
                f"among them {sorted(found)[:1]}; the peer has trained another adapter"
            )
        return found

    @cached_property
    def initial_loss(self) -> float:
        """Return the loss on the test rows before any round."""
        return self.loss(self._task.initial(rng.initial_stream(self._config.run.seed, "weights")))

    @cached_property
    def _task(self) -> TextGeneration:
        return task_of(TextGeneration, self._config, self._options)

    @cached_property
    def _test(self) -> Any:
        return self._task.examples(self.data, "test")


def of_peers(config: RunConfig) -> dict[str, Any]:
    """Return the run config for `task.json`. Raises ConfigError for a setting that the peers do not support."""
    train = config.train
    for name, value in type(train)().model_dump().items():
        if name not in _TAKEN and getattr(train, name) != value:
            key = f"train.{name.replace('_', '-')}"
            raise ConfigError(f"{key}: expected {value!r}, as the peers have, found {getattr(train, name)!r}")
    if train.max_steps < 1:
        raise ConfigError("train.max-steps: expected at least 1, the peers' steps per round, found 0; set it")
    adapter = strategies.create_method("fedavg", config.method.params).adapter
    if not isinstance(adapter, LoraAdapter):
        raise ConfigError(f"method.params: expected a LoRA adapter, found {adapter}; the peers train only LoRA")
    base = resources.base_folder("text-generation") if config.task.model == "tiny" else config.task.model
    fields = adapter.as_lora({})[0].for_peft() | {"target_modules": adapter.targets}
    return {
        "base": str(base),
        "lora": fields,
        "steps": train.max_steps,
        "batch_size": train.batch_size,
        "learning_rate": train.learning_rate,
        "weight_decay": train.weight_decay,
        "seed": config.run.seed,
    }


def to_peft(name: str) -> str:
    """Return PEFT's name for a factor, given FedVeil's, "<module>.lora_A"."""
    return f"{_BEFORE}{name}{_AFTER}"


def from_peft(name: str) -> str:
    """Return FedVeil's name for a factor, given PEFT's. Raises StateError for any other name."""
    if not (name.startswith(_BEFORE) and name.endswith(_AFTER)):
        raise StateError(f"weights: expected names {_BEFORE}...{_AFTER}, found {name[:80]!r}")
    return name.removeprefix(_BEFORE).removesuffix(_AFTER)


def describe_factors(names: Iterable[str]) -> str:
    """Describe the LoRA factors in a message with these field names, which may be FedVeil's or PEFT's."""
    kinds = {part for name in names for part in name.split(".") if part in ("lora_A", "lora_B")}
    match sorted(kinds):
        case ["lora_A", "lora_B"]:
            return "A and B"
        case [one]:
            return f"{one[-1]} alone"
        case _:
            return "no factor"
