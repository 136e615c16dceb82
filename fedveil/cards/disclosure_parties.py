"""Sentences about what each party in a run saw and was trusted with, based on the run's records rather than its
plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedveil.cards.card import DisclosureParty, card_text
from fedveil.config import RunConfig
from fedveil.contract.method import Method
from fedveil.federation.secagg.adversary_model import server_learns, weakest_adversary
from fedveil.records import disclosure_summary
from fedveil.sanitize import sanitize

_MOST_NAMES = 40


def disclosure_parties(
    messages: Sequence[Mapping[str, Any]], attempts: Sequence[Mapping[str, Any]], config: RunConfig, method: Method
) -> list[DisclosureParty]:
    """Return the parties of a run. The card lists the messages' fields and bytes separately."""
    words = disclosure_summary.what_is_learned(config.method.name)
    words = (
        disclosure_summary.what_is_learned_in_sum(words, server_learns(method.has_single_site_entries))
        if config.secure.enabled
        else words
    )
    learns = [card_text(sentence.replace("`", "")) for sentence in words]
    return [
        DisclosureParty(
            who="the server, and anyone who can read its run folder",
            saw=_server_saw(messages, attempts, config, [words for words in learns if "client learns" not in words]),
            trusted=_server_trusted(attempts, config, method),
        ),
        DisclosureParty(
            who="a site",
            saw=[
                "Its own examples, and the messages that the server sent it.",
                *(words for words in learns if "client learns" in words),
                *_told("down", messages, attempts),
            ],
            trusted=[
                "To train on its own examples as the run asks, and to report truthfully: a single site can poison "
                "the model."
            ],
        ),
        DisclosureParty(
            who="another site",
            saw=["Nothing of a single site, except through the model that the server sends out.", *_collusion(config)],
            trusted=[],
        ),
        DisclosureParty(
            who="anyone who gets this folder",
            saw=["The server's model after the last round, and this card. Attacks on it need no permission."],
            trusted=[],
        ),
    ]


def _server_saw(
    messages: Sequence[Mapping[str, Any]], attempts: Sequence[Mapping[str, Any]], config: RunConfig, learns: list[str]
) -> list[str]:
    sentences = ["Every round's model, and which site took part when."]
    sentences += [*learns, *_told("up", messages, attempts)]
    if names := disclosure_summary.reported_metrics(attempts):
        sentences.append(f"Besides the tensors, every accepted upload reported: {_listed(names)}.")
    if config.run.capture_messages:
        sentences.append("The messages themselves, which it stored (run.capture-messages).")
    return sentences


def _told(direction: str, messages: Sequence[Mapping[str, Any]], attempts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return sentences about the messages sent in this direction: count, bytes and scalar names."""
    sites = disclosure_summary.site_traffic(messages, attempts).values()
    if direction == "up":
        way, count, size = "from sites to the server", sum(s.up for s in sites), sum(s.up_bytes for s in sites)
        each = "including repeated and refused ones, and the keys and shares of secure aggregation"
    else:
        way, count, size = "from the server to sites", sum(s.down for s in sites), sum(s.down_bytes for s in sites)
        each = "including repeated ones, and the requests of secure aggregation"
    if not size:
        return []
    sentences = [f"{count} messages {way}, {size} bytes; {each}."]
    words = disclosure_summary.scalar_names(messages)[direction]
    return [*sentences, *([f"They also carried: {_listed(words)}."] if words else [])]


def _server_trusted(attempts: Sequence[Mapping[str, Any]], config: RunConfig, method: Method) -> list[str]:
    sentences = ["To continue the run, and to release the model that the sites trained."]
    if not config.secure.enabled:
        return [*sentences, "With every single upload: only the method itself keeps the server from attacking one."]
    noted = (attempt["unseen"] for attempt in attempts if attempt.get("unseen"))
    bound = method.has_bound_broadcast
    claim = weakest_adversary(
        noted, config.secure.min_sites, method.has_single_site_entries, bound, method.plans_entries
    )
    words = claim.words if claim else ["No attempt at a round produced a sum."]
    return [*sentences, *words]


def _collusion(config: RunConfig) -> list[str]:
    if not config.secure.enabled:
        return []
    noise = " and tell it their share of the noise" if config.secure.noise == "sum" else ""
    return [f"Up to {config.secure.max_colluders} of them may work with the server{noise}; the claim allows for that."]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return card_text(", ".join(sanitize(name, 80) for name in names[:_MOST_NAMES]))[:3800] + more
