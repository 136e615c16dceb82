"""The run config of a run in one process: read from a file or a mapping; keys that would do nothing are refused."""

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

# What only a run with a server, messages and sites of its own does; a value here would be passed over.
_ELSEWHERE = (
    "evaluate.held-out", "cohort.sites", "cohort.wait-seconds", "cohort.deadline-seconds", "cohort.max-retries",
    "cohort.max-norm-ratio", "secure.roster", "client.worker", "run.signature",
)  # fmt: skip
# Of files that stay after the run.
_IN_A_FOLDER = ("run.dir", "run.resume", "sinks.use")


def read_config(config: str | Path | Mapping[str, object] | RunConfig) -> RunConfig:
    """Return the run config in a TOML file or in a mapping, by dotted keys or by sections.

    A path as task.module is registered, and completes task.name and the adapter unless they are set.

    Raises:
        ConfigError: there is no such file, it is not TOML, or a key or a value is wrong.
    """
    if isinstance(config, RunConfig):
        return config
    if isinstance(config, str | Path):
        try:
            config = tomllib.loads(Path(config).expanduser().read_text("utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"config: expected a TOML file, found none at {config} ({error})") from None
    return parse(own_module.with_own_task(flatten_config(config)))


def require_local(config: RunConfig, sites: int, divides_data: bool) -> None:
    """Raise ConfigError for a value that a run in one process would pass over.

    Args:
        sites: the number of sites.
        divides_data: task.data is divided among the sites.
    """
    given, plain = config.flat(), RunConfig().flat()
    elsewhere = _ELSEWHERE if divides_data else ("task.data", *_ELSEWHERE)
    for key in elsewhere:
        if given[key] != plain[key]:
            raise ConfigError(
                f"{key}: expected {plain[key]!r} for a run in one process, found {given[key]!r}; leave it out, or "
                "submit the run"
            )
    for key in _IN_A_FOLDER:
        if given[key] != plain[key] and not config.run.name:
            raise ConfigError(
                f"run.name: expected the name of a run folder with {key} = {given[key]!r}, found none; without a name "
                "the folder of a run in one process is temporary"
            )
    drawn = cohort_size(config.cohort.fraction, sites)
    if config.cohort.min_sites != plain["cohort.min-sites"] and config.cohort.min_sites > drawn:
        raise ConfigError(
            f"cohort.min-sites: expected at most {drawn}, the sites of a round here, found {config.cohort.min_sites}; "
            "lower it, or give more sites"
        )
