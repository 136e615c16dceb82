"""Hook the checks of registered sites' calls into Flower's fleet port, for all supported Flower releases.

Flower checks which key signs a call and passes the call to a function of one module, looked up by attribute:

    1.39         flwr.server.superlink.fleet.message_handler.message_handler.push_messages(request=, state=)
    1.41, 1.42   flwr.superlink.servicer.fleet.fleet_handlers.push_messages(request=, state=)

In these functions, the request is already parsed, and `request.node` is the node whose key signed the call
(fleet_grpc.py and fleet_http.py ensure this). `install_fleet_port` replaces each of the twelve functions with a check
before the server starts. If a Flower release has moved one of the functions, the server does not start (`ConfigError`).

Formal guarantees, for every call that reaches one of the twelve functions:
- a site pulls only objects from instructions that were sent to it, and confirms only those instructions;
- only complete, checked replies reach Flower (staging.py), never an order or a reply for another site;
- an exception that the table below does not list becomes UNAVAILABLE or a refusal. It never becomes INTERNAL, which
  makes an honest SuperNode leave its loop permanently.

| call | admitted | otherwise |
|---|---|---|
| register_node, unregister_node | never | Flower's own refusal |
| activate_node, send_node_heartbeat | with an interval of 10 to 60 s; Flower's SuperNode sends 30 s | code 2003 |
| activate_node, from a member whose key the database has lost | never | UNAVAILABLE, 503, until the key is back |
| send_node_heartbeat, more often than its rate | answered without asking Flower | |
| pull_messages | always | more often than its rate: an empty answer |
| get_run, get_fab | a run from which the site has an instruction, and that run's bundle | code 2007 |
| pull_object | an object from an instruction to this site in this run | code 2007 |
| confirm_message_received | an instruction to this site; the second time without asking Flower | code 2007 |
| push_messages, push_object | an announced reply and its objects; answered here (staging.py) | code 2007 |
| any other call, more often than its rate | | UNAVAILABLE, 503: the SuperNode asks again |
| any call, when the database or disk fails | | UNAVAILABLE, 503; in a push at most ten times |
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable
from logging import ERROR
from typing import Any, cast

from flwr.proto.fleet_pb2 import PullMessagesResponse
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse
from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse, ObjectTree
from flwr.supercore import log
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.supercore.run import InvalidRunStatusException
from sqlalchemy.exc import SQLAlchemyError

from fedveil.errors import ConfigError, StateError
from fedveil.guard import fleet_limits as limits
from fedveil.guard.fleet.call_rates import CallRates
from fedveil.guard.fleet.delivered import DeliveredInstructions
from fedveil.guard.fleet.hand_over import HandOver
from fedveil.guard.fleet.refusal import DeferralReason, FleetCallDeferred, FleetCallRefused, RefusalReason
from fedveil.guard.fleet.refusal_log import FleetRefusalLog
from fedveil.guard.fleet.spool import ReplySpool
from fedveil.guard.fleet.staging import ReplyStaging
from fedveil.guard.fleet.sweep import PeriodicSweep, clean_up_runs, shrink_database
from fedveil.guard.flower import FlowerRelease, link_states
from fedveil.guard.flower.replaced import FLEET_CALLS, FLEET_MODULES
from fedveil.wire.flower_objects import is_object_id

Flower = Callable[..., Any]

_WITH_STORE = ("pull_messages", "confirm_message_received")
_PUSHES = ("push_messages", "push_object")
# In these calls, Flower 1.39's servicer converts a ValueError to an answer; in other calls, it becomes INTERNAL.
_VALUE_ERRORS = ("activate_node", "deactivate_node", "get_run", "get_fab")
_RATES = {
    **limits.CALLS_A_MINUTE,
    "announced bytes": limits.ANNOUNCED_BYTES_A_MINUTE,
    "objects read again": limits.CALLS_A_MINUTE["get_run"],
}
# The supported releases answer this Flower error with UNAVAILABLE and 503.
_UNAVAILABLE = ApiErrorCode.LINKSTATE_NOT_INITIALIZED


def install_fleet_port(release: FlowerRelease, port: FleetPort) -> None:
    """Put the checks in `port` before this process's fleet functions. Raises ConfigError for an unknown Flower."""
    name = FLEET_MODULES[release.speaks]
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"flwr {release.release}: this Flower has no module {name} ({error})") from None
    functions = {call: _flower_function(module, call) for call in FLEET_CALLS}  # find all of them before replacing one
    for call, function in functions.items():
        setattr(module, call, port.guarded(call, function))


def _flower_function(module: Any, call: str) -> Flower:
    function: Any = getattr(module, call, None)
    expected = {"request", "state"} | ({"store"} if call in _WITH_STORE else set())
    parameters = set(inspect.signature(function).parameters) if callable(function) else set()
    if not callable(function) or parameters - {"enable_supernode_auth"} != expected:
        raise ConfigError(
            f"{module.__name__}.{call}: it must take the arguments {', '.join(sorted(expected))}, but takes "
            f"{', '.join(sorted(parameters)) or 'none'}; this Flower would serve sites without FedVeil's checks"
        )
    return cast(Flower, function)


class FleetPort:
    """Checks on calls, in the order of the table above.

    Args:
        site_of: returns the name of the registered site with the given public key (PEM); "" if no site has it.
    """

    def __init__(
        self, refusals: FleetRefusalLog, site_of: Callable[[bytes], str], spool: ReplySpool, sweeps: bool = True
    ) -> None:
        self._refusals, self._site_of, self._sweeps = refusals, site_of, sweeps
        self._rates = CallRates(_RATES)
        self._delivered = DeliveredInstructions()
        self._site_names: dict[int, str] = {}
        self._functions: dict[str, Flower] = {}
        self._state: Any = None
        self._starting = threading.Lock()
        self._hand_over = HandOver(self)
        self._staging = ReplyStaging(spool, self._hand_over)

    def guarded(self, call: str, function: Flower) -> Flower:
        """Return the replacement for Flower's `function`."""
        self._functions[call] = function
        check = getattr(self, f"_{call}")

        def answer(request: Any, state: Any, **more: Any) -> Any:
            def flower(request: Any = request) -> Any:
                return function(request=request, state=state, **more)

            try:
                self._start(state)
                self._require_rate(call, request)
                return check(request, state, flower)
            except FleetCallRefused as refused:
                self._record(state, call, request, refused)
                code = (
                    ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL
                    if refused.reason is RefusalReason.HEARTBEAT_INTERVAL
                    else ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED
                )
                raise _flower_error(code, call, request, refused.reason.value) from None
            except FleetCallDeferred as deferred:
                raise _flower_error(_UNAVAILABLE, call, request, deferred.reason.value) from None
            except (FlowerError, InvalidRunStatusException):
                raise
            except Exception as error:
                if isinstance(error, ValueError) and call in _VALUE_ERRORS:
                    raise
                raise self._after_failure(state, call, request, error) from None

        return answer

    # Admission of calls

    def _register_node(self, _request: Any, _state: Any, _flower: Flower) -> Any:
        raise FlowerError(ApiErrorCode.FLEET_SUPERNODE_REGISTRATION_DISABLED, "sites are registered by fedveil members")

    def _unregister_node(self, _request: Any, _state: Any, _flower: Flower) -> Any:
        raise FlowerError(ApiErrorCode.FLEET_SUPERNODE_UNREGISTRATION_DISABLED, "sites are removed by fedveil members")

    def _activate_node(self, request: Any, state: Any, flower: Flower) -> Any:
        _require_interval(request.heartbeat_interval)
        if state.get_node_id_by_public_key(request.public_key) is None:  # Flower's answer would make the SuperNode exit
            raise FleetCallDeferred(DeferralReason.NOT_IN_DATABASE)
        return flower()

    def _deactivate_node(self, _request: Any, _state: Any, flower: Flower) -> Any:
        return flower()

    def _send_node_heartbeat(self, request: Any, _state: Any, flower: Flower) -> Any:
        _require_interval(request.heartbeat_interval)
        if not self._rates.admits(_node_of(request), "send_node_heartbeat"):
            return SendNodeHeartbeatResponse(success=True)
        return flower()

    def _pull_messages(self, request: Any, _state: Any, flower: Flower) -> Any:
        if not self._rates.admits(_node_of(request), "pull_messages"):
            return PullMessagesResponse()
        response = flower()
        for message, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            run_id = message.metadata.run_id
            self._delivered.record_delivery(_node_of(request), run_id, tree.object_id, _object_ids(tree))
        return response

    def _get_run(self, request: Any, state: Any, flower: Flower) -> Any:
        self._require_own_run(request, state)
        return flower()

    def _get_fab(self, request: Any, state: Any, flower: Flower) -> Any:
        self._require_own_run(request, state)
        runs = state.get_run_info(run_ids=[request.run_id])
        if runs and runs[0].fab_hash != request.hash_str:  # Flower would refuse it too, but without a line in our log
            raise FleetCallRefused(RefusalReason.FOREIGN_BUNDLE, request.hash_str)
        return flower()

    def _pull_object(self, request: Any, state: Any, flower: Flower) -> Any:
        of = _node_of(request), request.run_id, request.object_id
        if not self._delivered.may_pull(*of):
            self._read_again(request, state)
        if not self._delivered.may_pull(*of):
            raise FleetCallRefused(RefusalReason.FOREIGN_OBJECT, request.object_id)
        if self._delivered.is_pulled_too_often(*of):
            raise FleetCallRefused(RefusalReason.PULLED_TOO_OFTEN, request.object_id)
        response = flower()
        if response.object_content:  # a client may request an object again at no cost if it has not arrived yet
            self._delivered.count_pull(*of)
        return response

    def _confirm_message_received(self, request: Any, state: Any, flower: Flower) -> Any:
        node_id, root = _node_of(request), request.message_object_id
        if self._delivered.is_confirmed(node_id, root):
            return ConfirmMessageReceivedResponse()
        row = link_states.find_instruction(state, root) if is_object_id(root) else None
        if row is None or (row.node_id, row.run_id) != (node_id, request.run_id):
            raise FleetCallRefused(RefusalReason.FOREIGN_INSTRUCTION, root)
        response = flower()
        self._delivered.confirm(node_id, root)
        return response

    def _push_messages(self, request: Any, state: Any, _flower: Flower) -> Any:
        if not self._rates.admits(_node_of(request), "announced bytes", request.ByteSize()):
            raise FleetCallDeferred(DeferralReason.RATE)
        return self._staging.announce(request, state)

    def _push_object(self, request: Any, _state: Any, _flower: Flower) -> Any:
        return self._staging.push(request)

    # Flower's own functions, for the hand-over thread

    def push_messages(self, request: Any) -> Any:
        """Announce a complete reply to Flower."""
        return self._functions["push_messages"](request=request, state=self._state)

    def push_object(self, request: Any) -> Any:
        """Pass one object of a complete reply to Flower."""
        return self._functions["push_object"](request=request, state=self._state)

    def sweep(self) -> None:
        """Clean up once (sweep.py)."""
        self._staging.sweep(self._state, self._is_registered)
        self._refusals.write_counts()
        clean_up_runs(self._state)
        shrink_database(self._state)

    # Helpers

    def _start(self, state: Any) -> None:
        """Recover an earlier process's state at the first call, because Flower's state does not exist before it."""
        if self._state is not None:
            return
        with self._starting:
            if self._state is None:
                self._staging.recover(state)
                self._state = state
                if self._sweeps:
                    PeriodicSweep(self.sweep).start()

    def _is_registered(self, node_id: int) -> bool:
        """Return whether a site's key is valid today; if the registry is unreadable, every site keeps access."""
        try:
            nodes = self._state.get_node_info(node_ids=[node_id])
            return bool(nodes and self._site_of(nodes[0].public_key))
        except StateError as error:
            log(ERROR, "fleet port: %s", error)
            return True

    def _require_rate(self, call: str, request: Any) -> None:
        """Raise FleetCallDeferred if a call comes too often, unless this call has its own answer for that case."""
        if call in limits.CALLS_A_MINUTE and call not in ("send_node_heartbeat", "pull_messages"):
            site = request.public_key if call == "activate_node" else _node_of(request)
            if not self._rates.admits(site, call):
                raise FleetCallDeferred(DeferralReason.RATE)

    def _require_own_run(self, request: Any, state: Any) -> None:
        node_id, run_id = _node_of(request), request.run_id
        is_own = self._delivered.has_run(node_id, run_id)
        if not is_own and not link_states.instructions_of_node(state, node_id, run_id):
            raise FleetCallRefused(RefusalReason.FOREIGN_RUN, str(run_id))

    def _read_again(self, request: Any, state: Any) -> None:
        """Load the site's instructions from the database, because the cache is empty after a restart."""
        node_id = _node_of(request)
        if not self._rates.admits(node_id, "objects read again"):
            return
        rows = link_states.instructions_of_node(state, node_id, request.run_id)
        for row in rows[: limits.REMEMBERED_INSTRUCTIONS][::-1]:
            try:
                tree = state.object_store.get_object_tree(row.message_id)
            except NoObjectInStoreError:  # the instruction was confirmed, so its objects were deleted
                continue
            self._delivered.record_delivery(node_id, row.run_id, row.message_id, _object_ids(tree))

    def _record(self, state: Any, call: str, request: Any, refused: FleetCallRefused) -> None:
        node_id, name = _node_of(request), ""
        try:
            if call == "activate_node":  # the call contains the key that signed it
                node_id = state.get_node_id_by_public_key(request.public_key) or 0
            name = self._name_of(state, node_id)
        except (SQLAlchemyError, StateError) as error:  # the refusal stands and is logged with the node ID
            log(ERROR, "fleet port: cannot look up the name of node %s: %s", node_id, error)
        self._refusals.record_refusal(name, node_id, call, refused.reason, refused.value)

    def _name_of(self, state: Any, node_id: int) -> str:
        """Return the site's name in the registry; "" if the node has no name (a node's key never changes)."""
        if node_id not in self._site_names:
            nodes = state.get_node_info(node_ids=[node_id])
            if not (name := self._site_of(nodes[0].public_key) if nodes else ""):
                return ""
            self._site_names[node_id] = name
        return self._site_names[node_id]

    def _after_failure(self, state: Any, call: str, request: Any, error: Exception) -> FlowerError:
        """Return the answer to a site after an exception that the table does not list; the answer is never INTERNAL."""
        log(ERROR, "fleet port: %s of node %s failed", call, _node_of(request), exc_info=error)
        if isinstance(error, SQLAlchemyError | OSError):
            return _flower_error(_UNAVAILABLE, call, request, DeferralReason.STORAGE.value)
        if call not in _PUSHES:
            return _flower_error(_UNAVAILABLE, call, request, DeferralReason.OWN_ERROR.value)
        # Without this limit, a push that always fails would be repeated forever.
        refused = FleetCallRefused(RefusalReason.OWN_ERROR, type(error).__name__)
        self._record(state, call, request, refused)
        return _flower_error(ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED, call, request, RefusalReason.OWN_ERROR.value)


def _node_of(request: Any) -> int:
    """Return the ID of the node that signed a call; 0 for the two calls that contain a key instead."""
    return int(request.node.node_id if hasattr(request, "node") else getattr(request, "node_id", 0))


def _object_ids(tree: ObjectTree) -> set[str]:
    return {node.object_id for node in iterate_object_tree(tree)}


def _require_interval(seconds: float) -> None:
    if not limits.MIN_HEARTBEAT_SECONDS <= seconds <= limits.MAX_HEARTBEAT_SECONDS:
        raise FleetCallRefused(RefusalReason.HEARTBEAT_INTERVAL, str(seconds))


def _flower_error(code: int, call: str, request: Any, reason: str) -> FlowerError:
    return FlowerError(code, f"fedveil: {call} of node {_node_of(request)}: {reason}", public_details=reason)
