"""`flwr-clientapp` for a site's SuperExec: Flower's program, in which this site decides before anything is installed.

    SuperExec -> flwr-clientapp (the script that `fedveil site guard` writes) -> main
        message, run and bundle are pulled               Flower; here the message's objects, before it is decoded
        bundle SHA-256, signatures, policy               here; a refusal ends it: nothing is installed, loaded or opened
        the bundle is installed, its files compared      Flower, then here
        the bundle's ClientApp runs                      bundled code, for the first time
        the reply is measured against the policy         here
        the reply is sent                                Flower

Each decision is written to <state-dir>/audit-log.jsonl before it takes effect. The server's record gets it afterwards.

If the policy names neither a digest nor a signer, it admits code that was not reviewed at the site. Such
code could undo the later steps in this process and read everything that this user can read. `fedveil
doctor` warns about such a policy.

| case | what happens |
|---|---|
| the policy cannot be read, or any other error occurs here | refused |
| an Array in the message would become larger than the bytes received, or the message cannot be decoded
  (received_message.py) | refused |
| no policy is named | refused, unless the script was written for a site that permits everything |
| the audit log cannot be written, or its last line is incomplete | refused |
| the SuperLink names a digest, app or version other than the bundle's own | refused |
| a Flower version that guard/flower/ does not support | the process ends with the reason, before it takes a message |
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable
from logging import ERROR, INFO
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flwr.app import Error, Message
from flwr.common.config import get_project_dir
from flwr.supercore import log

from fedveil.errors import ConfigError, WireError
from fedveil.guard import flower, heartbeat, reply_check
from fedveil.guard.flower import replaced
from fedveil.guard.plain_log import write_plain_log
from fedveil.guard.received_message import ReceivingClient, decode_message
from fedveil.sanitize import sanitize

if TYPE_CHECKING:
    from fedveil.client_app.instruction import ClientAssignment
    from fedveil.guard.instruction_check import VerifiedInstruction

RUNTIME = "flwr.supernode.runtime.run_clientapp"
_DECODE = "pull_and_inflate_object_from_tree"
_HOOKS = ("pull_task_input", _DECODE, "install_from_fab", "push_message")
_QUESTION = "query.secure"  # Flower's type for a message about keys or shares; any other type requests a client round
_RAISED = 2  # Flower's ErrorCode.CLIENT_APP_RAISED_EXCEPTION
_BUNDLED = ("client_app", "fedveil", "server_app", "strategies")
_PUBLIC = ("PolicyError", "WireError")
_OWN_BOUNDS = ("PolicyError: ", "BudgetError: ")
_REASON = 2000  # maximum characters of a refusal's text
_RECORDS, _SHOWN = {"order": "ConfigRecord", "fedveil": "ArrayRecord"}, 10
# Settings for Flower's own loop, which sites do not read, and the server's signature (instruction_check.py).
_MORE_RECORDS = {"config": "ConfigRecord", "signature": "ConfigRecord"}
_NAMED = 100  # maximum number of a withheld reply's records that an audit-log line lists


class MessageRefused(Exception):
    """Raised when this site refuses a message; the text is sent to the server."""


class MessageGuard:
    """Makes the site's decisions about one message. `runtime` is the Flower module that processes it.

    Flower is unchanged until `install`; then this class replaces four functions of `runtime`.
    """

    def __init__(self, runtime: ModuleType, require_policy: bool) -> None:
        self._runtime = runtime
        self._pull: Callable[..., Any] = runtime.pull_task_input
        self._decode: Callable[..., Any] = getattr(runtime, _DECODE)
        self._install: Callable[..., Path] = runtime.install_from_fab
        self._push: Callable[..., None] = runtime.push_message
        self._require_policy = require_policy
        self._task: tuple[Any, ...] = ()
        self._client = ReceivingClient(None)
        self._fault: WireError | None = None
        self._assignment: ClientAssignment | None = None
        self._instruction: VerifiedInstruction | None = None
        self._down_bytes = 0
        self._about: dict[str, Any] = {}
        self._refusal = ""
        # Load these from the site's own installation now: the bundle has modules with the same names.
        (
            self._assignments, self._sites, self._decisions, self._policies, self._audit_log, self._header,
            self._bundle, self._signature, self._check, self._digests, self._cause, self._copies,
        ) = (
            importlib.import_module(f"fedveil.{name}")
            for name in (
                "client_app.instruction", "client_app.node_config", "client_app.policy.decisions",
                "client_app.policy.site_policy", "records.audit_log", "wire.header", "guard.installed_bundle",
                "guard.run_signature", "guard.instruction_check", "federation.message_signatures.digests",
                "client_app.failure_reason", "client_app.policy.policy_copies",
            )
        )  # fmt: skip

    def install(self) -> None:
        """Replace four of Flower's functions with this guard's, for the lifetime of the process."""
        for name, own in zip(_HOOKS, (self.pull, self.decode, self.install_bundle, self.push), strict=True):
            setattr(self._runtime, name, own)

    def pull(self, client: Any) -> tuple[Any, ...]:
        """Call Flower's pull_task_input and store its result."""
        self._client = ReceivingClient(client)
        self._task = self._pull(self._client)
        return self._task

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        """Call Flower's pull_and_inflate_object_from_tree; for a refused message, return only the metadata."""
        try:
            return decode_message(self._decode, *args, **kwargs)
        except WireError as error:
            self._fault = error
            return self._client.bare_message()

    def install_bundle(self, content: bytes, *args: Any, **kwargs: Any) -> Path:
        """Call Flower's install_from_fab if this site permits the run. Raises MessageRefused."""
        try:
            digest = self._admit(content)
            evidence = {"instruction": dict(self._instruction.evidence)} if self._instruction else {}
            self._note("admitted", **evidence)
            folder = self._installed() or self._install(content, *args, **kwargs)
            self._require_installed(content, folder)
        except Exception as error:
            self._refuse(error)
        os.environ["FEDVEIL_APP_DIGEST"], os.environ["FEDVEIL_APP_SIGNER"] = digest, self._about["signer"]
        os.environ["FEDVEIL_APP_MODULE"] = self._about.get("module", "")
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # so that the worker leaves no compiled code
        sys.dont_write_bytecode = True
        unload_modules()
        return folder

    def push(self, client: Any, message: Message, context: Any) -> None:
        """Call Flower's push_message with the upload if it is within bounds, otherwise with the reason."""
        if not self._refusal and message.has_error():
            message = reply_check.check_error_reply(message.error, self._task[0])
            by_policy = str(message.error.reason).startswith(_OWN_BOUNDS)  # known only after the client round
            event = "refused" if by_policy else "failed"
            self._try_to_note(event, MessageRefused(message.error.reason), cause=self._cause.take_failure())
        elif not self._refusal:
            record_list: list[list[str | int]] = []
            try:
                record_list = reply_check.list_records(message.content)
                message = self._measured(message)
            except Exception as error:
                _log_error("the upload is withheld", error)
                self._refusal = _public(error)
                self._try_to_note(
                    "withheld", error, up_bytes=sum(int(n) for _, _, n in record_list), records=record_list[:_NAMED]
                )
        if self._refusal:
            message = Message(Error(_RAISED, self._refusal), reply_to=self._task[0])
        self._push(client, message, context)

    def _admit(self, content: bytes) -> str:
        """Return the bundle's digest if the policy permits it for this message. Fills in the audit-log entry."""
        message, context, run, fab = self._task
        digest = hashlib.sha256(content).hexdigest()
        self._about = {"flower_run": str(run.run_id), "node": str(context.node_id), "app": digest}
        # Done first, even if the node config has other faults, so that the site's log records a refusal.
        state = context.node_config.get("state-dir", self._sites.SiteConfig.model_fields["state_dir"].default)
        self._log_file = Path(str(state)).expanduser() / self._audit_log.NAME
        site = self._sites.parse_site(context.node_config)
        self._about |= {"site": site.site, "policy": self._copies.keep_copy(self._log_file.parent, site.policy)}
        # Check the bundle before its message: a different app has different records, and the log must give this reason.
        self._require_bundle(site, digest, (fab.hash_str, run.fab_hash))
        if self._fault is not None:
            raise self._fault
        records = _own_records(message)
        self._down_bytes = sum(len(array.data) for array in records.array_records["fedveil"].values())
        received = sum(int(size) for _, _, size in reply_check.list_records(records))
        order = records.config_records["order"]
        assignment = self._assignments.ClientAssignment.from_instruction(
            order, context.run_config, context.node_config, run.run_id
        )
        self._about |= {**assignment.described(), "down_bytes": self._down_bytes, "server_log": assignment.order.log}
        required = self._policies.load_policy(site).requires_signed_instructions(site)
        self._instruction = self._check.verify_instruction(message, context, run.run_id, digest, site, required)
        self._about["signer"] = by = self._signer(assignment, digest)
        modules, own = self._bundle.module_digests(content), assignment.config.task.module
        self._decisions.check_modules(own, modules)
        if own:
            self._about["module"] = f"{own} {modules[own]}"
        bundle = self._decisions.VerifiedBundle(digest, by, modules)
        serves = message.metadata.message_type != _QUESTION
        self._decisions.check_run(assignment, bundle, received, serves=serves)
        self._decisions.bind_run(assignment)  # here, because bundled code could omit it
        self._assignment = assignment
        return digest

    def _require_bundle(self, site: Any, digest: str, named: tuple[str, str]) -> None:
        """Raise MessageRefused or PolicyError for a wrong bundle. `named`: the digests that the SuperLink gives."""
        if self._require_policy and not site.policy:
            raise MessageRefused("policy: this site requires a policy, but its node config names none; set policy")
        if digest != named[0] or named[1] not in ("", digest):
            raise MessageRefused(
                f"app digest: the SuperLink names {named[0]} and {named[1]}, but the bundle's digest is {digest}"
            )
        self._decisions.check_app_digest(site, digest)

    def _signer(self, assignment: ClientAssignment, digest: str) -> str:
        """Return the key that signed this run; "" for none. Raises PolicyError for an invalid signature."""
        order, run = assignment.order, assignment.config.run
        # The server appends 8 hex digits to the run's name; this site stores state under that name.
        if run.signature and not re.fullmatch(re.escape(run.name) + r"-[0-9a-f]{8}", order.run):
            raise MessageRefused(
                f"run.signature: it is for a run named {run.name!r}, but this run is {order.run!r}; set run.name"
            )
        return str(self._signature.verify_signer(run.signature, run.name, digest))

    def _installed(self) -> Path | None:
        """Return the folder that Flower loads, if it exists.

        Flower would otherwise extract all files again and then return the same folder.
        """
        run, fab = self._task[2:]
        loaded = get_project_dir(run.fab_id, run.fab_version, fab.hash_str)
        # The server chooses this name: do not remove even compiled code anywhere else on this machine.
        is_app = loaded.parent == get_project_dir("a/b", "", "").parent and not loaded.is_symlink()
        return loaded if is_app and loaded.is_dir() else None

    def _require_installed(self, content: bytes, folder: Path) -> None:
        run, fab = self._task[2:]
        loaded = get_project_dir(run.fab_id, run.fab_version, fab.hash_str)
        if folder.resolve() != loaded.resolve():
            raise MessageRefused(f"app: Flower would load the folder {loaded.name} instead of {folder.name}")
        self._bundle.require_same(content, folder)

    def _measured(self, message: Message) -> Message:
        """Return the guard's own reply with this upload and the log's anchor, if the upload is within bounds."""
        parts = reply_check.upload_slices(message.content)
        header, size = self._header.header_of_slices(parts), sum(map(len, parts))
        if self._assignment is None:
            raise MessageRefused("upload: no message was admitted before it")
        # The policy may have changed during training, and this decision reads it again.
        self._about["policy"] = self._copies.keep_copy(self._log_file.parent, self._assignment.site.policy)
        self._decisions.check_upload(self._assignment, self._down_bytes, size, header["num_examples"], header["report"])
        fields = [[entry[0], entry[3]] for entry in header["fields"]]
        about = {"up_bytes": size, "variant": header["variant"], "fields": fields, "figures": sorted(header["report"])}
        if self._instruction is None:
            return reply_check.check_upload_reply(parts, str(self._note("sent", **about)), self._task[0])
        content = self._digests.digest_content(parts)
        signs = {"content": content, "instruction": self._instruction.claims.digest}
        head = str(self._note("sent", **about, signs=signs))
        signature = self._instruction.sign_reply(content, head)
        return reply_check.check_upload_reply(parts, head, self._task[0], signature)

    def _refuse(self, error: Exception) -> None:
        _log_error("this site refuses the run", error)
        self._refusal = _public(error)
        self._try_to_note("refused", error)
        raise MessageRefused(self._refusal) from None  # Flower logs the raised error and its causes without sanitizing

    def _try_to_note(self, event: str, error: Exception, **more: Any) -> None:
        """Try to log an event. A refusal stands even if logging fails; the process's log then has the error."""
        try:
            self._note(event, reason=sanitize(f"{_kind(error)}: {error}"), **more)
        except Exception as unwritten:
            _log_error("this event could not be written to the audit log", unwritten)

    def _note(self, event: str, **more: Any) -> Any:
        head = self._audit_log.append_entry(self._log_file, event, {**self._about, **more})
        log(INFO, "%s; line %s of %s", event, head.lines, self._log_file)
        return head


def _own_records(message: Message) -> Any:
    """Return a message's records if they come from FedVeil's ServerApp. Raises MessageRefused."""
    records = message.content if message.has_content() else {}
    if missing := [name for name in _RECORDS if name not in records]:
        found = ", ".join(sanitize(name, 80) for name in sorted(map(str, records))[:_SHOWN]) or "none"
        raise MessageRefused(
            f"message: it lacks FedVeil's records {' and '.join(_RECORDS)} (found {found}); without {missing[0]}, it "
            "belongs to another app, which this site does not run"
        )
    known = {**_RECORDS, **_MORE_RECORDS}
    if strange := [name for name, record in records.items() if known.get(name) != type(record).__name__]:
        raise MessageRefused(
            f"message: it may contain only the records {', '.join(known)}, but has {sanitize(strange[0], 80)} of type "
            f"{type(records[strange[0]]).__name__}, whose size no limit would cover"
        )
    return records


def unload_modules() -> None:
    """Unload this installation's modules that the bundle also contains, so that the bundle's versions are imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] in _BUNDLED]:
        del sys.modules[name]


def main(require_policy: bool = True) -> None:
    """Run the process. It takes the arguments of Flower's own `flwr-clientapp`."""
    require_flower()
    write_plain_log()
    install_guard(require_policy)
    from flwr.supernode.cli import flwr_clientapp  # after the check: another Flower release may lack it

    flwr_clientapp()


def require_flower() -> None:
    """Exit with the reason if the guard does not support the installed Flower."""
    try:
        flower.installed_release()
    except ConfigError as error:
        sys.exit(f"error: {error}")


def install_guard(require_policy: bool) -> None:
    """Route every message that this process takes through a guard. Raises AttributeError for an unsupported Flower."""
    try:
        replaced.require_attributes("client process")
    except ConfigError as error:
        sys.exit(f"error: {error}")
    heartbeat.patch_task_heartbeat(RUNTIME)
    MessageGuard(importlib.import_module(RUNTIME), require_policy).install()


def _public(error: Exception) -> str:
    """Return the error text that the server may see, by the same rule as in client_app/app.py."""
    if isinstance(error, MessageRefused):
        return sanitize(f"PolicyError: {error}", _REASON)
    kind = type(error).__name__
    return sanitize(f"{kind}: {error}", _REASON) if kind in _PUBLIC else f"{kind} at the site; see the site's log"


def _kind(error: Exception) -> str:
    """Return the name under which an error is logged."""
    return "Refused" if isinstance(error, MessageRefused) else type(error).__name__


def _log_error(what: str, error: Exception) -> None:
    """Write an error's location and text to the process's log; the text may quote the server."""
    log(ERROR, "%s: %s: %s", what, _kind(error), sanitize(error, _REASON))
    log(ERROR, "%s", "".join(traceback.format_tb(error.__traceback__)))
