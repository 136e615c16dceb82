"""Data checks of `fedveil doctor`: examples with the columns that a run reads, and their number.

The checks prepare nothing and load no model. Of a large file they read at most what
`fedveil.data.file_probe` allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedveil import tasks
from fedveil.client_app.node_config import SiteConfig
from fedveil.client_app.policy.site_policy import policy_of_site as of_policy
from fedveil.config import TaskConfig
from fedveil.console.doctor.checks import CheckResult, run_check
from fedveil.contract.task import class_metrics
from fedveil.data import file_probe, images, tables
from fedveil.errors import ConfigError, FedVeilError, PolicyError


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
        count = len(images.image_table(data, split, task).rows)
        counted += [count]
        return CheckResult(name, "ok", f"{count:,} images in the folders of {folder}")
    file = tables.split_file(data, split)
    probe = file_probe.probe_file(file, columns)
    counted += [probe.rows] if probe.is_whole else []
    more = "" if probe.is_whole else "or more "
    return CheckResult(name, "ok", f"{probe.rows:,} examples {more}in {file}, with {', '.join(columns)}")
