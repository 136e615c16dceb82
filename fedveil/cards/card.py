"""The privacy card as data: privacy.json in a run's model folder, with all facts that the card's pages show.

It has the fields that NIST SP 800-226 requires for a claim: unit, relation, parameters, trust, mechanism and hazards.
It also has those in the deployment registry's schema (arXiv 2509.13509): who, for what, flavor, loss, model, accounting
and implementation. A fact that was not stated is "", and the pages then say "not stated".

A card may come from an untrusted source, so its size is bounded, and keys that this version does not know are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedveil.errors import StateError
from fedveil.sanitize import sanitize

NAME, PAGE, README = "privacy.json", "PRIVACY.md", "README.md"
MOST_BYTES = 8 << 20

Short = Annotated[str, Field(max_length=300)]
Text = Annotated[str, Field(max_length=4000)]
Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
Anchor = Annotated[str, Field(pattern=r"^(\d{1,18}:[0-9a-f]{64})?$")]
Count = Annotated[int, Field(ge=0, le=1 << 62)]
Epsilon = Annotated[float, Field(ge=0)] | Literal["infinite", "not known"]


def short_digest(value: object) -> str:
    """Sanitize an untrusted name for a card: printable, on one line, truncated."""
    return sanitize(value, 250)[:300]


def card_text(value: object) -> str:
    """Sanitize an untrusted sentence for a card."""
    return sanitize(value, 3500)[:4000]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class DeclaredFacts(_Part):
    """Facts that people must state, because the code cannot know them.

    Attributes:
        curator: who is responsible for the run.
        use: the purpose of the model.
        why_epsilon: the reason for the choice of epsilon, delta and unit.
        license: the model's license, by its name on the Hugging Face Hub.
        data_sets: the ID of each site's data set, as given by the site.
    """

    curator: Text = ""
    use: Text = ""
    why_epsilon: Text = ""
    license: Annotated[str, Field(pattern=r"^([a-z0-9][a-z0-9.-]{0,60})?$")] = ""
    data_sets: dict[Short, Short] = {}


class RunFacts(_Part):
    """The facts that identify a run.

    Attributes:
        id: 8 hex digits that distinguish runs with the same name; "" if there are none.
        fields: the method's fields.
        base: the base model's name.
        rounds: number of rounds that went into the model.
        scores: the last scores of the server's model.
        versions: package versions by name, at the start of the run.
    """

    name: Short
    id: Short
    task: Short
    method: Short
    version: int
    fields: dict[Short, Text]
    base: Short
    rounds: Count
    started: Short
    written: Short
    resumed: Count
    scores: dict[Short, float]
    versions: dict[Short, Short]


class SentMessages(_Part):
    """All messages of one kind. The disclosure ledger lists each kind by field.

    Attributes:
        sites: number of messages by site.
        bytes: size of whole messages, including refused and repeated ones; `payload` counts only the tensors.
        fields: name, codec, shape and bytes of each field in the first message of this kind.
    """

    direction: Literal["up", "down"]
    variant: Short
    sites: dict[Short, Count]
    bytes: Count
    payload: Count
    fields: list[tuple[Short, Short, list[Count], Count]]


class SiteTraffic(_Part):
    """One site's messages as the server recorded them, including the keys and shares for secure aggregation.

    `unsigned`: number of accepted uploads that the site did not sign.
    """

    site: Short
    up: Count
    up_bytes: Count
    down: Count
    down_bytes: Count
    unsigned: Count


class SiteRows(_Part):
    """The numbers of rows that a site read, truncated, and dropped as empty, as the site reported them."""

    site: Short
    read: Count
    cut: Count
    dropped: Count


class DisclosureParty(_Part):
    """A party in a run: what it saw, and what it was trusted with."""

    who: Short
    saw: list[Text]
    trusted: list[Text]


class SiteCost(_Part):
    """An upper bound on the epsilon charged to a site's examples, based on the site's reports.

    Attributes:
        against_all: epsilon against the server and all other sites together, if the noise is in the sum.
        mu: mu of Gaussian differential privacy; None if it is unknown.
        mu_down_to: mu bounds every epsilon whose delta is at least this; 0 if mu is exact.
        unknown: why there are no values; "" if there are values.
    """

    site: Short
    rows: Count = 0
    participations: Count = 0
    steps: Count = 0
    epsilon: Epsilon = "not known"
    against_all: Epsilon | None = None
    mu: float | None = None
    mu_down_to: float = 0.0
    unknown: Text = ""


class PartyBound(_Part):
    """The epsilon against one party."""

    party: Short
    epsilon: Epsilon


class PrivacyGuaranteeEntry(_Part):
    """A run's formal guarantee, or a statement that it has none.

    Attributes:
        formal: True if a bound holds against some adversary.
        says: the guarantee in a sentence.
        unit: what may differ between neighboring data sets.
        relation: the neighboring relation; "" without a guarantee.
        sampling: how batches are drawn, as far as it affects epsilon.
        against: the epsilon against each party.
        for_the_board: three sentences for an ethics board; [] if no figure holds against the server.
        nominal: an epsilon that was set for the method, but that the method does not guarantee.
        allowed: the largest epsilon that a site's ledger allows for a record.
        epsilon: upper bound for the site that was charged most.
        model: where the noise is added, in words.
    """

    formal: bool
    says: Text
    unit: Text
    relation: Short = ""
    sampling: Text = ""
    against: list[PartyBound] = []
    for_the_board: list[Text] = []
    delta: float | None = None
    nominal: float | None = None
    allowed: Epsilon = "infinite"
    epsilon: Epsilon = "infinite"
    model: Text = ""
    mechanism: Text = ""
    accountant: Text = ""
    sites: list[SiteCost] = []
    assumptions: list[Text] = []


class AttackScore(_Part):
    """The result of one attack on one model; `auroc` is given with its 95 % interval."""

    model: Short
    auroc: tuple[float, float, float]
    tpr_at_01: tuple[float, float, float]
    epsilon_at_least: float
    members: Count
    non_members: Count
    verdict: Literal["above", "below", "contains"]


class AttackEntry(_Part):
    """One attack with its controls.

    Attributes:
        usable: whether both kinds of controls were tried and hold; otherwise the scores mean nothing.
        why: the audit's explanation.
        run: scores on the run's own models.
        to_win: scores on controls where the attack must succeed.
        to_lose: scores on controls where the attack must fail.
    """

    name: Short
    usable: bool
    why: Text
    run: list[AttackScore]
    to_win: list[AttackScore]
    to_lose: list[AttackScore]


class AuditSection(_Part):
    """The results of the privacy attacks. Without an audit, `measured` is false and nothing is claimed."""

    measured: bool = False
    audit: Digest = ""
    attacks: list[AttackEntry] = []
    notes: list[Text] = []


class BaseModelFiles(_Part):
    """SHA-256 digests of the base model's files; {} if the files are not on the machine that wrote the card."""

    revision: Short = ""
    files: dict[Short, Digest] = {}


class RunDigests(_Part):
    """SHA-256 digests of the run's base model, app and config.

    Attributes:
        app: digest of the app bundle; "" if it is not known.
        config: digest of the run config with the method's fields, from `digest_config`.
    """

    base: BaseModelFiles
    app: Digest
    config: Digest


class LogAnchors(_Part):
    """The ends of the audit logs when the card was written, as "LINES:SHA-256".

    Attributes:
        sites: the last anchor that each site sent with an upload of this run.
        note: why anchors are missing; "" if none is.
    """

    server: Anchor = ""
    sites: dict[Short, Anchor] = {}
    note: Text = ""


class PrivacyCard(_Part):
    """The privacy card."""

    fedveil_card: Literal[1]
    run: RunFacts
    stated: DeclaredFacts
    parties: list[DisclosureParty]
    sent: list[SentMessages]
    traffic: list[SiteTraffic] = []
    rows: list[SiteRows] = []
    guarantee: PrivacyGuaranteeEntry
    audited: AuditSection
    not_protected: list[Text]
    digests: RunDigests
    audit_log: LogAnchors

    def to_bytes(self) -> bytes:
        """Return the content of privacy.json; equal cards give equal bytes."""
        return self.model_dump_json(indent=1).encode() + b"\n"


def parse_card(data: bytes, where: str) -> PrivacyCard:
    """Parse the bytes of privacy.json. Raises StateError, which names `where`."""
    if len(data) > MOST_BYTES:
        raise StateError(
            f"{where}: the card has {len(data)} bytes, but at most {MOST_BYTES} are allowed; use another card"
        )
    try:
        return PrivacyCard.model_validate_json(data)
    except (ValidationError, RecursionError) as error:
        raise StateError(
            f"{where}: not a privacy card of version 1 ({sanitize(error, 300)}); write it again with the fedveil "
            "version that created it, or use another card"
        ) from None


def read_card(folder: Path) -> PrivacyCard:
    """Read the card in a folder. Raises StateError if it is missing or invalid."""
    file = folder / NAME
    if file.is_symlink() or not file.is_file():
        raise StateError(f"{folder}: there is no privacy card ({NAME}); write one with fedveil card make RUN")
    with file.open("rb") as lines:
        return parse_card(lines.read(MOST_BYTES + 1), str(file))
