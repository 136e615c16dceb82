"""Check the policy's secure-aggregation requirements against the run config, before the server asks for a key.

| the policy has | a run without masks | a run with secure.enabled |
|---|---|---|
| require-secure | is refused | - |
| min-cohort | passes | secure.min-sites must be at least this value |
| min-threshold | passes | secure.threshold must be at least this value, or 0, in which case the plan is checked;
  a value above 1 refuses secure.whole-cohort |
| min-colluders | passes | secure.max-colluders must be at least this value |
| roster | passes | secure.roster must be set; its digest is compared with the roster that the server sends later |

fedveil/federation/secagg/plan_checks.py checks plans, lists and requests for shares.
"""

from __future__ import annotations

from fedveil.config import SecureConfig
from fedveil.errors import PolicyError


def check_secagg_demands(
    secure: SecureConfig,
    required: bool,
    min_cohort: int | None,
    min_threshold: int | None,
    roster: str | None,
    min_colluders: int | None = None,
) -> None:
    """Raise PolicyError, naming the run config key, if the run does not meet the policy's demands."""
    if not secure.enabled:
        if required:
            raise PolicyError("secure.enabled: this site permits only masked uploads; set it to true")
        return
    if secure.whole_cohort and min_threshold is not None and min_threshold > 1:
        raise PolicyError(
            f"secure.whole-cohort: this site permits only sums that {min_threshold} sites agree to; set it to false"
        )
    asked = (
        ("min-sites", secure.min_sites, min_cohort), ("threshold", secure.threshold or None, min_threshold),
        ("max-colluders", secure.max_colluders, min_colluders),
    )  # fmt: skip
    for key, value, least in asked:
        if least is not None and value is not None and value < least:
            raise PolicyError(f"secure.{key}: this site permits at least {least}, found {value}; raise it")
    if roster and not secure.roster:
        raise PolicyError(
            f"secure.roster: this site requires the roster {roster}, but the run names none; write one with fedveil "
            "members roster on the server"
        )
