"""Generate sample texts for test examples before and after training, saved in the run folder as samples.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from fedveil import rng
from fedveil.console.runs import final_model
from fedveil.errors import StateError
from fedveil.records.atomic_files import write_atomic
from fedveil.server_app.validation_split import read_test_split
from fedveil.tasks.text_generation import Source, TextGeneration

FILE = "samples.json"
_COUNT, _MOST_BYTES, _MOST_CHARACTERS = 3, 1 << 20, 600


@dataclass(frozen=True)
class SampleText:
    """A test example's prompt, the texts from the initial and the final model, and the example's own text."""

    prompt: str
    before: str
    after: str
    wanted: str


def write_samples(run: Path, device: str = "cpu") -> None:
    """Write a finished run's samples, unless the server has no test examples or the task generates no texts.

    Raises:
        StateError, ConfigError, TaskError: as for `load_final_model` and its task.
    """
    model = final_model.load_final_model(run, max_new_tokens=40)
    config = model.config
    task, weights = model.task(device)
    if not isinstance(task, TextGeneration) or not config.task.evaluation:
        return
    by_prompt = dict[Source, str]()  # if several examples share a prompt, take the first
    for row in read_test_split(task, config, Path(config.task.evaluation)).test:
        by_prompt.setdefault(*task.read_texts(row))
    prompts = list(by_prompt)[:_COUNT]
    initial = task.initial(rng.initial_stream(config.run.seed, "weights"))
    texts = zip(prompts, task.generate(initial, prompts), task.generate(weights, prompts), strict=True)
    samples = [
        SampleText(prompt if isinstance(prompt, str) else prompt.describe(), before, after, by_prompt[prompt])
        for prompt, before, after in texts
    ]
    write_atomic(run / FILE, json.dumps([asdict(sample) for sample in samples], indent=1).encode())


def read_samples(run: Path) -> list[SampleText]:
    """Return the samples in the run folder, with each text truncated; [] if there are none.

    Raises:
        StateError: the file was not written by `write_samples`.
    """
    file = run / FILE
    if not file.is_file():
        return []
    try:
        if (size := file.stat().st_size) > _MOST_BYTES:
            raise ValueError(f"{size} bytes")
        rows = json.loads(file.read_text(encoding="utf-8"))
        names = ("prompt", "before", "after", "wanted")
        return [SampleText(*(str(row[name])[:_MOST_CHARACTERS] for name in names)) for row in rows[: 4 * _COUNT]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(
            f"{file}: expected sample texts written by fedveil demo, found {error!r}; remove the file"
        ) from None
