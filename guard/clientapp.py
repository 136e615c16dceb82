"""`flwr-clientapp` as a site's SuperExec finds it: Flower's own, and before it this site's decision.

    SuperExec -> flwr-clientapp (the script that `fedveil site guard` writes) -> main
        message, run and bundle are pulled               Flower
        SHA-256 of the bundle, its signature, the policy here; a refusal ends it: nothing is installed, loaded or opened
        the bundle is installed, its files compared      Flower, then here
        the bundle's ClientApp runs                      bundled code, for the first time
        the reply is measured against the policy         here
        the reply is sent                                Flower

Every decision is a line of <state-dir>/audit-log.jsonl before it takes effect, and of the server's record afterwards.

What a digest or a signer in the policy does not name is code that nobody at the site has seen: then it could undo in
this process what follows it here, and read what this user can read. `fedveil doctor` warns of such a policy.

| case | what happens |
|---|---|
| the policy cannot be read, or anything else goes wrong here | refused |
| no policy named | refused, unless the script was written for a site that permits everything |
| the audit log cannot be written, or its last line is not whole | refused |
| the SuperLink names another digest, app or version than the bundle's own | refused |
| a Flower that guard/flower/ does not know | the process ends with the reason; no message is taken |
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

from fedveil.errors import ConfigError
from fedveil.foreign import shown
from fedveil.guard import flower, reply

if TYPE_CHECKING:
    from fedveil.client_app.site.assignment import Assignment

_HOOKS = ("pull_task_input", "install_from_fab", "push_message")
_QUESTION = "query.secure"  # Flower's type of a message about keys or shares; any other one asks for a turn
_RAISED = 2  # Flower's ErrorCode.CLIENT_APP_RAISED_EXCEPTION
_BUNDLED = ("client_app", "fedveil", "server_app", "strategies")
_PUBLIC = ("PolicyError", "WireError")
_OWN_BOUNDS = ("PolicyError: ", "BudgetError: ")
_REASON = 2000  # characters of a refusal
_NAMED = 100  # records of a withheld reply that a line of the audit log names


class Refused(Exception):
    """What this site does not do; the text is for the server."""


class Guard:
    """The decision about one message. `runtime` is Flower's module that takes it.

    Nothing of Flower is changed before `install`; then three functions of `runtime` pass by here.
    """

    def __init__(self, runtime: ModuleType, require_policy: bool) -> None:
        self._runtime = runtime
        self._pull: Callable[..., Any] = runtime.pull_task_input
        self._install: Callable[..., Path] = runtime.install_from_fab
        self._push: Callable[..., None] = runtime.push_message
        self._require_policy = require_policy
        self._task: tuple[Any, ...] = ()
        self._assignment: Assignment | None = None
        self._down_bytes = 0
        self._about: dict[str, Any] = {}
        self._refusal = ""
        # Loaded now, from the site's own installation, and kept: the bundle brings modules of the same names.
        (
            self._assignments, self._sites, self._policy, self._audit_log, self._header, self._bundle, self._signature,
            self._cause,
        ) = (
            importlib.import_module(f"fedveil.{name}")
            for name in (
                "client_app.site.assignment", "client_app.site.node_config", "client_app.site.policy",
                "records.audit_log", "wire.header", "guard.bundle", "guard.signature", "client_app.site.cause",
            )
        )  # fmt: skip

    def install(self) -> None:
        """Puts this guard's functions in place of Flower's three, for the rest of the process."""
        for name, own in zip(_HOOKS, (self.pull, self.install_bundle, self.push), strict=True):
            setattr(self._runtime, name, own)

    def pull(self, client: Any) -> tuple[Any, ...]:
        """Flower's pull_task_input; what it gave is kept."""
        self._task = self._pull(client)
        return self._task

    def install_bundle(self, content: bytes, *args: Any, **kwargs: Any) -> Path:
        """Flower's install_from_fab, if this site permits the run. Raises Refused."""
        try:
            digest = self._admit(content)
            self._note("admitted")
            folder = self._installed() or self._install(content, *args, **kwargs)
            self._require_installed(content, folder)
        except Exception as error:
            self._refuse(error)
        os.environ["FEDVEIL_APP_DIGEST"], os.environ["FEDVEIL_APP_SIGNER"] = digest, self._about["signer"]
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # for the worker; compiled code would be dropped every time
        sys.dont_write_bytecode = True
        forget()
        return folder

    def push(self, client: Any, message: Message, context: Any) -> None:
        """Flower's push_message: of the upload if it is within bounds, else of the reason."""
        if not self._refusal and message.has_error():
            message = reply.of_error(message.error, self._task[0])
            by_policy = str(message.error.reason).startswith(_OWN_BOUNDS)  # what only the turn itself could show
            event = "refused" if by_policy else "failed"
            self._try_to_note(event, Refused(message.error.reason), cause=self._cause.taken())
        elif not self._refusal:
            found: list[list[str | int]] = []
            try:
                found = reply.inventory(message.content)
                message = self._measured(message)
            except Exception as error:
                _log_error("the upload is withheld", error)
                self._refusal = _public(error)
                self._try_to_note("withheld", error, up_bytes=sum(int(n) for _, _, n in found), records=found[:_NAMED])
        if self._refusal:
            message = Message(Error(_RAISED, self._refusal), reply_to=self._task[0])
        self._push(client, message, context)

    def _admit(self, content: bytes) -> str:
        """The digest of a bundle that the policy permits for this message. Fills in what the audit log says."""
        message, context, run, fab = self._task
        digest = hashlib.sha256(content).hexdigest()
        self._about = {"flower_run": str(run.run_id), "node": str(context.node_id), "app": digest}
        # First of all, and whatever else is wrong with the node config: a refusal has its line in the site's log.
        state = context.node_config.get("state-dir", self._sites.Site.model_fields["state_dir"].default)
        self._log_file = Path(str(state)).expanduser() / self._audit_log.NAME
        site = self._sites.parse_site(context.node_config)
        self._about |= {"site": site.site, "policy": _file_digest(site.policy)}
        records = message.content
        self._down_bytes = sum(len(array.data) for array in records.array_records["fedveil"].values())
        order = records.config_records["order"]
        assignment = self._assignments.Assignment.of(order, context.run_config, context.node_config)
        self._about |= {**assignment.described(), "down_bytes": self._down_bytes, "server_log": assignment.order.log}
        self._about["signer"] = by = self._signer(assignment, digest)
        if digest != fab.hash_str or run.fab_hash not in ("", digest):
            raise Refused(
                f"app digest: expected the SuperLink to name {digest}, found {fab.hash_str} and {run.fab_hash}"
            )
        if self._require_policy and not site.policy:
            raise Refused("policy: this site permits nothing without one; name it in the node config")
        bundle, serves = self._policy.Bundle(digest, by), message.metadata.message_type != _QUESTION
        self._policy.check(assignment, bundle, self._down_bytes, serves=serves)
        self._assignment = assignment
        return digest

    def _signer(self, assignment: Assignment, digest: str) -> str:
        """The key that signed this run; "" for none. Raises PolicyError where the config's signature is not of it."""
        order, run = assignment.order, assignment.config.run
        # The server's run is called by its name and 8 hex digits; state at this site goes by that.
        if run.signature and not re.fullmatch(re.escape(run.name) + r"-[0-9a-f]{8}", order.run):
            raise Refused(f"run.signature: expected a run called {run.name!r}, found {order.run!r}; set run.name")
        return str(self._signature.signer(run.signature, run.name, digest))

    def _installed(self) -> Path | None:
        """The folder that Flower loads, if it is there: Flower would extract all files anew and then return it too."""
        run, fab = self._task[2:]
        loaded = get_project_dir(run.fab_id, run.fab_version, fab.hash_str)
        # The server names it: of any other place on this machine not even compiled code is to be dropped.
        is_app = loaded.parent == get_project_dir("a/b", "", "").parent and not loaded.is_symlink()
        return loaded if is_app and loaded.is_dir() else None

    def _require_installed(self, content: bytes, folder: Path) -> None:
        run, fab = self._task[2:]
        loaded = get_project_dir(run.fab_id, run.fab_version, fab.hash_str)
        if folder.resolve() != loaded.resolve():
            raise Refused(f"app: expected the run to name {folder.name}, found {loaded.name}")
        self._bundle.require_same(content, folder)

    def _measured(self, message: Message) -> Message:
        """The guard's own reply with the upload of this one, if it is within bounds; with the anchor of the log."""
        parts = reply.upload(message.content)
        header, size = self._header.of_slices(parts), sum(map(len, parts))
        if self._assignment is None:
            raise Refused("upload: expected one of an admitted message, found none")
        self._policy.check_upload(self._assignment, self._down_bytes, size, header["num_examples"], header["report"])
        fields = [[entry[0], entry[3]] for entry in header["fields"]]
        head = self._note(
            "sent", up_bytes=size, variant=header["variant"], fields=fields, figures=sorted(header["report"])
        )
        return reply.of_upload(parts, str(head), self._task[0])

    def _refuse(self, error: Exception) -> None:
        _log_error("this site refuses the run", error)
        self._refusal = _public(error)
        self._try_to_note("refused", error)
        raise Refused(self._refusal) from None  # Flower logs what is raised, with its causes as they are

    def _try_to_note(self, event: str, error: Exception, **more: Any) -> None:
        """A refusal stands, noted or not; what could not be noted is in the process's log."""
        try:
            self._note(event, reason=shown(f"{type(error).__name__}: {error}"), **more)
        except Exception as unwritten:
            _log_error("the audit log has no line of this", unwritten)

    def _note(self, event: str, **more: Any) -> Any:
        head = self._audit_log.append(self._log_file, event, {**self._about, **more})
        log(INFO, "%s; line %s of %s", event, head.lines, self._log_file)
        return head


def forget() -> None:
    """Lets go of this installation's modules whose names the bundle has too, so that its own are loaded."""
    for name in [name for name in sys.modules if name.partition(".")[0] in _BUNDLED]:
        del sys.modules[name]


def main(require_policy: bool = True) -> None:
    """The process. Its arguments are those of Flower's own `flwr-clientapp`."""
    require_flower()
    guard(require_policy)
    from flwr.supernode.cli import flwr_clientapp  # after the check: another Flower may not have it

    flwr_clientapp()


def require_flower() -> None:
    """Ends the process, with the reason, where Flower is one that the guard does not know."""
    try:
        flower.here()
    except ConfigError as error:
        sys.exit(f"error: {error}")


def guard(require_policy: bool) -> None:
    """From now on a message that this process takes passes a guard. Raises AttributeError for an unknown Flower."""
    Guard(importlib.import_module("flwr.supernode.runtime.run_clientapp"), require_policy).install()


def _public(error: Exception) -> str:
    """What the server may know: as the ClientApp's own rule, client_app/app.py."""
    if isinstance(error, Refused):
        return shown(f"PolicyError: {error}", _REASON)
    kind = type(error).__name__
    return shown(f"{kind}: {error}", _REASON) if kind in _PUBLIC else f"{kind} at the site; its log has the text"


def _log_error(what: str, error: Exception) -> None:
    """The place of an error and its text in the process's log; the text may quote what the server sent."""
    log(ERROR, "%s: %s: %s", what, type(error).__name__, shown(error, _REASON))
    log(ERROR, "%s", "".join(traceback.format_tb(error.__traceback__)))


def _file_digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest() if path else ""
    except OSError:
        return ""  # the check that follows refuses it, with the reason
