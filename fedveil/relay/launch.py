"""Start Flower's SuperNode as one end of a relay, for `fedveil relay export` and `import` (fedveil/relay)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedveil import paths
from fedveil.client_app.node_config import SiteConfig
from fedveil.console.flower.certificates import write_secret
from fedveil.console.flower.machine import format_toml, free_ports
from fedveil.console.flower.processes import ProcessGroup, flower_environment
from fedveil.console.flower.programs import relay_supernode_command, supernode_command
from fedveil.console.flower.site_process import single_user_environment, start_isolated, start_spare, write_program
from fedveil.console.launch import online_watch, site
from fedveil.console.launch.site_options import STATE
from fedveil.console.runs import re_encrypt
from fedveil.encrypted_files import FileSeal
from fedveil.errors import ConfigError
from fedveil.guard import poll_backoff
from fedveil.relay import status_events
from fedveil.relay.endpoint_config import EndpointConfig
from fedveil.relay.keys import SECRET, EndpointSecret, read_public
from fedveil.relay.message_log import MessageLog
from fedveil.sanitize import sanitize

PEER = "peer.pub"
MOST_MB, MOST_MB_AT_ALL = 1900, 1900  # protobuf's limit is 2 GiB
_POLL_SECONDS = 0.3


def endpoint_settings(options: Mapping[str, Any], kit: Path | None, state: Path) -> EndpointConfig:
    """Return one end's keys, folders and limits. Raises ConfigError, naming the option, if one is missing."""
    key_files = {}
    for name, file in (("relay-key", SECRET), ("peer", PEER)):
        given = options.get(name) or (kit / "keys" / file if kit else None)
        if given is None:
            raise ConfigError(f"--{name}: name a file, or give --kit with keys/{file} in it")
        key_files[name] = Path(given).expanduser().absolute()
    own, peer = EndpointSecret.from_file(key_files["relay-key"]), read_public(key_files["peer"])
    if own.public == peer:
        raise ConfigError(f"--peer: {key_files['peer']} is this end's own relay.pub; name the other end's")
    if not 1 <= (most := int(options["most-mb"])) <= MOST_MB_AT_ALL:
        raise ConfigError(f"--most-mb: expected 1 to {MOST_MB_AT_ALL}, found {most}")
    orders, replies = (Path(options[name]).expanduser().absolute() for name in ("orders", "replies"))
    if orders == replies:
        raise ConfigError(f"REPLIES: {replies} is also the folder for ORDERS; name two different folders")
    return EndpointConfig(key_files["relay-key"], key_files["peer"], orders, replies, state, most * 1_000_000)


def relay_environment(env: Mapping[str, str], folder: Path, end: str, settings: EndpointConfig) -> dict[str, str]:
    """Return `env` for a SuperNode that is the "server" or "site" end of a relay; write its program to `folder`."""
    write_program(folder / "flower-supernode", f"relay.{end}_endpoint", repr(settings.to_text()))
    return {**env, "PATH": os.pathsep.join([str(folder), env["PATH"]])}


def peer_of(ends: EndpointConfig) -> str:
    """Return the fingerprint of the other end's keys, which the users there can read aloud."""
    return read_public(ends.peer).fingerprint


def _require_folder(name: str, folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{name}: the folder for exchanged files does not exist at {folder}; create it")


@dataclass
class _Told:
    """Prints one end's status events.

    Attributes:
        answered, bad: number of answered and refused messages so far.
        idle: whether every file in the folder has been processed.
    """

    name: str
    file: Path
    answered: int = 0
    bad: int = 0
    idle: bool = False
    _read: int = field(default=0, repr=False)

    def tell(self) -> None:
        lines, self._read = status_events.read_events(self.file, self._read)
        for what, words in lines:
            self.answered += what == "answered"
            self.bad += what in status_events.BAD
            self.idle = what == status_events.IDLE
            if words:
                print(f"site {self.name}: {sanitize(words, 1000)}", flush=True)


def _told(name: str, state: Path) -> _Told:
    """Clear the status file of a relay that is about to start, and return a reader for it."""
    file = paths.private_folder(state) / status_events.NAME
    file.write_text("")
    return _Told(name, file)


def start_export(options: Mapping[str, Any], kit: Path | None) -> int:
    """Run the server's end until its SuperNode ends; then raise ConfigError with the reason."""
    both = (site.site_from_kit(kit) if kit else {}) | {
        name: value for name, value in options.items() if value is not None
    }
    if missing := [f"--{name}" for name in site.WIRED if name not in both]:
        raise ConfigError(
            f"--kit: name the unpacked start-up kit, or {site.list_settings(site.WIRED)}; missing: {', '.join(missing)}"
        )
    site.require_poll(poll := float(both.get("poll-seconds", poll_backoff.DEFAULT)))
    name, ca, key = SiteConfig(site=str(both["name"])).site, Path(both["ca"]).absolute(), Path(both["key"]).absolute()
    state = Path(both.get("state-dir") or (kit / "relay" if kit else STATE / f"relay-{name}")).expanduser().absolute()
    ends = endpoint_settings(both, kit, state)
    for option, file in (("ca", ca), ("key", key)):
        if not file.is_file():
            raise ConfigError(f"--{option}: there is no file at {file}; see docs/relay.md")
    _require_folder("REPLIES", ends.replies)
    paths.private_folder(ends.orders)
    site.require_link(ca, key)
    watched = online_watch.SiteStartWatcher.from_processes(
        ProcessGroup(state / "logs"), name, state, str(both["superlink"]), ca
    )
    watched.look()
    reporter = _told(name, state)
    paths.private_folder(state / "logs")
    config = state / f"{name}.toml"
    config.write_text(format_toml({"site": name}), encoding="utf-8")
    env = single_user_environment(
        {**flower_environment(state / "flower"), poll_backoff.VARIABLE: str(poll)}, state / "programs"
    )
    env = relay_environment(env, state / "programs" / "relay", "server", ends)
    (port,), secret = free_ports(1), write_secret(state / f"{name}.superexec")
    try:
        watched.processes.start(name, supernode_command(watched.superlink, ca, key, port, config, secret), env)
        print(f"site {name}: relay for {watched.superlink}, log {watched.processes.log(name)}", flush=True)
        print(f"site {name}: orders go to {ends.orders}, replies come from {ends.replies}", flush=True)
        print(f"site {name}: the other end is {peer_of(ends)}", flush=True)
        return watched.until_ended(reporter.tell)
    finally:
        watched.processes.stop()
        reporter.tell()


def start_import(options: Mapping[str, Any], kit: Path | None, permit_everything: bool, follow: bool) -> int:
    """Run the site's end until it has answered or refused every order, or forever with `follow`.

    Returns 1 if a message was refused, otherwise 0. Raises ConfigError, StateError.
    """
    start = site.resolve_site(options, kit, permit_everything, need=("name",))
    name, state = start.node.site, start.node.state_dir
    ends = endpoint_settings(options, kit, state)
    _require_folder("ORDERS", ends.orders)
    re_encrypt.require_key(state, FileSeal.from_key_file(start.node.key_file))
    site.require_policy(start.node)
    MessageLog.open(state).release()
    paths.private_folder(ends.replies)
    watched = online_watch.SiteStartWatcher.from_processes(ProcessGroup(state / "logs"), name, state, "", Path())
    reporter, (config, env) = _told(name, state), site.prepare_site(start)
    env = relay_environment(env, state / "guard" / "relay", "site", ends)
    (port,), secret = free_ports(1), write_secret(state / f"{name}.superexec")
    processes = watched.processes
    try:
        superexec = start_isolated(processes, name, relay_supernode_command(port, config, secret), env, port, secret)
        print(
            f"site {name}: orders from {ends.orders}, replies to {ends.replies}, log {processes.log(name)}", flush=True
        )
        print(f"site {name}: the other end is {peer_of(ends)}", flush=True)
        if follow:  # otherwise the first order starts one
            start_spare(start.node, superexec, env)
        while (code := processes.ended(name)) is None and (follow or not reporter.idle):
            time.sleep(_POLL_SECONDS)
            reporter.tell()
            watched.tell()
        if code is not None:
            raise watched.ended(code)
    finally:
        processes.stop()
    print(f"site {name}: {reporter.answered} answered, {reporter.bad} refused; log {state / 'relay-log.jsonl'}")
    return int(reporter.bad > 0)
