"""One site's local training with PEFT and plain PyTorch, without any federation code: each peer's client calls it.

The task is a folder with `task.json`, `initial.safetensors` (PEFT's names), and `site-<n>.jsonl`, which has one row per
line: its tokens, `ids`, and `start`, the index of the first token to train on.
"""

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM

_IGNORED = -100  # the label that the loss ignores


class Site:
    """One site's rows and model, loaded once.

    Args:
        folder: the task's folder.
        number: the site's number.

    Attributes:
        rows: the site's number of rows.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self._task, self._number = json.loads((folder / "task.json").read_text()), number
        self._rows = [json.loads(line) for line in (folder / f"site-{number}.jsonl").read_text().splitlines()]
        self.rows = len(self._rows)
        base = AutoModelForCausalLM.from_pretrained(self._task["base"], dtype=torch.float32)
        self._model = get_peft_model(base, LoraConfig(**self._task["lora"], task_type="CAUSAL_LM"))

    def trained(self, round_: int, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], float]:
        """Return the weights after a round's steps from `weights`, and the mean loss of the steps.

        Args:
            round_: the round number, from 1, which determines the order of the rows.

        Raises:
            ValueError: the weights do not match the model.
        """
        task, model = self._task, self._model
        if set(get_peft_model_state_dict(model)) != set(weights):
            raise ValueError(f"weights: expected PEFT's of this model, found {sorted(weights)[:2]} and others")
        set_peft_model_state_dict(model, dict(weights))
        model.train()
        optimiser = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad],
            lr=task["learning_rate"],
            weight_decay=task["weight_decay"],
        )
        order = list(range(self.rows))
        random.Random(f"{task['seed']} {self._number} {round_}").shuffle(order)
        losses, size = [], task["batch_size"]
        for first in itertools.islice(range(0, len(order), size), task["steps"]):
            loss = model(**batch([self._rows[i] for i in order[first : first + size]], task["padding"])).loss
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            losses.append(loss.item())
        found = {name: tensor.detach().clone() for name, tensor in get_peft_model_state_dict(model).items()}
        return found, sum(losses) / len(losses)


def batch(rows: Sequence[Mapping[str, Any]], padding: int) -> dict[str, Tensor]:
    """Return the model's inputs for some rows, padded on the right."""
    longest = max(len(row["ids"]) for row in rows)
    ids, mask, labels = [], [], []
    for row in rows:
        room = longest - len(row["ids"])
        ids.append(row["ids"] + room * [padding])
        mask.append(len(row["ids"]) * [1] + room * [0])
        labels.append(row["start"] * [_IGNORED] + row["ids"][row["start"] :] + room * [_IGNORED])
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "labels": torch.tensor(labels)}
