"""A site's own names for a run's columns: `columns = {source = "Befund"}` in its node config.

| name before the equals sign | the run's key |
|---|---|
| source, target, messages, image, choices, hint, label, rejected | task.source-column, task.target-column, ... |
| unit | dp.unit-column |
| a column of task.source-template | that column |

Names in the first two rows that the run does not use are ignored; any other name is refused. With task.messages-column,
a run uses neither source nor target; with captions, which have no question, it does not use source.

The site's copy of the run config has the site's names, so all code that reads data uses them. The server, the policy
and the ledger see the run config as it was sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fedveil.client_app.node_config import SiteConfig
from fedveil.config import RunConfig, parse_source_template
from fedveil.errors import ConfigError, TaskError

__all__ = ["apply_site_columns", "describe_site_columns", "name_site_columns"]

_ROLES = ("source", "target", "messages", "image", "choices", "hint", "label", "rejected")


def apply_site_columns(config: RunConfig, columns: Mapping[str, str]) -> RunConfig:
    """Return the run's config with the site's column names.

    Raises:
        ConfigError: a name is not among the run's columns.
    """
    if not columns:
        return config
    names, task, dp = _names_of_run(config), config.task, config.dp
    of_template = {column for _, column in _template(config)}
    if unknown := sorted(columns.keys() - names.keys() - {*_ROLES, "unit"}):
        raise ConfigError(
            f'node config: columns: "{unknown[0]}" (for "{columns[unknown[0]]}") is none of this run\'s columns '
            f"({', '.join(sorted(names))}); correct it, or leave it out"
        )
    if task.source_template:
        parts = ((text, columns.get(column, column)) for text, column in _template(config))
        template = "".join(_escaped(text) + (f"{{{column}}}" if column else "") for text, column in parts)
        task = task.model_copy(update={"source_template": template})
    roles = columns.keys() & names.keys() - of_template
    task = task.model_copy(update={f"{role}_column": columns[role] for role in _ROLES if role in roles})
    if "unit" in roles:
        dp = dp.model_copy(update={"unit_column": columns["unit"]})
    return config.model_copy(update={"task": task, "dp": dp})


def describe_site_columns(config: RunConfig, columns: Mapping[str, str]) -> str:
    """Return how this site's names map to the run's columns: "the run's mr is Befund here"."""
    names = _names_of_run(config)
    pairs = [f'"{names[name]}" is "{own}" here' for name, own in sorted(columns.items()) if name in names]
    return f"columns in the node config: the run's {', '.join(pairs)}" if pairs else ""


@contextmanager
def name_site_columns(config: RunConfig, site: SiteConfig) -> Iterator[None]:
    """Return a context in which errors about the site's data also give the run's names for its columns."""
    try:
        yield
    except TaskError as error:
        if not (said := describe_site_columns(config, site.columns)):
            raise
        raise TaskError(f"{error} ({said})") from None


def _names_of_run(config: RunConfig) -> dict[str, str]:
    """Return the names that a site may use, each with the run's column."""
    task = config.task
    names = {column: column for _, column in _template(config) if column}
    roles = {role: str(getattr(task, f"{role}_column")) for role in _ROLES}
    default = type(task).model_fields["source_column"].default
    has_captions = task.name == "vision-language" and not task.choices_column and task.source_column == default
    if task.source_template or task.messages_column or has_captions:
        roles.pop("source")
    if task.messages_column:
        roles.pop("target")
    if task.name != "preference":
        roles.pop("rejected")
    roles |= {"unit": config.dp.unit_column}
    return names | {role: column for role, column in roles.items() if column and role not in names}


def _template(config: RunConfig) -> tuple[tuple[str, str], ...]:
    return parse_source_template(config.task.source_template) if config.task.source_template else ()


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
