"""A site's part in secure aggregation: its keys on disk, and its requirements for a run.

    <state-dir>/<run>/<site>/secure.json   the unused prekey, the keys to the shares that others made for this site, and
                                           the steps it must not repeat; encrypted if there is a key file
    <state-dir>/.signing/<site>.key        created here if the node config names no signing key

| case | result |
|---|---|
| the run config has `secure.enabled` but the instruction has no plan, or vice versa | WireError: nothing is sent |
| a rule of plan_checks.py is violated | PolicyError or WireError, before any row is read |
| the message is not the plan's, although the method sends all sites one message | WireError, before decoding |
| the policy names a roster, but the node config names no site | PolicyError: the server would name the state folder |
| a request names a different site than the node config | PolicyError |
| secure.json is damaged | StateError; once the file has been moved away, the site makes a new prekey and refuses
  requests for the old one |
| secure.json is lost, or an older copy is restored | the site may agree to a second sum in a
  round: for the rounds that it forgot, it counts as colluding with the server. Never restore the file |
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from fedveil import encrypted_files, paths
from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.policy.site_policy import SitePolicy, load_policy
from fedveil.client_app.state.client_state import SECURE, ClientStateStore, safe_file_name, state_folder_of, state_role
from fedveil.encrypted_files import FileSeal
from fedveil.errors import PolicyError, StateError, WireError
from fedveil.federation.secagg import crypto
from fedveil.federation.secagg.messages import AgreeRequest, KeysRequest, OpenRequest, parse_request
from fedveil.federation.secagg.plan import AttemptPlan, broadcast_digest, config_digest
from fedveil.federation.secagg.plan_checks import RoundTerms, SiteRequirements, StateUse
from fedveil.federation.secagg.refusals import AuditLogWriter, log_refusals, number_refusals
from fedveil.federation.secagg.site import SecAggSite
from fedveil.federation.secagg.state import SiteSecAggState
from fedveil.records import audit_log
from fedveil.records.atomic_files import checksummed_bytes, verify_checksummed, write_atomic

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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
        """Hold the lock, which only one of the site's processes can hold at a time."""
        paths.private_folder(self.folder)
        with (self.folder / "secure.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def load(self) -> SiteSecAggState | None:
        """Return the last saved state; None if there is none. Raises StateError if the file is damaged."""
        if not self._file.exists():
            return None
        try:
            return SiteSecAggState.from_bytes(verify_checksummed(self.seal.read(self._file, state_role(self._file))))
        except (OSError, ValueError, WireError) as error:
            raise StateError(
                f"{self._file}: cannot read this site's keys for the run ({error}); move the file away to set the site "
                "up again"
            ) from None

    def save(self, kept: SiteSecAggState) -> None:
        """Save the state atomically. Raises StateError, for example on a full disk."""
        try:
            write_atomic(self._file, self.seal.closed([checksummed_bytes(kept.to_bytes())], state_role(self._file)))
        except OSError as error:
            raise StateError(f"{self._file}: cannot be written: {error}; free some disk space") from error


def read_boot_id() -> str:
    """Return the machine's boot id; "" on a system that has none. Raises StateError if it cannot be read."""
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise StateError(f"{_BOOT_ID}: cannot read this machine's boot id ({error})") from None


def open_secagg_site(assignment: ClientAssignment, policy: SitePolicy) -> SecAggSite:
    """Open this site with its keys and its policy's requirements. Raises ConfigError, PolicyError."""
    with number_refusals("T2"):
        _require_own_name(assignment, policy)
    site = assignment.site
    store = FileSecAggStore(
        state_folder_of(site.state_dir, assignment.order.run, assignment.name), FileSeal.from_key_file(site.key_file)
    )
    run, name = assignment.order.run, assignment.order.site
    return SecAggSite(
        run, name, signing_key(assignment), store, requirements_of(policy), read_boot_id, _audit_log_of(assignment)
    )


def _require_own_name(assignment: ClientAssignment, policy: SitePolicy) -> None:
    own = assignment.site.site
    if policy.roster and not own:
        raise PolicyError(
            "site: the policy names a roster, so the node config must name the site: the server could otherwise choose "
            "another folder for the site's mask state; set site"
        )
    if own and own != assignment.order.site:
        raise PolicyError(
            f"site: the server asked for {assignment.order.site}, but the node config names this site {own}; register "
            "the site under its own name"
        )


def _audit_log_of(assignment: ClientAssignment) -> AuditLogWriter:
    """Return a function that appends a line to the site's audit log. It raises StateError."""
    return functools.partial(audit_log.append_entry, assignment.site.state_dir.expanduser() / audit_log.NAME)


def _log_refusals(assignment: ClientAssignment, request: str) -> AbstractContextManager[None]:
    """Return a context that logs refusals in the audit log, until there is a `SecAggSite` that judges plans."""
    order = assignment.order
    about = {"run": order.run, "site": assignment.name, "round": order.round, "attempt": order.attempt}
    return log_refusals(_audit_log_of(assignment), request, about)


def requirements_of(policy: SitePolicy) -> SiteRequirements:
    """Return the conditions under which a site with this policy takes part in sums."""
    return SiteRequirements(
        max(policy.min_cohort or 2, 2), policy.min_threshold or 1, policy.roster or "", policy.min_colluders or 0
    )


def signing_key(assignment: ClientAssignment) -> bytes:
    """Return the site's private signing key: from the node config's file, or else a key that the site creates."""
    named = assignment.site.signing_key
    if named:
        return read_key(Path(named).expanduser())
    path = assignment.site.state_dir.expanduser() / ".signing" / f"{safe_file_name('site', assignment.name)}.key"
    if not path.exists():
        write_atomic(path, os.urandom(crypto.KEY_BYTES))
    return read_key(path)


def read_key(path: Path) -> bytes:
    """Read a 32-byte signing key. Raises ConfigError if the file is something else, or if others can read it."""
    return encrypted_files.read_key_file(path, "signing-key", "create one with fedveil site init", "fedveil site init")


def read_attempt_plan(assignment: ClientAssignment) -> AttemptPlan | None:
    """Return the instruction's plan if it matches the run config; None for a run without masks. Raises WireError."""
    order, config = assignment.order, assignment.config.secure
    if bool(order.secure) != config.enabled:
        asked = "a plan" if config.enabled else "none"
        raise WireError(f"order: secure: secure.enabled requires {asked}, found {order.secure[:20]!r}")
    if not order.secure:
        if order.entries:
            raise WireError("order: entries: an unmasked upload has no entry table, but the instruction has one")
        return None
    return AttemptPlan.from_bytes(order.secure.encode())


def round_terms(assignment: ClientAssignment) -> RoundTerms:
    """Return the site's own view of a client round, independent of the plan. Raises ConfigError, WireError."""
    from fedveil import strategies  # imports torch, which the process that answers requests does not need

    order, config, secure = assignment.order, assignment.config, assignment.config.secure
    method = strategies.create_from_json(order.method, order.fields)
    states = ClientStateStore.open(assignment.site.state_dir, order.run, assignment.name)
    continued: StateUse = "continues" if states.has(order.last) else "begins"
    return RoundTerms(
        run=order.run,
        round=order.round,
        attempt=order.attempt,
        bits=secure.ring_bits,
        most_weight=secure.max_weight,
        bound=secure.clip_bound,
        noise=secure.noise,
        least=secure.min_sites,
        colluding=secure.max_colluders,
        threshold=secure.threshold,
        neighbours=secure.graph_degree,
        config=config_digest(config.flat(), order.method, order.fields),
        app=assignment.app,
        roster=order.roster,
        table=order.entries,
        has_table=method.plans_entries,
        is_alike=method.sends_same_broadcast,
        state=continued if method.keeps_private_state else "none",
        is_whole=secure.whole_cohort,
    )


@dataclass(frozen=True)
class SecureClientRound:
    """A client round with a masked upload."""

    site: SecAggSite
    plan: AttemptPlan
    terms: RoundTerms

    def require_broadcast(self, digest: str) -> None:
        """Check rule T10: the message with this digest is the one that the plan names. Raises WireError."""
        with self.site.log_refusals("mask", self.plan), number_refusals("T10"):
            if self.plan.broadcast and broadcast_digest(digest) != self.plan.broadcast:
                raise WireError("secure plan: broadcast: this message is not the one that the plan names")


def begin_secure_round(assignment: ClientAssignment, policy: SitePolicy) -> SecureClientRound | None:
    """Return the client round with its accepted plan; None if not masked. Raises PolicyError, WireError."""
    with _log_refusals(assignment, "mask"):
        with number_refusals("T1"):
            plan = read_attempt_plan(assignment)
        if plan is None:
            return None
        site, terms = open_secagg_site(assignment, policy), round_terms(assignment)
    site.begin(plan, terms)
    return SecureClientRound(site, plan, terms)


def answer_secagg_request(assignment: ClientAssignment, statement: bytes) -> bytes:
    """Answer a request for a key, a signature or shares. Raises PolicyError, WireError, StateError."""
    with _log_refusals(assignment, "answer"):
        site = open_secagg_site(assignment, load_policy(assignment.site))
        if not assignment.config.secure.enabled:
            raise WireError("secure: a run with secure.enabled = false has no such requests, but one arrived")
        request = parse_request(statement)
    match request:
        case KeysRequest():
            return site.ready(request).to_bytes()
        case AgreeRequest():
            return site.agree(request).to_bytes()
        case OpenRequest():
            return site.open(request).to_bytes()
