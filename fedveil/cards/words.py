"""PRIVACY.md: the card in words. All of it follows from the card's data, so equal cards have equal pages.

What stands in a card may be anybody's text. No character of it is markup on the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fedveil.cards.card import Attack, Card, Epsilon, Guarantee, Score, Sent, SiteCost, Traffic
from fedveil.foreign import shown

NOT_MEASURED = (
    "Not measured: no attack had been run on this run when this card was written, so nothing is claimed of what "
    "attacks would find. `fedveil audit RUN` attacks it, and `fedveil card make RUN` then writes the card anew."
)
BY_SITE = (
    "All messages by site: these, refused uploads, and the keys and shares of secure aggregation. A site's own log may "
    "have more: an answer that came too late, or that the server needed no more, and those of an attempt that the "
    "server did not live to record."
)
_MARKUP = re.compile(r"([\\`*_\[\]#|~$@])|(?<=www)(\.)|(:)(?=//)|^([-+=])|^(\d{1,9}[.)])(?=\s|$)")
_LONGEST = 4200


def plain(value: object) -> str:
    """Text that Markdown and HTML show as it is, on one line."""
    text = _MARKUP.sub(lambda found: f"{found[0][:-1]}\\{found[0][-1]}", shown(value, _LONGEST))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def page(card: Card) -> str:
    """The whole page."""
    run = card.run
    parts = [
        f"# Privacy card: {plain(run.name)}",
        f"Method {plain(run.method)} (version {run.version}), task {plain(run.task)}, base {plain(run.base) or '?'}, "
        f"{run.rounds} rounds, resumed {run.resumed} times; started {plain(run.started) or '?'}, card of "
        f"{plain(run.written)}. The same as data: `privacy.json`.",
        "## Guarantee",
        *_guarantee(card.guarantee),
        "## Who saw what, and was trusted with what",
        *_parties(card),
        "## What was sent",
        *_sent(card.sent, card.traffic),
        "## What attacks found",
        *_attacks(card),
        "## What is not protected",
        bullets(card.not_protected),
        "## Stated by people",
        *_stated(card),
        "## What it was made from",
        *_made_from(card),
    ]
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; the head is ours, the cells are anybody's."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(plain, row)) + " |" for row in rows)])


def bullets(items: Iterable[object]) -> str:
    """A list."""
    return "\n".join(f"- {plain(item)}" for item in items)


def epsilon(value: Epsilon) -> str:
    """With four digits."""
    return f"{value:.4g}" if isinstance(value, float) else value


def _guarantee(of: Guarantee) -> list[str]:
    said = [f"**{plain(of.says)}**"]
    if not of.relation:
        return said
    rows: list[tuple[str, object]] = [
        ("unit", of.unit),
        ("relation of neighbouring data sets", of.relation),
        ("epsilon of what was done, at most", epsilon(of.epsilon)),
        ("delta", "" if of.delta is None else f"{of.delta:g}"),
        ("nominal epsilon, which is not kept", "none" if of.nominal is None else f"{of.nominal:g}"),
        ("most that a site's ledger lets a row be charged", epsilon(of.allowed)),
        ("where the noise is added", of.model),
        ("mechanism", of.mechanism),
        ("accountant", of.accountant),
    ]
    said.append(table(["", ""], rows))
    head = ["site", "rows", "participations", "steps in each", "epsilon, at most", "against all others", "mu (GDP)"]
    said.append(table(head, map(_site, of.sites)))
    said += [bullets(f"{site.site}: {site.unknown}" for site in of.sites if site.unknown)]
    return [part for part in [*said, "It rests on this:", bullets(of.assumptions)] if part]


def _site(site: SiteCost) -> list[object]:
    if site.unknown:
        return [site.site, "?", "?", "?", "not known", "", ""]
    mu = "not stated" if site.mu is None else f"{site.mu:.4g}"
    mu += f" (down to delta {site.mu_down_to:g})" if site.mu_down_to else ""
    against_all = "" if site.against_all is None else epsilon(site.against_all)
    return [site.site, site.rows, site.participations, site.steps, epsilon(site.epsilon), against_all, mu]


def _parties(card: Card) -> list[str]:
    said = []
    for party in card.parties:
        said += [f"### {plain(party.who)}", bullets(party.saw)]
        said += ["Trusted with:", bullets(party.trusted)] if party.trusted else ["Trusted with nothing."]
    return said


def _sent(sent: Sequence[Sent], traffic: Sequence[Traffic]) -> list[str]:
    if not sent and not traffic:
        return ["No message was exchanged."]
    head = ["direction", "variant", "tensors", "messages by site", "bytes", "of these, tensors"]
    rows = [
        [
            "site to server" if kind.direction == "up" else "server to site", kind.variant or "the only one",
            len(kind.fields), ", ".join(f"{site}: {count}" for site, count in kind.sites.items()), kind.bytes,
            kind.payload,
        ]
        for kind in sent
    ]  # fmt: skip
    said = [table(head, rows), "Every field with its codec, shape and bytes stands in `privacy.json`, under `sent`."]
    of_sites = [[s.site, s.up, s.up_bytes, s.down, s.down_bytes] for s in traffic]
    return [*said, BY_SITE, table(["site", "messages up", "bytes up", "messages down", "bytes down"], of_sites)]


def _attacks(card: Card) -> list[str]:
    if not card.audited.measured:
        return [NOT_MEASURED]
    said = ["AUROC 0.5 is guessing; intervals of 95 %. An attack counts only where both kinds of controls hold."]
    for attack in card.audited.attacks:
        holds = "its controls hold" if attack.usable else "NOT usable: a control fails or is missing"
        said += [f"### {plain(attack.name)}: {holds}", plain(attack.why)]
        head = ["", "model", "AUROC", "TPR at 0.1 % FPR", "epsilon at least", "rows", "verdict"]
        said.append(table(head, _scores(attack)))
    return [*said, bullets(card.audited.notes)]


def _scores(attack: Attack) -> list[list[object]]:
    groups: tuple[tuple[str, list[Score]], ...] = (
        ("the run", attack.run), ("control to win", attack.to_win), ("control to lose", attack.to_lose),
    )  # fmt: skip
    return [
        [
            what, s.model, "{:.3f} [{:.3f}, {:.3f}]".format(*s.auroc), "{:.3f} [{:.3f}, {:.3f}]".format(*s.tpr_at_01),
            f"{s.epsilon_at_least:.2f}", f"{s.members} / {s.non_members}", s.verdict,
        ]
        for what, scores in groups
        for s in scores
    ]  # fmt: skip


def _stated(card: Card) -> list[str]:
    of = card.stated
    rows = [
        ("who answers for the run", of.curator),
        ("what the model is for", of.use),
        ("why this epsilon, delta and unit", of.why_epsilon),
        ("license of the model", of.license),
        *((f"data set of {site}", name) for site, name in of.data_sets.items()),
    ]
    return [table(["", ""], [(what, said or "not stated") for what, said in rows])]


def _made_from(card: Card) -> list[str]:
    of, log = card.digests, card.audit_log
    base = [(f"base, {name}", digest) for name, digest in of.base.files.items()]
    rows = [
        ("app (bundle)", of.app or "not known"),
        ("config", of.config),
        ("base, revision", of.base.revision or "none"),
        *(base or [("base", "not on the machine that wrote the card")]),
        ("end of the server's audit log", log.server or "not known"),
        *(
            [(f"end of {site}'s audit log, as it told the server", anchor) for site, anchor in log.sites.items()]
            or [("ends of sites' audit logs", "none: no site keeps one, or has sent its end")]
        ),
        *((f"method field {name}", value) for name, value in card.run.fields.items()),
        *((f"version of {name}", version) for name, version in card.run.versions.items()),
    ]
    note = [plain(log.note)] if log.note else []
    return [*note, "SHA-256 of each; of a log, its lines and the hash of the last one.", table(["", ""], rows)]
