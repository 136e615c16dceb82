"""Check the policy's secure-aggregation requirements against the run config, before the server asks for a key.

| the policy has | a run in the clear | a run with secure.enabled |
|---|---|---|
| require-secure | is refused | - |
| min-cohort | passes | secure.min-sites must be at least that |
| min-threshold | passes | secure.threshold must be at least that unless it is 0; then the plan is checked;
  secure.whole-cohort is refused above 1 |
| min-colluders | passes | secure.max-colluders must be at least that |
| roster | passes | secure.roster must be set; its digest is compared with the one that the server sends later |

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
    """Raise PolicyError, which names the key of the run config."""
    if not secure.enabled:
        if required:
            raise PolicyError("secure.enabled: this site permits only masked uploads, found false; set it to true")
        return
    if secure.whole_cohort and min_threshold is not None and min_threshold > 1:
        raise PolicyError(
            f"secure.whole-cohort: this site permits only sums to which {min_threshold} sites agree, found true; set "
            "it to false"
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
            f"secure.roster: this site permits {roster}, found none at the server; write one with fedveil members "
            "roster"
        )
