"""What `fedveil doctor` looks at in data: rows with the columns that a run reads, and how many there are.

Nothing is prepared, no model is loaded, and of a large file no more is read than `fedveil.rows.looking` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedveil import tasks
from fedveil.client_app.site.node_config import Site
from fedveil.client_app.site.policy import of_site as of_policy
from fedveil.config import TaskConfig
from fedveil.console.provisioning.checks import Check, guarded
from fedveil.contract.task import of_classes
from fedveil.errors import ConfigError, FedVeilError, PolicyError
from fedveil.rows import decoding, looking, reading


def of_site(folder: str, task: TaskConfig, counted: list[int]) -> Check:
    """A site's training rows, whose number goes into `counted`."""
    try:
        return _rows("data", Path(folder), "train", task, counted)
    except FedVeilError as error:
        if task != TaskConfig():
            raise
        text = f"{error}; it was looked at as the default task: name the run's own with --config or --set"
        raise ConfigError(text) from None


def enough(check: Check, policy: str, counted: Sequence[int]) -> Check:
    """`check` of a site's data, held against what the policy file says: with fewer rows the site refuses each turn."""
    least = None
    with suppress(PolicyError):  # the policy's own check says it
        least = of_policy(Site(policy=policy)).min_examples
    if check.verdict != "ok" or least is None or not counted or counted[0] >= least:
        return check
    return replace(
        check,
        verdict="fail",
        text=f"{check.text}: fewer than the {least:,} of min-examples in {policy}, so that every turn is refused; add "
        "rows, or lower min-examples",
    )


def of_run(task: TaskConfig, counted: list[int]) -> Iterator[Check]:
    """The data that a run config names: of sites, whose number of rows goes into `counted`, and of the server."""
    for name, folder, split, into in (
        ("task.data", task.data, "train", counted),
        ("task.evaluation", task.evaluation, "test", []),
        ("task.server-data", task.server_data, "train", []),
    ):
        if folder:
            found = guarded(name, partial(_rows, name, Path(folder), split, task, into))
            yield replace(found, text=found.text.removeprefix("task.data: "))  # whichever key it was


def _rows(name: str, data: Path, split: str, task: TaskConfig, counted: list[int]) -> Check:
    info = tasks.info(task.name)
    columns, folder = info.columns(task), data / split
    if info.metrics is of_classes and decoding.is_by_class(data, split):
        count = len(decoding.table(data, split, task).rows)
        counted += [count]
        return Check(name, "ok", f"{count:,} images in the folders of {folder}")
    file = reading.split_file(data, split)
    found = looking.head(file, columns)
    counted += [found.rows] if found.is_whole else []
    more = "" if found.is_whole else "and more "
    return Check(name, "ok", f"{found.rows:,} rows {more}in {file}, with {', '.join(columns)}")
