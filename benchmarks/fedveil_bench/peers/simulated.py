"""FedVeil's in-process federation and pfl-research's simulator on the same work: many small sites, a small ViT.

In each seed, both systems have the same rows per site and the same initial weights. The systems run one after the
other, each alone on the machine in a process with one thread; FedVeil scores both final models on the same test rows.

| metric | meaning |
|---|---|
| loss, right | of the server's model on the test rows: nats per row; percentage of correct classes |
| s a round | seconds per round, without the first round |
| sites a second | sites trained per second in these rounds |
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fedveil import rng, strategies
from fedveil.config import parse
from fedveil.contract.param_spec import Weights
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.tasks.image_classification import ImageClassification, ImageExample
from fedveil.testing.training import limit_threads
from fedveil_bench import folders
from fedveil_bench.common import data, resampling, verdicts
from fedveil_bench.common.federations import create_federation, task_of
from fedveil_bench.fedrand.on_texts import figures_of
from fedveil_bench.peers import environments
from fedveil_bench.random_binary.vit import from_scratch
from fedveil_bench.runner import BenchOptions, BenchOutcome

OURS, BEFORE = "FedVeil", "before training"
PEER = environments.PeerPackage("pfl-research", "FEDVEIL_PFL_PYTHON", "peers/stock_pfl", ("pfl", "transformers"))
_TIMEOUT = 1800.0  # seconds allowed for one run


def list_requirements(settings: Mapping[str, Any]) -> list[data.DataRequirement]:
    """Return the requirement for the images."""
    return [data.DataRequirement(settings["data"], ("train", "test"))]


class SimulatedWork:
    """A seed's work, for both systems.

    Args:
        settings: the preset's settings.
        seed: the seed for all random draws.
        folder: an empty folder for the model's config and the peer's input.

    Raises:
        ConfigError: there are fewer rows than the sites need.
    """

    def __init__(self, settings: Mapping[str, Any], seed: int, options: BenchOptions, folder: Path) -> None:
        vit = from_scratch(settings["model"], settings["classes"], folder)
        flat = {**settings["config"], **vit, "run.seed": seed, "run.deterministic": True, "method.name": "fedavg"}
        flat |= {"method.params": 'adapter = { kind = "all" }', "run.rounds": settings["rounds"]}
        self._folder, self._settings, self._config = folder, settings, parse(flat)
        self._task = task_of(ImageClassification, self._config, options)
        where, wanted = data.find_data_folder(settings["data"]), settings["sites"] * settings["rows_a_site"]
        examples = list(self._task.examples(where, "train"))
        if len(examples) < wanted:
            raise ConfigError(f"{settings['data']}: expected {wanted} rows, found {len(examples)}; lower sites")
        rows, count = self._task.encode(random.Random(seed).sample(examples, wanted)), settings["sites"]
        self._sites: dict[str, Sequence[ImageExample]] = {f"site-{i}": rows[i::count] for i in range(count)}
        self._test = self._task.examples(where, "test")[: settings["test_rows"]]
        self.initial: Weights = self._task.initial(rng.initial_stream(seed, "weights"))

    def ours(self) -> tuple[Weights, list[float]]:
        """Return FedVeil's final model, and the seconds of each round."""
        method = strategies.create_method("fedavg", self._config.method.params)
        exchange, seconds = MessageExchange(method, "fedavg", self._task.spec), list[float]()
        with limit_threads(self._config):
            running = create_federation(exchange, self._config, self._task, self._sites, self.initial)
            for round_ in range(self._settings["rounds"]):
                began = time.perf_counter()
                running.round(round_)
                seconds.append(time.perf_counter() - began)
        return running.models()["server"], seconds

    def peer(self, python: Path) -> tuple[Weights, list[float]]:
        """Return the peer's model and seconds. Raises ConfigError if it fails, or its model or round count is wrong."""
        train, folder, rounds = self._config.train, self._folder, self._settings["rounds"]
        task = {
            "seed": self._config.run.seed, "sites": len(self._sites), "rounds": rounds,
            "batch_size": train.batch_size, "epochs": train.epochs, "learning_rate": train.learning_rate,
            "weight_decay": train.weight_decay,
        }  # fmt: skip
        (folder / "task.json").write_text(json.dumps(task))
        of = [(number, row) for number, rows in enumerate(self._sites.values()) for row in rows]
        tensors = {
            "pixels": torch.stack([row.pixels() for _, row in of]),
            "labels": torch.tensor([row.label for _, row in of]),
            "site": torch.tensor([number for number, _ in of]),
        }
        save_file(tensors, folder / "rows.safetensors")
        save_file({name: w.contiguous() for name, w in self.initial.items()}, folder / "initial.safetensors")
        try:
            done = subprocess.run(
                [python, folders.find_folder(PEER.folder) / "train.py", folder],
                capture_output=True, text=True, timeout=_TIMEOUT,
                env=environments.select_variables(os.environ) | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{PEER.name}: the run did not end within {_TIMEOUT:g} s") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise ConfigError(f"{PEER.name}: expected a completed run, found exit status {done.returncode}: {last}")
        weights = load_file(folder / "weights.safetensors")
        seconds = json.loads((folder / "noted.json").read_text())["seconds"]
        if weights.keys() != self.initial.keys() or len(seconds) != rounds:
            raise ConfigError(
                f"{PEER.name}: expected {len(self.initial)} tensors after {rounds} rounds, found {len(weights)} after "
                f"{len(seconds)}; its train.py trains another model than the preset names"
            )
        return weights, seconds

    def scores(self, weights: Weights, seconds: Sequence[float] = ()) -> dict[str, float]:
        """Return a run's metrics or, without `seconds`, those of the untrained model."""
        found = self._task.evaluate(weights, self._test, generate=False)
        scores = {"loss": found["loss"], "right": 100 * found["accuracy"]}
        if seconds:
            round_ = sum(seconds[1:]) / len(seconds[1:])
            scores |= {"s a round": round_, "sites a second": len(self._sites) / round_}
        return scores


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return a row for each system, over the seeds; without pfl-research's environment, only FedVeil's."""
    environment = environments.find_environment(PEER, os.environ)
    if environment.said:
        options.say(environment.said)
    done: dict[str, list[dict[str, float]]] = {}
    for seed in range(options.seeds or settings["seeds"]):
        with tempfile.TemporaryDirectory() as scratch:
            work = SimulatedWork(settings, seed, options, Path(scratch) / "work")
            runs: dict[str, tuple[Weights, list[float]]] = {BEFORE: (work.initial, [])}
            if environment.python:
                runs[PEER.name] = work.peer(environment.python)
            runs[OURS] = work.ours()
            for name, (weights, seconds) in runs.items():
                done.setdefault(name, []).append(scores := work.scores(weights, seconds))
                options.say(f"seed {seed}: {name}: " + ", ".join(f"{m} {value:.4g}" for m, value in scores.items()))
    return build_outcome(done, settings, environment.said)


def build_outcome(
    done: Mapping[str, Sequence[Mapping[str, float]]], settings: Mapping[str, Any], note: str = ""
) -> BenchOutcome:
    """Return rows and verdicts. `note` describes the peer's environment; there is no claim about an omitted peer."""
    figures = {name: figures_of(runs) for name, runs in done.items()}
    rows = [
        {"name": name, "metrics": {metric: resampling.compute_interval(figure) for metric, figure in of.items()}}
        for name, of in figures.items()
    ]
    claims = [claim for claim in settings["claims"] if {claim["row"], claim["than"]} <= done.keys()]
    said = verdicts.list_verdicts(verdicts.judge_claims(figures, claims, "+.3f"), len(done[OURS]), verdicts.SEEDS)
    config = settings["config"]
    what = (
        f"this run: {settings['sites']} sites of {settings['rows_a_site']} rows, all in each of {settings['rounds']} "
        f"rounds, an epoch in batches of {config['train.batch-size']}; {len(done[OURS])} seeds"
    )
    return BenchOutcome(rows, [*([f"{note}."] if note else []), *said], [what])
