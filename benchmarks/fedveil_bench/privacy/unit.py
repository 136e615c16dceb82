"""Compare models under row-level and unit-level differential privacy at equal epsilon, on texts with grouped rows.

A unit is a description with several sentences by different people. Every unit has the same number of rows, so both
kinds of training draw at the same rate and read as many rows in a step. Each has its own noise.

| row of the table | unit that is protected at epsilon | how |
|---|---|---|
| no noise | none | plain steps of clipped gradients of rows |
| a row | one row; "epsilon of a unit" is the resulting epsilon of a unit | rows are drawn, each row's gradient is
  clipped |
| a unit | all k rows of a unit | units are drawn, each unit's mean gradient is clipped |
| a unit, by its rows | all k rows of a unit | as "a row", with the noise at which a unit of k rows has that epsilon
  (unit_epsilon.py) |
| round 0 | - | the initial model, as the control: if the model without noise is no better, the other rows say nothing |

z is the noise multiplier, in units of the clip bound. A step divides its noise by the rows or units of a batch.
"CPU s" is the CPU time of all steps of both sites, in one thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fedveil import rng, strategies
from fedveil.config import RunConfig, parse
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import Weights
from fedveil.contract.privacy import Adjacency, Step
from fedveil.contract.task import Example
from fedveil.contract.trainer import Trainer
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.privacy import accounting
from fedveil.tasks.text_generation import TextGeneration
from fedveil.training.unit_gradients import UnitTrainer
from fedveil_bench.common import data, seeds
from fedveil_bench.common.federations import create_federation, task_of
from fedveil_bench.lora import tables
from fedveil_bench.privacy.unit_epsilon import compute_unit_epsilon, noise_for_unit
from fedveil_bench.runner import BenchOptions, BenchOutcome

CLEAR, ROW, UNIT, BY_ROWS, START = "no noise", "a row", "a unit", "a unit, by its rows", "round 0"
_COLUMN = "mr"


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return a row for each kind of guarantee on each data set, and the preset's claims."""
    noises = {name: compute_noises(settings, rows) for name, rows in _data_sets(settings).items()}
    epsilons = {
        name: {kind: _epsilon_of_unit(settings, kind, rows, noises[name][kind]) for kind in (ROW, UNIT, BY_ROWS)}
        for name, rows in _data_sets(settings).items()
    }
    answers = seeds.run_seeds(__name__, settings | {"noises": noises, "epsilons": epsilons}, options)
    return tables.build_outcome(answers, settings)


def list_requirements(settings: Mapping[str, Any]) -> list[data.DataRequirement]:
    """Return the requirements: rows for the sites, test rows, and the base."""
    needed = [data.DataRequirement(name, ("train", "test")) for name in settings["data"]]
    return [*needed, *data.list_base_requirements(settings)]


def _data_sets(settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the rows of a unit, by data set."""
    return dict(zip(settings["data"], settings["rows_a_unit"], strict=True))


def compute_noises(settings: Mapping[str, Any], rows: int) -> dict[str, float]:
    """Return the noise multiplier of each kind of guarantee, for units of `rows` rows."""
    epsilon, delta = settings["epsilon"], settings["delta"]
    rate, steps = _drawn(settings)

    def charges(z: float) -> dict[Step, int]:
        return {Step("poisson", settings["units_a_site"], settings["units_a_step"], z): steps}

    equal = accounting.noise_multiplier_for(charges, epsilon, delta, Adjacency.REPLACE_ONE)
    by_rows = noise_for_unit(rate, rows, steps, epsilon, delta)
    return {CLEAR: 0.0, ROW: equal, UNIT: equal, BY_ROWS: by_rows}  # units and rows are drawn at the same rate


def _drawn(settings: Mapping[str, Any]) -> tuple[float, int]:
    """Return the rate at which a step draws units or rows, and the number of steps."""
    config = settings["config"]
    return settings["units_a_step"] / settings["units_a_site"], config["run.rounds"] * config["train.max-steps"]


def _epsilon_of_unit(settings: Mapping[str, Any], kind: str, rows: int, z: float) -> dict[str, float]:
    """Return z and the epsilon of a unit of `rows` rows."""
    drawn_together = 1 if kind == UNIT else rows
    rate, steps = _drawn(settings)
    return {"z": z, "epsilon of a unit": compute_unit_epsilon(rate, drawn_together, z, steps, settings["delta"])}


def of_seed(settings: dict[str, Any], seed: int, options: BenchOptions) -> dict[str, dict[str, float]]:
    """Return one seed's results for `run_benchmark`: the metrics of each row of the table."""
    found: dict[str, dict[str, float]] = {}
    seeded = {"run.seed": seed, "run.deterministic": True}
    for name, rows in _data_sets(settings).items():
        reader = task_of(TextGeneration, parse(settings["config"] | seeded), options)
        drawn = _draw_rows(reader, name, rows, settings)
        start = reader.evaluate(_initial_weights(reader), drawn.test, generate=False)["loss"]
        found[f"{name}, {START}"] = {"loss": start}
        for kind, z in settings["noises"][name].items():
            config = parse(_keys(settings, kind, rows, z) | seeded)
            metrics = _measured(task_of(TextGeneration, config, options), drawn, rows)
            found[f"{name}, {kind}"] = metrics | settings["epsilons"][name].get(kind, {})
            options.say(f"seed {seed}: {name}, {kind}: loss {metrics['loss']:.4f} at z {z:.3f}")
    return found


def _keys(settings: Mapping[str, Any], kind: str, rows: int, z: float) -> dict[str, Any]:
    """Return the run config for a kind of guarantee; it draws rows at the same rate as units."""
    batch = settings["units_a_step"] * (1 if kind == UNIT else rows)
    own = {"dp.unit-column": _COLUMN, "dp.unit-rows": rows} if kind == UNIT else {}
    return {**settings["config"], **own, "train.batch-size": batch, "dp.noise-multiplier": z}


def draw_units(values: Sequence[str], sites: int, units: int, rows: int, seed: int) -> list[list[list[int]]]:
    """Return each site's units, each as the positions of `rows` rows with the same value; no unit is at two sites.

    Raises:
        ConfigError: too few values have that many rows.
    """
    places: dict[str, list[int]] = {}
    for place, value in enumerate(values):
        places.setdefault(value, []).append(place)
    large = [found for found in places.values() if len(found) >= rows]
    if len(large) < sites * units:
        raise ConfigError(
            f"units_a_site: expected at most {len(large) // sites}, which have {rows} rows each, found {units}; lower "
            "it or rows_a_unit"
        )
    stream = rng.RandomStream.derive(bytes(32), seed, "", "units")
    drawn = [large[int(place)] for place in stream.choice(len(large), sites * units)]
    chosen = [[unit[int(place)] for place in stream.choice(len(unit), rows)] for unit in drawn]
    return [chosen[site * units : (site + 1) * units] for site in range(sites)]


@dataclass(frozen=True)
class _DrawnRows:
    """The rows of each site, ordered by unit, and the test rows."""

    sites: tuple[tuple[Example, ...], ...]
    test: tuple[Example, ...]


def _draw_rows(task: TextGeneration, name: str, rows: int, settings: Mapping[str, Any]) -> _DrawnRows:
    folder, seed = data.find_data_folder(name), task.config.run.seed
    examples, test = task.examples(folder, "train"), task.examples(folder, "test")
    values = [str(example.values[_COLUMN]) for example in examples]
    units = draw_units(values, settings["sites"], settings["units_a_site"], rows, seed)
    stream = rng.RandomStream.derive(bytes(32), seed, "", "test rows")
    return _DrawnRows(
        tuple(tuple(examples[place] for unit in site for place in unit) for site in units),
        tuple(test[int(place)] for place in stream.choice(len(test), settings["test_rows"])),
    )


def _initial_weights(task: TextGeneration) -> Weights:
    return task.initial(rng.initial_stream(task.config.run.seed, "weights"))


def _measured(task: TextGeneration, drawn: _DrawnRows, rows: int) -> dict[str, float]:
    config = task.config
    method = strategies.create_method(config.method.name, config.method.params)
    exchange = MessageExchange(method, config.method.name, task.spec)
    prepared = {f"site-{number}": task.encode(site) for number, site in enumerate(drawn.sites)}
    units = tuple(tuple(range(i, i + rows)) for i in range(0, len(drawn.sites[0]), rows))
    around = partial(_by_units, units, config)
    trained = create_federation(exchange, config, task, prepared, _initial_weights(task), around=around)
    began = time.process_time()
    trained.run()
    seconds = time.process_time() - began
    return {"loss": task.evaluate(trained.models()["server"], drawn.test, generate=False)["loss"], "CPU s": seconds}


def _by_units(
    units: tuple[tuple[int, ...], ...], config: RunConfig, site: str, ctx: RoundContext, trainer: Trainer
) -> Trainer:
    return UnitTrainer(trainer, units, config) if config.dp.unit_column else trainer
