"""A run's privacy card as a page of the dashboard, from final/privacy.json alone. Signatures are not checked here."""

from __future__ import annotations

from typing import Any

from fedveil.cards import markdown
from fedveil.cards.card import AttackEntry, PrivacyCard
from fedveil.console.web.report.html import Html, html_table
from fedveil.sanitize import sanitize

__all__ = ["card_about"]

_MOST_ROWS = 200
_LONGEST = 1000


def card_about(card: PrivacyCard) -> dict[str, Any]:
    """Return the variables of the page about a card. Its texts are untrusted, and are bounded here."""
    of, log = card.guarantee, card.audit_log
    against = [[one.party, markdown.format_epsilon(one.epsilon)] for one in of.against]
    traffic = [[s.site, s.up, s.up_bytes, s.down, s.down_bytes, s.unsigned] for s in card.traffic]
    stated = [["who is responsible", card.stated.curator], ["what the model is for", card.stated.use],
              ["why this epsilon", card.stated.why_epsilon], ["license", card.stated.license],
              *([f"data set of {site}", name] for site, name in card.stated.data_sets.items())]  # fmt: skip
    made = [["app", card.digests.app or "not known"], ["config", card.digests.config],
            *([f"base, {name}", digest] for name, digest in card.digests.base.files.items()),
            ["end of the server's audit log", log.server or "not known"],
            *([f"end of {site}'s audit log", anchor] for site, anchor in log.sites.items())]  # fmt: skip
    return {
        "says": _text(of.says), "board": [_text(words) for words in of.for_the_board],
        "against": _table(["against", "epsilon, at most"], against, "Epsilon by adversary"),
        "assumptions": [_text(words) for words in of.assumptions],
        "parties": [(_text(p.who), [_text(saw) for saw in p.saw], [_text(t) for t in p.trusted])
                    for p in card.parties[:_MOST_ROWS]],
        "attacks": _table(["attack", "strongest on the run", "model", "controls"],
                          list(map(_attack, card.audited.attacks)), "Attacks"),
        "measured": card.audited.measured, "not_measured": markdown.NOT_MEASURED.replace("`", ""),
        "not_protected": [_text(words) for words in card.not_protected],
        "traffic": _table(["site", "messages up", "bytes up", "messages down", "bytes down", "unsigned uploads"],
                          traffic, "Messages by site"),
        "stated": _table(["what", "stated"], [[what, words or "not stated"] for what, words in stated],
                         "Stated by people"),
        "made": _table(["of", "SHA-256"], made, "Digests"), "written": sanitize(card.run.written, 40),
        "about": f"{card.run.method}: {card.run.task}, base {card.run.base or '?'}, {card.run.rounds} rounds",
    }  # fmt: skip


def _attack(attack: AttackEntry) -> list[object]:
    top = max(attack.run, key=lambda score: score.auroc[0], default=None)
    holds = "hold" if attack.usable else "NOT usable: a control fails or is missing"
    if top is None:
        return [attack.name, "not tried on the run", "", holds]
    return [attack.name, "{:.2f} [{:.2f}, {:.2f}]".format(*top.auroc), top.model, holds]


def _table(head: list[str], rows: list[list[Any]], caption: str) -> Html:
    return html_table(head, rows[:_MOST_ROWS], caption=caption) if rows else Html("")


def _text(value: object) -> str:
    return sanitize(value, _LONGEST)
