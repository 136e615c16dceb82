"""What `fedveil relay export` and `import` start: Flower's SuperNode as one end of a relay (guard/relay)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedveil import places
from fedveil.client_app.site.node_config import Site
from fedveil.console.flower.keys import write_secret
from fedveil.console.flower.machine import free_ports, toml
from fedveil.console.flower.processes import Processes, environment
from fedveil.console.flower.programs import supernode, unconnected
from fedveil.console.flower.site_process import alone, relayed, start_isolated, start_spare
from fedveil.console.runs import sealing
from fedveil.console.starting import online, site
from fedveil.console.starting.options import STATE
from fedveil.errors import ConfigError
from fedveil.foreign import shown
from fedveil.guard import pace
from fedveil.guard.relay import said
from fedveil.guard.relay.book import Book
from fedveil.guard.relay.ends import Settings
from fedveil.guard.relay.keys import SECRET, Secret, read_public
from fedveil.sealed import Seal

PEER = "peer.pub"
MOST_MB, MOST_MB_AT_ALL = 1900, 1900  # protobuf holds 2 GiB
_POLL_SECONDS = 0.3


def settings(options: Mapping[str, Any], kit: Path | None, state: Path) -> Settings:
    """Keys, folders and bounds of one end; keys and folders are there. Raises ConfigError, which names the option."""
    found = {}
    for name, file in (("relay-key", SECRET), ("peer", PEER)):
        given = options.get(name) or (kit / "keys" / file if kit else None)
        if given is None:
            raise ConfigError(f"--{name}: expected a file, or --kit with keys/{file} in it, found neither")
        found[name] = Path(given).expanduser().absolute()
    own, peer = Secret.of(found["relay-key"]), read_public(found["peer"])
    if own.public == peer:
        raise ConfigError(f"--peer: expected the other end's relay.pub, found this end's own at {found['peer']}")
    if not 1 <= (most := int(options["most-mb"])) <= MOST_MB_AT_ALL:
        raise ConfigError(f"--most-mb: expected 1 to {MOST_MB_AT_ALL}, found {most}")
    orders, replies = (Path(options[name]).expanduser().absolute() for name in ("orders", "replies"))
    if orders == replies:
        raise ConfigError(f"REPLIES: expected another folder than that of the orders, found {replies} twice")
    return Settings(found["relay-key"], found["peer"], orders, replies, state, most * 1_000_000)


def peer_of(ends: Settings) -> str:
    """The fingerprint of the other end's keys, which its people can read out."""
    return read_public(ends.peer).fingerprint


def _require_folder(name: str, folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{name}: expected the folder that letters come by, found none at {folder}; make it")


@dataclass
class _Told:
    """Prints what an end says.

    Attributes:
        answered, bad: how many letters so far.
        idle: whether everything that lay in the folder was judged.
    """

    name: str
    file: Path
    answered: int = 0
    bad: int = 0
    idle: bool = False
    _read: int = field(default=0, repr=False)

    def tell(self) -> None:
        lines, self._read = said.read(self.file, self._read)
        for what, words in lines:
            self.answered += what == "answered"
            self.bad += what in said.BAD
            self.idle = what == said.IDLE
            if words:
                print(f"site {self.name}: {shown(words, 1000)}", flush=True)


def _told(name: str, state: Path) -> _Told:
    """Of a start that is about to be."""
    file = places.private_folder(state) / said.NAME
    file.write_text("")
    return _Told(name, file)


def export(options: Mapping[str, Any], kit: Path | None) -> int:
    """The server's end: stays until its SuperNode ends, which raises ConfigError with the reason."""
    both = (site.of_kit(kit) if kit else {}) | {name: value for name, value in options.items() if value is not None}
    if missing := [f"--{name}" for name in site.WIRED if name not in both]:
        raise ConfigError(
            f"--kit: expected the unpacked start-up kit, or {site.listed(site.WIRED)}, found no {', '.join(missing)}"
        )
    site.require_poll(poll := float(both.get("poll-seconds", pace.DEFAULT)))
    name, ca, key = Site(site=str(both["name"])).site, Path(both["ca"]).absolute(), Path(both["key"]).absolute()
    state = Path(both.get("state-dir") or (kit / "relay" if kit else STATE / f"relay-{name}")).expanduser().absolute()
    ends = settings(both, kit, state)
    for option, file in (("ca", ca), ("key", key)):
        if not file.is_file():
            raise ConfigError(f"--{option}: expected a file, found none at {file}; see docs/relay.md")
    _require_folder("REPLIES", ends.replies)
    places.private_folder(ends.orders)
    site.require_link(ca, key)
    watched = online.Watch.of(Processes(state / "logs"), name, state, str(both["superlink"]), ca)
    watched.look()
    told = _told(name, state)
    places.private_folder(state / "logs")
    config = state / f"{name}.toml"
    config.write_text(toml({"site": name}))
    env = alone({**environment(state / "flower"), pace.VARIABLE: str(poll)}, state / "programs")
    env = relayed(env, state / "programs" / "relay", "server", ends)
    (port,), secret = free_ports(1), write_secret(state / f"{name}.superexec")
    try:
        watched.processes.start(name, supernode(watched.superlink, ca, key, port, config, secret), env)
        print(f"site {name}: relay for {watched.superlink}, log {watched.processes.log(name)}", flush=True)
        print(f"site {name}: orders go to {ends.orders}, replies are taken from {ends.replies}", flush=True)
        print(f"site {name}: the other end is {peer_of(ends)}", flush=True)
        return watched.until_ended(told.tell)
    finally:
        watched.processes.stop()
        told.tell()


def import_(options: Mapping[str, Any], kit: Path | None, permit_everything: bool, follow: bool) -> int:
    """The site's end: until every order was answered or refused, or for ever with `follow`.

    Returns 1 where a letter was refused, 0 else. Raises ConfigError, StateError.
    """
    start = site.settled(options, kit, permit_everything, need=("name",))
    name, state = start.node.site, start.node.state_dir
    ends = settings(options, kit, state)
    _require_folder("ORDERS", ends.orders)
    sealing.require(state, Seal.of(start.node.key_file))
    site.require_policy(start.node)
    Book.of(state).release()
    places.private_folder(ends.replies)
    watched = online.Watch.of(Processes(state / "logs"), name, state, "", Path())
    told, (config, env) = _told(name, state), site.prepared(start)
    env = relayed(env, state / "guard" / "relay", "site", ends)
    (port,), secret = free_ports(1), write_secret(state / f"{name}.superexec")
    processes = watched.processes
    try:
        superexec = start_isolated(processes, name, unconnected(port, config, secret), env, port, secret)
        print(
            f"site {name}: orders from {ends.orders}, replies to {ends.replies}, log {processes.log(name)}", flush=True
        )
        print(f"site {name}: the other end is {peer_of(ends)}", flush=True)
        if follow:  # else the first order starts one, if there is an order
            start_spare(start.node, superexec, env)
        while (code := processes.ended(name)) is None and (follow or not told.idle):
            time.sleep(_POLL_SECONDS)
            told.tell()
            watched.tell()
        if code is not None:
            raise watched.ended(code)
    finally:
        processes.stop()
    print(f"site {name}: {told.answered} answered, {told.bad} refused; log {state / 'relay-log.jsonl'}")
    return int(told.bad > 0)
