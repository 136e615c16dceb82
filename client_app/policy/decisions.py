"""All of a site's decisions about a run. Each raises PolicyError, naming the key and what the site permits.

| when | decision |
|---|---|
| a message has arrived, before it is read | `check_app_digest` |
| the message has been read, before any data is read | `check_run`; `list_refusals` lists all its refusals |
| a round is about to be served | `count_round`; `check_round` for messages that do not count as serving |
| the broadcast is decoded, before training | `check_broadcast` |
| the upload is complete, before the private state is saved | `check_examples` |
| the upload is about to leave the site | `check_upload` |

The policy's keys are in site_policy.py. fedveil/federation/secagg/site.py checks secure-aggregation keys and plans,
and the site's ledger checks privacy charges (fedveil/privacy/charged_gradients.py).


| case | result |
|---|---|
| the node config does not name a policy file | everything is permitted except a round that was already served
  (replay_guard.py) and a broadcast that changes or drifts by more than 10; only the guard's entry point in the image
  refuses |
| fewer examples than min-examples or min-batch, by the run config alone | the run is refused before any row is read
  (planned_examples.py) |
| the file is missing, is not TOML, has an unknown key or a value of the wrong type | PolicyError |
| a key is absent | no restriction; but a run config key that neither a policy key nor [permits] names must have its
  default |
| an empty list | nothing is permitted |
| several keys | all of them must hold: a signed bundle with an unlisted digest is refused |
| no modules, and the run has an own model (task.module) | PolicyError: the site runs only files that it has reviewed |
| app-digests, modules or signers, and the guard has not checked the bundle | PolicyError: only the guard can check it |
| min-noise-multiplier, and the run has no `dp.clip-norm` | PolicyError: its noise is 0 |
| max-epsilon, and the run has no budget that the site's ledger enforces, or its draws are seeded | PolicyError |
| too many bytes or too few examples, known only after training | the site withholds the upload and sends the reason |
| scores on held-out rows that are not permitted, or too many | the round continues without them, and reports why |
| norm, change or drift above a broadcast's three bounds | the client round ends before it reads an example |
| hours "22:00-06:00" | the window spans midnight, from 22:00 to before 06:00; "00:00-24:00" is always |

The server's bundle contains this file too, but the site's installed copy enforces the policy:
fedveil/guard/clientapp.py calls it before any of the bundle's code runs.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.node_config import SiteConfig
from fedveil.client_app.policy import privacy_cost, run_config_rules, secagg
from fedveil.client_app.policy.planned_examples import require_planned_examples
from fedveil.client_app.policy.site_policy import SitePolicy, load_policy, policy_of_site
from fedveil.client_app.policy.time_windows import require_hour
from fedveil.client_app.state.flower_runs import bind_flower_run, check_flower_run
from fedveil.client_app.state.replay_guard import ReplayGuard
from fedveil.config import RunConfig
from fedveil.contract.held_out_report import LOSS
from fedveil.errors import ConfigError, PolicyError


@dataclass(frozen=True)
class VerifiedBundle:
    """The bundle's SHA-256 and its signing key, as the site's guard determined them; "" = the guard did not check.

    `modules`: the digest of each own model's file in the bundle, by its name in task.module.
    """

    digest: str = ""
    signer: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_environment(cls) -> VerifiedBundle:
        """Return the bundle as fedveil/guard/clientapp.py recorded it in the environment."""
        name, _, digest = os.environ.get("FEDVEIL_APP_MODULE", "").partition(" ")
        modules = {name: digest} if name else {}
        return cls(os.environ.get("FEDVEIL_APP_DIGEST", ""), os.environ.get("FEDVEIL_APP_SIGNER", ""), modules)


def check_run(
    assignment: ClientAssignment,
    bundle: VerifiedBundle | None = None,
    down_bytes: int = 0,
    now: datetime | None = None,
    serves: bool = True,
) -> None:
    """Raise the first of `list_refusals`."""
    for found in list_refusals(assignment, bundle, down_bytes, now, serves):
        raise found


def list_refusals(
    assignment: ClientAssignment,
    bundle: VerifiedBundle | None,
    down_bytes: int,
    now: datetime | None = None,
    serves: bool = True,
) -> Iterator[PolicyError]:
    """Yield everything the site does not permit; nothing if it permits the client round.

    Raises PolicyError if the policy is unreadable.

    Args:
        down_bytes: size of the server's message.
        serves: the message requests a client round; otherwise secure-aggregation keys or shares, which do not count.
    """
    policy, config = load_policy(assignment.site), assignment.config
    judged: list[Callable[[], None]] = [
        lambda: check_round(assignment, policy.max_retries + 1 if serves else sys.maxsize)
    ]
    if assignment.site.policy:
        secure = (
            config.secure, policy.require_secure, policy.min_cohort, policy.min_threshold, policy.roster,
            policy.min_colluders,
        )  # fmt: skip
        judged += [
            lambda: _require_bundle(bundle or VerifiedBundle(), policy),
            lambda: _require_module(bundle or VerifiedBundle(), config.task.module, policy.modules),
            lambda: _require_methods(assignment, policy.methods),
            lambda: _require_one("task.name", config.task.name, policy.tasks),
            lambda: _require_one("task.model", config.task.model, policy.models),
            lambda: _require_rounds(config.run.rounds, policy.max_rounds),
            lambda: _require_bytes(policy, down_bytes, "in the server's message alone"),
            lambda: require_hour(policy.hours, now or datetime.now()),
            lambda: privacy_cost.require_noise(config, policy.min_noise_multiplier),
            lambda: secagg.check_secagg_demands(*secure),
            lambda: check_run_config(policy, config),
            lambda: require_planned_examples(policy.min_examples, policy.min_batch, config),
        ]
        if (most := policy.max_epsilon) is not None:
            judged.append(lambda: privacy_cost.require_epsilon(assignment, most, policy.delta))
    judged.append(lambda: _require_data_set(assignment))  # last: names may be probed only where the policy permits them
    for judge in judged:
        try:
            judge()
        except PolicyError as error:
            yield error


def _require_data_set(assignment: ClientAssignment) -> None:
    """Raise PolicyError if the site does not have the data set that the run names."""
    try:
        assignment.site.choose_data(assignment.config.task.data_set)
    except ConfigError as error:
        raise PolicyError(str(error)) from None


def check_run_config(policy: SitePolicy, config: RunConfig) -> None:
    """Raise PolicyError for the first key that neither the policy's own keys nor its [permits] allow."""
    run_config_rules.check_run_config(policy.permits, policy.named, config)


def check_app_digest(site: SiteConfig, digest: str) -> None:
    """Check only the bundle, before its message is read. Raises PolicyError, also if the policy is unreadable."""
    if site.policy:
        _require_bundle(VerifiedBundle(digest), policy_of_site(site).model_copy(update={"signers": None}))


def count_round(assignment: ClientAssignment) -> None:
    """Count this round as served, before it runs. Raises PolicyError if the round must not be served again."""
    most = load_policy(assignment.site).max_retries + 1
    bind_run(assignment)
    config = assignment.config
    part, name = config.held_out_fraction, config.task.data_set
    open_replay_guard(assignment).count(assignment.order.round, config.run.rounds, most, part, name)


def bind_run(assignment: ClientAssignment) -> None:
    """Bind the Flower run to the instruction's run. Raises PolicyError if it is already bound to another run."""
    if assignment.flower_run:
        bind_flower_run(assignment.site.state_dir, assignment.flower_run, assignment.order.run)


def check_round(assignment: ClientAssignment, most: int) -> None:
    """Raise PolicyError for a client round that the site refuses because of the rounds it has already served.

    The site refuses a round that is not in the run, is over, or was served `most` times; a round that holds out
    different rows, or names another data set, than the run's first round; any round of a purged run; and any run but
    the Flower run's first one.
    """
    if assignment.flower_run:
        check_flower_run(assignment.site.state_dir, assignment.flower_run, assignment.order.run)
    config = assignment.config
    part, name = config.held_out_fraction, config.task.data_set
    open_replay_guard(assignment).check(assignment.order.round, config.run.rounds, most, part, name)


def open_replay_guard(assignment: ClientAssignment) -> ReplayGuard:
    """Return the record of the rounds that this site has served in the assignment's run."""
    return ReplayGuard.open(assignment.site.state_dir, assignment.order.run, assignment.name)


def check_broadcast(policy: SitePolicy, norm: float, change: float, drift: float) -> None:
    """Check the weights that the client round starts from (broadcast_guard.py).

    Raises PolicyError without the numbers, because they depend on the site's private data.
    """
    if not math.isfinite(norm):
        raise PolicyError(
            "broadcast: expected finite values, found NaN or infinity in the received weights; correct the run"
        )
    asked = (
        ("norm", norm, policy.max_broadcast_norm),
        ("change", change, policy.max_broadcast_change),
        ("drift", drift, policy.max_broadcast_drift),
    )
    for key, found, limit in asked:
        if limit is not None and not found <= limit:
            raise PolicyError(
                f"broadcast: this site permits a {key} of at most {limit:g} (max-broadcast-{key}), found more; start "
                "from the weights of run.seed and train in smaller steps, or agree with the site on a larger bound"
            )


def check_examples(policy: SitePolicy, distinct: int, least: int) -> None:
    """Check the number of distinct examples and the size of the smallest step, known only after training.

    Raises PolicyError.
    """
    asked = (("examples: this site takes part with", distinct, policy.min_examples, "min-examples"),
             ("train.batch-size: this site takes steps of", least, policy.min_batch, "min-batch"))  # fmt: skip
    for words, found, limit, key in asked:
        if limit is not None and found < limit:
            # As in check_upload, the server must not learn the number.
            raise PolicyError(
                f"{words} at least {limit} examples, found fewer in this round ({key} of its policy); train on more "
                "examples, or leave the site out"
            )


def check_upload(
    assignment: ClientAssignment, down_bytes: int, up_bytes: int, num_examples: object, report: Collection[str] = ()
) -> None:
    """Check facts known only once there is an upload; `report` has the names of its metrics.

    Raises PolicyError; the upload must then not leave the site.
    """
    site, secure = assignment.site, assignment.config.secure.enabled
    if LOSS in report and not 0 < open_replay_guard(assignment).scores <= load_policy(site).max_scores:
        raise PolicyError(
            f"{LOSS}: this site permits {load_policy(site).max_scores} per run (max-scores), and this would be one "
            "more; the upload is withheld"
        )
    if secure and num_examples is not None:
        raise PolicyError("num_examples: a masked upload must not contain it; the upload is withheld")
    if not site.policy:
        return
    policy = policy_of_site(site)
    _require_bytes(policy, down_bytes + up_bytes, f"({down_bytes} down, {up_bytes} up)")
    enough = policy.min_examples is None or (type(num_examples) is int and num_examples >= policy.min_examples)
    if not enough and not secure:  # with masks, the client round itself has counted its examples (check_examples)
        # The server must not learn the number, only that it is below the bound.
        raise PolicyError(
            f"examples: this site takes part with at least {policy.min_examples} examples, found fewer "
            "(min-examples of its policy); leave the site out"
        )


def _require_bundle(bundle: VerifiedBundle, policy: SitePolicy) -> None:
    asked = (("app digest", "app-digests", bundle.digest, policy.app_digests),
             ("app signer", "signers", bundle.signer, policy.signer_keys))  # fmt: skip
    for key, where, found, permitted in asked:
        if permitted is not None and found not in permitted:
            shown = f'"{found}"' if found else "none verified by the site's own entry point"
            raise PolicyError(
                f"{key}: this site permits {permitted}, found {shown}; ask the site to add this bundle to {where} in "
                "its policy"
            )


def check_modules(module: str, modules: Mapping[str, str]) -> None:
    """Check a bundle's own-model files, even without a policy: only the file that task.module names is allowed.

    Raises PolicyError.
    """
    if extra := sorted(set(modules) - {module}):
        raise PolicyError(
            f"task.module: fedveil/own in the bundle may contain only the file of task.module, but also contains "
            f"{extra[0][:99]}.py; remove it"
        )
    if module and module not in modules:
        raise PolicyError(f"task.module: fedveil/own/{module}.py is missing from the bundle; add it")


def _require_module(bundle: VerifiedBundle, module: str, permitted: list[str] | None) -> None:
    """Raise PolicyError if the run has an own model whose file the policy does not list."""
    if not module:
        return
    found = bundle.modules.get(module, "none verified by the site's own entry point")
    if found not in (permitted or []):
        raise PolicyError(
            f'task.module: this site permits {permitted or "no own model"}, found "{module}" with the digest {found}; '
            "ask the site to review the file and add its digest to modules in the policy"
        )


def _require_methods(assignment: ClientAssignment, permitted: list[str] | None) -> None:
    """Check the methods named in the server's message and in the run config; the bundle's code uses the run config."""
    for method in (assignment.order.method, assignment.config.method.name):
        _require_one("method.name", method, permitted)


def _require_bytes(policy: SitePolicy, found: int, where: str) -> None:
    limit = policy.max_bytes_a_round
    if limit is not None and found > limit:
        raise PolicyError(f"bytes per round: this site permits at most {limit}, found {found} {where}; send less")


def _require_one(key: str, found: str, permitted: list[str] | None) -> None:
    """Raise PolicyError for a value that is not in the policy's list; None = no restriction."""
    if permitted is not None and found not in permitted:
        raise PolicyError(f'{key}: this site permits {permitted}, found "{found}"; ask the site to permit it')


def _require_rounds(found: int, most: int | None) -> None:
    """Raise PolicyError if the run has more rounds than the policy permits; None = no restriction."""
    if most is not None and found > most:
        raise PolicyError(f"run.rounds: this site permits at most {most}, found {found}; ask for fewer")
