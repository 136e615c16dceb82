"""The source of a run's privacy guarantee, `dp.*` or the method, and where its noise is added."""

from __future__ import annotations

from fedveil.config import DpConfig, RunConfig
from fedveil.contract.method import Method
from fedveil.contract.privacy import UNTIMED, PrivacyGuarantee, SamplingPlan, check_seeded, is_poisson_sampled
from fedveil.errors import ConfigError
from fedveil.privacy.distributed_dgauss import DistributedDiscreteGaussian
from fedveil.privacy.dp_sgd import DpSgdConfig
from fedveil.sanitize import sanitize

__all__ = ["as_planned", "check_class_names", "check_guarantee", "check_public_length", "guarantee_of"]

_OF_TOKENS = (
    "preference",
    "text-classification",
    "text-generation",
    "token-classification",
    "vision-language",
)  # tasks that read task.max-tokens


def guarantee_of(method: Method, config: RunConfig) -> PrivacyGuarantee | None:
    """Return the run's privacy guarantee, from `dp.*` or its method; None if there is none.

    Raises:
        ConfigError: `secure.noise = "sum"` for a run whose noise cannot be in the sum.
    """
    claim = DpSgdConfig.from_config(config.dp) or (method if isinstance(method, PrivacyGuarantee) else None)
    return DistributedDiscreteGaussian.from_guarantee(claim, config) if config.secure.noise == "sum" else claim


def as_planned(claim: PrivacyGuarantee) -> PrivacyGuarantee:
    """Return the guarantee at the planned resolution of its sums; without noise in the sum, return it unchanged."""
    return claim.as_planned() if isinstance(claim, DistributedDiscreteGaussian) else claim


def untimed(claim: PrivacyGuarantee) -> str:
    """Return the caveat about a server that times a site, for a guarantee with Poisson sampling; otherwise ""."""
    plan = SamplingPlan(rounds=1, steps=1, batch=1, examples=2, neighbours=claim.budget.neighbours)
    return UNTIMED if is_poisson_sampled(claim.privacy_spent(plan)) else ""


def check_guarantee(method: Method, config: RunConfig, has_row_gradients: bool) -> PrivacyGuarantee | None:
    """Check that the method, task and config fit the run's guarantee, and return the guarantee.

    Raises:
        ConfigError: the method or task does not support `dp.*`, a deterministic run has an epsilon, class names come
            from the data, or held-out scores would bypass a guarantee or secure aggregation.
    """
    dp = DpSgdConfig.from_config(config.dp)
    if dp is not None:
        problem = ""
        if isinstance(method, PrivacyGuarantee):
            problem = f"{config.method.name}, which adds its own noise"
        elif method.requests_raw_gradient:
            how = "sends gradients" if method.upload_kind == "gradients" else "asks for plain gradients"
            problem = f"{config.method.name}, which {how}"
        elif not has_row_gradients:
            problem = f"the task {config.task.name}, which has no per-example gradients"
        elif config.train.gradient_accumulation_steps > 1:
            steps = config.train.gradient_accumulation_steps
            problem = (
                f"train.gradient-accumulation-steps = {steps}, which DP-SGD does not support; raise train.batch-size"
            )
        if problem:
            raise ConfigError(
                f"dp: expected a run whose clients can train with DP-SGD, found {problem}; leave [dp] out"
            )
    claim = guarantee_of(method, config)
    check_class_names(claim, config)
    if claim is not None and config.task.empty_texts != "refuse":
        raise ConfigError(
            f'task.empty-texts: with "{config.task.empty_texts}", the number of examples depends on the rows\' '
            "texts, but a privacy claim treats that number as public; leave it out, and correct the data"
        )
    if isinstance(claim, DistributedDiscreteGaussian) and method.trainings > 1:
        raise ConfigError(
            f'secure.noise: expected "site" with {config.method.name}, which trains {method.trainings} times in a '
            'client round, found "sum"; leave it out'
        )
    _check_unit(claim, config)
    _check_held_out(claim, config)
    check_seeded(claim.budget if claim else None, config.run.deterministic)
    if config.aggregate.rule != "mean" and claim is not None and claim.budget.server_trusted:
        raise ConfigError(
            f'aggregate.rule: expected "mean" with {config.method.name}, whose server adds noise to the mean, found '
            f'"{config.aggregate.rule}"; leave it out'
        )
    return claim


def check_class_names(claim: PrivacyGuarantee | None, config: RunConfig) -> None:
    """Raise ConfigError if a guarantee would depend on class names from the data, where a single label can add a class.

    With a prompt, the texts of all classes enter every row's loss, and clipping does not bound that effect.
    """
    if claim is not None and config.task.name == "clip-prompt" and not config.task.class_list:
        raise ConfigError(
            "task.class-names: a privacy claim requires the public names of all classes, because one row's label "
            "could add a class and so change the loss of every row; set them"
        )


def check_public_length(claim: PrivacyGuarantee | None, config: RunConfig) -> None:
    """Raise ConfigError if a run with a guarantee would truncate its examples at a length that depends on them."""
    if claim is not None and config.task.name in _OF_TOKENS and not config.task.max_tokens:
        raise ConfigError(
            "task.max-tokens: a privacy claim requires a length, because the default depends on the lengths of "
            "the examples, which no noise covers; add task.max-tokens = 512, or another length chosen "
            "independently of these examples"
        )


def _check_unit(claim: PrivacyGuarantee | None, config: RunConfig) -> None:
    """Raise ConfigError for dp.unit-* keys that the run's guarantee cannot support."""
    dp = config.dp
    if dp.unit and (claim is None or dp.unit_column):
        found = f'dp.unit-column = "{sanitize(dp.unit_column)}"' if dp.unit_column else "a run without one"
        raise ConfigError(f'dp.unit: expected "{dp.unit}" with a guarantee for one row, found {found}; leave it out')
    if not dp.unit_column:
        if dp.unit_rows != DpConfig().unit_rows:
            raise ConfigError(
                f"dp.unit-rows: it requires dp.unit-column, found only {dp.unit_rows}; set both, or neither"
            )
        if dp.no_unit != DpConfig().no_unit:
            raise ConfigError(
                f'dp.no-unit: it requires dp.unit-column, found only "{dp.no_unit}"; set both, or neither'
            )
        return
    problem = ""
    if claim is None:
        problem = f"{config.method.name} without [dp], which has no guarantee; set dp.clip-norm"
    elif claim.budget.server_trusted:
        problem = f'{config.method.name} with noise at the server; set its mode to "strict"'
    elif not untimed(claim):
        problem = 'batches that are not drawn by Poisson sampling; set the method\'s sampling to "poisson"'
    elif config.task.examples_per_site:
        problem = (
            f"task.examples-per-site = {config.task.examples_per_site}, a choice that depends on how many rows a unit "
            "has; leave it out"
        )
    if problem:
        raise ConfigError(f"dp.unit-column: expected a run that can draw units, found {problem}")


def _check_held_out(claim: PrivacyGuarantee | None, config: RunConfig) -> None:
    """Refuse sites' held-out scores, which have no noise and reveal a single site, under a guarantee or secure.enabled.

    Scores on the server's own data do not conflict with either.
    """
    why = "secure.enabled, which hides every single site's figures" if config.secure.enabled else ""
    if claim is not None:
        why = "a privacy claim, which does not cover figures without noise"
    if (part := config.held_out_fraction) and why:
        raise ConfigError(
            f"{config.held_out_key}: expected 0 with {why}, found {part:g}; leave it out, and score on the server's "
            "own data (task.evaluation)"
        )
