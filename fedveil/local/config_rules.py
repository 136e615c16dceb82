"""Read the run config of a run in one process from a file or a mapping, and refuse keys that would have no effect."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from fedveil.config import RunConfig, parse
from fedveil.console.run_config_args import flatten_config
from fedveil.errors import ConfigError
from fedveil.federation.aggregation_rules import cohort_size
from fedveil.models import own_module

__all__ = ["read_config", "require_local"]

# Keys that affect only a run with a real server, messages and sites; in one process, their values would be ignored.
_ELSEWHERE = (
    "evaluate.held-out", "cohort.sites", "cohort.wait-seconds", "cohort.deadline-seconds", "cohort.max-retries",
    "cohort.max-norm-ratio", "secure.roster", "client.worker", "run.signature",
)  # fmt: skip
# Keys that concern files that outlive the run.
_IN_A_FOLDER = ("run.dir", "run.resume", "sinks.use")


def read_config(config: str | Path | Mapping[str, object] | RunConfig) -> RunConfig:
    """Return the run config from a TOML file or a mapping with dotted keys or sections.

    If task.module is a path, the module is registered; it also supplies task.name and the adapter if they are not set.

    Raises:
        ConfigError: the file does not exist or is not TOML, or a key or value is invalid.
    """
    if isinstance(config, RunConfig):
        return config
    if isinstance(config, str | Path):
        try:
            config = tomllib.loads(Path(config).expanduser().read_text("utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"config: there is no TOML file at {config} ({error})") from None
    return parse(own_module.with_own_task(flatten_config(config)))


def require_local(config: RunConfig, sites: int, divides_data: bool) -> None:
    """Raise ConfigError for a value that a run in one process would ignore.

    Args:
        sites: the number of sites.
        divides_data: whether task.data is divided among the sites.
    """
    given, plain = config.flat(), RunConfig().flat()
    elsewhere = _ELSEWHERE if divides_data else ("task.data", *_ELSEWHERE)
    for key in elsewhere:
        if given[key] != plain[key]:
            raise ConfigError(
                f"{key}: a run in one process supports only {plain[key]!r}, found {given[key]!r}; leave it out, or "
                "submit the run"
            )
    for key in _IN_A_FOLDER:
        if given[key] != plain[key] and not config.run.name:
            raise ConfigError(
                f"run.name: {key} = {given[key]!r} requires it, because without a name an in-process run's folder "
                "is temporary; set it"
            )
    drawn = cohort_size(config.cohort.fraction, sites)
    if config.cohort.min_sites != plain["cohort.min-sites"] and config.cohort.min_sites > drawn:
        raise ConfigError(
            f"cohort.min-sites: expected at most {drawn}, the number of sites drawn per round here, found "
            f"{config.cohort.min_sites}; lower it, or add sites"
        )
