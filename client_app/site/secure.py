"""This site in secure aggregation: its keys on disk, and what it demands of a run.

    <state-dir>/<run>/<site>/secure.json   run key, the seed of the last prekey, what was opened; sealed with a key file
    <state-dir>/.signing/<site>.key        made here where the node config names no signing key

| case | what happens |
|---|---|
| the run config says `secure.enabled`, and the order has no plan; or the other way round | WireError: nothing is sent |
| the plan's ring, least sum or threshold are not the run config's, which the policy has judged | WireError |
| membership or roster have another signing key under this site's name | PolicyError |
| secure.json is damaged | StateError; moved away, the site is set up anew, and answers no more for its old key |
| an older copy of secure.json is put back | not noticed: it may open the other half of a secret; never restore it |
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedveil import places, sealed
from fedveil.client_app.site import policy
from fedveil.client_app.site.assignment import Assignment
from fedveil.client_app.site.private import SECURE, folder_of, role_of, safe
from fedveil.config import SecureConfig
from fedveil.errors import PolicyError, StateError, WireError
from fedveil.federation.secure import keys
from fedveil.federation.secure.kept import Kept
from fedveil.federation.secure.membership import Membership
from fedveil.federation.secure.server import Settings
from fedveil.federation.secure.site import Demands, Site
from fedveil.federation.secure.statements import Hello, Plan, Setup, Unmask, question_of
from fedveil.records.files import stamped_bytes, unstamped_bytes, write_atomic
from fedveil.sealed import Seal


@dataclass(frozen=True)
class FileStore:
    """Implements `fedveil.federation.secure.site.Store` in the run's folder."""

    folder: Path
    seal: Seal = Seal()

    @property
    def _file(self) -> Path:
        return self.folder / SECURE

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Held by one process of the site at a time."""
        places.private_folder(self.folder)
        with (self.folder / "secure.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def load(self) -> Kept | None:
        """What was saved last. Raises StateError where it is damaged."""
        if not self._file.exists():
            return None
        try:
            return Kept.of(unstamped_bytes(self.seal.read(self._file, role_of(self._file))))
        except (OSError, ValueError, WireError) as error:
            raise StateError(
                f"{self._file}: expected this site's keys of the run, found none that can be read ({error}); move it "
                "away, and the site is set up anew"
            ) from None

    def save(self, kept: Kept) -> None:
        """Keeps it on disk, whole or not at all. Raises StateError, for example on a full disk."""
        try:
            write_atomic(self._file, self.seal.closed([stamped_bytes(kept.to_bytes())], role_of(self._file)))
        except OSError as error:
            raise StateError(f"{self._file}: expected to write it, found {error}; free space") from error


def site_of(assignment: Assignment) -> Site:
    """This site, with its keys and its demands. Raises ConfigError, PolicyError."""
    site, found = assignment.site, policy.of(assignment.site)
    store = FileStore(folder_of(site.state_dir, assignment.order.run, assignment.name), Seal.of(site.key_file))
    feared = assignment.config.secure.feared
    demands = Demands(max(found.min_cohort or 2, 2), found.min_threshold or 2, found.roster or "", feared)
    return Site(assignment.order.run, assignment.order.site, signing_key(assignment), store, demands)


def signing_key(assignment: Assignment) -> bytes:
    """The site's private signing key: of the file that the node config names, or else one of its own."""
    named = assignment.site.signing_key
    if named:
        return read_key(Path(named).expanduser())
    path = assignment.site.state_dir.expanduser() / ".signing" / f"{safe('site', assignment.name)}.key"
    if not path.exists():
        write_atomic(path, os.urandom(keys.KEY_BYTES))
    return read_key(path)


def read_key(path: Path) -> bytes:
    """A signing key of 32 bytes. Raises ConfigError for another file, or one that others can read."""
    return sealed.read_key(path, "signing-key", "fedveil site init makes one", "fedveil site init")


def plan_of(assignment: Assignment) -> Plan | None:
    """The plan of the order, as the run config has it; None for a run in the clear. Raises WireError."""
    order, config = assignment.order, assignment.config.secure
    if bool(order.secure) != config.enabled:
        asked = "a plan" if config.enabled else "none"
        raise WireError(f"order: secure: expected {asked}, as secure.enabled has it, found {order.secure[:20]!r}")
    if not order.secure:
        return None
    plan = Plan.of(order.secure.encode())
    found = (plan.run, plan.round, plan.attempt, plan.bits, plan.most_weight, plan.bound, plan.least)
    expected = (
        order.run, order.round, order.attempt, config.ring_bits, config.max_examples, config.bound, config.min_sites,
    )  # fmt: skip
    if found != expected:
        raise WireError(
            f"order: secure: expected a plan with {expected}, as order and run config have it, found {found}"
        )
    return plan


@dataclass(frozen=True)
class Unseen:
    """A turn whose upload nobody sees."""

    site: Site
    plan: Plan


def begun(assignment: Assignment) -> Unseen | None:
    """The turn's plan, which this site agrees to; None for one in the clear. Raises PolicyError, WireError."""
    plan = plan_of(assignment)
    if plan is None:
        return None
    site = site_of(assignment)
    site.begin(plan)
    return Unseen(site, plan)


def answered(assignment: Assignment, statement: bytes) -> bytes:
    """The answer to a question about keys or shares. Raises PolicyError, WireError, StateError."""
    config, site = assignment.config.secure, site_of(assignment)
    if not config.enabled:
        raise WireError("secure: expected no question in a run with secure.enabled = false, found one")
    match question := question_of(statement):
        case Hello():
            return site.hello(question).to_bytes()
        case Unmask():
            return site.unmask(question).to_bytes()
        case Setup():
            _require_agreed(question.membership, config)
            _require_own(question, site)
            return site.join(question).to_bytes()


def _require_own(asked: Setup, site: Site) -> None:
    """That sites agree on one roster says that all keys in it are theirs only if each of them has found its own there.

    Raises PolicyError.
    """
    own = keys.verifying_key(site.signing_key).hex()
    member = asked.membership.by_name.get(site.name)
    for where, found in (
        ("the membership", member.signing_key if member else None),
        ("the roster", asked.roster.get(site.name, own if not site.demands.roster else None)),
    ):
        if found != own:
            raise PolicyError(
                f"signing-key: expected this site's own in {where}, {own[:16]}..., found {(found or 'none')[:16]}; "
                "have it registered, and the roster written anew"
            )


def _require_agreed(found: Membership, config: SecureConfig) -> None:
    agreed = Settings(threshold=config.threshold, neighbours=config.neighbours)
    if found.digest != agreed.membership(found.run, found.members).digest:
        raise WireError(
            f"secure: expected a membership as the run config has it, found one of {found.count} holders, of whom "
            f"{found.threshold} open a secret"
        )
