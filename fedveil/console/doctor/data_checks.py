"""The data checks of `fedveil doctor`: whether examples have the columns that a run reads, and how many there are.

The checks prepare no examples and load no model. From a large file they read at most as much as
`fedveil.data.file_probe` allows, with two exceptions: an Excel workbook is scanned whole before its rows are read, and
`check_validation_share` reads all of the server's test examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedveil import strategies, tasks
from fedveil.client_app.node_config import SiteConfig
from fedveil.client_app.policy.site_policy import policy_of_site as of_policy
from fedveil.client_app.site_columns import apply_site_columns, describe_site_columns, name_site_columns
from fedveil.config import RunConfig, TaskConfig
from fedveil.console.doctor.checks import CheckResult, run_check
from fedveil.contract.held_out_report import LEAST_ROWS, NOT_PERMITTED, REFUSALS, TOO_FEW
from fedveil.contract.task import Example, ExampleOrigin, class_metrics
from fedveil.data import file_probe, images, picture_paths, split_files, tables
from fedveil.data.class_names import ClassNumbering, format_class_names
from fedveil.data.conversations import ConversationError, EmptyTurnError, read_conversation
from fedveil.data.image_decoding import describe_conversions, image_conversions
from fedveil.data.row_values import filled_text
from fedveil.errors import ConfigError, FedVeilError, PolicyError, TaskError
from fedveil.server_app.validation_split import KEY, read_test_split

_MOST_IMAGES = 1000  # images whose headers are read
_EMPTY = "rows without one, the first is"


def is_readable(result: CheckResult) -> bool:
    """Return whether the rows of checked data can be read, even if some lack a text."""
    return result.verdict == "ok" or _EMPTY in result.text


def check_site_data(site: SiteConfig, config: RunConfig, counted: list[int]) -> CheckResult:
    """Check a site's training examples, using its own column names, and store their number in `counted`."""
    task = config.task
    try:
        own = apply_site_columns(config, site.columns)
        with name_site_columns(config, site):
            found = _rows("data", Path(site.data), "train", own.task, counted)
        said = (found.text, describe_site_columns(config, site.columns), _held_out(site, config, counted))
        return replace(found, text="; ".join(filter(None, said)))
    except FedVeilError as error:
        if task != TaskConfig():
            raise
        text = f"{error}; this checked the default task, so give the run's task with --config or --set"
        raise ConfigError(text) from None


def _held_out(site: SiteConfig, config: RunConfig, counted: Sequence[int]) -> str:
    """Return how many of a site's examples a run would hold out; "" if it requests none, or they are not counted."""
    key, part = config.held_out_key, config.held_out_fraction
    if not key or not counted:
        return ""
    scores = 0
    with suppress(PolicyError):  # the policy check reports it
        scores = of_policy(site).max_scores if site.policy else 0
    if not scores:
        return f"{key}: {REFUSALS[NOT_PERMITTED]}; no example is held out"
    if (about := round(part * counted[0])) < LEAST_ROWS:
        return f"{key}: {REFUSALS[TOO_FEW]}"
    return f"{key}: about {about:,} of {counted[0]:,} examples are held out, for at most {scores:,} scores (max-scores)"


def check_validation_share(config: RunConfig) -> CheckResult:
    """Count the test examples in the server's data that a run holds out to choose the model."""
    task = tasks.load_task(config, strategies.create_method(config.method.name, config.method.params).adapter, "cpu")
    divided = read_test_split(task, config, Path(config.task.evaluation))
    said = divided.describe().removeprefix(f"{KEY}: ")
    return CheckResult(KEY, "ok", said or "the validation split chooses the model, so no test example is held out")


def list_data_checks(site: SiteConfig, config: RunConfig, counted: list[int]) -> dict[str, Callable[[], CheckResult]]:
    """Return a check of the data set that the run names, or of each one if the site has several and it names none."""
    if name := config.task.data_set:
        return {"data": lambda: _check_rows(site.choose_data(name), config, counted)}
    rows: dict[str, list[int]] = {name: [] if name else counted for name in site.list_data()}
    return {
        f"data {name}".strip(): partial(_check_rows, own, config, rows[name]) for name, own in site.list_data().items()
    }


def _check_rows(site: SiteConfig, config: RunConfig, counted: list[int]) -> CheckResult:
    return check_row_count(check_site_data(site, config, counted), site.policy, counted)


def check_row_count(check: CheckResult, policy: str, counted: Sequence[int]) -> CheckResult:
    """Compare a site's data with the policy minimum: with fewer examples, the site refuses every client round."""
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
    """Check the sites' and the server's data in a run config; store the number of site examples in `counted`."""
    for name, folder, split, into in (
        ("task.data", task.data, "train", counted),
        ("task.evaluation", task.evaluation, "test", []),
        ("task.server-data", task.server_data, "train", []),
    ):
        if folder:
            result = run_check(name, partial(_rows, name, Path(folder), split, task, into))
            yield replace(result, text=result.text.removeprefix("task.data: "))  # it applies to any key


def _rows(name: str, data: Path, split: str, task: TaskConfig, counted: list[int]) -> CheckResult:
    info = tasks.task_info(task.name)
    columns = info.columns(task)
    # True for tasks that classify images, which read image folders and class names.
    is_of_images = info.metrics is class_metrics or (info.labels and task.image_column in columns)
    if is_of_images and (folder := images.class_folder(data, split)):
        table = images.image_table(data, split, task)
        count = len(table.rows)
        counted += [count]
        chosen = (Example(table.rows[i], table.origin(i), table.folder) for i in range(min(count, _MOST_IMAGES)))
        unread = images.scan_class_folders(folder).describe_unread()
        said = f"{f'; {unread}' if unread else ''}{_conversions(chosen, task)}{_class_names(data, split, task)}"
        return CheckResult(name, "ok", f"{count:,} images in the folders of {folder}{said}")
    files = split_files.split_files(data, split)
    probe = file_probe.probe_files(files, columns, info.texts(task), (task.label_column,))
    counted += [probe.rows] if probe.is_whole else []
    more = "" if probe.is_whole else "or more "
    readings = dict.fromkeys(map(file_probe.describe_reading, files))
    layout = split_files.describe_layout(data, split, files), split_files.describe_unread(data, split, files)
    said = "".join(f"; {each}" for each in (*layout, *readings) if each)
    if info.drops and file_probe.is_small(files):
        said += _empty_texts(files, columns, task)
    if task.image_column in columns:
        said += _pictures(files[0], task)
    if is_of_images and task.image_column in columns:
        said += _class_names(data, split, task)
    return CheckResult(name, "ok", f"{probe.rows:,} examples {more}in {files[0]}, with {', '.join(columns)}{said}")


def _empty_texts(files: Sequence[Path], columns: tuple[str, ...], task: TaskConfig) -> str:
    """Return how many rows a run drops because they lack a text. Raises TaskError if it would refuse them instead.

    A column used in a template may be empty.
    """
    required = (task.target_column,) if task.source_template else columns
    table = tables.read_files(files, required, texts=required, only=required)
    rows = zip(*(table.rows[column] for column in required), strict=True)
    try:
        places = [number for number, values in enumerate(rows) if any(_lacks_text(value, task) for value in values)]
    except (ValueError, OverflowError):  # its message may quote a value
        raise file_probe.undecodable(files[0], required) from None
    empty = len(places)
    if empty and task.empty_texts == "refuse":
        where = Example({}, table.origin(places[0])).where
        raise TaskError(
            f"task.data: expected a text in {' and '.join(required)} of every row, found {empty:,} {_EMPTY} {where}; "
            'correct them, or set task.empty-texts = "drop"'
        )
    return f"; {empty:,} rows without a text are dropped" if empty else ""


def _lacks_text(value: object, task: TaskConfig) -> bool:
    if not task.messages_column:
        return filled_text(value) is None
    try:
        read_conversation(value)
    except EmptyTurnError:
        return True
    except ConversationError:  # the preview reports the reason
        return False
    return False


def _pictures(file: Path, task: TaskConfig) -> str:
    """Return where a file's images are, and how they are converted. Raises TaskError if one is not an image."""
    column, base = task.image_column, file.parent
    first = list(file_probe.first_rows(file, column, _MOST_IMAGES))
    place = picture_paths.find_pictures((value for value, _ in first), column, base)
    path_of = place.path_of if place else lambda value: value
    chosen = [Example({column: path_of(value)}, ExampleOrigin(str(file), row), str(base)) for value, row in first]
    return (f"; the pictures are {place.describe()}" if place else "") + _conversions(chosen, task)


def _class_names(data: Path, split: str, task: TaskConfig) -> str:
    """Return the line that a run config needs for these class names. Raises TaskError for names missing from the run.

    The base is not loaded here; if the base has class names of its own, the run config needs none.
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
    """Return how many of the images are converted, and how. Raises TaskError for an image without a readable header."""
    converted = [
        image_conversions(images.image_bytes(each, task.image_column), each.where, task.gray_window)
        for each in examples
    ]
    said = describe_conversions(converted)
    return f"; {sum(map(bool, converted)):,} of the first {len(converted):,} images are converted: {said}" * bool(said)
