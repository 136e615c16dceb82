"""A site's part in secure aggregation: its keys on disk, and its requirements for a run.

    <state-dir>/<run>/<site>/secure.json   run key, seed of the last prekey, revealed shares; encrypted with a key file
    <state-dir>/.signing/<site>.key        created here if the node config names no signing key

| case | result |
|---|---|
| the run config has `secure.enabled` but the instruction has no plan, or vice versa | WireError: nothing is sent |
| the plan's ring, minimum sum or threshold differ from the run config, which the policy has checked | WireError |
| membership or roster have another signing key under this site's name | PolicyError |
| secure.json is damaged | StateError; once moved away, the site gets a new setup, and its old key is unusable |
| an older copy of secure.json is restored | not detected: it may reveal the other half of a secret; never restore it |
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedveil import encrypted_files, paths
from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.policy.site_policy import SitePolicy, load_policy
from fedveil.client_app.state.client_state import SECURE, safe_file_name, state_folder_of, state_role
from fedveil.config import SecureConfig
from fedveil.contract.entry_table import EntryTable
from fedveil.encrypted_files import FileSeal
from fedveil.errors import PolicyError, StateError, WireError
from fedveil.federation.secagg import crypto, entry_plan
from fedveil.federation.secagg.membership import RunMembership
from fedveil.federation.secagg.messages import (
    AttemptPlan,
    MembershipRequest,
    PrekeyRequest,
    UnmaskRequest,
    parse_request,
)
from fedveil.federation.secagg.server import SecAggConfig
from fedveil.federation.secagg.site import SecAggSite, SiteRequirements
from fedveil.federation.secagg.state import SiteSecAggState
from fedveil.records.atomic_files import checksummed_bytes, verify_checksummed, write_atomic


@dataclass(frozen=True)
class FileSecAggStore:
    """Implements `fedveil.federation.secagg.site.SecAggStore` in the run's folder."""

    folder: Path
    seal: FileSeal = FileSeal()

    @property
    def _file(self) -> Path:
        return self.folder / SECURE

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock that only one process of the site can have."""
        paths.private_folder(self.folder)
        with (self.folder / "secure.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def load(self) -> SiteSecAggState | None:
        """Return the last saved state, or None. Raises StateError if the file is damaged."""
        if not self._file.exists():
            return None
        try:
            return SiteSecAggState.from_bytes(verify_checksummed(self.seal.read(self._file, state_role(self._file))))
        except (OSError, ValueError, WireError) as error:
            raise StateError(
                f"{self._file}: expected this site's keys of the run, found none that can be read ({error}); move it "
                "away to set the site up again"
            ) from None

    def save(self, kept: SiteSecAggState) -> None:
        """Save the state atomically. Raises StateError, for example on a full disk."""
        try:
            write_atomic(self._file, self.seal.closed([checksummed_bytes(kept.to_bytes())], state_role(self._file)))
        except OSError as error:
            raise StateError(f"{self._file}: expected to write it, found {error}; free space") from error


def open_secagg_site(assignment: ClientAssignment, policy: SitePolicy) -> SecAggSite:
    """Open this site with its keys and its policy's demands. Raises ConfigError, PolicyError."""
    site = assignment.site
    store = FileSecAggStore(
        state_folder_of(site.state_dir, assignment.order.run, assignment.name), FileSeal.from_key_file(site.key_file)
    )
    feared = assignment.config.secure.feared
    demands = SiteRequirements(max(policy.min_cohort or 2, 2), policy.min_threshold or 2, policy.roster or "", feared)
    return SecAggSite(assignment.order.run, assignment.order.site, signing_key(assignment), store, demands)


def signing_key(assignment: ClientAssignment) -> bytes:
    """Return the site's private signing key: from the file in the node config, or one that the site creates."""
    named = assignment.site.signing_key
    if named:
        return read_key(Path(named).expanduser())
    path = assignment.site.state_dir.expanduser() / ".signing" / f"{safe_file_name('site', assignment.name)}.key"
    if not path.exists():
        write_atomic(path, os.urandom(crypto.KEY_BYTES))
    return read_key(path)


def read_key(path: Path) -> bytes:
    """Read a signing key of 32 bytes. Raises ConfigError for another file, or one that others can read."""
    return encrypted_files.read_key_file(path, "signing-key", "create one with fedveil site init", "fedveil site init")


def read_attempt_plan(assignment: ClientAssignment) -> AttemptPlan | None:
    """Return the instruction's plan if it matches the run config; None for a run in the clear. Raises WireError."""
    order, config = assignment.order, assignment.config.secure
    if bool(order.secure) != config.enabled:
        asked = "a plan" if config.enabled else "none"
        raise WireError(f"order: secure: expected {asked}, as secure.enabled requires, found {order.secure[:20]!r}")
    if not order.secure:
        if order.entries:
            raise WireError("order: entries: expected no table for an upload in the clear, found one")
        return None
    plan = AttemptPlan.from_bytes(order.secure.encode())
    actual = (plan.run, plan.round, plan.attempt, plan.bits, plan.most_weight, plan.bound, plan.least)
    expected = (
        order.run, order.round, order.attempt, config.ring_bits, config.max_weight, config.clip_bound, config.min_sites,
    )  # fmt: skip
    if actual != expected:
        raise WireError(
            f"order: secure: expected a plan with {expected}, as order and run config state, found {actual}"
        )
    return plan


@dataclass(frozen=True)
class SecureClientRound:
    """A client round with a masked upload.

    Attributes:
        entries: the table of who sends which entries; None: the server sent none.
    """

    site: SecAggSite
    plan: AttemptPlan
    entries: EntryTable | None = None


def begin_secure_round(assignment: ClientAssignment, policy: SitePolicy) -> SecureClientRound | None:
    """Return the client round with its accepted plan; None if in the clear. Raises PolicyError, WireError."""
    plan = read_attempt_plan(assignment)
    if plan is None:
        return None
    site = open_secagg_site(assignment, policy)
    site.begin(plan)
    return SecureClientRound(site, plan, read_entry_table(assignment, plan))


def read_entry_table(assignment: ClientAssignment, plan: AttemptPlan) -> EntryTable | None:
    """Return the instruction's table if the plan's cohort may be summed by it. Raises PolicyError, WireError."""
    if not assignment.order.entries:
        return None
    table, secure = EntryTable.from_text(assignment.order.entries), assignment.config.secure
    quorum = entry_plan.signing_quorum(len(plan.cohort), secure)
    table.require_cohort(plan.cohort, plan.least, quorum, secure.max_colluders)
    return table


def answer_secagg_request(assignment: ClientAssignment, statement: bytes) -> bytes:
    """Answer a request for keys or shares. Raises PolicyError, WireError, StateError."""
    config = assignment.config.secure
    site = open_secagg_site(assignment, load_policy(assignment.site))
    if not config.enabled:
        raise WireError("secure: expected no request in a run with secure.enabled = false, found one")
    match question := parse_request(statement):
        case MembershipRequest():
            return site.hello(question).to_bytes()
        case UnmaskRequest():
            return site.unmask(question).to_bytes()
        case PrekeyRequest():
            _require_agreed(question.membership, config)
            _require_own(question, site)
            return site.join(question).to_bytes()


def _require_own(asked: PrekeyRequest, site: SecAggSite) -> None:
    """Raise PolicyError unless membership and roster have this site's own key under its name.

    Sites that agree on one roster can trust all its keys only if each site has found its own key there.
    """
    own = crypto.verifying_key(site.signing_key).hex()
    member = asked.membership.by_name.get(site.name)
    for where, key in (
        ("the membership", member.signing_key if member else None),
        ("the roster", asked.roster.get(site.name, own if not site.demands.roster else None)),
    ):
        if key != own:
            raise PolicyError(
                f"signing-key: expected this site's own in {where}, {own[:16]}..., found {(key or 'none')[:16]}; "
                "register it, and write the roster again"
            )


def _require_agreed(found: RunMembership, config: SecureConfig) -> None:
    agreed = SecAggConfig(threshold=config.threshold, neighbours=config.graph_degree)
    if found.digest != agreed.membership(found.run, found.members).digest:
        raise WireError(
            f"secure: expected a membership that matches the run config, found one of {found.count} holders with "
            f"threshold {found.threshold}"
        )
