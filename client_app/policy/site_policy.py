"""A site's policy: a TOML file that only the site writes. This module reads it; `decisions.py` checks runs against it.

methods = ["fedrand", "fedavg"]          # an omitted key restricts nothing
tasks = ["text-generation"]
models = ["tiny"]
max-rounds = 50
max-retries = 2                          # retries of one round after its first attempt; default 2
max-bytes-a-round = 50_000_000           # broadcast and upload together
max-epsilon = 8.0                        # for all runs together, at `delta`; a run reserves its part at delta / 16
delta = 1e-5                             # delta and adjacency: the site's privacy ledger is created with them and
adjacency = "replace-one"                # keeps them, even without max-epsilon
after-open = "refuse"                    # no private run after one that made epsilon infinite; default "say": it runs
min-noise-multiplier = 1.0               # the run must train with noisy steps (dp.*) with at least this noise
min-examples = 100                       # distinct examples behind an upload, in this client round
min-batch = 8                            # examples in each step behind an upload
max-scores = 20                          # scores of received weights on held-out examples, per run; default 0
report-received-loss = false             # report such a score also as loss_received; default: it is not reported
report-row-counts = false                # how many rows were truncated or dropped; default: the counts stay at the site
max-broadcast-norm = 50.0                # norm of the weights that a client round starts from (broadcast_guard.py)
max-broadcast-change = 1.0               # their change since this site last trained; default 2
max-broadcast-drift = 1.5                # their distance from the run's first weights; default 2
require-signed-instructions = true       # with a key in the kit's instruction-keys.toml; default: true with that file
require-secure = true                    # uploads leave this site masked (secure.enabled)
min-cohort = 5                           # sites in a cohort, and in a sum
min-threshold = 4                        # share holders needed to reveal one of this site's secrets
roster = "sha256:5f0c..."                # the signing keys of all sites: `fedveil members roster`. min-cohort,
                                         # min-threshold and roster apply to masked uploads only
app-digests = ["5f0c..."]                # SHA-256 of the app's bundle: `fedveil app digest`
modules = ["sha256:5f0c..."]             # own-model files (task.module); without this key, none is permitted
signers = ["ssh-ed25519 AAAA..."]        # keys that may sign the bundle: `fedveil app sign`
hours = ["20:00-06:00"]                  # by this machine's clock; a client round must begin in one of these windows
[permits]                                # all other run config keys (run_config_rules.py); comes last
"train.batch-size" = 16
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedveil.client_app.node_config import SiteConfig
from fedveil.client_app.policy import run_config_rules as run_keys
from fedveil.client_app.policy.time_windows import WINDOW
from fedveil.config import refuse_old_adjacency
from fedveil.contract.privacy import Adjacency, PrivacyBudget
from fedveil.errors import PolicyError

RENAMED_KEYS = {  # the names in files from before 0.2
    "neighbours": "adjacency",
    "max-repeats": "max-retries, which does not count the first serving: one less than before",
    "min-noise": "min-noise-multiplier",
}


class SitePolicy(BaseModel):
    """A site's permissions. A field that is None does not restrict anything."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, alias_generator=lambda n: n.replace("_", "-"))

    methods: list[str] | None = None
    tasks: list[str] | None = None
    models: list[str] | None = None
    max_rounds: int | None = Field(None, ge=1)
    max_retries: int = Field(2, ge=0)
    max_bytes_a_round: int | None = Field(None, ge=1)
    max_epsilon: float | None = Field(None, ge=0, allow_inf_nan=False)
    delta: float = Field(1e-5, gt=0, lt=1)
    adjacency: Literal["replace-one", "zero-out"] = "replace-one"
    after_open: Literal["refuse", "say"] = "say"
    min_noise_multiplier: float | None = Field(None, gt=0, allow_inf_nan=False)
    min_examples: int | None = Field(None, ge=1)
    min_batch: int | None = Field(None, ge=1)
    max_scores: int = Field(0, ge=0)
    report_received_loss: bool = False
    report_row_counts: bool = False
    max_broadcast_norm: float | None = Field(None, gt=0, allow_inf_nan=False)
    max_broadcast_change: float = Field(2.0, gt=0, allow_inf_nan=False)
    max_broadcast_drift: float = Field(2.0, gt=0, allow_inf_nan=False)
    require_signed_instructions: bool | None = None
    require_secure: bool = False
    min_cohort: int | None = Field(None, ge=2)
    min_threshold: int | None = Field(None, ge=2)
    min_colluders: int | None = Field(None, ge=0)
    roster: str | None = Field(None, pattern=r"^sha256:[0-9a-f]{64}$")
    app_digests: list[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]] | None = None
    modules: list[Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]] | None = None
    signers: list[Annotated[str, Field(pattern=r"^ssh-ed25519 [A-Za-z0-9+/=]+")]] | None = None
    hours: list[Annotated[str, Field(pattern=WINDOW)]] | None = None
    permits: dict[str, run_keys.Permit] = {}

    @field_validator("adjacency", mode="before")
    @classmethod
    def _refuse_old_name(cls, value: object) -> object:
        return refuse_old_adjacency(value)

    @field_validator("permits", mode="before")
    @classmethod
    def _whole_keys(cls, table: object) -> object:
        return run_keys.flatten_permits(table)

    @property
    def named(self) -> set[str]:
        """Return the run config keys that are bounded by a key of this policy."""
        bounds = {
            "method.name": self.methods, "task.module": self.modules,
            "task.name": self.tasks, "task.model": self.models,
            "run.rounds": self.max_rounds, "run.signature": self.signers, "run.name": self.signers,
            "dp.noise-multiplier": self.min_noise_multiplier, "dp.epsilon": self.max_epsilon,
            "secure.enabled": self.require_secure or None, "secure.min-sites": self.min_cohort,
            "evaluate.held-out": self.max_scores, "secure.threshold": self.min_threshold,
            "secure.max-colluders": self.min_colluders, "secure.roster": self.roster,
        }  # fmt: skip
        return {key for key, bound in bounds.items() if bound is not None}

    @property
    def budget(self) -> PrivacyBudget:
        """Return the site's own limit for all runs together, independent of a run's claim."""
        epsilon = math.inf if self.max_epsilon is None else self.max_epsilon
        return PrivacyBudget(epsilon, self.delta, Adjacency(self.adjacency))

    def requires_signed_instructions(self, site: SiteConfig) -> bool:
        """Return whether `site` refuses an instruction that the server has not signed.

        By default, it does if it pins the server's keys: otherwise an unsigned message would bypass them.
        If the policy requires signatures but the site pins no keys, it refuses every run.
        """
        required = self.require_signed_instructions
        return bool(site.instruction_keys) if required is None else required

    @property
    def signer_keys(self) -> list[str] | None:
        """Return the signers' keys without the comments after them."""
        return None if self.signers is None else [" ".join(key.split()[:2]) for key in self.signers]


# Without a policy, the server's own code runs unchecked, so these bounds only catch mistakes.
# Noisy steps may move the weights by more than 2.
_TRIAL = {"max-broadcast-change": 10.0, "max-broadcast-drift": 10.0}


def load_policy(site: SiteConfig) -> SitePolicy:
    """Return the site's policy; if the node config names none, the defaults with wide bounds on a broadcast."""
    return policy_of_site(site) if site.policy else SitePolicy.model_validate(_TRIAL)


def policy_of_site(site: SiteConfig) -> SitePolicy:
    """Return the policy that a site's node config names. Raises PolicyError if it is missing or unreadable."""
    path = Path(site.policy).expanduser()
    policy: dict[str, Any] = {}
    try:
        if not site.policy:
            raise FileNotFoundError
        policy = tomllib.loads(path.read_text("utf-8-sig"))
        return SitePolicy.model_validate(policy)
    except (OSError, ValueError, RecursionError) as error:  # ValidationError and TOMLDecodeError are ValueErrors
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            what = f"{key}: {first['msg'].removeprefix('Value error, ')}"
            if misplaced := _own_keys_in_permits(policy):
                what = f"{misplaced}: move it above the line [permits]"
            if new := RENAMED_KEYS.get(key):
                what = f"{key}: this is the key's old name; write {new}"
        else:
            what = f"not TOML: {error}" if isinstance(error, tomllib.TOMLDecodeError) else type(error).__name__
        problem = "cannot be read" if isinstance(error, OSError) else "is invalid"
        says = f"policy: the site's policy file {problem} ({what}); the site must correct it"
        raise PolicyError(says) from error


def _own_keys_in_permits(policy: Mapping[str, Any]) -> str:
    """Return the policy's own keys that are below [permits], where TOML reads them as keys of that table."""
    permits = policy.get("permits")
    own = {field.alias or name for name, field in SitePolicy.model_fields.items()}
    return ", ".join(sorted(own & set(permits))) if isinstance(permits, dict) else ""
