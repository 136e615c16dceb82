"""Decide how a run ends: its final model and card, and the reasons for an early stop or a failure."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from fedveil.contract.method import FederatedState
from fedveil.errors import ConfigError, FedVeilError
from fedveil.records import process_exit
from fedveil.server_app import checkpoints, validation_split
from fedveil.server_app.evaluation import BestEvaluation, ModelSelection, Scores, SiteScores

if TYPE_CHECKING:
    from fedveil.config import RunConfig
    from fedveil.contract.method import Method
    from fedveil.server_app.run_folder import RunFolder


log = logging.getLogger("fedveil.server")


@final
class BestRoundTracker:
    """The rounds of a run that counted, and the best of them.

    Attributes:
        done: the last round that counted; -1 before the first.
        best: the best round so far, by `choice`.
        told: true if the caller of `MethodStrategy.start` requested a stop after the last round.
        final: scores of the run's final model, if no round's line in metrics.jsonl contains all of them.
    """

    def __init__(self, choice: ModelSelection | None, folder: Path | None) -> None:
        """Set up the tracker. `folder` is the run folder; without it, ending with the best round's model is refused.

        Raises:
            ConfigError: the choice needs a folder.
        """
        if choice and choice.keep and folder is None:
            raise ConfigError(
                'evaluate.select-model: "best" needs a run folder, and this run has none; give it one, or set "last"'
            )
        self._choice, self._folder = choice, folder
        self.done, self.best, self.told = -1, BestEvaluation(), False
        self.final: Scores = {}
        self._kept: int | None = None

    def resume(self, loop: Mapping[str, Any]) -> None:
        """Continue from the result of `saved` in a checkpoint. Raises StateError if the best round's model is lost."""
        self.done = int(loop["round"])
        if self._choice:
            self.best = BestEvaluation.read(loop.get("best") or {})
            self.keep()

    def saved(self) -> dict[str, Any]:
        """Return the values for a checkpoint."""
        return {"best": self.best.saved()} if self._choice else {}

    def scored(self, round_: int, scores: Scores) -> None:
        """Count a round with these scores, {} if it was not scored."""
        self.done = round_
        if self._choice and not self._choice.by_sites:
            self.best = self.best.after(self._choice, round_, scores)

    def scored_by_sites(self, reports: Mapping[str, Mapping[str, float]]) -> None:
        """Count the sites' scores in a round's reports, which are of the model after the previous round that counted.

        Call it before `scored` and before the round's checkpoint, because that model's checkpoint may be preserved.
        The model before round 0 is not a candidate. Raises like `keep`.
        """
        if self._choice is None or not self._choice.by_sites or self.done < 0:
            return
        self.best, note = self.best.after_sites(self._choice, self.done, SiteScores.from_reports(reports))
        if note:
            log.warning("%s: round %d: %s", validation_split.KEY, self.done + 1, note)
        self.keep()

    def keep(self) -> None:
        """Preserve the best round's checkpoint: the last one, or one preserved earlier. Raises like `keep_best`."""
        if self._folder and self._choice and self._choice.keep:
            checkpoints.keep_best(self._folder, self.best.round, self.done)

    def replaced(self) -> FederatedState | None:
        """Return the run's final state if it is not the last round's state. Raises StateError."""
        self._kept, best = self.done, self.best.round
        if self._choice and self._choice.keep and best is None:
            log.warning(
                'evaluate.select-model = "best": no round has a score that can decide, so final/ holds the last '
                "round's model"
            )
        if self._folder is None or self._choice is None or not self._choice.keep or best in (None, self.done):
            return None
        self._kept = best
        return checkpoints.best_state(self._folder, best)

    def is_unscored(self, rounds: int) -> bool:
        """Return whether the selected model still lacks the scores that a last round gets, such as those of generated
        text."""
        return self._choice is not None and self._kept != rounds - 1

    def stopped(self, rounds: int) -> str:
        """Explain why no further round follows; "" if one follows, or all are done."""
        if self.done >= rounds - 1:
            return ""
        if self.told:
            return (
                f"stopped early, after round {self.done + 1}: should_stop, which was passed to start(), returned true"
            )
        return self.best.stopped(self._choice, self.done) if self._choice else ""

    def scores(self, attempts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return the scores of the run's final server model: each metric's last value up to the model's round."""
        last_scores: dict[str, float] = {}
        for row in attempts:
            if self._kept is None or row["round"] <= self._kept:
                last_scores |= (row.get("scores") or {}).get("server", {})
        return last_scores | dict(self.final.get("server", {}))

    @property
    def about(self) -> dict[str, Any]:
        """Return the entries for status.json.

        They are the best round so far and, at the end, the selected model's round and its scores.
        """
        if self._choice is None:
            return {}
        final = {} if self._kept is None else {"final": {"round": self._kept, "scores": self.final}}
        return self.best.about(self._choice) | final


_SERVER_ERROR = re.compile(r"\b500 Internal Server Error\b|\bStatusCode\.INTERNAL\b")


def failure_reason(error: BaseException, folder: Path) -> str:
    """Return the reason for status.json: the failure, what to lower, and the command that resumes the run, if any."""
    reason = str(error) if isinstance(error, FedVeilError) else f"{type(error).__name__}: {error}"
    if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and not error.code):
        # Flower raises SystemExit(0) on a signal, and also when it gives up a run because heartbeats are missing.
        reason = process_exit.describe_lost_contact() or process_exit.TOLD_TO_END
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    if any(isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT) for each in chain):
        reason += "; the server's disk is full: free some disk space"
    elif _SERVER_ERROR.search(reason):  # from the SuperLink, whose own log has the cause
        full = process_exit.describe_full_disk(folder, Path.cwd())
        reason += f"; {full}" if full else "; the SuperLink's log (logs/superlink.log in its state folder) says why"
    elif process_exit.is_out_of_memory(error):
        reason += f"; {process_exit.LOWER}"
    elif process_exit.ExitCause.MEMORY in reason:  # a site reported it
        reason += f"; {process_exit.LOWER_AT_SITE}"
    if isinstance(error, ConfigError) or not checkpoints.has_checkpoint(folder):
        return reason
    return f"{reason}; {process_exit.resume_command(folder)}"


def leave_card(run: RunFolder, config: RunConfig, method: Method, course: BestRoundTracker) -> None:
    """Write the card of a run that has just ended, and its digest to the audit log. No attack has been run yet.

    Raises:
        OSError: the card cannot be written.
        StateError: the run's record is damaged.
    """
    from fedveil.cards import collect
    from fedveil.cards.card import AuditSection, DeclaredFacts
    from fedveil.records import disclosure_ledger

    folder = run.folder
    rows = checkpoints.read_lines(folder / "metrics.jsonl")
    attempts = [row for row in rows if row["round"] >= 0 and not row.get("resumed")]
    recorded = collect.RecordedRun(
        folder=folder,
        id=run.id,
        about=json.loads((folder / "config.json").read_text(encoding="utf-8")),
        attempts=attempts,
        messages=disclosure_ledger.read_messages(folder / disclosure_ledger.NAME),
        rounds=course.done + 1,
        scores=course.scores(attempts),
        resumed=sum(1 for row in rows if row.get("resumed")),
    )
    card = collect.collect_card(recorded, config, method, DeclaredFacts(), AuditSection())
    collect.write_card(folder / "final", card)
    run.audit("card", {"card": hashlib.sha256(card.to_bytes()).hexdigest()})
