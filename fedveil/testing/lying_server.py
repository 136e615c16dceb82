"""Real sites with their stores, and a server that may send them any request and combines what it learns.

The server's knowledge is computed from real answers. A masked vector is y_i = x_i + own mask + pair masks, and a mask
is unknown until its secret, or t shares of that secret, are known. A plan for the whole cohort has no shares and no own
masks. What remains is a system of linear equations; `ComputableSums` are the combinations of masked vectors that
contain no unknown mask.

Tests and benchmarks of secure aggregation (fedveil/federation/secagg) use it as the attacker.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import FedVeilError, StateError
from fedveil.federation.secagg import crypto, derivations, mask_streams, shamir
from fedveil.federation.secagg.messages import AgreeRequest, KeysRequest, OpenRequest, OpenResponse, UploadAttachment
from fedveil.federation.secagg.plan import AttemptPlan, Prekey, agreed_text, list_digest, quorum_of
from fedveil.federation.secagg.plan_checks import RoundTerms, SiteRequirements
from fedveil.federation.secagg.roster import SigningKeyRoster, roster_digest
from fedveil.federation.secagg.schema import SecAggMessage
from fedveil.federation.secagg.site import SecAggSite
from fedveil.federation.secagg.state import MemorySecAggStore, SecAggStore

RUN = "run-27182"
CONFIG = hashlib.sha256(b"the run config").hexdigest()
TRUE_BROADCAST = hashlib.sha256(b"the weights").hexdigest()
POISONED_BROADCAST = hashlib.sha256(b"weights with which every site's vector is zero").hexdigest()
GARBAGE = "00" * 44
LENGTH = 4

Statement = TypeVar("Statement", bound=SecAggMessage)
Answer = TypeVar("Answer")


def site_names(count: int) -> list[str]:
    """Return s00, s01, ..."""
    return [f"s{i:02}" for i in range(count)]


@contextlib.contextmanager
def remembered_signatures() -> Iterator[None]:
    """Verify each signature once and cache the result, because a search repeats requests thousands of times."""
    known: dict[tuple[bytes, bytes, bytes], bool] = {}
    verify = crypto.is_signed

    def is_signed(key: bytes, signature: bytes, text: bytes) -> bool:
        asked = (bytes(key), bytes(signature), bytes(text))
        if asked not in known:
            known[asked] = verify(*asked)
        return known[asked]

    with mock.patch.object(crypto, "is_signed", is_signed):
        yield


def with_fields(statement: Statement, **changes: Any) -> Statement:
    """Return the statement with changed values, validated as if it had come over the wire."""
    changed = type(statement).model_validate(statement.model_dump() | changes)
    read: Statement = type(statement).from_bytes(changed.to_bytes())
    return read


def terms_of(plan: AttemptPlan, roster: str = "", **changes: Any) -> RoundTerms:
    """Return a site's knowledge of the client round, if the server wrote the run config to match the plan."""
    return replace(
        RoundTerms(
            plan.run, plan.round, plan.attempt, plan.bits, plan.most_weight, plan.bound, plan.noise, plan.least,
            plan.colluding, plan.quorum, plan.neighbours, plan.config, plan.app, roster,
            has_table=bool(plan.entries), is_alike=bool(plan.broadcast), is_whole=plan.is_whole,
        ),
        **changes,
    )  # fmt: skip


@dataclass(frozen=True)
class ObservedUpload:
    """A masked vector that the server received, with the true vector, which only the tests know."""

    site: str
    plan: AttemptPlan
    vector: NDArray[np.uint32]
    attached: UploadAttachment
    true: NDArray[np.uint32]
    number: int

    @property
    def unknown(self) -> tuple[str, int, str]:
        """Return the key of the true vector as an unknown in the linear equations."""
        return self.site, self.plan.round, self.plan.broadcast


ShareKey = tuple[int, str, str]  # the upload's number, the partner of the pair or "", the holder


class LyingServer:
    """A server, its colluding sites with their keys and stores, and honest sites that it can ask.

    Attributes:
        honest, colluders: site names.
        sites: the real sites, including colluders.
        uploads: the uploads of honest sites.
        numbered: the uploads in all games, by number.
        shares: all shares that were revealed or that colluders hold, by the secret they belong to and their holder.
        asked: number of requests, by kind and whether they were answered.
    """

    def __init__(
        self,
        honest: Collection[str],
        colluders: Collection[str] = (),
        demands: SiteRequirements | None = None,
        stores: Mapping[str, SecAggStore] | None = None,
        unlisted: Collection[str] = (),
    ) -> None:
        self.honest, self.colluders = sorted(honest), sorted(colluders)
        self.names = sorted([*honest, *colluders])
        keys = {name: hashlib.sha256(b"signing key of " + name.encode()).digest() for name in self.names}
        listed = {name: crypto.verifying_key(key).hex() for name, key in keys.items() if name not in unlisted}
        self.roster = SigningKeyRoster(signing_keys=listed).to_bytes().decode()
        self.roster_digest = roster_digest(listed)
        demands = demands or SiteRequirements(min_cohort=2, min_threshold=2, roster=self.roster_digest)
        self.boots = dict.fromkeys(self.names, "boot-0")
        self.sites = {
            name: SecAggSite(
                RUN, name, keys[name], (stores or {}).get(name) or MemorySecAggStore(), demands,
                partial(self.boots.__getitem__, name),
            )
            for name in self.names
        }  # fmt: skip
        self.uploads: list[ObservedUpload] = []
        self.numbered: list[ObservedUpload] = []
        self.shares: dict[ShareKey, bytes] = {}
        self.signatures: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
        self.asked: Counter[tuple[str, bool]] = Counter()
        self._private: dict[str, bytes] = {}  # the colluders' private keys, by public key

    # Plans

    def prekey(self, site: str) -> Prekey:
        """Return a site's unused prekey; if it is a colluder, the server takes the private half too."""
        prekey = self.sites[site].ready(KeysRequest(run=RUN)).prekey
        if site in self.colluders:
            state = self.sites[site].store.load()
            if state is None or state.next is None:
                raise StateError(f"{site}: its state lacks the prekey that it has just announced")
            self._private[prekey.key] = bytes.fromhex(state.next.private)
        return prekey

    def plan(
        self, round_: int = 0, attempt: int = 0, cohort: Collection[str] | None = None, **changes: Any
    ) -> AttemptPlan:
        """Return a plan for these sites, by default with the numbers of a server that follows the protocol."""
        members = tuple(self.prekey(site) for site in sorted(cohort or self.names))
        colluding = changes.get("colluding", 1)
        quorum = changes.get("quorum", quorum_of(0, len(members), colluding))
        fields = {
            "run": RUN, "round": round_, "attempt": attempt, "roster": self.roster_digest, "app": "", "config": CONFIG,
            "broadcast": TRUE_BROADCAST, "entries": "", "bits": 32, "most_weight": 1, "bound": 64.0, "noise": "site",
            "least": min(3, len(members)), "colluding": colluding, "quorum": quorum, "threshold": quorum,
            "neighbours": 0, "members": members,
        }  # fmt: skip
        return AttemptPlan(**(fields | changes))

    # Requests

    def mask(self, site: str, plan: AttemptPlan, terms: RoundTerms | None = None) -> ObservedUpload | None:
        """Ask a site to mask its vector for a plan; None if it refuses."""
        true = true_vector(site, plan)
        hidden = true.copy()
        try:
            attached = self.sites[site].mask(plan, terms or terms_of(plan, self.roster), hidden)
        except FedVeilError:
            return self._count("mask", None)
        upload = ObservedUpload(site, plan, hidden, attached, true, len(self.numbered))
        if site in self.honest:
            self.uploads.append(upload)
            self.numbered.append(upload)
            self.shares |= self._colluders_shares(upload)
        return self._count("mask", upload)

    def agree(self, site: str, plan: AttemptPlan, in_sum: Iterable[str]) -> str | None:
        """Ask a site to sign a list; None if it refuses."""
        in_sum = tuple(sorted(in_sum))
        try:
            answer = self.sites[site].agree(AgreeRequest(plan=plan, table="", in_sum=in_sum))
        except FedVeilError:
            return self._count("agree", None)
        self.signatures[plan.digest, answer.list][site] = answer.signature
        return self._count("agree", answer.signature)

    def open(
        self,
        site: str,
        plan: AttemptPlan,
        in_sum: Iterable[str],
        agreed: dict[str, str] | None = None,
        rows: dict[str, str] | None = None,
    ) -> OpenResponse | None:
        """Ask a site for its shares; None if it refuses. The default is the best certificate that the server has."""
        in_sum = tuple(sorted(in_sum))
        request = OpenRequest(
            plan=plan,
            table="",
            in_sum=in_sum,
            agreed=self.certificate(plan, in_sum) if agreed is None else agreed,
            rows=self.rows(site, plan, in_sum) if rows is None else rows,
        )
        try:
            answer = self.sites[site].open(request)
        except FedVeilError:
            return self._count("open", None)
        self.shares |= self._opened_shares(site, plan, answer)
        return self._count("open", answer)

    def _count(self, kind: str, answer: Answer) -> Answer:
        self.asked[kind, answer is not None] += 1
        return answer

    def certificate(self, plan: AttemptPlan, in_sum: Collection[str]) -> dict[str, str]:
        """Return the signatures of a list: those given by honest sites, and those that the colluders create."""
        listed = list_digest(plan.digest, in_sum)
        text = agreed_text(plan, listed)
        own = {
            site: crypto.sign_bytes(self.sites[site].signing_key, text).hex()
            for site in self.colluders
            if site in in_sum
        }
        return own | self.signatures[plan.digest, listed]

    def rows(
        self, holder: str, plan: AttemptPlan, in_sum: Collection[str], source: AttemptPlan | None = None
    ) -> dict[str, str]:
        """Return the rows for a holder, from the uploads for a plan; garbage for dealers without an upload."""
        wanted = (source or plan).digest
        made = {upload.site: upload.attached.rows for upload in self.uploads if upload.plan.digest == wanted}
        dealers = [dealer for dealer in plan.cohort if dealer in in_sum and holder in plan.holders(dealer)]
        return {dealer: made.get(dealer, {}).get(holder, GARBAGE) for dealer in dealers}

    # Knowledge

    def _colluders_shares(self, upload: ObservedUpload) -> dict[ShareKey, bytes]:
        """Return the shares of an upload's secrets that colluders hold."""
        plan, dealer = upload.plan, upload.site
        partners = ["", *plan.partners(dealer)]
        found: dict[ShareKey, bytes] = {}
        for holder in self.colluders:
            if holder not in plan.holders(dealer):
                continue
            shared = crypto.exchange_keys(
                self._private[plan.by_name[holder].key], bytes.fromhex(plan.by_name[dealer].key)
            )
            key, row = derivations.row_key(shared, plan.digest, dealer, holder), upload.attached.rows[holder]
            shares = derivations.decrypt_row(key, row, len(partners), plan.digest, dealer, holder)
            found |= {(upload.number, other, holder): share for other, share in zip(partners, shares, strict=True)}
        return found

    def _opened_shares(self, holder: str, plan: AttemptPlan, answer: OpenResponse) -> dict[ShareKey, bytes]:
        """Return an answer's shares by the secrets they belong to, as identified by the dealers' digests."""
        texts = [(dealer, "", text) for dealer, text in answer.own.items()]
        texts += [(dealer, other, text) for dealer, pairs in answer.pairs.items() for other, text in pairs.items()]
        found = {}
        for dealer, other, text in texts:
            if (share := self._share_of(holder, dealer, other, plan, bytes.fromhex(text))) is not None:
                found[share] = bytes.fromhex(text)
        return found

    def _share_of(self, holder: str, dealer: str, other: str, plan: AttemptPlan, share: bytes) -> ShareKey | None:
        """Find the secret that a share belongs to: usually the requested one, but every plan and partner is tried."""
        of_dealer = [upload for upload in self.numbered if upload.site == dealer]
        for upload in sorted(of_dealer, key=lambda upload: upload.plan.digest != plan.digest):
            digests = upload.attached.shares.get(holder)
            if digests is None:
                continue
            partners = ["", *upload.plan.partners(dealer)]
            for partner in sorted(partners, key=lambda partner: partner != other):
                digest = derivations.share_digest(share, upload.plan.digest, dealer, holder, partner)
                if digests[partners.index(partner)] == digest:
                    return upload.number, partner, holder
        return None

    def secret(self, upload: ObservedUpload, other: str) -> bytes | None:
        """Return the secret of an upload's own mask (if `other` is "") or of a pair, if t of its shares are known."""
        plan = upload.plan
        if plan.is_whole:  # the secret is not shared
            return None
        shares = {
            plan.place(upload.site, holder): self.shares[upload.number, other, holder]
            for holder in plan.holders(upload.site)
            if (upload.number, other, holder) in self.shares
        }
        if len(shares) < plan.threshold:
            return None
        return shamir.combine_shares(dict(itertools.islice(shares.items(), plan.threshold)))

    def pair_secret(self, upload: ObservedUpload, other: str) -> bytes | None:
        """Return a pair's secret, from shares of either end, or because the other end colludes with the server."""
        plan = upload.plan
        if other in self.colluders:
            private = self._private[plan.by_name[other].key]
            shared = crypto.exchange_keys(private, bytes.fromhex(plan.by_name[upload.site].key))
            return derivations.pair_secret(shared, plan.digest, upload.site, other)
        ends = [(upload, other)]
        ends += [(u, upload.site) for u in self.uploads if u.site == other and u.plan.digest == plan.digest]
        return next((found for u, o in ends if (found := self.secret(u, o)) is not None), None)

    def sums(self, is_counted: Callable[[ObservedUpload], bool] = lambda upload: True) -> ComputableSums:
        """Return the combinations of masked vectors in which no unknown mask remains."""
        signs: dict[int, dict[tuple[str, str, str], int]] = {}
        known: dict[tuple[str, str, str], bool] = {}
        for upload in self.uploads:
            if not is_counted(upload) or not self._is_known(upload, ""):
                continue
            p, site = upload.plan.digest, upload.site
            for other in upload.plan.partners(site):
                pair = (p, min(site, other), max(site, other))
                if pair not in known:
                    known[pair] = other in self.colluders or self._is_known(upload, other)
                    known[pair] = known[pair] or any(
                        self._is_known(u, site) for u in self.uploads if u.site == other and u.plan.digest == p
                    )
                if not known[pair]:
                    signs.setdefault(upload.number, {})[pair] = 1 if site < other else -1
            signs.setdefault(upload.number, {})
        return ComputableSums(self, _null_space(signs))

    def _is_known(self, upload: ObservedUpload, other: str) -> bool:
        plan = upload.plan
        if plan.is_whole:  # vectors have no own mask, and pair secrets are not shared
            return not other
        shares = sum((upload.number, other, holder) in self.shares for holder in plan.holders(upload.site))
        return shares >= plan.threshold

    def unmasked(self, combination: Mapping[int, int]) -> NDArray[np.uint32]:
        """Return a combination of masked vectors, given by upload number, with all known masks removed."""
        total = np.zeros(LENGTH, np.uint32)
        for number, factor in combination.items():
            upload, p = self.numbered[number], self.numbered[number].plan.digest
            vector = upload.vector.copy()
            masks = []
            if not upload.plan.is_whole:
                own = self.secret(upload, "")
                if own is None or derivations.own_secret_digest(own, p, upload.site) != upload.attached.own:
                    raise StateError(f"{upload.site}: its shares give a secret other than that of its own mask")
                masks.append(derivations.own_mask(own, p, upload.site))
            for other in upload.plan.partners(upload.site):
                if (secret := self.pair_secret(upload, other)) is not None:
                    if derivations.pair_secret_digest(secret, p, upload.site, other) != upload.attached.pairs[other]:
                        raise StateError(
                            f"{upload.site}, {other}: the shares give a secret other than that of their mask"
                        )
                    masks.append(derivations.pairwise_mask(secret, p, upload.site, other))
            mask_streams.add_masks(vector, [replace(mask, sign=-mask.sign) for mask in masks])
            total += vector * np.uint32(factor % (1 << 32))
        return total


def true_vector(site: str, plan: AttemptPlan) -> NDArray[np.uint32]:
    """Return a site's vector in a round: zeros, which the server knows, if the site got the poisoned broadcast."""
    if plan.broadcast == POISONED_BROADCAST:
        return np.zeros(LENGTH, np.uint32)
    seed = hashlib.sha256(f"{site} {plan.round} {plan.broadcast}".encode()).digest()
    return np.frombuffer(seed[: 4 * LENGTH], "<u4").copy()


def _null_space(signs: Mapping[int, Mapping[tuple[str, str, str], int]]) -> list[dict[int, int]]:
    """Return a basis of the combinations of uploads in which each unknown pair mask cancels.

    Uploads with a mask that no other upload has are removed first. The remaining uploads form parts that share no
    masks. If every mask in a part is in exactly two uploads, with opposite signs, the part is a connected graph, and
    its masks cancel only if all factors are equal.
    """
    left = {upload: dict(masks) for upload, masks in signs.items()}
    while True:
        count = Counter(pair for masks in left.values() for pair in masks)
        alone = [upload for upload, masks in left.items() if any(count[pair] == 1 for pair in masks)]
        if not alone:
            break
        for upload in alone:
            del left[upload]
    by_pair: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for upload, masks in left.items():
        for pair in masks:
            by_pair[pair].append(upload)
    basis, unseen = [], set(left)
    while unseen:
        part, queue = set(), [unseen.pop()]
        while queue:
            upload = queue.pop()
            part.add(upload)
            for pair in left[upload]:
                queue += [u for u in by_pair[pair] if u in unseen]
                unseen -= set(by_pair[pair])
        pairs = sorted({pair for upload in part for pair in left[upload]})
        if all(len(by_pair[pair]) == 2 and sum(left[u][pair] for u in by_pair[pair]) == 0 for pair in pairs):
            basis.append(dict.fromkeys(sorted(part), 1))
        else:
            basis += _left_null_space(sorted(part), [[left[u].get(pair, 0) for pair in pairs] for u in sorted(part)])
    return basis


def _left_null_space(uploads: list[int], matrix: list[list[int]]) -> list[dict[int, int]]:
    """Return an integer basis of the rational combinations of rows that are zero."""
    size = len(uploads)
    rows = [[Fraction(v) for v in row] + [Fraction(i == j) for j in range(size)] for i, row in enumerate(matrix)]
    rank, width = 0, len(matrix[0])
    for column in range(width):
        pivot = next((r for r in range(rank, size) if rows[r][column]), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        for r in range(rank + 1, size):
            if factor := rows[r][column] / rows[rank][column]:
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[rank], strict=True)]
        rank += 1
    found = []
    for row in rows[rank:]:
        factors = row[width:]
        scale = int(np.lcm.reduce([f.denominator for f in factors]))
        found.append({u: int(f * scale) for u, f in zip(uploads, factors, strict=True) if f})
    return found


@dataclass
class ComputableSums:
    """All combinations of masked vectors that the server can compute.

    Attributes:
        basis: a basis of the combinations, each with factors by upload number.
    """

    server: LyingServer
    basis: list[dict[int, int]]

    def lightest(self, exempt: Collection[str] = ()) -> tuple[int, dict[int, int]] | None:
        """Return the smallest nonzero number of honest vectors in a combination, and that combination.

        Vectors from `exempt` sites, whose state was rolled back, do not count.
        """
        uploads = self.server.numbered
        unknowns = sorted(
            {
                uploads[u].unknown
                for combination in self.basis
                for u in combination
                if uploads[u].plan.broadcast != POISONED_BROADCAST and uploads[u].site not in exempt
            }
        )
        place = {unknown: i for i, unknown in enumerate(unknowns)}
        vectors, combinations = [], []
        for combination in self.basis:
            vector = [0] * len(unknowns)
            for u, factor in combination.items():
                if uploads[u].unknown in place:
                    vector[place[uploads[u].unknown]] += factor
            vectors.append(vector)
            combinations.append(combination)
        best = None
        for factors in _candidates(vectors):
            weight = sum(any_of_column(factors, column) for column in zip(*vectors, strict=True))
            if weight and (best is None or weight < best[0]):
                best = (weight, factors)
        if best is None:
            return None
        total: Counter[int] = Counter()
        for factor, combination in zip(best[1], combinations, strict=True):
            for u, value in combination.items():
                total[u] += factor * value
        return best[0], {u: value for u, value in total.items() if value}

    def attack(self, exempt: Collection[str] = ()) -> int:
        """Compute the values of the lightest combination, and return the number of honest vectors in it.

        0 if the server learns nothing.
        """
        found = self.lightest(exempt)
        if found is None:
            return 0
        weight, combination = found
        expected = np.zeros(LENGTH, np.uint32)
        for u, factor in combination.items():
            expected += self.server.numbered[u].true * np.uint32(factor % (1 << 32))
        if not np.array_equal(self.server.unmasked(combination), expected):
            raise StateError("sums: the combination differs from the same combination of the true vectors")
        return weight


def any_of_column(factors: Collection[int], column: Collection[int]) -> bool:
    """Return whether a combination contains this unknown."""
    return sum(f * v for f, v in zip(factors, column, strict=True)) != 0


_MOST_EXACT = 4  # maximum basis size for which all combinations are searched


def _candidates(vectors: list[list[int]]) -> Iterator[list[int]]:
    """Yield candidate factors, including those of the combination with the fewest nonzero entries.

    A lightest combination is zero in enough independent columns to determine it. With more than four vectors, only
    combinations of up to three of them are searched, so some may be missed.
    """
    count = len(vectors)
    for i in range(count):
        yield [int(i == j) for j in range(count)]
    for size in range(2, min(count, _MOST_EXACT if count <= _MOST_EXACT else 3) + 1):
        for chosen in itertools.combinations(range(count), size):
            columns = {tuple(vectors[i][c] for i in chosen) for c in range(len(vectors[0]))} - {(0,) * size}
            for zeros in itertools.combinations(sorted(columns), size - 1):
                matrix = [list(row) for row in zip(*zeros, strict=True)]  # its null space makes these columns zero
                null = _left_null_space(list(range(size)), matrix)
                if len(null) == 1:
                    factors = [0] * count
                    for i, value in null[0].items():
                        factors[chosen[i]] = value
                    yield factors
