"""Canary pairs in a site's examples: a coin selects one of each pair, and a run reveals the coins (one_run.py).

A canary is an example with another example's target: a model can learn this combination only from the
canary. Each position holds one canary of a pair. Data sets of different coins thus differ by replacing one
example, so the adjacency is replace-one. The coins affect neither the number of examples nor their
positions.

| file in a folder of canaries | content |
|---|---|
| `data/train.*` | the site's training data: its examples without two per pair, plus one of each pair |
| `secret/first.*`, `secret/second.*` | the pairs, in the same order |
| `secret/coins.json` | the chosen one of each pair; people who train must not read it |

| score of a pair | first canary's value minus the second's |
|---|---|
| loss | decrease of the loss from the public base to the run's model |
| alignment | cosine of the example's gradient with the site's upload (attacks/membership/alignment.py) |

| case | result |
|---|---|
| a run that never trained on the canaries | a bound of 0, except with probability 1 - confidence |
| canaries that `task.examples-per-site` left out | their coins are guessed at random, which lowers the bound |
| a claim of zero-out | another adjacency: both are shown, but not compared |
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
    "canary_scores",
    "describe_bound",
    "plant_canaries",
]

LEAST, MOST = 20, 20_000  # pairs
DATA, SECRET, FIRST, SECOND, COINS = "data", "secret", "first", "second", "coins.json"
DELTA = 1e-5  # if the run claims no delta
_MOST_BYTES, _MOST_UPLOADS = 1 << 20, 8
Row = Mapping[str, Any]


@dataclass(frozen=True)
class CanaryPlan:
    """Data to write: `train` for the site, and the pairs."""

    train: Sequence[Row]
    first: Sequence[Row]
    second: Sequence[Row]


def plant_canaries(rows: Sequence[Row], column: str, coins: NDArray[np.bool_], choice: random.Random) -> CanaryPlan:
    """Create a canary pair for each coin; the training data gets the first one if the coin is true.

    Args:
        rows: the site's examples.
        column: column of the target.
        coins: (pairs,) fair coins, independent of everything else.
        choice: selects the examples that become canaries, independently of the coins.

    Raises:
        ConfigError: too few or too many pairs, or too few examples.
    """
    pairs = len(coins)
    if not LEAST <= pairs <= MOST or 2 * pairs > len(rows):
        raise ConfigError(
            f"--pairs: expected {LEAST} to {MOST}, and at most half of the {len(rows)} examples, found {pairs}"
        )
    drawn = choice.sample(range(len(rows)), 2 * pairs)
    # Each takes the target of the one before; the first takes that of the last.
    swapped = {at: {**rows[at], column: rows[drawn[i - 1]][column]} for i, at in enumerate(drawn)}
    places, away = drawn[:pairs], drawn[pairs:]
    first, second = [swapped[at] for at in places], [swapped[at] for at in away]
    put = {at: first[i] if coins[i] else second[i] for i, at in enumerate(places)}
    left = set(away)
    return CanaryPlan([put.get(at, row) for at, row in enumerate(rows) if at not in left], first, second)


def canary_coins(folder: Path) -> NDArray[np.bool_]:
    """Return the coins in a folder of canaries. Raises StateError if it is not such a folder."""
    file = folder / SECRET / COINS
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError("a file that is too large")
        coin_bits = json.loads(file.read_text())["coins"]
        if not LEAST <= len(coin_bits) <= MOST or set(coin_bits) - {"0", "1"}:
            raise ValueError(f"{len(coin_bits)} coins")
        return np.array([coin == "1" for coin in coin_bits])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(
            f"{file}: expected the coins that fedveil canaries wrote, found {type(error).__name__}: {error}; name the "
            "folder that it made"
        ) from None


def bound_from_audit(
    folder: Path, site: str, view: AdversaryView, knowledge: AdversaryKnowledge, delta: float
) -> EpsilonLowerBound:
    """Bound epsilon from below by how well a run reveals the coins of one site.

    Args:
        folder: folder of the canaries.
        site: site whose examples contain the canaries.
        view: the server's view.
        knowledge: adversary knowledge that includes the run's final model.

    Raises:
        StateError: not a folder of canaries.
        ConfigError: the site did not take part, or the number of pairs differs from the number of coins.
    """
    coins, task = canary_coins(folder), knowledge.task
    if site not in view.sites:
        raise ConfigError(f"--canaries: expected a site of the run ({', '.join(view.sites)}), found {site}")
    first, second = (_rows(task, folder / SECRET, name, len(coins)) for name in (FIRST, SECOND))
    return one_run.best_epsilon_bound(canary_scores(site, view, knowledge, first, second), coins, delta)


def canary_scores(
    site: str, view: AdversaryView, knowledge: AdversaryKnowledge, first: Sequence[Rows], second: Sequence[Rows]
) -> dict[str, Scores]:
    """Return each applicable score, shape (pairs,): above 0 if the first canary is more likely in the data.

    Args:
        site: site whose examples contain the canaries.
        view: view of the server, or of its sums.
        knowledge: includes the run's final model.
        first, second: the prepared rows of each canary, by pair.
    """
    rows = [row for each in (*first, *second) for row in each]
    scores = {"loss": _falls(knowledge, rows)}
    if not explain_misfit(AlignmentAttack(), view, knowledge):
        scores["alignment"] = alignment_scores(view, site, knowledge, rows, _MOST_UPLOADS)
    sizes = [len(each) for each in (*first, *second)]
    return {name: _of_pairs(s, sizes) for name, s in scores.items()}


def describe_bound(bound: EpsilonLowerBound, site: str, claim: PrivacyBudget | None) -> str:
    """Return a sentence that compares the bound with the run's privacy guarantee."""
    relation = Adjacency.REPLACE_ONE
    statement = (
        f"{site}, one run with {bound.canaries} pairs of canaries: epsilon at least {bound.epsilon:.2f} at delta "
        f"{bound.delta:g}, {relation.value}, with {100 * bound.confidence:.0f} % confidence ({bound.correct} of "
        f"{bound.guesses} guesses right, by {bound.score})"
    )
    if claim is None or not math.isfinite(claim.epsilon):
        return f"{statement}; claimed: nothing."
    if claim.server_trusted:
        return f"{statement}; claimed: nothing against the server, whose view this is."
    at_most = f"at most {claim.epsilon:g} at delta {claim.delta:g}, {claim.neighbours.value}"
    if claim.neighbours is not relation or claim.delta != bound.delta:
        return f"{statement}; claimed: {at_most}, which has another adjacency or delta and is not compared."
    if bound.epsilon > claim.epsilon:
        return (
            f"{statement}; claimed: {at_most}. The claim is CONTRADICTED: one of the two is wrong; do not rely on it."
        )
    return f"{statement}; claimed: {at_most}."


def _rows(task: Task, folder: Path, name: str, count: int) -> list[Rows]:
    """Return the rows of each canary of one side."""
    files = sorted(folder.glob(f"{name}.*"))
    if len(files) != 1:
        raise StateError(f"{folder}: expected one file {name}.jsonl or {name}.parquet, found {len(files)}")
    examples = task.examples(files[0], "test")
    if len(examples) != count:
        raise ConfigError(
            f"{files[0]}: expected {count} rows, one per coin, found {len(examples)}; is this another folder?"
        )
    return encode_examples(task, list(examples))


def _falls(knowledge: AdversaryKnowledge, rows: Rows) -> Scores:
    """Return the loss under the public base minus that under the run's model, shape (rows,)."""
    if knowledge.server is None:
        raise ValueError(
            "knowledge.server: expected the server's final model, found None; pass it to AdversaryKnowledge"
        )
    after = [target_loss(prediction) for prediction in knowledge.task.predict(knowledge.server, rows)]
    return np.asarray(PublicBaseScores(knowledge.task, knowledge.initial).losses(rows) - np.array(after))


def _of_pairs(scores: Scores, sizes: Sequence[int]) -> Scores:
    """Return the mean over the first's rows minus the second's, (pairs,); `sizes` lists firsts, then seconds."""
    means = np.array([part.mean() if len(part) else 0.0 for part in np.split(scores, np.cumsum(sizes)[:-1])])
    half = len(means) // 2
    return np.asarray(means[:half] - means[half:])
