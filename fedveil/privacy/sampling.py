"""The rows of a site's turn, drawn in the way that the accountant assumes."""

from __future__ import annotations

from fedveil.contract.budget import Sampling, check_batch
from fedveil.contract.method import RoundContext
from fedveil.contract.trainer import Batch, RowGradients
from fedveil.rng import Stream


def batches(rows: RowGradients, sampling: Sampling, ctx: RoundContext, one: bool) -> list[Batch]:
    """The batches of a turn: `rows.steps` of them, or `one`. Raises ConfigError for a batch larger than the site.

    A repeated turn draws its rows anew, because the accountant's amplification assumes independent draws. With `one`
    and "disjoint", consecutive rounds take consecutive batches of one epoch, which has one order for all of them.
    """
    if not one or sampling != "disjoint":
        return rows.batches(sampling, 1 if one else rows.steps, Stream(ctx.noise("rows")(32)))
    check_batch(rows.batch_size, rows.num_examples)
    epoch, place = divmod(ctx.round, rows.num_examples // rows.batch_size)
    order = Stream.derive(ctx.secret, epoch, ctx.client, "order of an epoch")
    return rows.batches("disjoint", 1, order, place)
