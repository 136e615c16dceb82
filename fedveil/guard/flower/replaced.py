"""List the attributes of Flower and other libraries that the guard replaces; all are looked up before any is replaced.

Assigning to an attribute that no code reads does not raise an error, so a release that has moved or renamed one would
silently run without the replacement. So a process does not start if any of its attributes is missing. The table in
docs/decisions/upstream/README.md gives the reason for each attribute; a test compares the two.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any, Literal

from fedveil.errors import ConfigError
from fedveil.guard import flower

Process = Literal["SuperLink", "SuperNode", "SuperExec", "client process", "ServerApp process"]


@dataclass(frozen=True)
class ReplacedAttribute:
    """A third-party function or class that one of the guard's files replaces.

    Attributes:
        file: the guard's file that replaces it, below fedveil/.
        process: the process in which it is replaced.
        module: the module that defines it.
        name: name of the attribute, with its class: "SqlCoreState.store_object".
        takes: names of the arguments that the replacement relies on.
        speaks: the protocol used by the releases that have it; "" = all releases.
    """

    file: str
    process: Process
    module: str
    name: str
    takes: tuple[str, ...] = ()
    speaks: Literal["gRPC", "HTTP", ""] = ""

    def fault(self) -> str:
        """Describe what is missing; "" if the attribute is as required."""
        try:
            found: Any = importlib.import_module(self.module)
        except ImportError as error:
            return f"{self.module} ({error})"
        for part in self.name.split("."):
            found = getattr(found, part, None)
            if found is None:
                return f"{self.module}.{self.name}"
        taken = inspect.signature(found).parameters if self.takes else {}
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values())
        if missing := [name for name in self.takes if name not in taken and not takes_any]:
            return f"the argument {missing[0]} of {self.module}.{self.name}"
        return ""


_LOOP, _STORE = "flwr.supernode.start_client_internal", "flwr.supercore.corestate"
_LINK = "flwr.server.superlink.linkstate"
_CLIENT, _SUPEREXEC = "flwr.supernode.runtime.run_clientapp", "flwr.supercore.superexec.run_superexec"
_GRPC, _HTTP = "flwr.client.grpc_rere_client.connection", "flwr.supernode.fleet_http_connection"
_CALLS = (
    "receive", "get_run", "get_fab", "pull_object", "confirm_message_received", "state", "object_store", "node_config",
)  # fmt: skip

FLEET_MODULES: dict[Literal["gRPC", "HTTP"], str] = {
    "gRPC": "flwr.server.superlink.fleet.message_handler.message_handler",
    "HTTP": "flwr.superlink.servicer.fleet.fleet_handlers",
}
FLEET_CALLS = (
    "register_node", "unregister_node", "activate_node", "deactivate_node", "send_node_heartbeat", "pull_messages",
    "get_run", "get_fab", "pull_object", "confirm_message_received", "push_messages", "push_object",
)  # fmt: skip

REPLACED = (
    ReplacedAttribute("guard/clientapp.py", "client process", _CLIENT, "pull_task_input", ("client",)),
    ReplacedAttribute(
        "guard/clientapp.py", "client process", _CLIENT, "pull_and_inflate_object_from_tree",
        ("object_tree", "pull_object_fn", "confirm_object_received_fn"),
    ),
    ReplacedAttribute("guard/clientapp.py", "client process", _CLIENT, "install_from_fab"),
    ReplacedAttribute("guard/clientapp.py", "client process", _CLIENT, "push_message", ("client", "message")),
    ReplacedAttribute("guard/heartbeat.py", "client process", _CLIENT, "HeartbeatSender", ("heartbeat_fn",)),
    ReplacedAttribute(
        "guard/heartbeat.py", "ServerApp process", "flwr.superlink.runtime.run_serverapp", "HeartbeatSender",
        ("heartbeat_fn",),
    ),
    *(
        ReplacedAttribute(
            "guard/permitted_bundles.py", "ServerApp process", "flwr.superlink.runtime.run_serverapp", name
        )
        for name in ("fab_from_proto", "install_from_fab")
    ),
    ReplacedAttribute("guard/heartbeat.py", "SuperNode", _GRPC, "HeartbeatSender", ("heartbeat_fn",), "gRPC"),
    ReplacedAttribute("guard/heartbeat.py", "SuperNode", _HTTP, "HeartbeatSender", ("heartbeat_fn",), "HTTP"),
    ReplacedAttribute(
        "guard/flower/retries.py", "SuperNode", _LOOP, "_make_fleet_connection_retry_invoker", speaks="gRPC"
    ),
    ReplacedAttribute("guard/flower/retries.py", "SuperNode", _HTTP, "make_simple_http_retry_invoker", speaks="HTTP"),
    ReplacedAttribute("guard/flower/retries.py", "SuperExec", _SUPEREXEC, "make_simple_http_retry_invoker"),
    ReplacedAttribute(
        "guard/superexec.py", "SuperExec", "flwr.supercore.superexec.plugin.base_exec_plugin",
        "AutoExecPlugin.supported_task_types",
    ),
    *(
        ReplacedAttribute(file, "SuperExec", "flwr.supercore.superexec.executor.subprocess_executor", "subprocess")
        for file in ("guard/process_zygote.py", "guard/flower/task_claims.py")
    ),
    ReplacedAttribute("guard/poll_backoff.py", "SuperNode", _LOOP, "time"),
    ReplacedAttribute("guard/poll_backoff.py", "SuperExec", _SUPEREXEC, "time"),
    ReplacedAttribute("guard/supernode.py", "SuperNode", _LOOP, "_pull_and_store_message", _CALLS),
    ReplacedAttribute("guard/supernode.py", "SuperNode", _LOOP, "_push_messages", ("state", "object_store")),
    *(
        ReplacedAttribute(
            "guard/duplicate_pushes.py", process, f"{_STORE}.{module}", f"{state}.store_object",
            ("run_id", "session_id", "object_id", "object_content"),
        )
        for process in ("SuperLink", "SuperNode")
        for module, state in (("sql_corestate", "SqlCoreState"), ("in_memory_corestate", "InMemoryCoreState"))
    ),
    *(
        ReplacedAttribute("guard/fleet/port.py", "SuperLink", module, call, ("request", "state"), speaks)
        for speaks, module in FLEET_MODULES.items()
        for call in FLEET_CALLS
    ),
    ReplacedAttribute("guard/flower/fleet_calls.py", "SuperLink", "grpc", "server", ("interceptors",), "gRPC"),
    ReplacedAttribute("guard/flower/database_locks.py", "SuperLink", "flwr.supercore.sql_mixin", "SQLITE_PRAGMAS"),
    ReplacedAttribute("guard/superlink.py", "SuperLink", "uvicorn", "Config.__init__", ("app",)),
    *(
        ReplacedAttribute(f"guard/flower/{file}", "SuperLink", f"{_LINK}.{module}", f"{state}.{name}", takes)
        for module, state in (("sql_linkstate", "SqlLinkState"), ("in_memory_linkstate", "InMemoryLinkState"))
        for file, name, takes in (
            ("incomplete_replies.py", "get_message_res", ("message_ids",)),
            ("incomplete_replies.py", "store_message_and_object_tree", ()),
            ("redelivery.py", "get_message_ins", ()),
        )
    ),
    *(
        ReplacedAttribute("guard/steady_clock.py", "SuperLink", f"{package}.{module}", "now", speaks="gRPC")
        for package, modules in (
            (_LINK, ("sql_linkstate", "in_memory_linkstate", "utils")),
            (_STORE, ("sql_corestate", "in_memory_corestate")),
        )
        for module in modules
    ),
    ReplacedAttribute(
        "guard/flower/fleet_grpc.py", "SuperLink",
        "flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor",
        "NodeAuthServerInterceptor._wrap_method_handler", speaks="gRPC",
    ),
    ReplacedAttribute("guard/flower/keepalive.py", "SuperNode", "grpc", "secure_channel", ("options",), "gRPC"),
    ReplacedAttribute("guard/flower/keepalive.py", "SuperNode", "grpc", "insecure_channel", ("options",), "gRPC"),
    *(
        ReplacedAttribute("guard/flower/response_sizes.py", "SuperNode", "grpc", name, ("options",), "gRPC")
        for name in ("secure_channel", "insecure_channel")
    ),
    ReplacedAttribute(
        "guard/flower/response_sizes.py", "SuperNode", "flwr.supercore.protobuf.client", "ProtobufClient.__init__",
        speaks="HTTP",
    ),
    ReplacedAttribute("guard/flower/fleet_http.py", "SuperLink", "uvicorn", "Server.run", ("sockets",), "HTTP"),
    ReplacedAttribute(
        "guard/flower/redirects.py", "SuperNode", "flwr.supercore.protobuf.client", "ProtobufClient.__init__",
        speaks="HTTP",
    ),
    ReplacedAttribute("relay/site_endpoint.py", "SuperNode", _LOOP, "_init_connection"),
)  # fmt: skip


def require_attributes(process: Process) -> None:
    """Raise ConfigError if the installed Flower lacks an attribute that the guard replaces in this process."""
    line = flower.installed_release()
    for attribute in REPLACED:
        if attribute.process == process and attribute.speaks in ("", line.speaks) and (fault := attribute.fault()):
            raise ConfigError(
                f"flwr: FedVeil replaces parts of Flower in a {process} (fedveil/{attribute.file}), but this Flower "
                f"lacks {fault}; install the version of Flower in constraints.txt"
            )
