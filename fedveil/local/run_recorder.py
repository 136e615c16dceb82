"""Record an in-process run in a run folder, as a server does, for reports, cards, audits and sinks.

The folder does not claim anything that only a real server provides: `config.json` contains `"in_process": true`, no
upload is signed, and no site's audit log is anchored.

| with run.name | without run.name |
|---|---|
| the folder is run.dir/run.name, and is kept | the folder is temporary |
| checkpoints after every round, with the sites' private states, for run.resume | checkpoints only for select-model =
  "best" |

With cohort.buffer-size, a checkpoint contains no uploads: a resumed run asks every site again, and records which sites
were training.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from fedveil.contract.layout import Direction
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.errors import ConfigError, FedVeilError, StateError
from fedveil.federation.in_process import InProcessFederation
from fedveil.records.tensor_state import load_state, save_state, state_digest
from fedveil.server_app import completion, run_fingerprint
from fedveil.server_app.completion import BestRoundTracker
from fedveil.server_app.evaluation import ServerEvaluator
from fedveil.server_app.message_recorder import RunMessageRecorder
from fedveil.server_app.metrics import optional_deps, sinks
from fedveil.server_app.metrics.dispatcher import MetricsDispatcher
from fedveil.server_app.metrics.epsilon import make_epsilon_sink
from fedveil.server_app.round_record import RoundRecord
from fedveil.server_app.run_folder import RunFolder
from fedveil.server_app.run_plan import RunPlan
from fedveil.training.adapter_task import count_adapter_weights
from fedveil.wire.envelope import describe_message

__all__ = ["LocalRunRecorder"]

_STATES = "sites"  # the folder of private states
_STATE_FILE = re.compile(r"\d+-\d+\.safetensors")


@final
class LocalRunRecorder:
    """The run folder of a run in one process, and the rules that decide when the run ends.

    Attributes:
        folder: the run folder; locked for the lifetime of this object.
        course: the completed rounds, and the best of them.
        evaluator: scores the server's model on task.evaluation; None if that is not set.
        server_task: the task with the adapter of the server's model.
        next_round: the next round, from 0.
        ended: whether the run has its final model.
        has_failed: whether an error or Ctrl-C ended the run.
    """

    def __init__(self, plan: RunPlan, federation: InProcessFederation) -> None:
        """Create the folder, or open the folder of the run to resume.

        Raises:
            StateError: the folder contains another run, or the run to resume cannot be read.
            ConfigError: the resumed run would differ from the original one, or a sink is not installed.
        """
        run = plan.config.run
        self._plan, self._federation, self._is_temporary = plan, federation, not run.name
        path = _temporary_folder(self) if self._is_temporary else Path(run.dir).expanduser() / run.name
        optional_deps.require_installed(plan.config, "here")
        self.course = BestRoundTracker(plan.selection, path)
        server_task = plan.load_server_task()
        self.evaluator = ServerEvaluator.from_config(server_task, plan.config, keeps_model=server_task is plan.task)
        self.server_task = server_task
        self.next_round, self.ended, self.has_failed = 0, False, False
        self._private: dict[str, int] = {}  # by site: the round in which its state was saved
        self._named_before = set[str]()
        self._terms = run_fingerprint.run_terms(federation.exchange, plan.settings) | {"in_process": True}
        self.folder = RunFolder(path, run.resume)  # created last, so that an invalid config leaves no folder behind
        try:
            self.folder.config(plan.config, plan.method, count_adapter_weights(plan.task), in_process=True)
            if self.folder.resumed:
                self._resume()
        except BaseException:
            self.folder.__exit__()
            raise
        if plan.config.run.capture_messages:
            federation.tap = self.folder.tap()
        federation.on_message = self._record_message

    @property
    def rounds(self) -> int:
        """Return the number of rounds in the config."""
        return self._plan.config.run.rounds

    def begin(self) -> None:
        """Open the sinks, record that the run starts or resumes, and score the model before round 1."""
        config, folder = self._plan.config, self.folder.folder
        opened = sinks.open_sinks(sinks.SinkRunInfo(folder, self.folder.id, config, self.folder.resumed))
        epsilon = make_epsilon_sink(self._plan.guarantee, config, folder / "metrics.jsonl")
        self.folder.outlets = MetricsDispatcher(opened, epsilon)
        self.folder.reading = self.evaluator.notes if self.evaluator else []
        self.folder.status("running", self.next_round - 1, self.rounds, **self.course.about)
        about = {"method": config.method.name, "task": config.task.name, "rounds": self.rounds}
        self.folder.audit("started", {"in_process": True, **about})
        if self.next_round:
            return
        if self.evaluator and not self.folder.is_scored(-1):
            self.folder.scores(-1, self._scores(-1))
        self._checkpoint(-1)

    def end_with(self, owner: object) -> None:
        """Delete a temporary folder once `owner` is gone; this object lives longer, as the federation refers to it."""
        if self._is_temporary:
            weakref.finalize(owner, shutil.rmtree, self.folder.folder.parent, ignore_errors=True)

    def is_over(self) -> bool:
        """Return whether no rounds are left: all are done, or evaluate.patience has run out."""
        return self.next_round >= self.rounds or bool(self.course.stopped(self.rounds))

    def run_round(self) -> RoundRecord:
        """Run the next round and record it. A round that raises an error does not count and can be run again."""
        federation, round_ = self._federation, self.next_round
        self.folder.status("running", round_, self.rounds, **self.course.about)
        started, before = time.monotonic(), (federation.upload_bytes, federation.download_bytes)
        federation.round(round_)
        accepted, secure = federation.last_cohort, federation.unseen is not None
        failed, unlisted = self._discarded(round_)
        record = RoundRecord(
            round_, 0, sorted({*federation.asked, *accepted, *failed}), accepted=list(accepted),
            unsigned=list(accepted), failed=failed, unlisted=unlisted, staleness=dict(federation.staleness),
            upload_bytes=federation.upload_bytes - before[0], download_bytes=federation.download_bytes - before[1],
            reports={} if secure else {site: self._report(site) for site in accepted},
            cut=dict(federation.cut), left_out=list(federation.left_out), unseen=self._secure_sum(),
            seconds=round(time.monotonic() - started, 3),
        )  # fmt: skip
        weights = state_digest(federation.models()["server"])
        record = replace(record, weights=weights, scores=self._scores(round_))
        self.course.scored_by_sites(record.reports)
        self.course.scored(round_, record.scores)
        self.folder.round(record)
        self.next_round = round_ + 1
        self._checkpoint(round_)
        return record

    def _discarded(self, round_: int) -> tuple[dict[str, str], dict[str, list[int]]]:
        """Record the uploads that were too stale. Return, by site, the reasons, and the uploads' bytes and messages."""
        failed, unlisted = dict[str, str](), dict[str, list[int]]()
        for site, (size, reason) in self._federation.discarded.items():
            failed[site], unlisted[site] = f"refused: {reason}", [size, 0, 1, 0]
            self.folder.audit("failed", {"step": round_, "site": site, "reason": failed[site], "up_bytes": size})
        return failed, unlisted

    def finish(self) -> None:
        """Choose the final model, score it unless a round already has, and write it with its card."""
        federation, course = self._federation, self.course
        if (best := course.replaced()) is not None:
            federation.server = best
        if self.evaluator and course.is_unscored(self.rounds):
            course.final = self._scores(self.rounds - 1)
        task = self.server_task
        self.folder.final(
            federation.models(), lambda weights, into: task.save({name: weights[name] for name in task.spec}, into)
        )
        completion.leave_card(self.folder, self._plan.config, self._plan.method, course)
        why = course.stopped(self.rounds)
        self.folder.audit("ended", {"state": "completed"} | ({"reason": why} if why else {}))
        self.folder.status("completed", course.done, self.rounds, why, **course.about)
        self.ended = True
        self.folder.__exit__()

    def fail(self, error: BaseException) -> None:
        """Record that an error, or Ctrl-C, ended the run."""
        reason = str(error) if isinstance(error, FedVeilError) else f"{type(error).__name__}: {error}"
        if isinstance(error, KeyboardInterrupt):
            reason = "interrupted by its user"
        self.has_failed = True
        try:
            self.folder.failed(self.rounds, reason)
        finally:
            self.folder.__exit__()

    def _scores(self, round_: int) -> dict[str, dict[str, float]]:
        if self.evaluator is None:
            return {}
        return self.evaluator.scores(self._plan.method, self._federation.server, round_)

    def _report(self, site: str) -> dict[str, float]:
        return {"num_examples": self._federation.num_examples[site], **self._federation.reports[site]}

    def _secure_sum(self) -> dict[str, Any]:
        """Return the `unseen` entry of a round's line, with the sizes of the sum; {} without secure aggregation."""
        secure = self._federation.unseen
        if secure is None or secure.last is None:
            return {}
        attempt = secure.last
        plan = attempt.plan
        return {
            "sites": len(attempt.in_sum), "cohort": len(plan.members), "quorum": plan.quorum,
            "threshold": plan.threshold, "neighbours": plan.neighbours, "colluding": plan.colluding, "deaf": {},
        }  # fmt: skip

    def _record_message(self, data: bytes, ctx: RoundContext, direction: Direction) -> None:
        federation = self._federation
        step = self.next_round if self._plan.config.cohort.buffer_size else None
        recorder = RunMessageRecorder(self.folder, None, federation.cohort, step)
        disclosed = describe_message(data)
        if direction == "down":
            recorder.record_sent(ctx, disclosed, [])
        else:
            recorder.record_accepted(ctx, disclosed, b"", "", {})

    def _checkpoint(self, round_: int) -> None:
        keeps_best = self._plan.selection is not None and self._plan.selection.keep
        if self._is_temporary and not keeps_best:
            return
        states = {} if self._is_temporary else self._save_private(round_)
        federation = self._federation
        loop = {
            "participated": sorted(federation.participated), "secrets": federation.secrets, "private": states,
            "bytes": [federation.upload_bytes, federation.download_bytes], "clock": federation.clock,
            **({"in_flight": federation.in_flight.rounds} if self._plan.config.cohort.buffer_size else {}),
        }  # fmt: skip
        about = {"round": round_, "terms": self._terms, **self.course.saved()}
        self.folder.checkpoint(federation.server, about | loop)
        self.course.keep()
        self._remove_old_states(states)

    def _save_private(self, round_: int) -> dict[str, int]:
        """Save the private states that the round changed. Return the round in which each site's state was saved."""
        folder, federation = self.folder.folder / _STATES, self._federation
        for number, site in enumerate(federation.sites):
            if site in federation.last_cohort and round_ >= 0 and (state := federation.private.get(site)) is not None:
                save_state(state, folder / f"{number}-{round_}.safetensors")
                self._private[site] = round_
        return dict(self._private)

    def _remove_old_states(self, now: Mapping[str, int]) -> None:
        """Remove the states that neither this checkpoint nor the previous one refers to."""
        folder, numbers = self.folder.folder / _STATES, {site: i for i, site in enumerate(self._federation.sites)}
        if not folder.is_dir():
            return
        named = {f"{numbers[site]}-{round_}.safetensors" for site, round_ in now.items()}
        kept = named | self._named_before
        self._named_before = named
        for file in folder.iterdir():
            if _STATE_FILE.fullmatch(file.name) and file.name not in kept:
                file.unlink()

    def _resume(self) -> None:
        server, loop = self.folder.load_checkpoint()
        if "secrets" not in loop:
            raise StateError(
                f"run.resume: the run in {self.folder.folder} is a server's run, not an in-process run; resume it "
                "with fedveil submit"
            )
        changes = run_fingerprint.changed_terms(loop["terms"], self._terms)
        federation, numbers = self._federation, {site: i for i, site in enumerate(self._federation.sites)}
        if unknown := sorted(loop["private"].keys() - numbers.keys()):
            raise ConfigError(
                f"sites: the checkpoint is from a site {unknown[0]}, which is missing here; name the same sites as "
                "before"
            )
        self._private = {site: int(round_) for site, round_ in loop["private"].items()}
        self._named_before = {f"{numbers[site]}-{round_}.safetensors" for site, round_ in self._private.items()}
        private: dict[str, FederatedState | None] = {
            site: load_state(self.folder.folder / _STATES / f"{numbers[site]}-{round_}.safetensors")
            for site, round_ in self._private.items()
        }
        federation.restore(server, loop["participated"], loop["secrets"], private)
        federation.upload_bytes, federation.download_bytes = (int(size) for size in loop["bytes"])
        federation.clock = float(loop.get("clock", 0.0))
        if lost := loop.get("in_flight"):
            self.folder.notes["in-flight"] = lost
        self.course.resume(loop)
        self.next_round = int(loop["round"]) + 1
        self.folder.resume(self.next_round, changes)


def _temporary_folder(owner: LocalRunRecorder) -> Path:
    """Return a run folder that is deleted with its owner, or at the latest when the process ends."""
    parent = Path(tempfile.mkdtemp(prefix="fedveil-run-"))
    weakref.finalize(owner, shutil.rmtree, parent, ignore_errors=True)
    return parent / "local"
