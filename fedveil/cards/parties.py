"""Who saw what in a run, and was trusted with what: sentences from the run's own record, not from what was planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedveil.cards.card import Party, text
from fedveil.config import RunConfig
from fedveil.federation.secure.claim import weakest
from fedveil.foreign import shown
from fedveil.records import disclosed

_MOST_NAMES = 40


def of(
    messages: Sequence[Mapping[str, Any]], attempts: Sequence[Mapping[str, Any]], config: RunConfig, method: str
) -> list[Party]:
    """The parties of a run. Fields and bytes of the messages stand beside them on the card."""
    words = disclosed.words_of(method)
    words = disclosed.in_sum(words, disclosed.THE_SUM) if config.secure.enabled else words
    learns = [text(sentence.replace("`", "")) for sentence in words]
    return [
        Party(
            who="the server, and who reads its run folder",
            saw=_server_saw(messages, attempts, config, [words for words in learns if "client learns" not in words]),
            trusted=_server_trusted(attempts, config),
        ),
        Party(
            who="a site",
            saw=[
                "Its own rows, and what the server sent it.",
                *(words for words in learns if "client learns" in words),
                *_told("down", messages, attempts),
            ],
            trusted=["To train on its own rows as the run asks, and to report truthfully: one can poison the model."],
        ),
        Party(
            who="another site",
            saw=["Nothing of a single site but through the model that the server sends out.", *_collusion(config)],
            trusted=[],
        ),
        Party(
            who="whoever gets this folder",
            saw=["The server's model after the last round, and this card. Attacks on it need nobody's leave."],
            trusted=[],
        ),
    ]


def _server_saw(
    messages: Sequence[Mapping[str, Any]], attempts: Sequence[Mapping[str, Any]], config: RunConfig, learns: list[str]
) -> list[str]:
    said = ["Every round's model, and which site took part when."]
    said += [*learns, *_told("up", messages, attempts)]
    if names := disclosed.reported(attempts):
        said.append(f"Beside the tensors every accepted upload told: {_listed(names)}.")
    if config.run.tap:
        said.append("The messages themselves, which it kept (run.tap).")
    return said


def _told(direction: str, messages: Sequence[Mapping[str, Any]], attempts: Sequence[Mapping[str, Any]]) -> list[str]:
    """How much went that way, and which words went with it."""
    sites = disclosed.traffic(messages, attempts).values()
    if direction == "up":
        way, count, size = "from sites to the server", sum(s.up for s in sites), sum(s.up_bytes for s in sites)
        each = "repeated and refused ones, and the keys and shares of secure aggregation, counted"
    else:
        way, count, size = "from the server to sites", sum(s.down for s in sites), sum(s.down_bytes for s in sites)
        each = "repeated ones, and the questions of secure aggregation, counted"
    if not size:
        return []
    said = [f"{count} messages {way}, {size} bytes; {each}."]
    words = disclosed.scalars(messages)[direction]
    return [*said, *([f"They also carried: {_listed(words)}."] if words else [])]


def _server_trusted(attempts: Sequence[Mapping[str, Any]], config: RunConfig) -> list[str]:
    said = ["That the run goes on, and that the model here is what the sites made."]
    if not config.secure.enabled:
        return [*said, "With every single upload: nothing but the method itself keeps it from attacking one."]
    least = config.secure.min_sites
    claim = weakest((attempt["unseen"] for attempt in attempts if attempt.get("unseen")), least)
    words = claim.words if claim else ["No attempt at a round got as far as a sum."]
    beside = "Sites whose policy names the roster of all sites are better off; the server does not know their policies."
    return [*said, *words, beside]


def _collusion(config: RunConfig) -> list[str]:
    if config.secure.noise != "sum":
        return []
    return [
        f"{config.secure.colluding} of them may tell the server their share of the noise; the claim counts on that."
    ]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return text(", ".join(shown(name, 80) for name in names[:_MOST_NAMES]))[:3800] + more
