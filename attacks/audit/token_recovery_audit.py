"""Audit `token_recovery`: compare tokens recovered from single training steps with the sites' own examples.

The attack reads one step of plain SGD on a LoRA pair after the embeddings. A run contains such steps if a
site trains one step of `dp.*` without noise, or if it sends the gradient of one batch. For all other runs
the audit reports why it skips the attack (`explain_misfit`).

| case | example |
|---|---|
| a site | the auditor's example from that site whose tokens the uploads reveal most |
| the control to lose | the same, among equally many examples that no site has; first tokens may coincide |
| the control to win | an example that no site has, on which the auditor takes one step from the same start |

The auditor's examples are a sample. If it contains few of a site's examples, an upload may reveal an example
outside the sample.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from fedveil.attacks.base import AdversaryKnowledge, AdversaryView
from fedveil.attacks.membership.client_updates import ObservedClientUpdate, ObservedClientUpdates
from fedveil.attacks.membership.per_example_gradients import row_gradient
from fedveil.attacks.reconstruction import token_recovery
from fedveil.attacks.samples import AuditSample
from fedveil.config import RunConfig
from fedveil.contract.task import Task
from fedveil.tasks.text_generation import TextGeneration
from fedveil.training.adapter_task import AdaptedTask

POSITIONS = 12  # tokens recovered per example; fewer if examples are shorter
_SITES, _A_SITE = 4, 4  # maximum number of sites, and of last uploads per site, to try
_WHOLE = 0.9  # minimum fraction of its tokens for an example to count as recovered


def explain_misfit(view: AdversaryView, task: Task, config: RunConfig) -> str:
    """Return why tokens cannot be recovered from a run, as text to follow a colon; "" if the attack applies."""
    method, dp = view.exchange.method, config.dp
    if not isinstance(task, TextGeneration):
        return "the sites' examples are not text"
    if view.is_unseen:
        return "the server saw only sums of the uploads"
    if method.upload_kind == "changes":
        return "it reads LoRA factors or their gradients, but the sites of this run send changes to a proxy"
    if config.train.precision != "fp32":
        return f"it needs single precision, but the sites of this run train in {config.train.precision}"
    if method.upload_kind == "gradients":
        whole = getattr(method, "exchange", "batch") == "batch"
        return "" if whole else "it reads one step, but the sites of this run send the result of many steps"
    if not dp.clip_norm:
        return (
            "it reads one step of plain SGD, but the sites of this run train with AdamW, whose step spans another space"
        )
    if dp.noise_multiplier or config.secure.noise == "sum":
        return "the sites of this run add noise to every step, which hides the span"
    if config.train.max_steps != 1:
        asked = config.train.max_steps or "as many as their epochs have"
        return f"it reads one step, but the sites of this run take {asked} per participation (train.max-steps)"
    return ""


def describe_recovery(
    view: AdversaryView,
    knowledge: AdversaryKnowledge,
    members: Mapping[str, AuditSample],
    non_members: AuditSample,
    is_over: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Return sentences about the tokens recovered from a run. Once `is_over` is true, no further upload is tried.

    Args:
        view: the server's view.
        members, non_members: the auditor's examples.
    """
    task = knowledge.task
    assert isinstance(task, AdaptedTask)
    layer = token_recovery.first_layer(task, knowledge.initial)
    if layer is None:
        return [_left_out("no layer with a LoRA pair reads only the embeddings")]
    turns, name = ObservedClientUpdates(view, knowledge.initial), f"{layer}.lora_A"
    b = f"{layer}.lora_B"
    everyone = [*non_members.rows, *(row for site in members for row in members[site].rows)]
    positions = min(POSITIONS, *(len(row.ids) for row in everyone))
    places = [token_recovery.token_inputs(task, knowledge.initial, layer, position) for position in range(positions)]
    mine, others, control, uploads = list[float](), list[float](), list[float](), 0
    for site in [site for site in members if site in turns.sites][:_SITES]:
        rows = [list(row.ids) for row in members[site].rows]
        beside = [list(row.ids) for row in non_members.rows[: len(rows)]]
        for index in range(len(turns.rounds(site)))[-_A_SITE:]:
            turn = turns.at(site, index)
            if name not in turn.moved or not turn.start[b].any() or is_over():
                continue
            tokens, uploads = token_recovery.read_tokens(turn.moved[name], places), uploads + 1
            mine.append(max(token_recovery.recovered_share(tokens, row) for row in rows))
            others.append(max(token_recovery.recovered_share(tokens, row) for row in beside))
            control.append(_one_step(task, turn, name, places, non_members.rows[index % len(non_members.rows)]))
    if not uploads:
        reason = "there was not enough time" if is_over() else "no upload has an A whose B was seen and is not 0"
        return [_left_out(reason)]
    return _words(mine, others, control, positions, len(knowledge.initial[name]))


def _one_step(task: AdaptedTask, turn: ObservedClientUpdate, name: str, places: Sequence[object], row: object) -> float:
    """Return the fraction of an example's tokens revealed by its own gradient at the start of the client round."""
    task.put(turn.start)
    moved = row_gradient(task, row)[name]
    return token_recovery.recovered_share(token_recovery.read_tokens(moved, places), list(row.ids))  # type: ignore[arg-type, attr-defined]


def _words(
    mine: Sequence[float], others: Sequence[float], control: Sequence[float], positions: int, rank: int
) -> list[str]:
    whole, beside = (sum(share >= _WHOLE for share in shares) for shares in (mine, others))
    sentence = (
        f"Tokens recovered from the span of one step, the first {positions} of an example: {whole} of {len(mine)} "
        f"uploads spell out an example of their site (to {100 * _WHOLE:.0f} % or more; mean of the nearest example "
        f"{statistics.fmean(mine):.2f}), and {beside} one that no site trained on ({statistics.fmean(others):.2f}, "
        f"the control to lose). One step on one example gives {statistics.fmean(control):.2f} (the control to win)."
    )
    if statistics.fmean(control) < _WHOLE:
        sentence += (
            " NOT usable here: it does not win on one example. An example has as many distinct tokens as the rank "
            f"({rank}) or more, or B still has too few directions."
        )
    elif not whole:
        sentence += (
            f" This does NOT show that texts are safe: batches with fewer distinct tokens than the rank ({rank}) can "
            "be read."
        )
    return [sentence]


def _left_out(reason: str) -> str:
    return f"Left out: tokens from the span of one step: {reason}."


def audit_notes(
    view: AdversaryView,
    knowledge: AdversaryKnowledge,
    config: RunConfig,
    members: Mapping[str, AuditSample],
    non_members: AuditSample,
    is_over: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Return the audit's notes: those of `describe_recovery`, or the reason why the attack was skipped."""
    reason = explain_misfit(view, knowledge.task, config) or ("there was not enough time" if is_over() else "")
    return [_left_out(reason)] if reason else describe_recovery(view, knowledge, members, non_members, is_over)
