"""docs/results.md: the figures of its claims stand in the results that they link, and no verdict says more.

A claim is a list item and a comment with what was measured, the verdict and the intervals. What was measured is a list,
separated by "; ", of "`row` metric: figure", "`row` figure B up", "`row` figure s" and quotes of the file's sentences.
A figure is compared as it is rounded, an interval as far as its figure can go. The sentence of the claim may use no
other figures than those, and settings of the preset; its words are free. The page that it links has the command.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest

from fedveil import strategies
from fedveil_bench import figures, requirements, runner
from tests.conftest import ROOT
from tools.pages import results

CLAIM = re.compile(r"^- (.+) \(\[([\w/]+)\]\(reference/results/(\w+)\.md\)\)\n  <!-- (.+) -->$", re.MULTILINE)
SEEDS = "5"  # of a claim that names no other number, according to the page
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
    """One claim of the page: its sentence, the preset that it links, and the parts of its comment."""

    claim: str
    link: str
    measured: str
    verdict: str
    interval: str


def rows() -> list[Row]:
    """The claims of the page."""
    claims = []
    for sentence, link, page, comment in CLAIM.findall(PAGE.read_text()):
        assert page == link.replace("/", "_")
        claims.append(Row(sentence, link, *(part.strip() for part in comment.split(" | "))))
    return claims


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
    settings = runner.read_preset(preset, result["form"])["settings"]
    quoted = re.findall(r'"Accuracy of ([^,"]+), ([^"]+?) less that of ([^":]+):', measured)
    named_ = set(re.findall("`([^`]+)`", measured)) | {f"{base}, {m}" for base, *pair in quoted for m in pair}
    measures = [row for row in result["rows"] if "base" in row and row["name"] in named_]
    fewest = min((len(row["metrics"]["accuracy"]["seeds"]) for row in measures), default=0)
    return requirements.recorded_seeds(result) or int(fewest or settings["seeds"])


def problems(row: Row) -> list[str]:
    """What in the row is not so."""
    preset = row.link
    if preset not in runner.list_presets():
        return [f"no preset {preset}"]
    if not (RESULTS / f"{preset.replace('/', '_')}.json").is_file():
        return [f"no result of {preset}"]
    result = result_of(preset)
    by_name = {each["name"]: each for each in result["rows"]}
    wrong = _stated_seeds(row)
    if stated := re.search(r"\(paper: ([^)]*)\)", row.claim):
        known = [value for each in result["paper"].values() for value in each.values()]
        wrong += [f"paper: {t}" for t in stated[1].split(", ") if not any(is_shown(t, value) for value in known)]
    wanted: list[tuple[str, Any]] = []
    for item in row.measured.split("; "):
        wrong += _item(item, by_name, result["verdicts"], wanted)
    wrong += _sentence(row, preset, result)
    wrong += _no_stronger(row, result["verdicts"])
    return wrong + _intervals(row.interval, wanted) + _verdict(row, wanted, result, preset)


def _stated_seeds(row: Row) -> list[str]:
    """A sentence that names another number of seeds or repeats than its verdict, or none where they are not five."""
    if not (verdict := re.search(r"\((\d+) (?:seeds|repeats)", row.verdict)):
        return []
    stated = set(re.findall(r"over (\d+) (?:seeds|repeats)|\d+ of (\d+) (?:seeds|pictures)", row.claim))
    counts = {a or b for a, b in stated} or {SEEDS}
    return [] if counts == {verdict[1]} else [f"{row.verdict}, the sentence has {sorted(counts)}"]


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
    if match := COUNT.fullmatch(item):
        value = by_name.get(match[1], {}).get(KEYS[match[3]])
        return [] if value is not None and is_shown(match[2], value) else [f"{item}, the file has {value}"]
    if match := METRIC.fullmatch(item):
        metric = by_name.get(match[1], {}).get("metrics", {}).get(match[2])
        if metric is None:
            return [f"no metric for {item}"]
        least, most = figures.find_metric_bounds(match[2])
        wanted.append(("metric", metric | {"low": max(metric["low"], least), "high": min(metric["high"], most)}))
        return [] if is_shown(match[3], metric["mean"]) else [f"{item}, the file has {metric['mean']}"]
    return [f"cannot be read: {item}"]


def names_setting(before: str) -> bool:
    """Tell whether a number after these words may be a setting or a count, and not a figure."""
    return bool(re.search(r"(?:=|epsilon(?: of)?|within|masks of|at|of|with|and|over|after) $", before))


def _sentence(row: Row, preset: str, result: dict[str, Any]) -> list[str]:
    """Figures of the sentence that neither the comment has nor the settings and rows of the result."""
    figures_ = set(re.findall(NUMBER, f"{row.measured} {row.interval} {row.verdict}"))
    settings = json.dumps(runner.read_preset(preset, result["form"])["settings"])
    names = " ".join(each["name"] for each in result["rows"])
    given = set(re.findall(NUMBER, f"{settings} {names} {row.measured}"))
    wrong = []
    for match in re.finditer(NUMBER, row.claim):
        is_setting = names_setting(row.claim[: match.start()]) and match[0].rstrip(",") in given
        if match[0].rstrip(",") not in figures_ and not is_setting:
            wrong.append(f"{match[0]} of the sentence stands in no result")
    return wrong


def _no_stronger(row: Row, sentences: list[str]) -> list[str]:
    """A row that decides, while a sentence that it quotes does not, or says the other thing."""
    word = row.verdict.partition(" (")[0]
    wrong = []
    for quote in (item.strip('"') for item in row.measured.split("; ") if item.startswith('"')):
        for sentence in sentences:
            sentence_verdict = next(
                (of for end, of in _SAID.items() if quote in sentence and sentence.endswith(end)), word
            )
            wrong += (
                []
                if word in ("not decided", sentence_verdict)
                else [f"{row.verdict}, its sentence: {sentence_verdict}"]
            )
    return wrong


def _intervals(cell: str, wanted: list[tuple[str, Any]]) -> list[str]:
    bare = [re.sub(" (points|nats)$", "", each) for each in cell.split("; ")]
    cell_intervals = [] if cell == "-" else [tuple(each.split(" to ")) for each in bare]
    if len(cell_intervals) != len(wanted):
        return [f"{len(cell_intervals)} intervals for {len(wanted)} figures"]
    wrong = []
    for (low, high), (kind, value) in zip(cell_intervals, wanted, strict=True):
        if kind == "quote":
            right = any(rest.startswith((f" [{low}, {high}]", f" (95 % interval {low} to {high},")) for rest in value)
        else:
            right = is_shown(low, value["low"]) and is_shown(high, value["high"])
        wrong += [] if right else [f"interval {low} to {high}, the file has {value}"]
    return wrong


def _kept(result: dict[str, Any]) -> list[int]:
    """Of how many seeds the file keeps the values."""
    return [max(len(metric.get("seeds", ())) for row in result["rows"] for metric in row["metrics"].values())]


def _verdict(row: Row, wanted: list[tuple[str, Any]], result: dict[str, Any], preset: str) -> list[str]:
    """A claim is decided by counting, by three repeats or more, or by three seeds or more with each one's value."""
    cell = row.verdict
    match = re.fullmatch(r"(holds|refuted|not decided)(?: at [^(]+)? \((.+)\)", cell)
    if not match:
        return [f"no verdict: {cell}"]
    word, why = match.groups()
    metrics = [metric for kind, metric in wanted if kind == "metric"]
    counts = {metric["n"] for metric in metrics}
    seed_counts = [len(metric.get("seeds", ())) for metric in metrics] or _kept(
        result
    )  # a quoted difference is over them
    if seeds := re.match(r"(\d+) seeds?(, no value of each)?$", why):
        count = seeds_of(result, preset, row.measured)
        if int(seeds[1]) != count:
            return [f"{cell}, the file has {count} seeds"]
        if word == "not decided":
            unkept = count >= 3 and not (seed_counts and min(seed_counts) >= 3)
            return [] if bool(seeds[2]) == unkept else [f"{cell}: say whether each seed's value is kept"]
        return [] if seed_counts and min(seed_counts) >= 3 else [f"{cell}, the file keeps {seed_counts} seeds' values"]
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
# Claims that are not decided, which the page does not show, for the tests of the rules.
SHADOW_MODELS = Row(
    "Shadow models find no member: AUROC 0.490, where they find an overfitted one in 0.598.",
    "dp_fpl/mia",
    "`overfitted` AUROC, global: 0.598; `DP-FPL, noise 4 C each` AUROC, global: 0.490",
    "not decided (5 seeds)",
    "0.518 to 0.674; 0.421 to 0.559",
)
MOVED = Row(
    "Entries move in a share of 0.6722 of the epochs.",
    "random_binary/accuracy",
    "`scratch, R = 0.8` entries moved: 0.6722",
    "not decided (5 seeds, no value of each)",
    "0.6717 to 0.6727",
)
NEIGHBORS = Row(
    "Without noise DP-FPL differs from PromptFL by -3.4 points on other sites' classes.",
    "dp_fpl/table2",
    '"Neighbour accuracy of DP-FPL, no noise less that of PromptFL: -3.4"',
    "not decided (5 seeds)",
    "-5.6 to -1.3 points",
)
WITHHELD = Row(
    "With the withheld factor the attack changes by -0.064 on Caltech.",
    "fedrand/withheld",
    '"Caltech alignment of FedRand client less that of FedAvg client: -0.064"',
    "not decided (5 seeds)",
    "-0.179 to +0.048",
)


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.link}-{row.claim[:30]}" for row in ROWS])
def test_a_row_says_what_its_result_has(row):
    assert problems(row) == []


def test_the_page_has_a_claim_in_every_list_item_and_is_short():
    text = PAGE.read_text()
    assert len(ROWS) == sum(line.startswith("- ") for line in text.splitlines()) > 40
    assert len(text.split()) <= 3000
    assert f"| seeds | {SEEDS}, where a claim names no other number |" in text


def test_each_section_has_one_picture_and_five_to_ten_claims():
    _, *sections = PAGE.read_text().split("\n## ")
    assert len(sections) == 6
    for section in sections:
        assert 5 <= len(CLAIM.findall(section)) <= 10, section.splitlines()[0]
        assert section.count("![") == 1, section.splitlines()[0]


def test_every_claim_that_is_shown_is_decided():
    assert [row.claim for row in ROWS if row.verdict.startswith("not decided")] == []


def test_no_claim_is_shown_whose_measurement_is_open_in_another_table():
    pairs = results.find_double_verdicts(results.read_results())
    assert len(pairs) == 4
    sentences = {(name, text) for pair in pairs for name, text in pair}
    for row in ROWS:
        quotes = [item.strip('"') for item in row.measured.split("; ") if item.startswith('"')]
        name = row.link.replace("/", "_")
        assert not any(name == of and quote in text for of, text in sentences for quote in quotes), row.claim


@pytest.mark.parametrize("cell", ["claim", "measured", "interval"])
def test_no_figure_can_be_changed_unseen(cell):
    """Every number of every row, its last digit moved by two, or by three where two gives another figure of the row."""
    unseen = []
    for row in ROWS:
        text = getattr(row, cell)
        bare = re.sub(r"`[^`]+`", lambda name: "_" * len(name[0]), text)
        for at in re.finditer(NUMBER, bare):
            digits = at[0].rstrip(",")
            if cell == "claim" and names_setting(text[: at.start()]):
                continue
            moved = [digits[:-1] + str((int(digits[-1]) + step) % 10) for step in (2, 3)]
            texts = [text[: at.start()] + number + text[at.start() + len(digits) :] for number in moved]
            if not any(problems(replace(row, **{cell: changed})) for changed in texts):
                unseen.append((row.link, at[0], text))
    assert unseen == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"link": "fedrand/table9"}, "no preset"),
        ({"link": "core/training"}, "no result"),
        ({"claim": "Shadow models find no member: AUROC 0.490, over 4 seeds."}, "the sentence has ['4']"),
        ({"verdict": "not decided (4 seeds)"}, "has 5 seeds"),
        ({"verdict": "holds (seen twice)"}, "expected one of"),
        ({"verdict": "holds (60 repeats)"}, "only timings"),
        ({"verdict": "likely (2 seeds)"}, "no verdict"),
        ({"claim": "The same (paper: 99.9)."}, "paper: 99.9"),
        ({"claim": "They find 0.491."}, "0.491 of the sentence stands in no result"),
        ({"link": "dp_fpl/table2"}, "no metric for"),
        ({"measured": "next to nothing"}, "cannot be read"),
    ],
)
def test_a_row_that_says_more_is_refused(changes, said):
    assert problems(SHADOW_MODELS) == []
    assert said in " ".join(problems(replace(SHADOW_MODELS, **changes)))


def test_without_the_value_of_each_seed_nothing_is_decided():
    assert problems(MOVED) == []
    assert "keeps" in " ".join(problems(replace(MOVED, verdict="holds (5 seeds)")))


def test_a_row_decides_no_more_than_the_sentence_it_quotes():
    assert problems(NEIGHBORS) == []
    for word in ("holds", "refuted"):
        messages = problems(replace(NEIGHBORS, verdict=f"{word} (5 seeds)"))
        assert f"{word} (5 seeds), its sentence: not decided" in messages


def test_the_withheld_factor_is_not_decided_before_five_seeds_of_two_data_sets():
    """README and page say so in these words as long as the result does."""
    assert problems(WITHHELD) == []
    assert problems(replace(WITHHELD, verdict="refuted (5 seeds)")) != []
    sentence = '"an attacker who knows the method loses nothing by the withheld factor" is not yet decided'
    for page in (PAGE, ROOT / "README.md"):
        assert sentence in " ".join(page.read_text().split()), page


def test_pictures_and_pages_that_the_page_names_are_there():
    links = re.findall(r"\]\((?!https://arxiv\.org/abs/)([^)]+)\)", PAGE.read_text())
    assert links
    headings = [line.lstrip("# ") for line in PAGE.read_text().splitlines() if line.startswith("#")]
    within = {f"#{heading.lower().replace(' ', '-')}" for heading in headings}
    pages = {
        "reference/results/index.md",
        "reference/results/papers.md",
        *(f"reference/results/{name}.md" for name in results.read_results()),
    }
    assert [x for x in links if x not in {*within, *pages} and not (PAGE.parent / x).is_file()] == []


def measured(result, settings) -> str:
    """The settings without the methods of which the result has no row: a preset may have grown since it ran."""
    rows = [row["name"] for row in result["rows"]]
    has = lambda label: any(name == label or name.startswith((f"{label} ", f"{label},")) for name in rows)  # noqa: E731
    if isinstance(methods := settings.get("methods"), dict):
        settings = settings | {"methods": {label: of for label, of in methods.items() if has(label)}}
    return json.dumps(settings)


def test_a_method_without_a_row_is_not_measured():
    settings = {"methods": {"FedProx": {"name": "fedprox"}, "FedPer": {"name": "fedper"}}}
    text = measured({"rows": [{"name": "FedPer server"}, {"name": "FedProximal server"}]}, settings)
    assert '"fedper"' in text
    assert '"fedprox"' not in text


def test_the_page_of_methods_says_whether_any_committed_result_has_them():
    """Its last column: a dash, or presets whose results are committed and which run the method. None need be listed."""
    said = re.findall(
        r"^\| [^|]+, `(\w+)` \| .* \| ([^|]+) \|$", (ROOT / "docs" / "methods.md").read_text(), re.MULTILINE
    )
    assert [name for name, _ in said if name not in strategies.list_methods()] == []
    committed = {name for name in runner.list_presets() if (RESULTS / f"{name.replace('/', '_')}.json").is_file()}
    ran = {
        name: measured(result_of(name), runner.read_preset(name, result_of(name)["form"])["settings"])
        for name in committed
    }
    for method, cell in said:
        having = {name for name in committed if f'"{method}"' in ran[name]}
        assert (cell == "-") == (not having), f"{method}: the page says {cell}, results are {sorted(having)}"
        for preset in re.findall(r"`(\w+/\w+)`", cell):
            assert preset in having, f"{method}: the page names {preset}"
