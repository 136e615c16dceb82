"""The record of one attempt at a round: a line of metrics.jsonl, and an entry of `MethodStrategy.history`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fedveil.records.process_exit import group_by_reason


@dataclass(frozen=True)
class RoundRecord:
    """One finished attempt at a round.

    Attributes:
        cohort: the sites drawn; with cohort.buffer-size, those asked in this step and those whose request ended in it.
        failed: reason by site, for every site in the cohort whose upload is not in the sums; with cohort.buffer-size,
            not for those that are still training.
        upload_bytes, download_bytes: sizes of whole messages, including refused uploads, because they were sent.
        unlisted: for each site, bytes and messages up and down that disclosure.jsonl does not list: refused
            uploads, and keys and shares for secure aggregation. Older versions wrote only the bytes.
        reports: the metrics that each accepted site reported, with its num_examples.
        cut: number of examples counted for a site that claimed more than cohort.max-weight-fraction allows.
        left_out: accepted sites whose uploads the rule did not select (aggregate.rule = "multi-krum").
        unsigned: accepted sites that did not sign their upload; only the SuperLink vouches for these senders.
        unseen: for secure aggregation: the sites in the sum, the share holders and the threshold, the holders that
            revealed no shares and why, and the reason if there is no sum; {} if uploads are not masked.
        staleness: with cohort.buffer-size, the number of server steps between the state that each accepted site trained
            from and the one that its upload was added to; {} otherwise.
        weights: digest of the model weights after the round.
    """

    round: int
    attempt: int
    cohort: list[str]
    accepted: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    upload_bytes: int = 0
    download_bytes: int = 0
    unlisted: dict[str, list[int]] = field(default_factory=dict)
    reports: dict[str, dict[str, float]] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    unsigned: list[str] = field(default_factory=list)
    unseen: dict[str, Any] = field(default_factory=dict)
    staleness: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    weights: str = ""
    scores: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def reasons(self) -> str:
        """Return the reasons for missing uploads as text."""
        reasons = group_by_reason(self.failed)
        reasons += [f"no sum: {self.unseen['reason']}"] if "reason" in self.unseen else []
        return "; ".join(reasons) or f"accepted: {', '.join(self.accepted) or 'none'}"
