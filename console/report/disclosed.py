"""What left each side of a run, and each site's own part of it: the report's sections of that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fedveil.console.report.page import Figure, Html, bullets, fold, join, table, tag
from fedveil.console.runs import by_site, disclosure
from fedveil.console.runs.folder import Run

LEDGER_NOTE = (
    "Every message of every attempt that the server has; refused and repeated ones count. What a site sent and the "
    "server never had whole is in the site's own log alone, so that one may count more. Payload is the bytes of the "
    "tensors; overhead is everything else in the message: names, shapes, and the figures a site reports about "
    "its training. Refused uploads, and the keys and shares of secure aggregation, stand in one line, without fields. "
    "The lines of a direction add up to the bytes in the summary."
)
LOSSES_NOTE = (
    "Loss received: of the model as it came, before its training at the site, on the first train.score-rows rows. Loss "
    "trained: the mean over all training steps, on all rows, with dropout, while the model changes. They are no before "
    "and after: a higher loss trained does not say that training did harm."
)
HELD_OUT_NOTE = (
    "Each site says this of itself, of the weights that it received: the model after the round before, with what the "
    "site keeps for itself. The last round's model is not scored so, and nothing is decided by these figures."
)


def learned(run: Run) -> Html:
    """What each side came to know, in sentences."""
    items: list[object] = [*disclosure.learned(run)]
    uploads = [kind for kind in disclosure.kinds(run) if kind.direction == "up"]
    for site in run.sites:
        held = [f"{_held(run, kind)} {times(kind.sites[site])}" for kind in uploads if kind.sites[site]]
        if held:
            never = ", never all of it in one upload" if disclosure.never_together(run, site) else ""
            items.append(f"{site} sent the server {' and '.join(held)}{never}.")
    if reported := disclosure.reported(run):
        items.append(f"Beside the tensors every accepted upload told the server: {', '.join(reported)}.")
    if words := disclosure.scalars(run)["up"]:
        items.append(f"Uploads also carried: {', '.join(words)}.")
    empty = tag("p", "No message was exchanged.", "note")
    return join([tag("h3", heading(run)), bullets(items) if items else empty])


def _held(run: Run, kind: disclosure.Kind) -> str:
    """What a message held, as the server saw it."""
    return "a masked vector with keys" if run.unseen and kind.direction == "up" else variant(kind)


def times(count: int) -> str:
    """In words."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def variant(kind: disclosure.Kind) -> str:
    """Which tensors a message held."""
    what = f"{len(kind.fields)} tensors"
    return f"{kind.variant} ({what})" if kind.variant else f"all {what}"


def ledger(run: Run) -> Html:
    """Every kind of message: direction, tensors, bytes; field by field folded away."""
    found = disclosure.kinds(run)
    if not found:
        return join([tag("h3", heading(run)), tag("p", "No message was exchanged.", "note")])
    rows, folds = [], []
    for kind in found:
        about = disclosure.describe_fields(kind.fields)
        way = "site to server" if kind.direction == "up" else "server to site"
        share = Figure(f"{100 * kind.overhead_bytes / kind.payload_bytes:.2f}&nbsp;%") if kind.payload_bytes else None
        rows.append([
            way, kind.variant or "the only one", ", ".join(about["codecs"]), about["tensors"], about["entries"],
            kind.messages, kind.payload_bytes, kind.overhead_bytes, share, kind.total_bytes,
        ])  # fmt: skip
        fields = [[tag("code", name), codec, str(shape), nbytes] for name, codec, shape, nbytes in kind.fields]
        title = f"{way}, {kind.variant or 'every message'}: {len(fields)} fields, bytes in one message"
        folds.append(fold(title, table(["field", "codec", "shape", "bytes"], fields)))
    for direction, way in (("up", "site to server"), ("down", "server to site")):
        if rest := run.unlisted(direction):
            rows.append([way, disclosure.unlisted(run, direction), *[None] * 7, rest])
    head = ["direction", "variant", "codec", "tensors", "entries", "messages", "payload bytes", "overhead bytes"]
    parts = [tag("h3", heading(run)), table([*head, "overhead", "total bytes"], rows), _by_site(run, found), *folds]
    return join(parts)


def _by_site(run: Run, found: Sequence[disclosure.Kind]) -> Html:
    """How many uploads of each variant each site sent."""
    uploads = [kind for kind in found if kind.direction == "up"]
    if len(uploads) < 2:
        return Html("")
    rows = [[site, *(kind.sites[site] for kind in uploads)] for site in run.sites]
    return table(["uploads by site", *(variant(kind) for kind in uploads)], rows)


def exchanged(run: Run) -> list[list[object]]:
    """Of each site: what it sent how often, bytes of those tensors, all bytes that it sent, what it got, bytes."""
    found, tensors = disclosure.kinds(run), Counter[str]()
    for message in run.messages:
        tensors[str(message["site"])] += (message["direction"] == "up") * message["payload_bytes"]

    def said(site: str, way: str) -> str:
        kinds = [kind for kind in found if kind.direction == way and kind.sites[site]]
        return ", ".join(f"{_held(run, kind)} {times(kind.sites[site])}" for kind in kinds)

    def sent(site: by_site.SiteRecord) -> str:
        refused = sum(why.startswith(by_site.REFUSED) for _, why in site.failures)
        return ", ".join(filter(None, [said(site.name, "up"), f"refused uploads {times(refused)}" if refused else ""]))

    return [[s.name, sent(s), tensors[s.name], s.up, said(s.name, "down"), s.down] for s in by_site.of(run)]


def sites(run: Run) -> Html:
    """Each site's turns, what it told, its bytes and its failures."""
    told = [] if run.unseen else ["examples", "loss received", "loss trained", "train seconds"]
    head = ["site", "accepted", "asked", *told, "upload bytes", "download bytes", "failures"]
    rows, records = [], by_site.of(run)
    for s in records:
        said = [] if run.unseen else [s.examples, s.loss_received, s.loss_trained, s.train_seconds]
        why = join((f"round {round_ + 1}: {reason}" for round_, reason in s.failures), "; ") or None
        rows.append([s.name, s.accepted, s.asked, *said, s.up, s.down, why])
    notes = [_not_by_site(run, records), *([] if run.unseen else [tag("p", LOSSES_NOTE, "note")])]
    return join([tag("h3", heading(run)), last_attempt(run), table(head, rows), *notes, held_out(run, records)])


def last_attempt(run: Run) -> Html:
    """The attempt with which the run ended, or which is under way, site by site."""
    last = by_site.last_attempt(run)
    if last is None:
        return Html("")
    kinds = {by_site.ACCEPTED: "completed", by_site.WAITING: "plain"}
    rows = [[site, tag("span", state, f"tag {kinds.get(state, 'failed')}"), why] for site, state, why in last.sites]
    return table(["site", "what became of it", "why"], rows, caption=last.words)


def _not_by_site(run: Run, records: Sequence[by_site.SiteRecord]) -> Html:
    """What records of older runs have of all sites together alone."""
    rest = run.upload_bytes - sum(s.up for s in records), run.download_bytes - sum(s.down for s in records)
    what = disclosure.unlisted(run, "up")
    words = f"Not in this table, for the run's record does not have them by site: {what}, {rest[0]:,} upload bytes"
    return tag("p", f"{words} and {rest[1]:,} download bytes.", "note") if any(rest) else Html("")


def held_out(run: Run, records: Sequence[by_site.SiteRecord]) -> Html:
    """Each site's last score on its held-out rows with the rows behind it, and their weighted mean; "" without one."""
    found = [(s.name, s.held_out) for s in records if s.held_out is not None]
    if not found:
        return Html("")
    rows = [[name, said.round + 1, said.loss, said.rows or None, said.why or None] for name, said in found]
    means = [(int(a["round"]), by_site.mean_scored(a.get("reports") or {})) for a in run.attempts if not a.get("void")]
    last = [
        f"Over sites, weighted with rows, in round {round_ + 1}: {mean[0]:.4f} ({mean[1]} rows of {mean[2]} sites). "
        for round_, mean in means
        if mean
    ][-1:]
    head = ["site", "received in round", "loss on held-out rows", "rows", "no score, because"]
    return join([table(head, rows), tag("p", f"{''.join(last)}{HELD_OUT_NOTE}", "note")])


def heading(run: Run) -> str:
    """A run's name in a section, with its method."""
    return run.name if run.name == run.method else f"{run.name} ({run.method})"
