"""Gaps between a server's model and its proxies, compared with the gaps of a control that hides nothing.

A method in a preset names its `control`: a method in the same preset that trains the same weights and hides nothing.
The control's gaps are not 0: a client's own training moves its model away from the mean of all clients, and a received
model is one round older than the server's. The control's gap is therefore subtracted, paired by test row and seed.

| row of a result | verdict on its loss |
|---|---|
| <method> gap less control, <method> tuned gap less control | "a gap" above 0, "no gap can be told" around it |
| the control's own gaps | the value, without a verdict |
| gaps of a method without a control | the value, without a verdict |
| <method> tuned | whether the tuned model is better than the public base trained by one client alone |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedveil.errors import ConfigError
from fedveil_bench.common import resampling, verdicts
from fedveil_bench.common.resampling import ResampledMetric
from fedveil_bench.common.verdicts import ClaimSentence

LESS = " less control"
Rows = Mapping[str, Mapping[str, ResampledMetric]]


def controls_of(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return each method's control, if any. Raises ConfigError unless the control is another method in the preset."""
    others = [label for label, chosen in methods.items() if "control" not in chosen]
    found = {label: chosen["control"] for label, chosen in methods.items() if "control" in chosen}
    for label, control in found.items():
        if control not in others:
            raise ConfigError(
                f"methods.{label}.control: expected one of {others}, found {control!r}; name one that hides nothing"
            )
    return found


def less_controls(rows: Rows, controls: Mapping[str, str]) -> dict[str, dict[str, ResampledMetric]]:
    """Return each method's gaps minus its control's, paired by test row and seed."""
    pairs = {
        f"{label} {kind}{LESS}": (rows[f"{label} {kind}"], rows[f"{control} {kind}"])
        for label, control in controls.items()
        for kind in ("gap", "tuned gap")
    }
    return {
        name: {metric: resampling.subtract_metrics(mine[metric], nothing[metric]) for metric in mine}
        for name, (mine, nothing) in pairs.items()
    }


def judge_gaps(rows: Rows, controls: Mapping[str, str], seeds_: int) -> list[str]:
    """Return sentences about gaps, compared with their controls, and about tuned proxies versus the fine-tuned base."""
    plain, found = [], list[tuple[str, ClaimSentence]]()
    for name, figures in rows.items():
        if "loss" not in figures:
            continue
        text = f"{name}, loss: {resampling.format_interval(resampling.compute_interval(figures['loss']), '+.3f')}"
        if name.endswith(LESS):
            words = ("less than where nothing is hidden", "a gap", "no gap can be told")
            found.append((text, verdicts.judge_sign(figures["loss"], *words)))
        elif name.endswith(" gap") and f"{name}{LESS}" not in rows:
            is_control = name.removesuffix(" gap").removesuffix(" tuned") in controls.values()
            why = "the control: nothing is hidden" if is_control else "not judged, because it has no control"
            plain.append(f"{text}; {why}.")
        elif name.endswith(" tuned"):
            d = resampling.subtract_metrics(rows["public base, fine-tuned"]["loss"], figures["loss"])
            shown = resampling.format_interval(resampling.compute_interval(d), "+.3f")
            text = f"{name} against the public base fine-tuned alone, loss: {shown} lower"
            found.append((text, verdicts.judge_sign(d, "worse", "better")))
    return [*plain, *verdicts.list_verdicts(found, seeds_)]
