"""The report sections on the data that left each side of a run, and on each site's share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fedveil.console.runs import disclosure, per_site
from fedveil.console.runs.run_reader import RunView
from fedveil.console.web.report.html import (
    FormattedNumber,
    Html,
    html_details,
    html_list,
    html_table,
    html_tag,
    join_markup,
)

LEDGER_NOTE = (
    "Every message of every attempt that the server received, including refused and repeated ones. Messages that the "
    "server never fully received are only in the site's own log, which may therefore count more. Payload is the "
    "bytes in the tensors; overhead is everything else in the message: names, shapes, and the figures a site reports "
    "about its training. Refused uploads, and secure-aggregation keys and shares, have one line without "
    "fields. The lines for each direction add up to the bytes in the summary."
)
UNSIGNED_NOTE = (
    "Unsigned: accepted uploads without their site's signature. Only the server's SuperLink vouches for their sender."
)
LOSSES_NOTE = (
    "Loss received: loss of the received model, before training at the site, on the first "
    "train.received-loss-examples examples. Loss trained: the mean over all training steps, on all examples, with "
    "dropout, while the model changes. The two are not a before-and-after comparison: a higher loss trained does not "
    "mean that training did harm."
)
HELD_OUT_NOTE = (
    "Each site reports this itself, for the weights that it received: the model after the previous round, combined "
    "with the site's private part. The last round's model is not scored this way, and no decision depends on these "
    "figures."
)


def learned_section(run: RunView) -> Html:
    """Return the sentences on what each side learned."""
    items: list[object] = [*disclosure.what_was_learned(run)]
    uploads = [kind for kind in disclosure.message_kinds(run) if kind.direction == "up"]
    for site in run.sites:
        upload_texts = [f"{_held(run, kind)} {format_times(kind.sites[site])}" for kind in uploads if kind.sites[site]]
        if upload_texts:
            never = ", never all in one upload" if disclosure.never_together(run, site) else ""
            items.append(f"{site} sent the server {' and '.join(upload_texts)}{never}.")
    if reported := disclosure.reported_metrics(run):
        items.append(f"In addition to the tensors, every accepted upload told the server: {', '.join(reported)}.")
    if words := disclosure.scalar_names(run)["up"]:
        items.append(f"Uploads also carried: {', '.join(words)}.")
    empty = html_tag("p", "No messages were exchanged.", "note")
    return html_list(items) if items else empty


def _held(run: RunView, kind: disclosure.DisclosureKind) -> str:
    """Describe a message's content, as the server saw it."""
    return "a masked vector with keys" if run.unseen and kind.direction == "up" else variant_label(kind)


def format_times(count: int) -> str:
    """Format a count as words, such as "once"."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def variant_label(kind: disclosure.DisclosureKind) -> str:
    """Describe which tensors a message contained."""
    what = f"{len(kind.fields)} tensors"
    return f"{kind.variant} ({what})" if kind.variant else f"all {what}"


def ledger_section(run: RunView) -> Html:
    """Return all kinds of messages with direction, tensors and bytes; the individual fields are collapsed."""
    kinds = disclosure.message_kinds(run)
    if not kinds:
        return html_tag("p", "No messages were exchanged.", "note")
    rows, folds = [], []
    for kind in kinds:
        about = disclosure.describe_fields(kind.fields)
        way = "site to server" if kind.direction == "up" else "server to site"
        share = (
            FormattedNumber(f"{100 * kind.overhead_bytes / kind.payload_bytes:.2f}&nbsp;%")
            if kind.payload_bytes
            else None
        )
        rows.append([
            way, kind.variant or "single variant", ", ".join(about["codecs"]), about["tensors"], about["entries"],
            kind.messages, kind.payload_bytes, kind.overhead_bytes, share, kind.total_bytes,
        ])  # fmt: skip
        fields = [[html_tag("code", name), codec, str(shape), nbytes] for name, codec, shape, nbytes in kind.fields]
        title = f"{way}, {kind.variant or 'every message'}: {len(fields)} fields, bytes in one message"
        folds.append(html_details(title, html_table(["field", "codec", "shape", "bytes"], fields)))
    for direction, way in (("up", "site to server"), ("down", "server to site")):
        if rest := run.unlisted(direction):
            rows.append([way, disclosure.unlisted_messages(run, direction), *[None] * 7, rest])
    head = ["direction", "variant", "codec", "tensors", "entries", "messages", "payload bytes", "overhead bytes"]
    return join_markup([html_table([*head, "overhead", "total bytes"], rows), _by_site(run, kinds), *folds])


def _by_site(run: RunView, found: Sequence[disclosure.DisclosureKind]) -> Html:
    """Return a table of each site's upload count per variant."""
    uploads = [kind for kind in found if kind.direction == "up"]
    if len(uploads) < 2:
        return Html("")
    rows = [[site, *(kind.sites[site] for kind in uploads)] for site in run.sites]
    return html_table(["uploads by site", *(variant_label(kind) for kind in uploads)], rows)


def exchange_section(run: RunView) -> list[list[object]]:
    """Return a row per site: tensors sent and how often, their bytes, all bytes sent, tensors received, their bytes."""
    all_kinds, tensors = disclosure.message_kinds(run), Counter[str]()
    for message in run.messages:
        tensors[str(message["site"])] += (message["direction"] == "up") * message["payload_bytes"]

    def said(site: str, way: str) -> str:
        kinds = [kind for kind in all_kinds if kind.direction == way and kind.sites[site]]
        return ", ".join(f"{_held(run, kind)} {format_times(kind.sites[site])}" for kind in kinds)

    def sent(site: per_site.SiteRecord) -> str:
        refused = sum(why.startswith(per_site.REFUSED) for _, why in site.failures)
        return ", ".join(
            filter(None, [said(site.name, "up"), f"refused uploads {format_times(refused)}" if refused else ""])
        )

    return [
        [s.name, sent(s), tensors[s.name], s.up, said(s.name, "down"), s.down] for s in per_site.records_by_site(run)
    ]


def sites_section(run: RunView) -> Html:
    """Return each site's client rounds, reported values, bytes and failures."""
    report_columns = [] if run.unseen else ["examples", "rows", "loss received", "loss trained", "train seconds"]
    head = ["site", "accepted", "unsigned", "asked", *report_columns, "upload bytes", "download bytes", "failures"]
    rows, records = [], per_site.records_by_site(run)
    for s in records:
        counts = s.rows.words if s.rows else None
        report_values = [] if run.unseen else [s.examples, counts, s.loss_received, s.loss_trained, s.train_seconds]
        why = join_markup((f"round {round_ + 1}: {reason}" for round_, reason in s.failures), "; ") or None
        rows.append([s.name, s.accepted, s.unsigned, s.asked, *report_values, s.up, s.down, why])
    unsigned = [html_tag("p", UNSIGNED_NOTE, "note")] if any(s.unsigned for s in records) else []
    notes = [_not_by_site(run, records), *unsigned, *([] if run.unseen else [html_tag("p", LOSSES_NOTE, "note")])]
    return join_markup([last_attempt(run), html_table(head, rows), *notes, held_out(run, records)])


def last_attempt(run: RunView) -> Html:
    """Return the run's last or current attempt, site by site."""
    last = per_site.last_attempt(run)
    if last is None:
        return Html("")
    kinds = {per_site.ACCEPTED: "completed", per_site.WAITING: "plain"}
    rows = [
        [site, html_tag("span", state, f"tag {kinds.get(state, 'failed')}"), why] for site, state, why in last.sites
    ]
    return html_table(["site", "result", "why"], rows, caption=last.words)


def _not_by_site(run: RunView, records: Sequence[per_site.SiteRecord]) -> Html:
    """Return a note on data that older runs recorded only for all sites together."""
    rest = run.upload_bytes - sum(s.up for s in records), run.download_bytes - sum(s.down for s in records)
    what = disclosure.unlisted_messages(run, "up")
    words = f"Not in this table, because the run's record does not list them by site: {what}, {rest[0]:,} upload bytes"
    return html_tag("p", f"{words} and {rest[1]:,} download bytes.", "note") if any(rest) else Html("")


def held_out(run: RunView, records: Sequence[per_site.SiteRecord]) -> Html:
    """Return each site's last held-out score with its number of examples, and the weighted mean; "" without scores."""
    site_scores = [(s.name, s.held_out) for s in records if s.held_out is not None]
    if not site_scores:
        return Html("")
    rows = [[name, score.round + 1, score.loss, score.rows or None, score.why or None] for name, score in site_scores]
    means = [(int(a["round"]), per_site.mean_scored(a.get("reports") or {})) for a in run.attempts if not a.get("void")]
    last = [
        f"Mean weighted by examples, in round {round_ + 1}: {mean[0]:.4f} ({mean[1]} examples of {mean[2]} sites). "
        for round_, mean in means
        if mean
    ][-1:]
    head = ["site", "received in round", "loss on held-out examples", "examples", "reason for no score"]
    return join_markup([html_table(head, rows), html_tag("p", f"{''.join(last)}{HELD_OUT_NOTE}", "note")])
