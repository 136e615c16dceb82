"""The rows of a site's turn: drawn as the accountant takes them to be drawn."""

from __future__ import annotations

from fedveil.contract.budget import Sampling, check_batch
from fedveil.contract.method import RoundContext
from fedveil.contract.trainer import Batch, RowGradients
from fedveil.rng import Stream


def batches(rows: RowGradients, sampling: Sampling, ctx: RoundContext, one: bool) -> list[Batch]:
    """The batches of a turn: `one`, or those of `rows.steps`. Raises ConfigError for a batch larger than the site.

    Rows are drawn anew where a turn is repeated: amplification is accounted for draws that are independent. With `one` and
    "disjoint", rounds walk through one epoch: the same order for all of them, each at its own place.
    """
    if not one or sampling != "disjoint":
        return rows.batches(sampling, 1 if one else rows.steps, Stream(ctx.noise("rows")(32)))
    check_batch(rows.batch_size, rows.num_examples)
    epoch, place = divmod(ctx.round, rows.num_examples // rows.batch_size)
    order = Stream.derive(ctx.secret, epoch, ctx.client, "order of an epoch")
    return rows.batches("disjoint", 1, order, place)
