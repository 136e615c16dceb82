"""Data checks of `fedveil doctor`: examples with the columns that a run reads, and their number.

The checks prepare nothing and load no model. Of a large file they read at most what
`fedveil.data.file_probe` allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedveil import tasks
from fedveil.client_app.node_config import SiteConfig
from fedveil.client_app.policy.site_policy import policy_of_site as of_policy
from fedveil.config import TaskConfig
from fedveil.console.doctor.checks import CheckResult, run_check
from fedveil.contract.task import Example, ExampleOrigin, class_metrics
from fedveil.data import file_probe, images, tables
from fedveil.data.class_names import ClassNumbering, format_class_names
from fedveil.data.image_decoding import describe_conversions, image_conversions
from fedveil.errors import ConfigError, FedVeilError, PolicyError

_MOST_IMAGES = 1000  # of which the header is read


def check_site_data(folder: str, task: TaskConfig, counted: list[int]) -> CheckResult:
    """Check a site's training examples, and store their number in `counted`."""
    try:
        return _rows("data", Path(folder), "train", task, counted)
    except FedVeilError as error:
        if task != TaskConfig():
            raise
        text = f"{error}; this checked the default task: give the run's task with --config or --set"
        raise ConfigError(text) from None


def check_row_count(check: CheckResult, policy: str, counted: Sequence[int]) -> CheckResult:
    """Compare a site's data with the policy's minimum: with fewer examples the site refuses every client round."""
    least = None
    with suppress(PolicyError):  # the policy check reports it
        least = of_policy(SiteConfig(policy=policy)).min_examples
    if check.verdict != "ok" or least is None or not counted or counted[0] >= least:
        return check
    return replace(
        check,
        verdict="fail",
        text=f"{check.text}: fewer than min-examples = {least:,} in {policy}, so the site refuses every round; add "
        "examples, or lower min-examples",
    )


def check_run_data(task: TaskConfig, counted: list[int]) -> Iterator[CheckResult]:
    """Check the sites' and the server's data in a run config; store the sites' number of examples in `counted`."""
    for name, folder, split, into in (
        ("task.data", task.data, "train", counted),
        ("task.evaluation", task.evaluation, "test", []),
        ("task.server-data", task.server_data, "train", []),
    ):
        if folder:
            result = run_check(name, partial(_rows, name, Path(folder), split, task, into))
            yield replace(result, text=result.text.removeprefix("task.data: "))  # any key


def _rows(name: str, data: Path, split: str, task: TaskConfig, counted: list[int]) -> CheckResult:
    info = tasks.task_info(task.name)
    columns, folder = info.columns(task), data / split
    if info.metrics is class_metrics and images.is_by_class(data, split):
        table = images.image_table(data, split, task)
        count = len(table.rows)
        counted += [count]
        chosen = (Example(table.rows[i], table.origin(i), table.folder) for i in range(min(count, _MOST_IMAGES)))
        unread = images.scan_class_folders(folder).describe_unread()
        said = f"{f'; {unread}' if unread else ''}{_conversions(chosen, task)}{_class_names(data, split, task)}"
        return CheckResult(name, "ok", f"{count:,} images in the folders of {folder}{said}")
    file = tables.split_file(data, split)
    probe = file_probe.probe_file(file, columns, info.texts(task))
    counted += [probe.rows] if probe.is_whole else []
    more = "" if probe.is_whole else "or more "
    said = "".join(f"; {each}" for each in (file_probe.describe_reading(file), tables.describe_unread(data)) if each)
    if task.image_column in columns:
        base = str(file.parent)
        first = file_probe.first_rows(file, task.image_column, _MOST_IMAGES)
        chosen = (Example({task.image_column: value}, ExampleOrigin(str(file), row), base) for value, row in first)
        said += _conversions(chosen, task)
    if info.metrics is class_metrics and task.image_column in columns:
        said += _class_names(data, split, task)
    return CheckResult(name, "ok", f"{probe.rows:,} examples {more}in {file}, with {', '.join(columns)}{said}")


def _class_names(data: Path, split: str, task: TaskConfig) -> str:
    """Return the line that a run config lacks for these names. Raises TaskError for names that the run does not have.

    The base is not loaded here; with the names of its own classes a run needs none in its config.
    """
    declared, numbering = images.declared_names(data, split, task), ClassNumbering(task)
    if not declared:
        return ""
    if not task.class_list:
        return f"; unless the base names these classes, a run needs {format_class_names(declared)}"
    numbering.note(declared, str(data))
    numbering.require_shared()
    return ""


def _conversions(examples: Iterable[Example], task: TaskConfig) -> str:
    """Return how many of the images are converted, and how. Raises TaskError for an image that has no header."""
    converted = [image_conversions(images.image_bytes(each, task.image_column), each.where) for each in examples]
    said = describe_conversions(converted)
    return f"; of the first {len(converted):,} images {sum(map(bool, converted)):,} are converted: {said}" * bool(said)
