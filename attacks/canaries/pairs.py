"""Canary pairs in a site's examples: a coin selects one canary per pair, and a bound on epsilon follows from how well a
run reveals the coins (one_run.py).

A canary is an example with another example's target: a model can learn this combination only from the
canary. Each pair takes up one position in the data, whichever canary is chosen. Flipping one coin therefore replaces
one example, so the adjacency is replace-one. The coins affect neither the number of examples nor their positions.

For a run with `dp.unit-column`, a canary is a whole unit of k rows with the targets of another unit's rows, and the
adjacency replaces one unit. A canary's score is the mean of its rows' scores. Rows beyond the k-th of a unit used for
canaries are dropped. A guarantee for single rows says nothing about these canaries.

| file in a canary folder | content |
|---|---|
| `data/train.*` | the site's training data: its examples minus two per pair, plus one canary of each pair |
| `secret/first.*`, `secret/second.*` | the pairs, in the same order |
| `secret/coins.json` | which canary of each pair was chosen; the people who train must not read it |

| score of a pair | first canary's value minus the second's |
|---|---|
| loss | decrease of the loss from the public base to the run's model |
| alignment | cosine of the example's gradient with the site's upload (attacks/membership/alignment.py) |

| case | result |
|---|---|
| a run that never trained on the canaries | a bound of 0, except with probability 1 - confidence |
| canaries that `task.examples-per-site` left out | their coins are guessed at random, which lowers the bound |
| a guarantee with zero-out adjacency | both epsilons are shown but not compared |
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.attacks.base import AdversaryKnowledge, AdversaryView, explain_misfit
from fedveil.attacks.canaries import one_run
from fedveil.attacks.canaries.one_run import EpsilonLowerBound
from fedveil.attacks.membership.alignment import AlignmentAttack, alignment_scores
from fedveil.attacks.membership.model_scores import PublicBaseScores, target_loss
from fedveil.attacks.samples import encode_examples
from fedveil.attacks.statistics import Scores
from fedveil.contract.privacy import Adjacency, PrivacyBudget
from fedveil.contract.task import Rows, Task
from fedveil.errors import ConfigError, StateError

__all__ = [
    "DELTA",
    "CanaryPlan",
    "bound_from_audit",
    "canary_coins",
    "canary_rows",
    "canary_scores",
    "describe_bound",
    "plant_canaries",
]

LEAST, MOST = 20, 20_000  # pairs
MOST_UNIT_ROWS = 1000
DATA, SECRET, FIRST, SECOND, COINS = "data", "secret", "first", "second", "coins.json"
DELTA = 1e-5  # used if the run claims no delta
_MOST_BYTES, _MOST_UPLOADS = 1 << 20, 8
Row = Mapping[str, Any]


@dataclass(frozen=True)
class CanaryPlan:
    """Data to write: `train` for the site, and the canaries' rows on each side of the pairs, in order."""

    train: Sequence[Row]
    first: Sequence[Row]
    second: Sequence[Row]


def plant_canaries(
    rows: Sequence[Row],
    column: str,
    coins: NDArray[np.bool_],
    choice: random.Random,
    units: Sequence[Sequence[int]] | None = None,
    unit_rows: int = 1,
) -> CanaryPlan:
    """Create a canary pair for each coin.

    If the coin is true, the training data gets the first canary, otherwise the second.

    Args:
        rows: the site's examples.
        column: column of the target.
        coins: (pairs,) fair coins, independent of everything else.
        choice: selects the examples that become canaries, independently of the coins.
        units: the rows of each unit; None means that each row is a unit.
        unit_rows: number of rows in a canary; units with fewer rows cannot become canaries.

    Raises:
        ConfigError: too few or too many pairs, or too few examples.
    """
    pairs = len(coins)
    large = (
        [unit for unit in units if len(unit) >= unit_rows] if units is not None else [(at,) for at in range(len(rows))]
    )
    if not LEAST <= pairs <= MOST or 2 * pairs > len(large):
        what = "examples" if units is None else f"units with {unit_rows} rows or more"
        raise ConfigError(
            f"--pairs: expected {LEAST} to {MOST}, and at most half of the {len(large)} {what}, found {pairs}"
        )
    drawn = choice.sample(large, 2 * pairs)
    used = [tuple(unit[:unit_rows]) for unit in drawn]
    # Each canary takes the targets of the one before it; the first takes the targets of the last.
    swapped = [
        [{**rows[at], column: rows[other][column]} for at, other in zip(unit, used[i - 1], strict=True)]
        for i, unit in enumerate(used)
    ]
    first, second = swapped[:pairs], swapped[pairs:]
    put: dict[int, Row] = {}
    for i, unit in enumerate(used[:pairs]):
        put |= dict(zip(unit, first[i] if coins[i] else second[i], strict=True))
    left = {at for unit in drawn for at in unit} - set(put)
    train = [put.get(at, row) for at, row in enumerate(rows) if at not in left]
    return CanaryPlan(train, [row for unit in first for row in unit], [row for unit in second for row in unit])


def canary_coins(folder: Path) -> NDArray[np.bool_]:
    """Return the coins in a canary folder. Raises StateError if `folder` is not a canary folder."""
    return _read_coins(folder)[0]


def canary_rows(folder: Path) -> int:
    """Return the number of rows per canary in a canary folder. Raises StateError like `canary_coins`."""
    return _read_coins(folder)[1]


def _read_coins(folder: Path) -> tuple[NDArray[np.bool_], int]:
    file = folder / SECRET / COINS
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError("the file is too large")
        content = json.loads(file.read_text())
        coin_bits, unit_rows = content["coins"], content.get("rows", 1)
        if not LEAST <= len(coin_bits) <= MOST or set(coin_bits) - {"0", "1"}:
            raise ValueError(f"{len(coin_bits)} coins")
        if type(unit_rows) is not int or not 1 <= unit_rows <= MOST_UNIT_ROWS:
            raise ValueError("the number of rows per canary is invalid")
        return np.array([coin == "1" for coin in coin_bits]), unit_rows
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(
            f"{file}: not a coin file that fedveil canaries wrote ({type(error).__name__}: {error}); give the "
            "folder that it created"
        ) from None


def bound_from_audit(
    folder: Path, site: str, view: AdversaryView, knowledge: AdversaryKnowledge, delta: float
) -> EpsilonLowerBound:
    """Bound epsilon from below by how well a run reveals one site's coins.

    Args:
        folder: folder of the canaries.
        site: site whose examples contain the canaries.
        view: the server's view.
        knowledge: adversary knowledge that includes the run's final model.

    Raises:
        StateError: `folder` is not a canary folder.
        ConfigError: the site did not take part, or the number of pairs differs from the number of coins.
    """
    (coins, unit_rows), task = _read_coins(folder), knowledge.task
    if site not in view.sites:
        raise ConfigError(f"--canaries: {site} is not a site of the run; its sites are {', '.join(view.sites)}")
    first, second = (_rows(task, folder / SECRET, name, len(coins), unit_rows) for name in (FIRST, SECOND))
    return one_run.best_epsilon_bound(canary_scores(site, view, knowledge, first, second), coins, delta)


def canary_scores(
    site: str, view: AdversaryView, knowledge: AdversaryKnowledge, first: Sequence[Rows], second: Sequence[Rows]
) -> dict[str, Scores]:
    """Return each applicable score, shape (pairs,): above 0 if the first canary is more likely in the data.

    Args:
        site: site whose examples contain the canaries.
        view: view of the server, or of its sums.
        knowledge: includes the run's final model.
        first, second: the preprocessed rows of each canary, by pair; a unit's score is the mean over its rows.
    """
    rows = [row for each in (*first, *second) for row in each]
    scores = {"loss": _falls(knowledge, rows)}
    if not explain_misfit(AlignmentAttack(), view, knowledge):
        scores["alignment"] = alignment_scores(view, site, knowledge, rows, _MOST_UPLOADS)
    sizes = [len(each) for each in (*first, *second)]
    return {name: _of_pairs(s, sizes) for name, s in scores.items()}


def describe_bound(
    bound: EpsilonLowerBound, site: str, claim: PrivacyBudget | None, unit_rows: int = 1, by_units: bool = False
) -> str:
    """Return a sentence that compares the bound with the run's privacy guarantee.

    `unit_rows`: number of rows in a canary. `by_units`: whether the guarantee is for a unit, not for a row.
    """
    relation = Adjacency.REPLACE_ONE
    of_units = f", units of {unit_rows} rows" if unit_rows > 1 else ""
    statement = (
        f"{site}, one run with {bound.canaries} pairs of canaries: epsilon at least {bound.epsilon:.2f} at delta "
        f"{bound.delta:g}, {relation.value}{of_units}, with {100 * bound.confidence:.0f} % confidence "
        f"({bound.correct} of "
        f"{bound.guesses} guesses right, by {bound.score})"
    )
    if claim is None or not math.isfinite(claim.epsilon):
        return f"{statement}; claimed: nothing."
    if claim.server_trusted:
        return f"{statement}; claimed: nothing against the server, whose view this is."
    at_most = f"at most {claim.epsilon:g} at delta {claim.delta:g}, {claim.neighbours.value}"
    if claim.neighbours is not relation or claim.delta != bound.delta:
        return f"{statement}; claimed: {at_most}, which has another adjacency or delta and is not compared."
    if unit_rows > 1 and not by_units:
        return f"{statement}; claimed: {at_most}, for one row, which is not compared."
    if bound.epsilon > claim.epsilon:
        return (
            f"{statement}; claimed: {at_most}. The claim is CONTRADICTED: one of the two is wrong; do not rely on it."
        )
    return f"{statement}; claimed: {at_most}."


def _rows(task: Task, folder: Path, name: str, count: int, unit_rows: int) -> list[Rows]:
    """Return the rows of each canary on one side of the pairs."""
    files = sorted(folder.glob(f"{name}.*"))
    if len(files) != 1:
        raise StateError(f"{folder}: expected one file {name}.jsonl or {name}.parquet, found {len(files)}")
    examples = task.examples(files[0], "test")
    if len(examples) != count * unit_rows:
        each = "one" if unit_rows == 1 else str(unit_rows)
        raise ConfigError(
            f"{files[0]}: expected {count * unit_rows} rows, {each} per coin, found {len(examples)}; is this another "
            "folder?"
        )
    encoded = encode_examples(task, list(examples))
    return [[row for each in encoded[i : i + unit_rows] for row in each] for i in range(0, len(encoded), unit_rows)]


def _falls(knowledge: AdversaryKnowledge, rows: Rows) -> Scores:
    """Return the loss under the public base minus the loss under the run's model, shape (rows,)."""
    if knowledge.server is None:
        raise ValueError("knowledge.server: the server's final model is missing; pass it to AdversaryKnowledge")
    after = [target_loss(prediction) for prediction in knowledge.task.predict(knowledge.server, rows)]
    return np.asarray(PublicBaseScores(knowledge.task, knowledge.initial).losses(rows) - np.array(after))


def _of_pairs(scores: Scores, sizes: Sequence[int]) -> Scores:
    """Return each pair's mean score on the first canary minus the second, (pairs,); `sizes`: firsts, then seconds."""
    means = np.array([part.mean() if len(part) else 0.0 for part in np.split(scores, np.cumsum(sizes)[:-1])])
    half = len(means) // 2
    return np.asarray(means[:half] - means[half:])
