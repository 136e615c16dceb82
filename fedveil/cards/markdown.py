"""PRIVACY.md: the card as a readable page. It is computed only from the card's data, so equal cards give equal pages.

Texts in a card are untrusted, so all markup characters in them are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fedveil.cards.card import (
    AttackEntry,
    AttackScore,
    Epsilon,
    PrivacyCard,
    PrivacyGuaranteeEntry,
    SentMessages,
    SiteCost,
    SiteRows,
    SiteTraffic,
)
from fedveil.sanitize import sanitize

NOT_MEASURED = (
    "Not measured: this run had not been attacked when this card was written, so nothing is claimed about what "
    "attacks would find. `fedveil audit RUN` attacks it, and `fedveil card make RUN` then updates the card."
)
NOT_SAID = (
    "An epsilon bounds what changes with one example. It does not decide whether data or a model are personal data in "
    "the sense of a law, and it is no percentage."
)
BY_SITE = (
    "All messages by site: those above, refused uploads, and the keys and shares of secure aggregation. A site's own "
    "log may have more: answers that came too late or were no longer needed, and messages of an attempt that the "
    "server crashed before recording."
)
NO_ROWS = (
    "No site reported this. Sites report it in runs on text, without a privacy guarantee and without secure "
    "aggregation, and only if their policy permits it."
)
AS_REPORTED = "As each site reported it last. A row that is longer than `task.max-tokens` loses its end."
_MARKUP = re.compile(r"([\\`*_\[\]#|~$@])|(?<=www)(\.)|(:)(?=//)|^([-+=])|^(\d{1,9}[.)])(?=\s|$)")
_LONGEST = 4200


def plain_text(value: object) -> str:
    """Escape a value so that Markdown and HTML show it literally, on one line."""
    text = _MARKUP.sub(lambda found: f"{found[0][:-1]}\\{found[0][-1]}", sanitize(value, _LONGEST))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def card_page(card: PrivacyCard) -> str:
    """Return the whole page."""
    run = card.run
    parts = [
        f"# Privacy card: {plain_text(run.name)}",
        f"Method {plain_text(run.method)} (version {run.version}), task {plain_text(run.task)}, base "
        f"{plain_text(run.base) or '?'}, {run.rounds} rounds, resumed {run.resumed} times; started "
        f"{plain_text(run.started) or '?'}, card written {plain_text(run.written)}. `privacy.json` has the same "
        "content as data.",
        "## Guarantee",
        *_guarantee(card.guarantee),
        *_board(card.guarantee),
        "## Who saw what, and was trusted with what",
        *_parties(card),
        "## What was sent",
        *_sent(card.sent, card.traffic),
        "## Rows that were cut or left out",
        *_rows(card.rows),
        "## What attacks found",
        *_attacks(card),
        "## What is not protected",
        markdown_list(card.not_protected),
        "## Stated by people",
        *_stated(card),
        "## What it was made from",
        *_made_from(card),
    ]
    return "\n\n".join(parts) + "\n"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table. The head is trusted; the cells are not, and are escaped."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(plain_text, row)) + " |" for row in rows)])


def markdown_list(items: Iterable[object]) -> str:
    """Return a Markdown list."""
    return "\n".join(f"- {plain_text(item)}" for item in items)


def format_epsilon(value: Epsilon) -> str:
    """Format an epsilon with four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else value


def _guarantee(of: PrivacyGuaranteeEntry) -> list[str]:
    blocks = [f"**{plain_text(of.says)}**"]
    if not of.relation:
        return blocks
    rows: list[tuple[str, object]] = [
        ("unit", of.unit),
        ("relation of neighboring data sets", of.relation),
        ("sampling", of.sampling),
        ("epsilon spent, at most", format_epsilon(of.epsilon)),
        ("delta", "" if of.delta is None else f"{of.delta:g}"),
        ("nominal epsilon, which is not guaranteed", "none" if of.nominal is None else f"{of.nominal:g}"),
        ("the most that a site's ledger lets an example be charged", format_epsilon(of.allowed)),
        ("where the noise is added", of.model),
        ("mechanism", of.mechanism),
        ("accountant", of.accountant),
    ]
    blocks.append(markdown_table(["", ""], rows))
    if of.against:
        against = ((one.party, format_epsilon(one.epsilon)) for one in of.against)
        blocks.append(markdown_table(["against", "epsilon, at most"], against))
    head = ["site", "examples", "participations", "steps in each", "epsilon, at most", "against all others", "mu (GDP)"]
    blocks.append(markdown_table(head, map(_site, of.sites)))
    blocks += [markdown_list(f"{site.site}: {site.unknown}" for site in of.sites if site.unknown)]
    return [part for part in [*blocks, "It relies on these assumptions:", markdown_list(of.assumptions)] if part]


def _board(of: PrivacyGuaranteeEntry) -> list[str]:
    """Return the section for an ethics board; [] if the card has no sentences for one."""
    if not of.for_the_board:
        return []
    numbered = "\n".join(f"{number}. {plain_text(words)}" for number, words in enumerate(of.for_the_board, 1))
    return ["## For an ethics board", numbered, NOT_SAID]


def _site(site: SiteCost) -> list[object]:
    if site.unknown:
        return [site.site, "?", "?", "?", "not known", "", ""]
    mu = "not stated" if site.mu is None else f"{site.mu:.4g}"
    mu += f" (down to delta {site.mu_down_to:g})" if site.mu_down_to else ""
    against_all = "" if site.against_all is None else format_epsilon(site.against_all)
    return [site.site, site.rows, site.participations, site.steps, format_epsilon(site.epsilon), against_all, mu]


def _parties(card: PrivacyCard) -> list[str]:
    blocks = []
    for party in card.parties:
        blocks += [f"### {plain_text(party.who)}", markdown_list(party.saw)]
        blocks += ["Trusted with:", markdown_list(party.trusted)] if party.trusted else ["Trusted with nothing."]
    return blocks


def _sent(sent: Sequence[SentMessages], traffic: Sequence[SiteTraffic]) -> list[str]:
    if not sent and not traffic:
        return ["No message was exchanged."]
    head = ["direction", "variant", "tensors", "messages by site", "bytes", "tensor bytes"]
    rows = [
        [
            "site to server" if kind.direction == "up" else "server to site", kind.variant or "the only one",
            len(kind.fields), ", ".join(f"{site}: {count}" for site, count in kind.sites.items()), kind.bytes,
            kind.payload,
        ]
        for kind in sent
    ]  # fmt: skip
    blocks = [
        markdown_table(head, rows),
        "`privacy.json` lists every field with its codec, shape and bytes, under `sent`.",
    ]
    of_sites = [[s.site, s.up, s.up_bytes, s.down, s.down_bytes, s.unsigned] for s in traffic]
    return [
        *blocks,
        BY_SITE,
        markdown_table(
            ["site", "messages up", "bytes up", "messages down", "bytes down", "unsigned uploads"], of_sites
        ),
    ]


def _rows(rows: Sequence[SiteRows]) -> list[str]:
    if not rows:
        return [NO_ROWS]
    head = ["site", "rows read", "cut at their end", "left out as empty"]
    return [markdown_table(head, [[s.site, s.read, s.cut, s.dropped] for s in rows]), AS_REPORTED]


def _attacks(card: PrivacyCard) -> list[str]:
    if not card.audited.measured:
        return [NOT_MEASURED]
    blocks = [
        "An AUROC of 0.5 is guessing; intervals are 95 %. An attack counts only where both kinds of controls hold."
    ]
    for attack in card.audited.attacks:
        holds = "its controls hold" if attack.usable else "NOT usable: a control fails or is missing"
        blocks += [f"### {plain_text(attack.name)}: {holds}", plain_text(attack.why)]
        head = ["", "model", "AUROC", "TPR at 0.1 % FPR", "epsilon at least", "examples", "verdict"]
        blocks.append(markdown_table(head, _scores(attack)))
    return [*blocks, markdown_list(card.audited.notes)]


def _scores(attack: AttackEntry) -> list[list[object]]:
    groups: tuple[tuple[str, list[AttackScore]], ...] = (
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


def _stated(card: PrivacyCard) -> list[str]:
    of = card.stated
    rows = [
        ("who is responsible for the run", of.curator),
        ("what the model is for", of.use),
        ("why this epsilon, delta and unit", of.why_epsilon),
        ("license of the model", of.license),
        *((f"data set of {site}", name) for site, name in of.data_sets.items()),
    ]
    return [markdown_table(["", ""], [(what, text or "not stated") for what, text in rows])]


def _made_from(card: PrivacyCard) -> list[str]:
    of, log = card.digests, card.audit_log
    base = [(f"base, {name}", digest) for name, digest in of.base.files.items()]
    rows = [
        ("app (bundle)", of.app or "not known"),
        ("config", of.config),
        ("base, revision", of.base.revision or "none"),
        *(base or [("base", "not on the machine that wrote the card")]),
        ("end of the server's audit log", log.server or "not known"),
        *(
            [(f"end of {site}'s audit log, as reported to the server", anchor) for site, anchor in log.sites.items()]
            or [("ends of sites' audit logs", "none: no site keeps a log or has reported its end")]
        ),
        *((f"method field {name}", value) for name, value in card.run.fields.items()),
        *((f"version of {name}", version) for name, version in card.run.versions.items()),
    ]
    note = [plain_text(log.note)] if log.note else []
    return [
        *note,
        "SHA-256 of each; for a log, its number of lines and the hash of the last one.",
        markdown_table(["", ""], rows),
    ]
