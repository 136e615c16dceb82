"""The site policy that permits one run, with a comment on each line, for a person at the site to read and change.

What the run asks for is filled in: names, the reviewed app, rounds, bytes, secure aggregation, noise and run config
keys. What protects the site whatever the run is keeps the start-up kit's value, even if it refuses the run: the bounds
on broadcasts, min-examples, min-batch, and scores (0). `list_run_refusals` then says which lines refuse it.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

from fedveil.client_app.policy.decisions import VerifiedBundle
from fedveil.client_app.policy.planned_examples import MAX_TRAININGS
from fedveil.client_app.policy.run_config_rules import permits_for_run
from fedveil.client_app.policy.site_policy import SitePolicy
from fedveil.config import RunConfig
from fedveil.console.provisioning.policy_template import fill_policy
from fedveil.console.runs.sampling_plan import plan_sampling
from fedveil.contract.method import Method
from fedveil.contract.privacy import PrivacyBudget, PrivacyGuarantee
from fedveil.federation.exchange import MessageExchange
from fedveil.privacy.dp_sgd import DpSgdConfig
from fedveil.privacy.guarantee_source import as_planned, guarantee_of
from fedveil.privacy.ledger_account import ROW, UNIT, RunTerms, SiteAccount
from fedveil.privacy.own_share import charged_guarantee

__all__ = ["list_policy_warnings", "write_policy_for_run"]

_SPARE = 1.25  # factor on the computed bytes, for names and headers
_HEADERS = 1_000_000
_FEW_SITES = 3


def write_policy_for_run(
    config: RunConfig, exchange: MessageExchange, up: int, bundle: VerifiedBundle, examples: int | None, source: str
) -> str:
    """Return the policy as TOML.

    Args:
        up: bytes of the largest upload, which may be masked.
        bundle: the reviewed app's digest and own models.
        examples: the site's number of training examples, or of units in a run with `dp.unit-column`, needed for
            max-epsilon; None leaves max-epsilon out.
        source: the name of the file with the run config, for the first comment.
    """
    down = exchange.largest("down")
    values = {
        "methods": _names(config.method.name),
        "tasks": _names(config.task.name),
        "models": _names(config.task.model),
        "app-digests": _names(bundle.digest),
        "max-rounds": str(config.run.rounds),
        "max-bytes-a-round": _grouped(_round_up(_SPARE * (down + up) + _HEADERS)),
    }
    notes = {
        "max-bytes-a-round": f"This run's largest broadcast has {down:,} bytes of values and its largest upload "
        f"{up:,}; the limit leaves room for headers.",
    }
    if config.task.module:
        values["modules"] = _names(bundle.modules[config.task.module])
        notes["modules"] = f"Read fedveil/own/{config.task.module}.py of the app before you permit this digest."
    if config.held_out_fraction:
        notes["max-scores"] = (
            f"The run asks this site to score weights on {100 * config.held_out_fraction:g} % of its examples; without "
            "max-scores the site trains on all of them and reports no score."
        )
    for part in (_secure_values(config), _privacy_values(exchange.method, config, examples)):
        values |= part[0]
        notes |= part[1]
    name = f'the run "{config.run.name}"' if config.run.name else "the run"
    introduction = (
        f"It permits {name} of {source}, any number of times: {exchange.name} on {config.task.name}, at most "
        f"{config.run.rounds} rounds. Read each line, and change what you did not agree to; `fedveil explain --config "
        "FILE --policy THIS` says what the run would send from here."
    )
    for line in list_policy_warnings(config):
        introduction += f" Warning: {line}."
    return fill_policy(introduction, values, notes, _permits(config))


def list_policy_warnings(config: RunConfig) -> list[str]:
    """Return sentences on what the run asks for and a site should not take over without thinking."""
    warnings = []
    if config.task.data:
        warnings.append(f"the run names a folder of your machine, task.data = {_names(config.task.data)[1:-1]}")
    if config.secure.enabled and config.secure.min_sites < _FEW_SITES:
        warnings.append(f"secure.min-sites = {config.secure.min_sites} lets the other site compute your upload")
    if config.secure.enabled and not config.secure.max_colluders:
        warnings.append("secure.max-colluders = 0 promises nothing if one other site works with the server")
    return warnings


def _secure_values(config: RunConfig) -> tuple[dict[str, str], dict[str, str]]:
    secure = config.secure
    if not secure.enabled:
        return {}, {"require-secure": "This run sends uploads unmasked (secure.enabled = false): the server sees each."}
    values = {
        "require-secure": "true",
        "min-cohort": str(secure.min_sites),
        "min-colluders": str(secure.max_colluders),
    }
    if secure.threshold:
        values["min-threshold"] = str(secure.threshold)
    roster = "The run names no roster, so a server that lies could replace the other sites' keys with its own."
    if secure.roster:  # a file at the server, from which a site must not take the digest
        roster = (
            "The run names a roster. Write its digest here, as compared with the other sites by phone: without it, a "
            "server that lies could replace their keys with its own."
        )
    return values, {"roster": roster}


def _privacy_values(method: Method, config: RunConfig, examples: int | None) -> tuple[dict[str, str], dict[str, str]]:
    claim = guarantee_of(method, config)
    if claim is None or config.run.deterministic:
        return {}, {
            "max-epsilon": "This run has no differential-privacy guarantee: with max-epsilon, the site would refuse it."
        }
    budget = claim.budget
    values = {"delta": repr(budget.delta), "adjacency": json.dumps(budget.neighbours.value)}
    notes = {"delta": "As in the run. The ledger keeps the delta and adjacency of its first day."}
    if DpSgdConfig.from_config(config.dp) is not None:
        values["min-noise-multiplier"] = repr(config.dp.noise_multiplier)
    if budget.server_trusted:
        notes["max-epsilon"] = (
            "The server sees this run's values before the noise: with max-epsilon, the site would refuse it."
        )
    elif math.isinf(budget.epsilon):
        notes["max-epsilon"] = "The run sets no limit on its own epsilon: with max-epsilon, the site would refuse it."
    elif examples is None:
        notes["max-epsilon"] = (
            f"The run's own limit is {budget.epsilon:g}. What it takes of max-epsilon depends on this site's number of "
            "examples: `fedveil site policy` computes it with --examples N."
        )
    else:
        reserved = _reserved_epsilon(method, config, claim, examples)
        if math.isfinite(reserved):
            values["max-epsilon"] = f"{math.ceil(reserved * 100) / 100:.2f}"
            notes["max-epsilon"] = (
                f"What this run reserves in an empty ledger, with {examples:,} {_unit_name(config)}: its whole plan, "
                "with repeats, at delta / 16, so that 16 runs keep to delta together. Add what earlier runs reserved "
                f"(fedveil site ledger show). The run's own limit is {budget.epsilon:g} at its delta."
            )
        else:
            notes["max-epsilon"] = f"No finite epsilon is known for this run with {examples:,} examples."
    return values, notes


def _unit_name(config: RunConfig) -> str:
    return f"units ({config.dp.unit_column})" if config.dp.unit_column else "examples"


def _reserved_epsilon(method: Method, config: RunConfig, claim: PrivacyGuarantee, examples: int) -> float:
    """Return what the run's first charge reserves in an empty ledger, as the site's account computes it.

    The policy has no roster yet, so noise in a sum counts only as far as it is the site's own.
    """
    budget = claim.budget
    charged = charged_guarantee(as_planned(claim), None)
    plan = replace(plan_sampling(method, config, budget.neighbours, examples), rounds=1)
    account = SiteAccount(PrivacyBudget(math.inf, budget.delta, budget.neighbours))
    most = config.run.rounds * (SitePolicy().max_retries + 1) * MAX_TRAININGS
    terms = RunTerms("planned", charged.budget, config.run.rounds, most, UNIT if config.dp.unit_column else ROW)
    account = account.charge(terms, charged.privacy_spent(plan))
    return account.reserved_epsilon(account.entries[-1])


def _permits(config: RunConfig) -> list[tuple[str, str]]:
    """Return the lines of [permits], each with the default of its key as a comment."""
    defaults = RunConfig().flat()
    _, _, table = permits_for_run(config).partition("[permits]\n")
    lines = []
    for line in table.rstrip("\n").split("\n"):
        key = line.partition(" = ")[0].strip('"')
        default = defaults.get(key)
        says = "a parameter of the method" if key not in defaults else f"default: {json.dumps(default)}"
        if key == "run.name":
            says = 'this run alone; for a whole study: {pattern = "study-[0-9]+"}'
        if key == "run.resume":
            says = "continuing the run after an interruption; gives a server nothing"
        lines.append((_printable(line), says))
    return lines


def _printable(line: str) -> str:
    """Return a line of TOML with characters that do not print, such as direction marks, as TOML escapes."""
    return "".join(each if each.isprintable() else _escape(each) for each in line)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


def _names(name: str) -> str:
    return _printable(f"[{json.dumps(name, ensure_ascii=False)}]")


def _round_up(number: float) -> int:
    """Round up to two significant digits."""
    unit = int(10 ** max(0, len(str(math.ceil(number))) - 2))
    return math.ceil(number / unit) * unit


def _grouped(number: int) -> str:
    return f"{number:_}"
