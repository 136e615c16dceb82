"""docs/results.md: the figures of its tables stand in the results that their rows name, and no verdict says more.

A cell holds items, parted by "; ": "`row` metric: figure", "`row` figure B up", "`row` figure s", or a quote of
one of the file's sentences. A figure is compared as it is rounded, an interval as far as its figure can go.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest

from fedveil import strategies
from fedveil.benchmarks import figures, ready, run
from fedveil.console.commands.trying import bench
from tests.conftest import ROOT

COLUMNS = ("claim", "measured", "verdict", "interval", "cost", "command")
COUNTED = ("bytes counted", "exact arithmetic")
PAGE = ROOT / "docs" / "results.md"
RESULTS = ROOT / "benchmarks" / "results"
NUMBER = r"[+-]?[\d,]*\.?\d+"
METRIC = re.compile(rf"`([^`]+)` (.+): ({NUMBER})(?: (?:dB|%|nats|MB|kB|MB/s|GB/s|s))?")
COUNT = re.compile(rf"`([^`]+)` ({NUMBER}) (B up|B down|s)")
_SAID = {
    "not decided.": "not decided",
    "not told apart.": "not decided",
    "does not hold here.": "refuted",
    " holds here.": "holds",
}
KEYS = {"B up": "upload_bytes", "B down": "download_bytes", "s": "seconds"}


@dataclass(frozen=True)
class Row:
    """One row of a table, a cell a field."""

    claim: str
    measured: str
    verdict: str
    interval: str
    cost: str
    command: str


def rows() -> list[Row]:
    """The rows of every table with the columns of a result."""
    found, head = [], ()
    for line in PAGE.read_text().splitlines():
        cells = tuple(cell.strip() for cell in line.strip("|").split(" | "))
        if not line.startswith("|"):
            head = ()
        elif not head:
            head = tuple(cell.strip() for cell in cells)
            assert head == COLUMNS, line
        elif not set(line) <= set("|-"):
            found.append(Row(*cells))
    return found


def named(row: Row) -> tuple[str, argparse.Namespace]:
    """The preset of the row's command, and what its options say, read as the command line is."""
    command = re.fullmatch(r"`fedveil bench (.+)`", row.command)
    assert command, f"command: {row.command}"
    parser = argparse.ArgumentParser(exit_on_error=False)
    bench.add_arguments(parser)
    args = parser.parse_args(command[1].split())
    return args.preset, args


@functools.cache
def result_of(preset: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{preset.replace('/', '_')}.json").read_text())


def is_shown(text: str, value: float) -> bool:
    """Whether `text` is `value`, rounded as it is written."""
    plain = text.replace(",", "")
    decimals = len(plain.partition(".")[2])
    return abs(float(plain) - value) <= 0.5 * 10**-decimals + 1e-12 * abs(value)


def seeds_of(result: dict[str, Any], preset: str, measured: str = "") -> int:
    """How many seeds the file has: what its own sentences say, else its preset; of a table by bases, which can be of
    fewer seeds than asked for, what all rows have that the row names; of a share, what the quoted sentence says."""
    if shares := re.findall(r"read on \d+ of (\d+) seeds", measured):
        return min(map(int, shares))
    settings = run.read(preset, result["form"])["settings"]
    quoted = re.findall(r'"Accuracy of ([^,"]+), ([^"]+?) less that of ([^":]+):', measured)
    named_ = set(re.findall("`([^`]+)`", measured)) | {f"{base}, {m}" for base, *pair in quoted for m in pair}
    measures = [row for row in result["rows"] if "base" in row and row["name"] in named_]
    fewest = min((len(row["metrics"]["accuracy"]["seeds"]) for row in measures), default=0)
    return ready.seeds_of(result) or int(fewest or settings["seeds"])


def problems(row: Row) -> list[str]:
    """What in the row is not so."""
    preset, args = named(row)
    if preset not in run.names():
        return [f"no preset {preset}"]
    if not (RESULTS / f"{preset.replace('/', '_')}.json").is_file():
        return [f"no result of {preset}"]
    result = result_of(preset)
    by_name = {each["name"]: each for each in result["rows"]}
    wrong = [] if args.form == result["form"] else ["the command has another form than the file"]
    if args.seeds and args.seeds != seeds_of(result, preset):
        wrong.append("the command has another number of seeds than the file")
    if stated := re.search(r"\(paper: ([^)]*)\)", row.claim):
        known = [value for each in result["paper"].values() for value in each.values()]
        wrong += [f"paper: {t}" for t in stated[1].split(", ") if not any(is_shown(t, value) for value in known)]
    wanted: list[tuple[str, Any]] = []
    for item in row.measured.split("; "):
        wrong += _item(item, by_name, result["verdicts"], wanted)
    if row.cost != "not recorded":
        for item in row.cost.split("; "):
            wrong += _item(item, by_name, [], [])
    wrong += _no_stronger(row, result["verdicts"])
    return wrong + _intervals(row.interval, wanted) + _verdict(row, wanted, result, preset)


def _item(item: str, by_name: dict[str, Any], sentences: list[str], wanted: list[tuple[str, Any]]) -> list[str]:
    """What is wrong with one item; what has an interval goes to `wanted`."""
    if item.startswith('"'):
        quote = item.strip('"')
        after = [s[s.index(quote) + len(quote) :] for s in sentences if quote in s]
        after = [rest for rest in after if not re.match(r"[\d.]\d", rest)]
        if not after:
            return [f"no sentence has {item}"]
        if any(re.match(r" (\[|\(95)", rest) for rest in after):
            wanted.append(("quote", after))
        return []
    if found := COUNT.fullmatch(item):
        value = by_name.get(found[1], {}).get(KEYS[found[3]])
        return [] if value is not None and is_shown(found[2], value) else [f"{item}, the file has {value}"]
    if found := METRIC.fullmatch(item):
        metric = by_name.get(found[1], {}).get("metrics", {}).get(found[2])
        if metric is None:
            return [f"no metric for {item}"]
        least, most = figures.possible(found[2])
        wanted.append(("metric", metric | {"low": max(metric["low"], least), "high": min(metric["high"], most)}))
        return [] if is_shown(found[3], metric["mean"]) else [f"{item}, the file has {metric['mean']}"]
    return [f"cannot be read: {item}"]


def _no_stronger(row: Row, sentences: list[str]) -> list[str]:
    """A row that decides, while a sentence that it quotes does not, or says the other thing."""
    word = row.verdict.partition(" (")[0]
    wrong = []
    for quote in (item.strip('"') for item in row.measured.split("; ") if item.startswith('"')):
        for sentence in sentences:
            said = next((of for end, of in _SAID.items() if quote in sentence and sentence.endswith(end)), word)
            wrong += [] if word in ("not decided", said) else [f"{row.verdict}, its sentence: {said}"]
    return wrong


def _intervals(cell: str, wanted: list[tuple[str, Any]]) -> list[str]:
    bare = [re.sub(" (points|nats)$", "", each) for each in cell.split("; ")]
    shown = [] if cell == "-" else [tuple(each.split(" to ")) for each in bare]
    if len(shown) != len(wanted):
        return [f"{len(shown)} intervals for {len(wanted)} figures"]
    wrong = []
    for (low, high), (kind, found) in zip(shown, wanted, strict=True):
        if kind == "quote":
            right = any(rest.startswith((f" [{low}, {high}]", f" (95 % interval {low} to {high},")) for rest in found)
        else:
            right = is_shown(low, found["low"]) and is_shown(high, found["high"])
        wrong += [] if right else [f"interval {low} to {high}, the file has {found}"]
    return wrong


def _kept(result: dict[str, Any]) -> list[int]:
    """Of how many seeds the file keeps the values."""
    return [max(len(metric.get("seeds", ())) for row in result["rows"] for metric in row["metrics"].values())]


def _verdict(row: Row, wanted: list[tuple[str, Any]], result: dict[str, Any], preset: str) -> list[str]:
    """A claim is decided by counting, by three repeats or more, or by three seeds or more with each one's value."""
    cell = row.verdict
    found = re.fullmatch(r"(holds|refuted|not decided)(?: at [^(]+)? \((.+)\)", cell)
    if not found:
        return [f"no verdict: {cell}"]
    word, why = found.groups()
    metrics = [metric for kind, metric in wanted if kind == "metric"]
    counts = {metric["n"] for metric in metrics}
    kept = [len(metric.get("seeds", ())) for metric in metrics] or _kept(result)  # a quoted difference is over them
    if seeds := re.match(r"(\d+) seeds?(, no value of each)?$", why):
        count = seeds_of(result, preset, row.measured)
        if int(seeds[1]) != count:
            return [f"{cell}, the file has {count} seeds"]
        if word == "not decided":
            unkept = count >= 3 and not (kept and min(kept) >= 3)
            return [] if bool(seeds[2]) == unkept else [f"{cell}: say whether each seed's value is kept"]
        return [] if kept and min(kept) >= 3 else [f"{cell}, the file keeps {kept} seeds' values"]
    if repeats := re.match(r"(\d+) repeats?\b", why):
        if preset.partition("/")[2] != "speed" and preset.partition("/")[0] not in ("core", "secure"):
            return [f"{cell}: only timings have repeats"]
        if metrics and counts != {int(repeats[1])}:
            return [f"{cell}, the file has {counts}"]
        return [] if word == "not decided" or int(repeats[1]) >= 3 else [f"{cell}: too few"]
    if points := re.fullmatch(r"all (\d+) points equal", why):
        total = sum(row["metrics"]["points"]["mean"] for row in result["rows"])
        equal = sum(row["metrics"]["equal"]["mean"] for row in result["rows"])
        return [] if total == equal == int(points[1]) else [f"{cell}, the file has {equal} of {total}"]
    return [] if word == "not decided" or why in COUNTED else [f"{cell}: expected one of {COUNTED}"]


ROWS = rows()


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.command.strip('`').split()[2]}-{row.claim[:30]}" for row in ROWS])
def test_a_row_says_what_its_result_has(row):
    assert problems(row) == []


def test_every_committed_result_has_a_row():
    assert {named(row)[0].replace("/", "_") for row in ROWS} == {file.stem for file in RESULTS.glob("*.json")}


@pytest.mark.parametrize("cell", ["measured", "interval", "cost"])
def test_no_figure_can_be_changed_unseen(cell):
    """Every number of every row, moved by two of its last digit."""
    unseen = []
    for row in ROWS:
        text = getattr(row, cell)
        bare = re.sub(r"`[^`]+`", lambda name: "_" * len(name[0]), text)
        for at in re.finditer(NUMBER, bare):
            digits = at[0].rstrip(",")
            moved = digits[:-1] + str((int(digits[-1]) + 2) % 10)
            changed = replace(row, **{cell: text[: at.start()] + moved + text[at.start() + len(digits) :]})
            if not problems(changed):
                unseen.append((row.command, at[0], text))
    assert unseen == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"command": "`fedveil bench fedrand/table9 --small`"}, "no preset"),
        ({"command": "`fedveil bench core/training`"}, "no result"),
        ({"command": "`fedveil bench dp_fpl/mia`"}, "another form"),
        ({"command": "`fedveil bench dp_fpl/mia --small --seeds 4`"}, "another number of seeds"),
        ({"verdict": "not decided (4 seeds)"}, "has 5 seeds"),
        ({"verdict": "holds (seen twice)"}, "expected one of"),
        ({"verdict": "holds (60 repeats)"}, "only timings"),
        ({"verdict": "likely (2 seeds)"}, "no verdict"),
        ({"claim": "the same (paper: 99.9)"}, "paper: 99.9"),
        ({"cost": "next to nothing"}, "cannot be read"),
    ],
)
def test_a_row_that_says_more_is_refused(changes, said):
    row = next(row for row in ROWS if "shadow models find no member" in row.claim)
    assert said in " ".join(problems(replace(row, **changes)))


def test_without_the_value_of_each_seed_nothing_is_decided():
    row = next(row for row in ROWS if row.verdict == "not decided (5 seeds, no value of each)")
    assert problems(row) == []
    assert "keeps" in " ".join(problems(replace(row, verdict="holds (5 seeds)")))


def test_a_row_decides_no_more_than_the_sentence_it_quotes():
    row = next(row for row in ROWS if "no worse on the neighbours'" in row.claim)
    assert row.verdict == "not decided (5 seeds)"
    for word in ("holds", "refuted"):
        said = problems(replace(row, verdict=f"{word} (5 seeds)"))
        assert f"{word} (5 seeds), its sentence: not decided" in said


def test_the_withheld_factor_is_not_decided_before_five_seeds_of_two_data_sets():
    """README and page say so in these words as long as the row does."""
    row = next(row for row in ROWS if "withheld factor" in row.claim)
    assert row.verdict.startswith("not decided")
    said = '"an attacker who knows the method loses nothing by the withheld factor" is not yet decided'
    for page in (PAGE, ROOT / "README.md"):
        assert said in " ".join(page.read_text().split()), page


def test_pictures_and_pages_that_the_page_names_are_there():
    links = re.findall(r"\]\((?!https://arxiv\.org/abs/)([^)]+)\)", PAGE.read_text())
    assert links
    headings = [line.lstrip("# ") for line in PAGE.read_text().splitlines() if line.startswith("#")]
    within = {f"#{heading.lower().replace(' ', '-')}" for heading in headings}
    assert [link for link in links if link not in within and not (PAGE.parent / link).is_file()] == []


def measured(result, settings) -> str:
    """The settings without the methods of which the result has no row: a preset may have grown since it ran."""
    rows = [row["name"] for row in result["rows"]]
    has = lambda label: any(name == label or name.startswith((f"{label} ", f"{label},")) for name in rows)  # noqa: E731
    if isinstance(methods := settings.get("methods"), dict):
        settings = settings | {"methods": {label: of for label, of in methods.items() if has(label)}}
    return json.dumps(settings)


def test_a_method_without_a_row_is_not_measured():
    settings = {"methods": {"FedProx": {"name": "fedprox"}, "FedPer": {"name": "fedper"}}}
    said = measured({"rows": [{"name": "FedPer server"}, {"name": "FedProximal server"}]}, settings)
    assert '"fedper"' in said
    assert '"fedprox"' not in said


def test_readme_says_of_each_method_whether_any_committed_result_has_it():
    """README's last column: a dash, or presets whose results are committed and which run the method."""
    said = re.findall(r"^\| [^|]+, `(\w+)` \| .* \| ([^|]+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [name for name, _ in said if name not in strategies.names()] == []
    assert sorted(name for name, _ in said) == strategies.names()
    committed = {name for name in run.names() if (RESULTS / f"{name.replace('/', '_')}.json").is_file()}
    ran = {name: measured(result_of(name), run.read(name, result_of(name)["form"])["settings"]) for name in committed}
    for method, cell in said:
        having = {name for name in committed if f'"{method}"' in ran[name]}
        assert (cell == "-") == (not having), f"{method}: README says {cell}, results are {sorted(having)}"
        for preset in re.findall(r"`(\w+/\w+)`", cell):
            assert preset in having, f"{method}: README names {preset}"


def test_the_list_at_the_top_counts_the_verdicts_below():
    counts: dict[str, list[int]] = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| ") and len(cells := line.strip("|").split(" | ")) == len(COLUMNS):
            found = [cells[2].strip().startswith(verdict) for verdict in ("holds", "refuted", "not decided")]
            if any(found):
                of = counts.setdefault(section, [0, 0, 0])
                counts[section] = [a + b for a, b in zip(of, found, strict=True)]
    said = {
        f"- [{name}](#{name.lower().replace(' ', '-')}): {sum(of)} claims, {of[0]} hold, {of[1]} refuted, {of[2]} "
        "not decided"
        for name, of in counts.items()
    }
    assert len(said) == 6
    assert said <= set(PAGE.read_text().splitlines())
