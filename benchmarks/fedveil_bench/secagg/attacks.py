"""Attack a secure run and the same run in the clear: what is hidden, what is not, and what remains (the sum).

Each row of the result is a view (`run_pair`) or the control to lose: another site's upload in the clear run for
membership, and the mean of other images for reconstruction. Figures are AUROC over examples (mean over sites and
seeds) and PSNR in dB over images; intervals are 95%, by bootstrap.

A figure is judged by how far it exceeds its control to lose (0.5, or the mean image, image by image):

| the difference's interval | verdict |
|---|---|
| lies entirely above 0 | won |
| does not, and contains no gain above the preset's margin | lost |
| any other | not decided |

The verdicts on all views of an attack are corrected together (`common.verdicts`). An attack counts only if its controls
hold: it must win by more than the margin in the clear, with every mask off, and for a lying server when the broadcast
is not in the plan; and it must not win on a wrong site.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from fedveil.attacks.reconstruction.image_metrics import contact_sheet
from fedveil_bench.common import data, resampling, seeds
from fedveil_bench.common import verdicts as common
from fedveil_bench.common.resampling import ResampledMetric
from fedveil_bench.common.verdicts import ClaimSentence, Must
from fedveil_bench.runner import BenchOptions, BenchOutcome
from fedveil_bench.secagg import on_pictures, on_texts
from fedveil_bench.secagg.paired_federations import HIDDEN, SEEN, UNHIDDEN

_PICTURES = 6  # names the random draws
Figures = dict[str, dict[str, ResampledMetric]]  # by attack, then row


def list_requirements(settings: Mapping[str, Any]) -> list[data.DataRequirement]:
    """Return the requirements: text that sites train on, and held-out images."""
    return [
        data.DataRequirement(settings["texts"]["data"], ("train",)),
        data.DataRequirement(settings["pictures"]["data"], ("test",)),
    ]


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Measure a row for each view and each control to lose."""
    count = options.seeds or settings["seeds"]
    settings["pictures"]["most_seeds"] = count
    answers = seeds.run_seeds(__name__, settings, options)
    figures: Figures = {}
    for row in answers[0]["texts"]:
        for attack in answers[0]["texts"][row]:
            of_seeds = [ResampledMetric.from_json(answer["texts"][row][attack]) for answer in answers]
            figures.setdefault(attack, {})[row] = resampling.over_seeds(of_seeds)
    for row in answers[0]["pictures"]:
        for attack in answers[0]["pictures"][row]:
            psnr = list(itertools.chain(*(answer["pictures"][row][attack] for answer in answers)))
            figures.setdefault(attack, {})[row] = resampling.resample_mean(psnr, _PICTURES)
    names = [*SEEN, on_texts.WRONG, on_pictures.MEAN]
    rows = [
        {
            "name": name,
            "metrics": {
                attack: resampling.compute_interval(of_rows[name])
                for attack, of_rows in figures.items()
                if name in of_rows
            },
        }
        for name in names
    ]
    done = f"this run: {count} seeds, {settings['texts']['sites']} sites of {settings['texts']['rows']} texts, "
    done += f"{settings['pictures']['sites']} sites of one picture"
    return BenchOutcome(rows, list_verdicts(figures, settings), [done], {"png": base64.b64decode(answers[0]["sheet"])})


def of_seed(settings: dict[str, Any], seed: int, options: BenchOptions) -> dict[str, Any]:
    """Return one seed's results for `run_benchmark`."""
    texts = on_texts.measure_alignment(settings["texts"], seed, options)
    for attack in texts["clear"]:
        options.say(f"seed {seed}: {attack} " + ", ".join(f"{row} {f[attack].value:.3f}" for row, f in texts.items()))
    pictures, shown = on_pictures.measure_psnr(settings["pictures"], seed, options)
    for attack in pictures["clear"]:
        told = (f"{row} {' '.join(f'{v:.0f}' for v in of_row[attack])}" for row, of_row in pictures.items())
        options.say(f"seed {seed}: {attack}, dB: " + ", ".join(told))
    images = [image for of_row in shown.values() for image in of_row]
    labels = [label if i == 0 else "" for label, of_row in shown.items() for i in range(len(of_row))]
    sheet = contact_sheet(images, labels, -1.0, 1.0, settings["pictures"]["sites"])
    return {
        "texts": {row: {attack: f.to_json() for attack, f in of_row.items()} for row, of_row in texts.items()},
        "pictures": pictures,
        "sheet": base64.b64encode(sheet).decode(),
    }


def judge_attack(mine: ResampledMetric, control: ResampledMetric, margin: float) -> ClaimSentence:
    """Judge a figure by its control to lose."""
    gain = resampling.subtract_metrics(mine, control)
    won = resampling.p_value(gain) if gain.value > 0 else 1.0
    if won <= common.ALPHA:
        return ClaimSentence("won", won, common.OPEN)
    return ClaimSentence("lost", resampling.p_value(gain, margin) if gain.value < margin else 1.0, common.OPEN)


def list_verdicts(figures: Figures, settings: Mapping[str, Any]) -> list[str]:
    """Return sentences about each attack: its controls, what the secure run hides from it, and what remains."""
    controls = {attack: _controls(of_rows, settings["margin"]) for attack, of_rows in figures.items()}
    held = iter(common.decide_words([said for of in controls.values() for said in of]))
    words = {attack: [next(held) for _ in of] for attack, of in controls.items()}
    return [s for attack, of in figures.items() for s in _verdicts(attack, of, settings["margin"], words[attack])]


def _lost(figures: Mapping[str, ResampledMetric], margins: Mapping[str, float]) -> tuple[ResampledMetric, float, str]:
    """Return an attack's figure for the control to lose, the margin above it, and the number format."""
    if on_pictures.MEAN in figures:
        return figures[on_pictures.MEAN], margins["psnr"], ".1f"
    return resampling.from_constant(common.CHANCE), margins["auroc"], ".3f"


def _controls(figures: Mapping[str, ResampledMetric], margins: Mapping[str, float]) -> list[ClaimSentence]:
    """Judge the controls to win and, for membership, the control to lose. The mean image is itself chance level."""
    lost, margin, _ = _lost(figures, margins)
    musts: dict[str, Must] = dict.fromkeys(UNHIDDEN, "won")
    musts[on_texts.WRONG] = "not won"
    return [common.judge_control(figures[v], must, margin, lost) for v, must in musts.items() if v in figures]


def _verdicts(
    attack: str, figures: Mapping[str, ResampledMetric], margins: Mapping[str, float], controls: Sequence[str]
) -> Sequence[str]:
    lost, margin, form = _lost(figures, margins)
    views = (*HIDDEN, "sum")
    found = dict(zip(views, common.decide_words([judge_attack(figures[v], lost, margin) for v in views]), strict=True))
    failed = common.NOT_HELD in controls
    stand = "they stand" if set(controls) == {common.HELD} else common.NOT_HELD if failed else common.OPEN
    shown = {
        name: resampling.format_interval(resampling.compute_interval(figure), form) for name, figure in figures.items()
    }
    psnr = on_pictures.MEAN in figures
    against = f"mean picture {shown[on_pictures.MEAN]} dB" if psnr else f"wrong site {shown[on_texts.WRONG]}"
    rest = "" if stand == "they stand" else ", the other figures of this attack say nothing"
    said = [
        f"{attack}, controls: clear {shown['clear']}, the secure run with every mask off {shown['every mask off']}, "
        f"a lying server without the rule against it {shown['lying server, undefended']}, {against}: {stand}{rest}."
    ]
    means = {"lost": "at its lost control", "won": "WON: something shows", common.OPEN: common.OPEN}
    said += [f"{attack}, secure run, {name}: {shown[name]}: {means[found[name]]}." for name in HIDDEN]
    stays = {"lost": "nothing is found in it", "won": "won: this stays", common.OPEN: common.OPEN}
    return [*said, f"{attack}, the sum: {shown['sum']}: {stays[found['sum']]}."]
