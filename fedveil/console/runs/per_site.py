"""A run broken down by site: how often each site took part, what it sent, and why it failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedveil.console.runs.run_reader import Row, RunView
from fedveil.contract import held_out_report
from fedveil.contract.row_counts import RowCounts
from fedveil.records import disclosure_ledger, disclosure_summary


@dataclass(frozen=True)
class HeldOutScore:
    """A site's latest score on its held-out examples: the loss and the number of examples, or why there is none.

    It is for the weights that the site received in `round` (0-based), that is, the model after the previous round.
    """

    round: int
    loss: float | None
    rows: int
    why: str


_MOST = 1e12  # largest value a site may report, so that sums stay finite


@dataclass
class SiteRecord:
    """One site's part in a run. `failures` are (round, reason); losses come from the last accepted upload.

    `unsigned`: number of accepted uploads that the site did not sign. `rows`: None if the site reported no counts.
    """

    name: str
    asked: int = 0
    accepted: int = 0
    unsigned: int = 0
    examples: int | None = None
    loss_received: float | None = None
    loss_trained: float | None = None
    train_seconds: float | None = None
    held_out: HeldOutScore | None = None
    rows: RowCounts | None = None
    up: int = 0
    down: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)


def records_by_site(run: RunView) -> list[SiteRecord]:
    """Return a record for every site in the run."""
    records = {name: SiteRecord(name) for name in run.sites}
    for attempt in run.attempts:
        for name in attempt.get("cohort", []):
            records[name].asked += 1
        for name in [] if attempt.get("void") else attempt.get("accepted", []):
            records[name].accepted += 1
            report = attempt.get("reports", {}).get(name, {})
            _report(records[name], report)
            records[name].held_out = held_out_scores(int(attempt["round"]), report) or records[name].held_out
        for name in [] if attempt.get("void") else disclosure_summary.unsigned_sites(attempt):
            records[name].unsigned += 1
        for name, (up, down, *_) in (attempt.get("unlisted") or {}).items():
            records[name].up += int(up)
            records[name].down += int(down)
        for name, reason in attempt.get("failed", {}).items():
            records[name].failures.append((int(attempt["round"]), str(reason)))
    for message in run.messages:
        site = records[str(message["site"])]
        if message["direction"] == "up":
            site.up += int(message["bytes"])
        else:
            site.down += int(message["bytes"])
    return list(records.values())


@dataclass(frozen=True)
class LastRoundAttempt:
    """A run's last attempt, ended or not: `sites` are (site, state, reason).

    `round` and `attempt` count from 0. `over`: whether the attempt has ended.
    """

    round: int
    attempt: int
    sites: list[tuple[str, str, str]]
    over: bool = True
    goes_on: bool = False

    @property
    def words(self) -> str:
        """Describe the attempt, with numbers counted from 1."""
        accepted = sum(state == ACCEPTED for _, state, _ in self.sites)
        progress = f"{accepted} of {len(self.sites)} sites accepted" if self.sites else "no site was contacted"
        now = " (done; the run continues)" if self.goes_on else "" if self.over else " (in progress)"
        return f"Round {self.round + 1}, attempt {self.attempt + 1}{now}: {progress}{'' if self.over else ' so far'}"


def last_attempt(run: RunView) -> LastRoundAttempt | None:
    """Return the last attempt, site by site, of a run that has not completed; otherwise None."""
    if run.status.get("state") == "completed":
        return None
    if run.progress.get("phase") == "round":  # it has no line in metrics.jsonl yet, or the server ended first
        return _under_way(run)
    if not run.attempts:
        return None
    last = run.attempts[-1]
    accepted, failed = set(last.get("accepted") or []), dict(last.get("failed") or {})
    rows = [
        (site, ACCEPTED if site in accepted else _state(failed.get(site, "")), str(failed.get(site, "")))
        for site in sorted({*(last.get("cohort") or []), *failed})
    ]
    return LastRoundAttempt(int(last["round"]), int(last.get("attempt", 0)), rows, goes_on=_goes_on(run))


def _under_way(run: RunView) -> LastRoundAttempt | None:
    at = run.progress.get("round"), run.progress.get("attempt")
    waiting, reasons = run.progress.get("waiting"), run.progress.get("reasons")
    if type(at[0]) is not int or type(at[1]) is not int or not isinstance(reasons, dict):
        return None
    messages = [message for message in run.messages if disclosure_ledger.counted_in(message) == at]
    sent = {str(message["site"]) for message in messages if message["direction"] == "up"}
    sent -= set(map(str, waiting)) if isinstance(waiting, list) else set()
    silent = WAITING if _goes_on(run) else "no answer before the server stopped"
    rows = [
        (site, _state(reasons[site]), str(reasons[site])) if site in reasons
        else (site, ACCEPTED if site in sent else silent, "")
        for site in sorted({str(message["site"]) for message in messages} | set(reasons))
    ]  # fmt: skip
    return LastRoundAttempt(at[0], at[1], rows, over=not _goes_on(run))


def _goes_on(run: RunView) -> bool:
    return run.status.get("state") == "running"


def absent_since(run: RunView) -> dict[str, int]:
    """Return the sites missing from the latest rounds, each with the first round that it missed, counted from 1.

    If a round did not ask the site, it counts as missed only if rounds ask all connected sites (cohort.fraction = 1),
    because otherwise the site may just not have been sampled. With cohort.buffer-size, only a round in which the site's
    request failed counts, because otherwise the site may still be training.
    """
    rounds = [(int(attempt["round"]) + 1, attempt) for attempt in run.finished_rounds]
    config = run.config.get("config", {})
    is_buffered = bool(config.get("cohort.buffer-size", 0))
    all_asked = config.get("cohort.fraction", 1.0) == 1.0 and not is_buffered
    absent: dict[str, int] = {}
    for site in run.sites:
        for number, attempt in reversed(rounds):
            if site in (attempt.get("accepted") or []):
                break
            was_asked = all_asked or (not is_buffered and site in (attempt.get("cohort") or []))
            if was_asked or site in (attempt.get("failed") or {}):
                absent[site] = number
    return absent


def sites_left(run: RunView) -> str:
    """Describe how many sites the latest rounds had, such as "2 of 3 sites since round 2"; "" if all, or if unknown."""
    absent = absent_since(run)
    if not absent:
        return ""
    return f"{len(run.sites) - len(absent)} of {len(run.sites)} sites since round {max(absent.values())}"


def state_with_sites(run: RunView, state: str) -> str:
    """Return a state with the number of remaining sites, such as "completed, 2 of 3 sites since round 2"."""
    left = sites_left(run) if state in ("completed", "running") else ""
    return f"{state}, {left}" if left else state


ACCEPTED, WAITING = "accepted", "no answer yet"
REFUSED = "refused: "  # an upload that the server received but did not accept
_BY_REASON = {
    REFUSED: "refused by the server",
    "PolicyError: ": "refused by the site's policy",
    "BudgetError: ": "refused by the site's ledger",
    "no reply within ": "silent",
    "no answer within ": "silent",
    "interrupted: ": "interrupted",
}


def _state(reason: object) -> str:
    """Derive a site's state from the prefix of its failure reason (server_app/round_attempt.py)."""
    words = str(reason)
    return next(
        (state for start, state in _BY_REASON.items() if words.startswith(start)), "failed" if words else "silent"
    )


def site_losses(run: RunView) -> list[tuple[int, float]]:
    """Return (rounds done, loss) for the model that the sites received, on their training (not held-out) examples.

    The loss is the mean over the sites that reported it, weighted by their number of examples. Reports are untrusted:
    negative or non-finite values are ignored.
    """
    counted = ((a, describe_loss(a)) for a in run.attempts if a.get("weights") and not a.get("void"))
    return sorted({int(attempt["round"]): loss for attempt, loss in counted if loss is not None}.items())


def describe_loss(attempt: Row) -> float | None:
    """Return the mean loss that `site_losses` gives for an attempt; None if no site reported a loss."""
    reports = (attempt.get("reports") or {}).values()
    pairs = [(_number(r.get("num_examples", 1)), _number(r.get("loss_received"))) for r in reports]
    known = [(weight, loss) for weight, loss in pairs if weight and loss is not None]
    return sum(w * x for w, x in known) / sum(w for w, _ in known) if known else None


def _number(value: object) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST
    return float(value) if known else None  # type: ignore[arg-type]


def _report(site: SiteRecord, report: dict[str, float]) -> None:
    if "num_examples" in report:
        site.examples = int(report["num_examples"])
    site.loss_received = report.get("loss_received", site.loss_received)
    site.loss_trained = report.get("loss_trained", site.loss_trained)
    site.rows = RowCounts.from_report(report) or site.rows
    if "train_seconds" in report:
        site.train_seconds = (site.train_seconds or 0.0) + report["train_seconds"]


def incomplete_rows(run: RunView) -> list[str]:
    """Return a line for each site that reported truncated or dropped rows."""
    return [f"{s.name}: {s.rows.words}" for s in records_by_site(run) if s.rows is not None and not s.rows.is_whole]


def held_out_scores(round_: int, report: Mapping[str, float]) -> HeldOutScore | None:
    """Return the held-out score in a report, or None."""
    if held_out_report.LOSS in report:
        return HeldOutScore(round_, float(report[held_out_report.LOSS]), int(report.get(held_out_report.ROWS, 0)), "")
    if held_out_report.REFUSED in report:
        return HeldOutScore(
            round_, None, 0, held_out_report.REFUSALS.get(int(report[held_out_report.REFUSED]), "of another version")
        )
    return None


def mean_scored(reports: Mapping[str, Mapping[str, float]]) -> tuple[float, int, int] | None:
    """Return a round's mean held-out loss, weighted by examples; total examples; number of sites. None if unscored."""
    scores = [
        each
        for report in reports.values()
        if (each := held_out_scores(0, report)) and each.loss is not None and each.rows
    ]
    rows = sum(each.rows for each in scores)
    return (sum((each.loss or 0.0) * each.rows for each in scores) / rows, rows, len(scores)) if scores else None


def failure_note(reports: Mapping[str, Mapping[str, float]]) -> str:
    """Describe a round's mean held-out loss for the round's output line; "" if there is none."""
    held_out_mean = mean_scored(reports)
    return (
        ""
        if held_out_mean is None
        else f"  held out: loss {held_out_mean[0]:.4f}, {held_out_mean[1]} examples of {held_out_mean[2]} sites"
    )
