"""Who makes a run's claim of privacy: `dp.*`, or the method; and where its noise is."""

from __future__ import annotations

from fedveil.config import RunConfig
from fedveil.contract.budget import Claim, check_seeded
from fedveil.contract.method import Method
from fedveil.errors import ConfigError
from fedveil.privacy.dp_sgd import DpSgd
from fedveil.privacy.in_sum import InSum


def claim_of(method: Method, config: RunConfig) -> Claim | None:
    """The run's claim of privacy, made by `dp.*` or by its method; None if there is none.

    Raises:
        ConfigError: `secure.noise = "sum"` for a run whose noise cannot be in the sum.
    """
    claim = DpSgd.of(config.dp) or (method if isinstance(method, Claim) else None)
    return InSum.of(claim, config) if config.secure.noise == "sum" else claim


def checked_claim(method: Method, config: RunConfig, has_row_gradients: bool) -> Claim | None:
    """The run's claim, after a check that method, task and config fit it.

    Raises:
        ConfigError: `dp.*` with a method or task that cannot have it, an epsilon in a deterministic run, or scores of
            sites' held-out rows that would pass a claim or a sum by.
    """
    dp = DpSgd.of(config.dp)
    if dp is not None:
        found = ""
        if isinstance(method, Claim):
            found = f"{config.method.name}, which adds noise of its own"
        elif method.asks_gradient:
            how = "sends gradients" if method.sends == "gradients" else "asks for plain gradients"
            found = f"{config.method.name}, which {how}"
        elif not has_row_gradients:
            found = f"the task {config.task.name}, which has no gradients of single rows"
        elif config.train.accumulate > 1:
            found = (
                f"train.accumulate = {config.train.accumulate}, which noisy steps do not have; raise train.batch-size"
            )
        if found:
            raise ConfigError(
                f"dp: expected a run whose clients can train by noisy steps, found {found}; leave [dp] out"
            )
    claim = claim_of(method, config)
    _check_held_out(claim, config)
    check_seeded(claim.budget if claim else None, config.run.deterministic)
    if config.aggregate.rule != "mean" and claim is not None and claim.budget.server_trusted:
        raise ConfigError(
            f'aggregate.rule: expected "mean" with {config.method.name}, whose server adds noise for a mean, found '
            f'"{config.aggregate.rule}"; leave it out'
        )
    return claim


def _check_held_out(claim: Claim | None, config: RunConfig) -> None:
    """A site's own score is a figure without noise, and of its rows alone: neither a claim nor a sum has room for it.

    Scores on the server's own data cost nothing of either.
    """
    why = "secure.enabled, where nothing of a single site is sent" if config.secure.enabled else ""
    if claim is not None:
        why = "a claim of privacy, which covers no figure without noise"
    if config.evaluate.held_out and why:
        raise ConfigError(
            f"evaluate.held-out: expected 0 with {why}, found {config.evaluate.held_out:g}; leave it out, and score on "
            "the server's own data (task.evaluation)"
        )
