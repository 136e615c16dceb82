"""A run from each site's side: how often it took part, what it sent, and why it failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedveil.console.runs.folder import Row, Run
from fedveil.contract import held_out


@dataclass(frozen=True)
class Scored:
    """A site's last word on its held-out rows: the loss and the rows behind it, or why there is none.

    It is of the weights that the site received in `round`, 0-based: the model after the round before.
    """

    round: int
    loss: float | None
    rows: int
    why: str


_MOST = 1e12  # of a figure that a site reports: sums stay finite


@dataclass
class SiteRecord:
    """One site's part in a run. `failures` are (round, reason); losses are those of the last accepted upload."""

    name: str
    asked: int = 0
    accepted: int = 0
    examples: int | None = None
    loss_received: float | None = None
    loss_trained: float | None = None
    train_seconds: float | None = None
    held_out: Scored | None = None
    up: int = 0
    down: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)


def of(run: Run) -> list[SiteRecord]:
    """Every site of the run."""
    found = {name: SiteRecord(name) for name in run.sites}
    for attempt in run.attempts:
        for name in attempt.get("cohort", []):
            found[name].asked += 1
        for name in [] if attempt.get("void") else attempt.get("accepted", []):
            found[name].accepted += 1
            report = attempt.get("reports", {}).get(name, {})
            _report(found[name], report)
            found[name].held_out = scored(int(attempt["round"]), report) or found[name].held_out
        for name, (up, down, *_) in (attempt.get("unlisted") or {}).items():
            found[name].up += int(up)
            found[name].down += int(down)
        for name, reason in attempt.get("failed", {}).items():
            found[name].failures.append((int(attempt["round"]), str(reason)))
    for message in run.messages:
        site = found[str(message["site"])]
        if message["direction"] == "up":
            site.up += int(message["bytes"])
        else:
            site.down += int(message["bytes"])
    return list(found.values())


@dataclass(frozen=True)
class LastAttempt:
    """The attempt with which a run ended, or the last of one that goes on: `sites` are (site, state, reason).

    `round` and `attempt` count from 0. `over`: it is not under way.
    """

    round: int
    attempt: int
    sites: list[tuple[str, str, str]]
    over: bool = True
    goes_on: bool = False

    @property
    def words(self) -> str:
        """Counted from 1, as people count."""
        accepted = sum(state == ACCEPTED for _, state, _ in self.sites)
        found = f"{accepted} of {len(self.sites)} sites accepted" if self.sites else "no site was asked"
        now = " (over; the run goes on)" if self.goes_on else "" if self.over else " (under way)"
        return f"Round {self.round + 1}, attempt {self.attempt + 1}{now}: {found}{'' if self.over else ' so far'}"


def last_attempt(run: Run) -> LastAttempt | None:
    """The last attempt site by site, of a run that has not completed; None without one."""
    if run.status.get("state") == "completed":
        return None
    if run.progress.get("phase") == "round":  # no line has it yet, or the server ended before it wrote one
        return _under_way(run)
    if not run.attempts:
        return None
    last = run.attempts[-1]
    accepted, failed = set(last.get("accepted") or []), dict(last.get("failed") or {})
    rows = [
        (site, ACCEPTED if site in accepted else _state(failed.get(site, "")), str(failed.get(site, "")))
        for site in sorted({*(last.get("cohort") or []), *failed})
    ]
    return LastAttempt(int(last["round"]), int(last.get("attempt", 0)), rows, goes_on=_goes_on(run))


def _under_way(run: Run) -> LastAttempt | None:
    at = run.progress.get("round"), run.progress.get("attempt")
    waiting, reasons = run.progress.get("waiting"), run.progress.get("reasons")
    if type(at[0]) is not int or type(at[1]) is not int or not isinstance(reasons, dict):
        return None
    messages = [message for message in run.messages if (message["round"], message["attempt"]) == at]
    sent = {str(message["site"]) for message in messages if message["direction"] == "up"}
    sent -= set(map(str, waiting)) if isinstance(waiting, list) else set()
    silent = WAITING if _goes_on(run) else "no answer before the server ended"
    rows = [
        (site, _state(reasons[site]), str(reasons[site])) if site in reasons
        else (site, ACCEPTED if site in sent else silent, "")
        for site in sorted({str(message["site"]) for message in messages} | set(reasons))
    ]  # fmt: skip
    return LastAttempt(at[0], at[1], rows, over=not _goes_on(run))


def _goes_on(run: Run) -> bool:
    return run.status.get("state") == "running"


ACCEPTED, WAITING = "accepted", "no answer yet"
REFUSED = "refused: "  # an upload that the server had and did not take
_BY_REASON = {
    REFUSED: "refused by the server",
    "PolicyError: ": "refused by the site's policy",
    "BudgetError: ": "refused by the site's ledger",
    "no reply within ": "silent",
    "no answer within ": "silent",
    "interrupted: ": "interrupted",
}


def _state(reason: object) -> str:
    """What became of a site, by the first words of its reason (server_app/attempt.py)."""
    words = str(reason)
    return next(
        (state for start, state in _BY_REASON.items() if words.startswith(start)), "failed" if words else "silent"
    )


def losses(run: Run) -> list[tuple[int, float]]:
    """(rounds done, loss) of the model as the sites received it, on rows that they train on: no held-out loss.

    The mean over the sites that told it, weighted with their examples. Sites say what they like: a figure that is no
    finite number from 0 on is left out.
    """
    counted = ((a, loss_told(a)) for a in run.attempts if a.get("weights") and not a.get("void"))
    return sorted({int(attempt["round"]): loss for attempt, loss in counted if loss is not None}.items())


def loss_told(attempt: Row) -> float | None:
    """The same of one attempt; None where no site told it."""
    told = (attempt.get("reports") or {}).values()
    pairs = [(_number(r.get("num_examples", 1)), _number(r.get("loss_received"))) for r in told]
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
    if "train_seconds" in report:
        site.train_seconds = (site.train_seconds or 0.0) + report["train_seconds"]


def scored(round_: int, report: Mapping[str, float]) -> Scored | None:
    """What a report says of held-out rows; None where it says nothing."""
    if held_out.LOSS in report:
        return Scored(round_, float(report[held_out.LOSS]), int(report.get(held_out.ROWS, 0)), "")
    if held_out.REFUSED in report:
        return Scored(round_, None, 0, held_out.REFUSALS.get(int(report[held_out.REFUSED]), "of another version"))
    return None


def mean_scored(reports: Mapping[str, Mapping[str, float]]) -> tuple[float, int, int] | None:
    """Mean held-out loss of a round weighted with rows, all rows, and the sites behind it; None without one."""
    found = [each for report in reports.values() if (each := scored(0, report)) and each.loss is not None and each.rows]
    rows = sum(each.rows for each in found)
    return (sum((each.loss or 0.0) * each.rows for each in found) / rows, rows, len(found)) if found else None


def note(reports: Mapping[str, Mapping[str, float]]) -> str:
    """The same in words, for a round's line."""
    found = mean_scored(reports)
    return "" if found is None else f"  held out: loss {found[0]:.4f}, {found[1]} rows of {found[2]} sites"
