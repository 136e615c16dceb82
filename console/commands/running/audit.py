"""`fedveil audit`: attacks a run on what its own tap recorded, beside controls that an attack must win and lose."""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.errors import ConfigError, StateError

if TYPE_CHECKING:
    from rich.table import Table

    from fedveil.attacks.audit import Finding, Sample
    from fedveil.config import RunConfig
    from fedveil.console.runs.folder import Run
    from fedveil.contract.task import Examples, Task

FILE = "audit.json"
_BY_HEART = 64  # members of the overfitted control
_LEAST = 20  # rows of a side below which no interval means anything


def add_parser(sub: Any) -> None:
    """Adds the sub-command."""
    parser = sub.add_parser(
        "audit",
        help="attack a run on its own tap, with controls",
        description="The run must have recorded a tap (run.tap = true). The auditor needs the rows that the sites trained "
        "on, and rows of the same distribution that none of them had.",
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder: <run.dir>/<run.name>")
    parser.add_argument(
        "--data",
        type=Path,
        help="the sites' rows; cut as the run config says, sites in the order of their names (default: task.data)",
    )
    parser.add_argument(
        "--site", action="append", default=[], metavar="NAME=FOLDER", help="the rows of one site, instead of --data"
    )
    parser.add_argument(
        "--non-members",
        type=Path,
        help="rows of no site, of the same distribution (default: rows that task.max-examples left out, else the split test)",
    )
    parser.add_argument("--max-rows", type=int, default=300, help="members and non-members used, each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Attacks the run, prints a table and writes RUN/audit.json, which the report shows."""
    from rich.console import Console

    from fedveil import rng, strategies, tasks
    from fedveil.attacks import audit as attack
    from fedveil.attacks import controls
    from fedveil.attacks.base import Knowledge, View
    from fedveil.attacks.reconstruction import pictures
    from fedveil.config import parse
    from fedveil.console.runs import folder as runs
    from fedveil.federation.exchange import Exchange
    from fedveil.records.state import load_state, write_atomic
    from fedveil.wire.tap import Tap

    console = Console(highlight=False)

    def say(text: str) -> None:
        console.print(text, markup=False, style="dim")

    found = runs.load(args.folder)
    if "config" not in found.config:
        raise StateError(f"{args.folder}: expected config.json of a run that began, found none; audit another run")
    config = parse(found.config["config"])
    method = strategies.create(config.method.name, config.method.fields)
    task = tasks.load(config, method.adapter, args.device)
    tap = Tap(args.folder / "tap")
    list(tap.messages())  # there, or an error that says how to get one
    view = View.server(tap, Exchange(method, config.method.name, task.spec))
    members = _members(args, config, found, task, view.sites)
    others = _sampled(_non_members(args, config, members, len(found.sites)), args.max_rows, args.seed)
    samples = {
        site: _prepared(task, config, _sampled(of_site, args.max_rows, args.seed)) for site, of_site in members.items()
    }
    non_members = _prepared(task, config, others)
    _enough(samples, non_members)
    own = controls.settings(config)
    plain = strategies.create("fedavg")
    control_task = tasks.load(own, plain.adapter, args.device)
    by_heart = [row for sample in samples.values() for row in sample.rows]
    by_heart = random.Random(args.seed).sample(by_heart, min(_BY_HEART, len(by_heart)))
    knowledge = Knowledge(
        task=task,
        initial=task.initial(rng.initial(config.run.seed, "weights")),
        server=method.deployed(load_state(args.folder / "final" / "server.safetensors"))["server"],
    )
    console.print(f"Training the overfitted control on {len(by_heart)} members", style="dim")
    with tempfile.TemporaryDirectory() as scratch:
        control = controls.overfitted(control_task, by_heart, own, Tap(Path(scratch)))
        result = attack.audit(view, knowledge, samples, non_members, control, args.seed, say)
    notes = [*result.notes]
    if (found_pictures := pictures.reconstructed(view, task, config, samples)) is not None:
        sheet, said = found_pictures
        write_atomic(args.folder / pictures.FILE, sheet)
        notes += said
    result = replace(result, notes=notes)
    write_atomic(args.folder / FILE, json.dumps(result.to_json(), indent=1).encode())
    console.width = max(console.width, 150)
    console.print(table(result.findings, found.name))
    for note in notes:
        console.print(f"- {note}", markup=False)
    console.print(f"Result: {args.folder / FILE}; fedveil report {args.folder} shows it", soft_wrap=True)
    return 0


def table(findings: Sequence[Finding], name: str) -> Table:
    """The findings, a row each."""
    from rich.table import Table

    shown = Table("model", "attack", title=f"{name}: membership attacks (95 % intervals)")
    for head in ("AUROC", "TPR at 1 % FPR", "TPR at 0.1 % FPR", "epsilon at least", "members / non-members", "0.5"):
        shown.add_column(head, justify="right")
    last = ""
    for f in findings:
        shown.add_row(
            f.model if f.model != last else "",
            f.attack,
            _interval(f.auroc),
            _interval(f.tpr_at_1),
            _interval(f.tpr_at_01),
            f"{f.epsilon_bound:.2f}",
            f"{f.members} / {f.non_members}",
            f.verdict,
        )
        last = f.model
    return shown


def _interval(value: Sequence[float]) -> str:
    return "{:.3f} \\[{:.3f}, {:.3f}]".format(*value)


def _members(
    args: argparse.Namespace, config: RunConfig, found: Run, task: Task, sites: Sequence[str]
) -> Mapping[str, Examples]:
    """Training rows of each site that took part."""
    from fedveil.contract.task import Share

    if args.site:
        folders = dict(_named(text) for text in args.site)
        if unknown := sorted(set(folders) - set(sites)):
            raise ConfigError(f"--site: expected a site of the run ({', '.join(sites)}), found {unknown[0]}")
        return {site: task.examples(folder, "train") for site, folder in folders.items()}
    data = _data(args, config)
    if data is None:
        raise ConfigError(
            "--data: expected the folder of the sites' rows, found none (the run's sites named their own); give --data, or "
            "--site NAME=FOLDER for each site whose rows you have"
        )
    every = sorted(found.sites, key=_natural)
    return {site: task.examples(data, "train", Share(every.index(site), len(every))) for site in sites}


def _non_members(args: argparse.Namespace, config: RunConfig, members: Mapping[str, Examples], sites: int) -> Examples:
    """Rows of --non-members; else those that task.max-examples left out; else the split test."""
    from fedveil import strategies, tasks
    from fedveil.config import parse
    from fedveil.contract.task import Share

    whole = parse(config.flat() | {"task.max-examples": 0})
    task = tasks.load(whole, strategies.create("fedavg").adapter, "cpu")  # reads rows only
    if args.non_members:
        return task.examples(args.non_members, "test")
    data = _data(args, config)
    if data is None:
        raise ConfigError("--non-members: expected a folder or file with rows of no site, found none; give one")
    if config.task.max_examples and not args.site:
        used = {row.origin for rows in members.values() for row in rows}
        every = (row for i in range(sites) for row in task.examples(data, "train", Share(i, sites)))
        if left := [row for row in every if row.origin not in used]:
            return left
    return task.examples(data, "test")


def _data(args: argparse.Namespace, config: RunConfig) -> Path | None:
    return args.data or (Path(config.task.data) if config.task.data else None)


def _natural(name: str) -> list[tuple[int, str]]:
    """site-2 before site-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _named(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise ConfigError(f'--site: expected NAME=FOLDER, found "{text}"')
    return name, Path(folder)


def _sampled(rows: Examples, most: int, seed: int) -> Examples:
    """At most that many, a seeded choice."""
    if most < _LEAST:
        raise ConfigError(f"--max-rows: expected at least {_LEAST}, found {most}")
    return rows if len(rows) <= most else random.Random(seed).sample(list(rows), most)


def _prepared(task: Task, config: RunConfig, examples: Examples) -> Sample:
    """Rows with the label of their example, "" where the data were not cut by label."""
    from datasets import Dataset

    from fedveil.attacks.audit import Sample
    from fedveil.rows import partition

    skewed = config.task.partition != "iid"  # else a site has no labels of its own
    has_label = skewed and bool(examples) and config.task.label_column in examples[0].values
    column = (
        Dataset.from_list([{config.task.label_column: e.values[config.task.label_column]} for e in examples])
        if has_label
        else None
    )
    labels = partition.labels(column, config.task) if column is not None else [""] * len(examples)
    prepared = [task.encode([example]) for example in examples]
    return Sample(
        [row for rows in prepared for row in rows],
        [label for label, rows in zip(labels, prepared, strict=True) for _ in rows],
    )


def _enough(members: Mapping[str, Sample], non_members: Sample) -> None:
    count = sum(len(sample.rows) for sample in members.values())
    if min(count, len(non_members.rows)) < _LEAST:
        raise ConfigError(
            f"--data, --non-members: expected at least {_LEAST} members and non-members, found {count} and "
            f"{len(non_members.rows)}; an interval of fewer says nothing"
        )
