"""What this site permits: a TOML file that only the site writes. It is checked before any data is read; an error
refuses.

    methods = ["fedrand", "fedavg"]          # a key that is left out restricts nothing
    tasks = ["text-generation"]
    models = ["tiny"]
    max-rounds = 50
    max-repeats = 3                          # servings of one round; 3 unless said
    max-bytes-a-round = 50_000_000           # the server's message and the upload together
    max-epsilon = 8.0                        # the run's budget, at `delta`
    delta = 1e-5                             # what the site's privacy ledger judges every charge by, beside what
    neighbours = "replace-one"               # the run claims; also without max-epsilon
    min-noise = 1.0                          # the run must train by noisy steps (dp.*) with at least this noise
    min-examples = 100                       # different rows that an upload was made from, in this turn
    min-batch = 8                            # rows of each step that it was made from
    max-scores = 20                          # of received weights on held-out rows, in one run; 0 unless said
    max-broadcast-norm = 50.0                # of what a turn is about to train from (received.py)
    max-broadcast-change = 10.0              # of it against what this site trained from last; 10 unless said
    require-secure = true                    # uploads leave this site masked, in sums alone (secure.enabled)
    min-cohort = 5                           # sites of a cohort, and of a sum
    min-threshold = 4                        # holders that it takes to open a secret of this site
    roster = "sha256:5f0c..."                # the signing keys of all sites: `fedveil members roster`. These three hold
                                             # for masked uploads, and require nothing of others
    app-digests = ["5f0c..."]                # SHA-256 of the app's bundle: `fedveil app digest`
    signers = ["ssh-ed25519 AAAA..."]        # who may have signed the bundle: `fedveil app sign`
    hours = ["20:00-06:00"]                  # by this machine's clock; a turn must begin in one of these windows
    [permits]                                # all other keys of the run config (permits.py); comes last in the file
    "train.batch-size" = 16

| case | what happens |
|---|---|
| the node config names no file | everything is permitted but a round that was served before (served.py); only the
  guard's entry point in the image refuses |
| the file is missing, is not TOML, has an unknown key or a value of another type | PolicyError |
| a key is absent | it restricts nothing; but a key of the run config that neither it nor [permits] names must have its
  default |
| an empty list | nothing is permitted |
| several keys | all of them must hold: a signed bundle whose digest is not listed is refused |
| app-digests or signers, and the guard has not checked the bundle | PolicyError: only the guard can check it |
| min-noise, and the run has no `dp.clip` | PolicyError: its noise is 0 |
| max-epsilon, and the run has no budget that the site's ledger enforces, or its draws are seeded | PolicyError |
| too many bytes or too few rows, which only the turn shows | the site withholds the upload and sends the reason |
| scores of held-out rows that are not permitted, or no more of them | the turn goes on without, and says why |
| more norm or change than the two bounds of a broadcast | the turn ends before a row is looked at |
| hours "22:00-06:00" | the window runs over midnight, from 22:00 to before 06:00; "00:00-24:00" is always |

This file comes with the server's bundle too. The policy is enforced by the site's own copy of it, which
guard/clientapp.py calls before any code of the bundle runs.
"""

from __future__ import annotations

import math
import os
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedveil.client_app.site import cost, demands
from fedveil.client_app.site import permits as run_keys
from fedveil.client_app.site.assignment import Assignment
from fedveil.client_app.site.hours import WINDOW, require_hour
from fedveil.client_app.site.node_config import Site
from fedveil.client_app.site.served import Served
from fedveil.contract.budget import Budget, Neighbours
from fedveil.contract.held_out import LOSS
from fedveil.errors import PolicyError


class Policy(BaseModel):
    """What is permitted. A field that is None restricts nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, alias_generator=lambda n: n.replace("_", "-"))

    methods: list[str] | None = None
    tasks: list[str] | None = None
    models: list[str] | None = None
    max_rounds: int | None = Field(None, ge=1)
    max_repeats: int = Field(3, ge=1)
    max_bytes_a_round: int | None = Field(None, ge=1)
    max_epsilon: float | None = Field(None, ge=0, allow_inf_nan=False)
    delta: float = Field(1e-5, gt=0, lt=1)
    neighbours: Literal["replace-one", "add-or-remove-one"] = "replace-one"
    min_noise: float | None = Field(None, gt=0, allow_inf_nan=False)
    min_examples: int | None = Field(None, ge=1)
    min_batch: int | None = Field(None, ge=1)
    max_scores: int = Field(0, ge=0)
    max_broadcast_norm: float | None = Field(None, gt=0, allow_inf_nan=False)
    max_broadcast_change: float = Field(10.0, gt=0, allow_inf_nan=False)
    require_secure: bool = False
    min_cohort: int | None = Field(None, ge=2)
    min_threshold: int | None = Field(None, ge=2)
    roster: str | None = Field(None, pattern=r"^sha256:[0-9a-f]{64}$")
    app_digests: list[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]] | None = None
    signers: list[Annotated[str, Field(pattern=r"^ssh-ed25519 [A-Za-z0-9+/=]+")]] | None = None
    hours: list[Annotated[str, Field(pattern=WINDOW)]] | None = None
    permits: dict[str, run_keys.Permit] = {}

    @field_validator("permits", mode="before")
    @classmethod
    def _whole_keys(cls, table: object) -> object:
        return run_keys.flattened(table)

    @property
    def named(self) -> set[str]:
        """Keys of the run config that a key of this policy bounds."""
        bounds = {
            "method.name": self.methods, "task.name": self.tasks, "task.model": self.models,
            "run.rounds": self.max_rounds, "run.signature": self.signers, "run.name": self.signers,
            "dp.noise": self.min_noise, "dp.epsilon": self.max_epsilon,
            "secure.enabled": self.require_secure or None, "secure.min-sites": self.min_cohort,
            "evaluate.held-out": self.max_scores, "secure.threshold": self.min_threshold, "secure.roster": self.roster,
        }  # fmt: skip
        return {key for key, bound in bounds.items() if bound is not None}

    @property
    def budget(self) -> Budget:
        """What the site itself lets a record be charged, whatever a run claims."""
        epsilon = math.inf if self.max_epsilon is None else self.max_epsilon
        return Budget(epsilon, self.delta, Neighbours(self.neighbours))

    @property
    def signer_keys(self) -> list[str] | None:
        """The signers without the comments behind their keys."""
        return None if self.signers is None else [" ".join(key.split()[:2]) for key in self.signers]


@dataclass(frozen=True)
class Bundle:
    """The bundle's SHA-256 and the key that signed it, as the site's guard found them; "" = the guard did not check."""

    digest: str = ""
    signer: str = ""

    @classmethod
    def of_environment(cls) -> Bundle:
        """The bundle as guard/clientapp.py recorded it in the environment."""
        return cls(os.environ.get("FEDVEIL_APP_DIGEST", ""), os.environ.get("FEDVEIL_APP_SIGNER", ""))


def check(
    assignment: Assignment,
    bundle: Bundle | None = None,
    down_bytes: int = 0,
    now: datetime | None = None,
    serves: bool = True,
) -> None:
    """Raises the first of `refusals`."""
    for found in refusals(assignment, bundle, down_bytes, now, serves):
        raise found


def refusals(
    assignment: Assignment, bundle: Bundle | None, down_bytes: int, now: datetime | None = None, serves: bool = True
) -> Iterator[PolicyError]:
    """What the site does not permit; nothing where it permits the turn. Raises PolicyError for an unreadable policy.

    Args:
        down_bytes: size of the server's message.
        serves: the message asks for a turn; else for keys or shares of secure aggregation, which count as no serving.
    """
    policy, config = of(assignment.site), assignment.config
    judged: list[Callable[[], None]] = [lambda: check_round(assignment, policy.max_repeats if serves else sys.maxsize)]
    if assignment.site.policy:
        secure = config.secure, policy.require_secure, policy.min_cohort, policy.min_threshold, policy.roster
        judged += [
            lambda: _require_bundle(bundle or Bundle(), policy),
            lambda: run_keys.require_one("method.name", assignment.order.method, policy.methods),
            lambda: run_keys.require_one("task.name", config.task.name, policy.tasks),
            lambda: run_keys.require_one("task.model", config.task.model, policy.models),
            lambda: run_keys.require_rounds(config.run.rounds, policy.max_rounds),
            lambda: _require_bytes(policy, down_bytes, "in the server's message alone"),
            lambda: require_hour(policy.hours, now or datetime.now()),
            lambda: cost.require_noise(config, policy.min_noise),
            lambda: demands.check(*secure),
            lambda: run_keys.check(policy.permits, policy.named, config),
        ]
        if (most := policy.max_epsilon) is not None:
            judged.append(lambda: cost.require_epsilon(assignment, most, policy.delta))
    for judge in judged:
        try:
            judge()
        except PolicyError as error:
            yield error


def count_round(assignment: Assignment) -> None:
    """Counts this turn's round as served, before the turn. Raises PolicyError for one that may not be served again."""
    most = of(assignment.site).max_repeats
    served_of(assignment).count(assignment.order.round, assignment.config.run.rounds, most)


def check_round(assignment: Assignment, most: int) -> None:
    """Raises PolicyError for a round that is not the run's, is over, or was served `most` times, and a purged run."""
    served_of(assignment).check(assignment.order.round, assignment.config.run.rounds, most)


def served_of(assignment: Assignment) -> Served:
    """What this site has served of the run that the assignment is of."""
    return Served.of(assignment.site.state_dir, assignment.order.run, assignment.name)


def of(site: Site) -> Policy:
    """The site's policy; the defaults where it names none."""
    return of_site(site) if site.policy else Policy()


def check_upload(
    assignment: Assignment, down_bytes: int, up_bytes: int, num_examples: object, report: Collection[str] = ()
) -> None:
    """Checks what only the upload shows; `report`: names of its figures. Raises PolicyError; the upload must then not
    leave the site."""
    site, secure = assignment.site, assignment.config.secure.enabled
    if LOSS in report and not 0 < served_of(assignment).scores <= of(site).max_scores:
        raise PolicyError(f"{LOSS}: this site permits {of(site).max_scores} a run (max-scores), found more; withheld")
    if secure and num_examples is not None:
        raise PolicyError("num_examples: expected none beside a masked upload, found one; it is withheld")
    if not site.policy:
        return
    policy = of_site(site)
    _require_bytes(policy, down_bytes + up_bytes, f"({down_bytes} here, {up_bytes} back)")
    enough = policy.min_examples is None or (type(num_examples) is int and num_examples >= policy.min_examples)
    if not enough and not secure:  # there the turn itself has counted its rows (check_rows)
        # The server must not learn the number: it learns only that it is below the bound.
        raise PolicyError(
            f"examples: this site takes part with at least {policy.min_examples} rows, found fewer (min-examples of "
            "its policy); leave it out"
        )


def check_received(site: Site, norm: float, change: float) -> None:
    """Checks what the turn is about to train from (received.py). Raises PolicyError, which does not name the numbers:
    they hold what the site keeps for itself."""
    policy = of(site)
    if not math.isfinite(norm):
        raise PolicyError("broadcast: expected finite values, found others among what is to be trained; mend the run")
    asked = (("norm", norm, policy.max_broadcast_norm), ("change", change, policy.max_broadcast_change))
    for key, found, limit in asked:
        if limit is not None and not found <= limit:
            raise PolicyError(
                f"broadcast: this site permits a {key} of at most {limit:g} (max-broadcast-{key}), found more; start "
                "from the weights of run.seed and train in smaller steps, or agree on another bound with the site"
            )


def check_rows(site: Site, distinct: int, least: int) -> None:
    """Checks what only the training shows: different rows, and rows of the smallest step. Raises PolicyError."""
    policy = of(site)
    asked = (("examples: this site takes part with", distinct, policy.min_examples, "min-examples"),
             ("train.batch-size: this site takes steps of", least, policy.min_batch, "min-batch"))  # fmt: skip
    for words, found, limit, key in asked:
        if limit is not None and found < limit:
            # As in check_upload, the server must not learn the number.
            raise PolicyError(
                f"{words} at least {limit} rows, found fewer in this turn ({key} of its policy); train on more, or "
                "leave it out"
            )


def of_site(site: Site) -> Policy:
    """The policy that a site's node config names. Raises PolicyError if it names none, or the file cannot be read."""
    path = Path(site.policy).expanduser()
    try:
        if not site.policy:
            raise FileNotFoundError
        return Policy.model_validate(tomllib.loads(path.read_text()))
    except (OSError, ValueError, RecursionError) as error:  # ValidationError and TOMLDecodeError are ValueErrors
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            what = f"{'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}"
        else:
            what = type(error).__name__
        found = "none" if isinstance(error, OSError) else "one that does not fit"
        says = f"policy: expected a readable policy file, found {found} ({what}); the site must correct it"
        raise PolicyError(says) from error


def _require_bundle(bundle: Bundle, policy: Policy) -> None:
    asked = (("app digest", "app-digests", bundle.digest, policy.app_digests),
             ("app signer", "signers", bundle.signer, policy.signer_keys))  # fmt: skip
    for key, where, found, permitted in asked:
        if permitted is not None and found not in permitted:
            shown = f'"{found}"' if found else "none that the site's own entry point has checked"
            raise PolicyError(
                f"{key}: this site permits {permitted}, found {shown}; have this very bundle permitted: {where} of the "
                "site's policy"
            )


def _require_bytes(policy: Policy, found: int, where: str) -> None:
    limit = policy.max_bytes_a_round
    if limit is not None and found > limit:
        raise PolicyError(f"bytes a round: this site permits at most {limit}, found {found} {where}; share less")
