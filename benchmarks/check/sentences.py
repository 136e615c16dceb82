"""Check the sentences of a result file: their figures, their intervals, and their verdicts after correction.

A sentence belongs to a table of sentences, whose last one is "... corrected for N comparisons" or "... N controls". A
function below reads each kind of sentence. A sentence that no function can read is listed as not checked, unless it has
no figures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.check import claims, costs, orders, reference
from benchmarks.check.claims import Verdict
from benchmarks.check.figure import Difference, Figure, subtract
from benchmarks.check.report import FileCheck

Rows = Mapping[str, Mapping[str, Figure]]
NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
INTERVAL = rf"({NUMBER}) \[({NUMBER}), ({NUMBER})\]"
_CORRECTED = re.compile(r"(?:corrected for|comparisons:) (\d+) (comparisons|controls)")
# These are checked with the pieces next to the file, or have nothing to compare, because each order is a separate
# family.
_ELSEWHERE = r"points ended as the undisturbed|^By commit: |^Trainings: |corrected for all pairs of an order"
_SIDES = {"Local accuracy": "local", "Neighbour accuracy": "neighbour"}
CHANCE = 0.5


@dataclass
class Table:
    """The state while reading a file: its rows, the comparisons so far, and the incomplete families of verdicts."""

    check: FileCheck
    result: Mapping[str, Any]
    rows: Rows
    families: dict[str, list[Verdict]] = field(default_factory=lambda: {"comparisons": [], "controls": []})

    def compare_number(self, text: str, printed: str, value: float) -> None:
        """Compare a printed number with a value, up to its rounding."""
        is_equal = abs(read_number(printed) - value) <= rounding_of(printed) * (1 + 1e-6) + 1e-9 * abs(value)
        self.check.compare(f"{text} (computed: {value:.6g})", is_equal)

    def compare_difference(self, text: str, printed: Sequence[str], d: Difference) -> Difference:
        """Compare a printed difference with its interval; return it with the rows' part implied by the interval."""
        self.compare_number(text, printed[0], d.value)
        low, high = map(read_number, printed[1:])
        rounding = max(map(rounding_of, printed)) * (1 + 1e-6) + 1e-9 * abs(d.value)
        for printed_end, (least, most) in zip((low, high), d.interval(), strict=True):
            said = f"{text} (computed: an end from {least:.6g} to {most:.6g})"
            is_within = least - rounding <= printed_end <= most + rounding
            (self.check.compare if d.is_known() else self.check.bound)(said, is_within)
        return d if d.is_known() else d.narrow(low, high, rounding)

    def add(self, verdict: Verdict, family: str = "comparisons") -> None:
        """Add a verdict to its family; the words are compared once the family is complete."""
        self.families[family].append(verdict)

    def close(self, family: str, count: int | None = None) -> None:
        """Compare the words of a family, which has `count` verdicts according to the file."""
        verdicts = self.families[family]
        if count is not None:
            self.check.compare(f"{len(verdicts)} verdicts are read, the file counts {count}", len(verdicts) == count)
        for verdict, words in zip(verdicts, claims.find_possible_words(verdicts), strict=True):
            if verdict.printed:  # a comparison that the file counts but does not print has no verdict
                said = f"{verdict.text}: the verdict is {' or '.join(sorted(words))}, the file has {verdict.printed}"
                self.check.verdicts += 1
                (self.check.compare if len(words) == 1 else self.check.bound)(said, verdict.printed in words)
        verdicts.clear()


def read_number(text: str) -> float:
    """Return a printed number."""
    return float(text.replace(",", ""))


def rounding_of(text: str) -> float:
    """Return half a unit in the last digit of a printed number."""
    digits, _, exponent = text.replace(",", "").partition("e")
    return float(0.5 * 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2])))


def check_sentences(check: FileCheck, result: Mapping[str, Any], rows: Rows) -> None:
    """Compare every sentence of the file with its rows."""
    table = Table(check, result, rows)
    unread = []
    for sentence in result["verdicts"]:
        if match := _CORRECTED.search(sentence):
            table.close(match[2], int(match[1]))
        elif re.search(_ELSEWHERE, sentence):
            continue
        elif not any(read(table, sentence) for read in _READERS) and re.search(r"\d", sentence):
            unread.append(sentence)
    for family, left in table.families.items():
        if left:
            table.close(family)
    if unread:
        check.unchecked.append(f"{len(unread)} sentences of other kinds, such as: {unread[0][:90]}")


def _read_claim(table: Table, sentence: str) -> bool:
    """Read "METRIC of ROW less that of ROW: D [L, H]; the claim has it IS (within M): VERDICT."."""
    pattern = (
        rf"(.+) less (?:that of (.+)|({NUMBER})): {INTERVAL}(?: points)?(?:, seeds: \d+)?"
        r"(?:; (?:the claim has|the paper has|a control, which must have) it ([a-z ]+?)(?: \(within ([\d.]+)\))?)?"
        r": ([^:]+)\."
    )
    if not (match := re.fullmatch(pattern, sentence)):
        return False
    head, other, constant, *printed, claim, margin, word = match.groups()
    if (found := _find_figures(table.rows, head, other)) is None:
        return False
    mine, theirs = found
    d = subtract(mine, float(constant) if theirs is None else theirs)
    d = table.compare_difference(sentence, printed, d)
    if claim:
        verdict, p_values = claims.judge_claim(d, claim, float(margin or 0))
        table.add(Verdict(sentence, word, verdict, claims.OPEN, p_values))
    else:
        verdict, p_values = claims.judge_side(d, "lower", "higher")
        table.add(Verdict(sentence, word, verdict, "not told apart", p_values))
    return True


def _find_figures(rows: Rows, head: str, other: str | None) -> tuple[Figure, Figure | None] | None:
    """Return the figures of "METRIC of ROW" and of the other row, trying every way to split the names."""
    for at in re.finditer(" of ", head):
        metric, row = head[: at.start()], head[at.end() :]
        metric = _SIDES.get(metric, metric)
        if metric == "Accuracy":  # of "BASE, METHOD", less that of another METHOD
            metric, base = "accuracy", row.partition(", ")[0]
            other = f"{base}, {other}"
        mine = rows.get(row, {}).get(metric)
        theirs = rows.get(other, {}).get(metric) if other else None
        if mine and (theirs or not other):
            return mine, theirs
    return None


def _read_ratio(table: Table, sentence: str) -> bool:
    """Read "ROW: METRIC is R of ROW's (95 % interval L to H, N seeds)." and "ROW: uploads are R of ROW's bytes."."""
    if match := re.fullmatch(rf"(.+): uploads are ({NUMBER}) of (.+)'s bytes\.", sentence):
        sent = {row["name"]: row.get("upload_bytes") for row in table.result["rows"]}
        table.compare_number(sentence, match[2], sent[match[1]] / sent[match[3]])
        return True
    pattern = rf"(.+): (\w+) is ({NUMBER}) of (.+)'s \(95 % interval ({NUMBER}) to ({NUMBER}), (\d+) seeds\)\."
    if not (match := re.fullmatch(pattern, sentence)):
        return False
    row, metric, ratio, other, low, high, count = match.groups()
    mine, theirs = (table.rows[name][metric].seeds for name in (row, other))
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    mean, half = reference.compute_mean(ratios), reference.compute_half_width(ratios)
    for printed, value in ((ratio, mean), (low, mean - half), (high, mean + half)):
        table.compare_number(sentence, printed, value)
    table.check.compare(f"{sentence} has {len(ratios)} seeds", int(count) == len(ratios))
    return True


def _read_gap(table: Table, sentence: str) -> bool:
    """Read FedQSN's gaps: "ROW, loss: D [L, H]: VERDICT." and the like."""
    pattern = rf"(.+), loss: {INTERVAL}( lower)?(?:: ([^:;]+)|; (?:the control|not judged).*)\."
    if not (match := re.fullmatch(pattern, sentence)):
        return False
    name, *printed, lower, word = match.groups()
    if lower:
        row = name.removesuffix(" against the public base fine-tuned alone")
        base = table.rows["public base, fine-tuned"]["loss"]
        d = table.compare_difference(sentence, printed, subtract(base, table.rows[row]["loss"]))
        verdict, p_values = claims.judge_side(d, "worse", "better")
        table.add(Verdict(sentence, word, verdict, "not told apart", p_values))
        return True
    if not (figure := table.rows.get(name, {}).get("loss")):
        return False
    d = table.compare_difference(sentence, printed, subtract(figure, 0.0))
    if word:
        verdict, p_values = claims.judge_side(d, "less than where nothing is hidden", "a gap")
        table.add(Verdict(sentence, word, verdict, "no gap can be told", p_values))
    return True


def _read_adaptive(table: Table, sentence: str) -> bool:
    """Read "ROW: loss D [L, H] beside the server's model: VERDICT."."""
    if not (match := re.fullmatch(rf"(.+): loss {INTERVAL} (?:beside|compared with) (.+): (.+)\.", sentence)):
        return False
    name, *printed, what, word = match.groups()
    server = f"{name.partition(', ')[0]}, server"
    other = server if what == "the server's model" else "public base, fine-tuned"
    d = subtract(table.rows[name]["loss"], table.rows[other]["loss"])
    d = table.compare_difference(sentence, printed, d)
    verdict, p_values = claims.judge_side(d, "better", "worse")
    table.add(Verdict(sentence, word, verdict, "not told apart", p_values))
    return True


def _read_noise_table(table: Table, sentence: str) -> bool:
    """Read the tables that compare noise at the sites with noise in the sum, each row with all its controls."""
    if match := re.fullmatch(r"(\d+ sites): noise is not compared, .*", sentence):
        # The file counts this comparison without printing it; only the seeds' part of its interval is known.
        metric = "right" if "right" in table.rows[f"{match[1]}, at the site"] else "loss"
        site, sums = (table.rows[f"{match[1]}, {where}"][metric] for where in ("at the site", "in the sum"))
        d = subtract(sums, site)
        table.add(Verdict(sentence, "", "told apart", "not told apart", d.p_values()))
        return True
    if match := re.fullmatch(rf"(\d+ sites), at the site less in the sum, loss: {INTERVAL}: (.+)\.", sentence):
        count, *printed, word = match.groups()
        site, sums = (table.rows[f"{count}, {where}"]["loss"] for where in ("at the site", "in the sum"))
        d = table.compare_difference(sentence, printed, subtract(site, sums))
        verdict, p_values = claims.judge_side(d, "the site is better", "the sum is better")
        table.add(Verdict(sentence, word, verdict, "not told apart", p_values))
        return True
    if not (match := re.fullmatch(r"(\d+ sites, [\w ]+): (.+ \[.+\]): ([^:]+)\.", sentence)):
        return False
    row, parts, word = match.groups()
    differences = []
    for part in parts.split("; "):
        if ahead := re.fullmatch(rf"less (.+): {INTERVAL}", part):
            d = subtract(table.rows[row]["right"], table.rows[ahead[1]]["right"])
        elif ahead := re.fullmatch(rf"(.+) less it: {INTERVAL}", part):
            d = subtract(table.rows[ahead[1]]["loss"], table.rows[row]["loss"])
        else:
            return False
        differences.append(table.compare_difference(f"{row}: {part}", ahead.groups()[1:], d))
    won = "above all of them" if "right" in table.rows[row] else "below all of them"
    table.add(Verdict(sentence, word, won, "not told from all", claims.judge_all(differences)))
    return True


def _read_peer(table: Table, sentence: str) -> bool:
    """Read "METRIC: ROW V, ROW V, the difference D [L, H]: ROW is ahead."."""
    pattern = rf"(.+): (.+) ({NUMBER}), (.+) ({NUMBER}), the difference {INTERVAL}: (.+)\."
    if not (match := re.fullmatch(pattern, sentence)):
        return False
    metric, row, value, other, others, *printed, word = match.groups()
    mine, theirs = table.rows[row][metric], table.rows[other][metric]
    table.compare_number(sentence, value, mine.mean)
    table.compare_number(sentence, others, theirs.mean)
    d = table.compare_difference(sentence, printed, subtract(mine, theirs))
    verdict, p_values = claims.judge_side(d, "FedVeil is ahead", f"{other} is ahead")
    table.add(Verdict(sentence, word, verdict, "not told apart", p_values))
    return True


def _read_reconstruction(table: Table, sentence: str) -> bool:
    """Read "CASE: read on K of N seeds, ..." and "CASE: PSNR V [L, H] dB, expected ...: VERDICT."."""
    pattern = rf"(.+): read on (\d+) of (\d+) seeds, in a share of {INTERVAL}, expected (\w+) than ({NUMBER}): (.+)\."
    if match := re.fullmatch(pattern, sentence):
        name, count, trials, *printed, side, share, word = match.groups()
        found = table.rows[name]["read"].seeds
        successes = round(sum(found))
        said = f"{sentence} (computed: {successes} of {len(found)})"
        table.check.compare(said, (successes, len(found)) == (int(count), int(trials)))
        expected = (successes / len(found), *reference.compute_share_interval(successes, len(found)))
        for text, value in zip(printed, expected, strict=True):
            table.compare_number(sentence, text, value)
        is_above = successes > len(found) * float(share)
        verdict = claims.HOLDS if is_above == (side == "higher") else claims.FAILS
        p = reference.compute_share_p_value(successes, len(found), float(share))
        table.add(Verdict(sentence, word, verdict, claims.OPEN, (p, p)))
        return True
    if not (match := re.fullmatch(rf"(.+): PSNR {INTERVAL} dB, expected (.+): (.+)\.", sentence)):
        return False
    name, *printed, expected_, word = match.groups()
    mine = table.rows[name]["psnr"]
    table.compare_difference(sentence, printed, subtract(mine, 0.0))
    if above := re.fullmatch(rf"above ({NUMBER}) dB", expected_):
        verdict, p_values = claims.judge_claim(subtract(mine, float(above[1])), "higher", 0.0)
    else:
        guesses = [row for row in table.rows if row.startswith("mean image, ")]
        of_model = [row for row in guesses if name.startswith(row.removeprefix("mean image, "))] or guesses[:1]
        guess = table.rows[max(of_model, key=len)]["psnr"]
        verdict, p_values = claims.judge_claim(subtract(mine, guess), "lower", 0.0)
    table.add(Verdict(sentence, word, verdict, claims.OPEN, p_values))
    return True


def _read_control(table: Table, sentence: str) -> bool:
    """Read "Control ROW, METRIC: V [L, H], expected ...: held." and "ROW, METRIC: V [L, H]; a control, ...: held."."""
    pattern = rf"(?:Control )?(.+): {INTERVAL}(?:;|, expected|: )(?: a control, expected)? ?(.+?)(?:: (.+))?\."
    if not (match := re.fullmatch(pattern, sentence)):
        return False
    name, *printed, expected, word = match.groups()
    figure = next((of[m] for row, of in table.rows.items() for m in of if f"{row}, {m}" == name), None)
    if figure is None:
        return False
    d = subtract(figure, 0.0)
    if re.match(r"(not told from|above|below) 0\.5$", expected) and word is None:
        table.compare_difference(sentence, printed, d)
        verdict, p_values = claims.judge_side(subtract(figure, CHANCE), "below 0.5", "above 0.5")
        table.add(Verdict(sentence, expected, verdict, "not told from 0.5", p_values))
        return True
    won = re.fullmatch(rf"above ({NUMBER})", expected)
    is_over_seeds = won or expected == "wholly above 0.5"
    of_rows = d if is_over_seeds else Difference(d.value, (), d.below, d.above)
    table.compare_difference(sentence, printed, of_rows)
    low, high = map(read_number, printed[1:])
    if won:
        verdict, p_values = claims.judge_claim(subtract(figure, float(won[1])), "higher", 0.0)
    elif span := re.fullmatch(rf"within ({NUMBER}) to ({NUMBER})", expected):
        gain = Difference(of_rows.value - CHANCE, (), of_rows.below, of_rows.above)
        verdict, p_values = claims.judge_claim(gain, "equal", CHANCE - float(span[1]))
    elif most := re.fullmatch(rf"below ({NUMBER})", expected):
        gain = Difference(of_rows.value - CHANCE, (), of_rows.below, of_rows.above)
        verdict, p_values = claims.judge_claim(gain, "not higher", float(most[1]) - CHANCE)
    else:  # in results from before controls were corrected, the word follows from the interval
        is_held = {
            "0.5 inside": low <= CHANCE <= high,
            "not wholly above 0.5": low <= CHANCE,
            "wholly above 0.5": low > CHANCE,
        }.get(expected)
        if is_held is None:
            return False
        table.check.compare(sentence, word == ("held" if is_held else "NOT HELD"))
        return True
    verdict = "held" if verdict == claims.HOLDS else "NOT HELD"
    table.add(Verdict(sentence, word, verdict, claims.OPEN, p_values), "controls")
    return True


def _read_errors(table: Table, sentence: str) -> bool:
    """Read "Reconstruction error: ROW is smaller than ROW (difference D [L, H])."."""
    words = "is smaller than|is larger than|is not told from"
    pattern = rf"Reconstruction error: (.+?) ({words}) (.+) \(difference {INTERVAL}\)\."
    if not (match := re.fullmatch(pattern, sentence)):
        return False
    mine, word, other, *printed = match.groups()
    metric = "reconstruction error"
    d = subtract(table.rows[f"{mine} client"][metric], table.rows[f"{other} client"][metric])
    d = table.compare_difference(sentence, printed, d)
    verdict, p_values = claims.judge_side(d, "is smaller than", "is larger than")
    table.families.setdefault("errors", []).append(Verdict(sentence, word, verdict, "is not told from", p_values))
    return True


def _read_contradiction(table: Table, sentence: str) -> bool:
    """Read "ROW: epsilon at most E; shown E at most: not contradicted."."""
    pattern = rf"(.+): epsilon at most ({NUMBER}); shown ({NUMBER}) at most: (.+)\."
    if not (match := re.fullmatch(pattern, sentence)):
        return False
    figures = table.rows[match[1]]
    table.compare_number(sentence, match[2], figures["at most"].seeds[0])
    table.compare_number(sentence, match[3], max(figures["shown"].seeds))
    pairs = zip(figures["shown"].seeds, figures["at most"].seeds, strict=True)
    is_over = any(shown > most for shown, most in pairs)
    table.check.compare(sentence, is_over == match[4].startswith("CONTRADICTED"))
    return True


def _read_cost(table: Table, sentence: str) -> bool:
    """Read "Uploads to a loss of V, of ROW less those of ROW: D [L, H] MB, R of them: VERDICT."."""
    pattern = (
        rf"(Uploads|Uploads and downloads) to a (.+) of {NUMBER}, of (.+) less those of (.+): {INTERVAL} MB, "
        rf"({NUMBER}) of them: (.+)\."
    )
    if not (match := re.fullmatch(pattern, sentence)):
        return False
    what, metric, row, target, *printed, ratio, word = match.groups()
    curves = {each["name"]: each["curve"] for each in table.result["rows"] if "curve" in each}
    mine, theirs = (costs.compute_costs(curves[name], curves[target], metric, what) for name in (row, target))
    differences = tuple(a - b for a, b in zip(mine, theirs, strict=True))
    d = Difference(reference.compute_mean(differences), differences, (0.0, 0.0), (0.0, 0.0))
    table.compare_difference(sentence, printed, d)
    table.compare_number(sentence, ratio, reference.compute_mean(mine) / reference.compute_mean(theirs))
    verdict, p_values = claims.judge_side(d, "lower", "higher")
    table.add(Verdict(sentence, word, verdict, "not told apart", p_values))
    return True


def _read_quoted(table: Table, sentence: str) -> bool:
    """Read any other sentence that quotes figures of the rows with their intervals."""
    figures = [figure for of_row in table.rows.values() for figure in of_row.values()]
    if not (quoted := re.findall(INTERVAL, sentence)) or re.search(r" grows: | ~ N\^|^Bytes to ", sentence):
        return False  # these intervals are for slopes and bytes, which no row contains
    for printed in quoted:
        stands = any(
            all(
                abs(read_number(text) - value) <= rounding_of(text) * (1 + 1e-6)
                for text, value in zip(printed, (figure.mean, figure.low, figure.high), strict=True)
            )
            for figure in figures
        )
        table.check.bound(f"{sentence}: {printed} stands in no row", stands)
    return True


def _read_order(table: Table, sentence: str) -> bool:
    return orders.check_order(table.check, table.rows, sentence)


_READERS: tuple[Callable[[Table, str], bool], ...] = (
    _read_order, _read_claim, _read_ratio, _read_adaptive, _read_noise_table, _read_gap, _read_peer,
    _read_reconstruction, _read_errors, _read_contradiction, _read_cost, _read_control, _read_quoted,
)  # fmt: skip
