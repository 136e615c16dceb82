"""A federation on this machine: one SuperLink, one SuperNode per site, TLS, and node authentication.

It stops everything it starts, even after Ctrl-C or an error.

    with LocalDeployment([LocalSite("north", data), LocalSite("south", data)]) as federation:
        run = federation.run(app, {"run.dir": str(runs), "run.name": "first"})
        ended = federation.wait(run, timeout=600)
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import tempfile
import time
import tomllib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fedveil.client_app.node_config import parse_site
from fedveil.console.flower import instruction_key_files
from fedveil.console.flower.certificates import write_node_key, write_secret, write_tls
from fedveil.console.flower.flwr_cli import CONNECTION, FlowerCli, write_connection
from fedveil.console.flower.machine import Value, count_cores, format_toml, free_ports, is_port_open
from fedveil.console.flower.operator_tokens import write_registry
from fedveil.console.flower.processes import LaunchError, ProcessGroup, flower_environment, named_error
from fedveil.console.flower.programs import ONLINE, superlink_command, supernode_command
from fedveil.console.flower.site_process import (
    guarded_environment,
    single_user_environment,
    start_isolated,
    start_spare,
    unguarded_environment,
)
from fedveil.federation.message_signatures.key_files import (
    INSTRUCTION_KEYS,
    InstructionKeys,
    SiteSigner,
    SiteSigners,
)
from fedveil.federation.secagg import crypto
from fedveil.records import process_exit
from fedveil.records.atomic_files import write_atomic

SUPERLINK = "superlink"
SERVER_APP = "flwr-serverapp"


@dataclass(frozen=True)
class LocalSite:
    """A site in the federation: its name, its data (None = as in the run config), and other node config keys."""

    name: str
    data: Path | None = None
    node_config: tuple[tuple[str, Value], ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", self.name) or self.name == SUPERLINK:
            raise LaunchError(f"site name: expected letters, digits, '-', '_' or '.', at most 64, found {self.name!r}")


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a run."""

    completed: bool
    reason: str
    seconds: float


class LocalDeployment:
    """A federation on this machine that starts on entry and stops on exit; no process outlives the `with` block.

    Args:
        sites: the sites; each gets its own SuperNode.
        folder: location of keys, logs and the sites' private state; None means a temporary folder, removed at
            the end.
        device: "cpu" or "cuda", for all sites.
        client_threads: training threads per site; 0 divides the machine's cores among the sites.
        database: store the SuperLink's state in a file instead of in memory.
        start_timeout: seconds within which all sites must be online.
        own_waits: for comparison, sites poll as in unmodified Flower and start a new client process each
            time.
        guarded: run a guard at every site; otherwise only sites with a policy have one.
        signed: the server and the guarded sites sign their messages.
    """

    def __init__(
        self,
        sites: Sequence[LocalSite],
        folder: Path | None = None,
        device: str = "cpu",
        client_threads: int = 0,
        database: bool = False,
        start_timeout: float = 120.0,
        own_waits: bool = False,
        guarded: bool = False,
        signed: bool = True,
    ) -> None:
        self.sites = {site.name: site for site in sites}
        if not sites or len(self.sites) != len(sites):
            raise LaunchError(f"sites: expected at least one, with unique names, found {[site.name for site in sites]}")
        self.device = device
        self.client_threads = client_threads or max(1, count_cores() // len(sites))
        self._database, self._start_timeout, self._own_waits = database, start_timeout, own_waits
        self._guarded, self._signed = guarded, signed
        self._temporary = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="fedveil-")) if folder is None else folder.absolute()
        self.processes = ProcessGroup(self.folder / "logs")
        self._status_files: dict[int, tuple[Path, float]] = {}
        self._log_starts: dict[str, int] = {}
        self._signers: SiteSigners | None = None
        self._nodes: dict[str, str] = {}

    def __enter__(self) -> Self:
        try:
            self._prepare()
            self.start_superlink()
            self._start_sites()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # Runs

    def run(self, app: Path | None, overrides: Mapping[str, Value]) -> int:
        """Submit the app in folder `app`, or this installation's own, with `overrides`; return the run ID."""
        submitted = time.time()
        run = int(self.flower.submit(app, overrides))
        if overrides.get("run.dir") and overrides.get("run.name"):
            folder = Path(str(overrides["run.dir"])) / str(overrides["run.name"])
            self._status_files[run] = (folder / "status.json", submitted)
        return run

    def wait(self, run: int, timeout: float, on_tick: Callable[[dict[str, Any]], None] | None = None) -> RunOutcome:
        """Wait until the run ends; call `on_tick` with its status.json about twice a second.

        A run also counts as ended if its ServerApp or the SuperLink died silently.
        """
        started = asked = time.monotonic()
        while True:
            status = self.status(run)
            if on_tick:
                on_tick(status)
            self._require_alive(SUPERLINK)
            now = time.monotonic()
            if now - asked >= 60.0 or (now - asked >= 2.0 and not self.processes.runs(SERVER_APP, SUPERLINK)):
                if (flower_status := self.flower.run_status(str(run))).startswith("finished"):
                    return self._ended(run, flower_status, now - started)
                asked = time.monotonic()
            if now - started > timeout:
                with suppress(LaunchError):
                    self.flower.stop(str(run))
                status.pop("process", None)
                raise LaunchError(
                    f"run {run}: not finished within {timeout:.0f} s, stopped; last status: {status or 'none'}"
                )
            time.sleep(0.5)

    def status(self, run: int) -> dict[str, Any]:
        """Return the run's status.json, or {} if there is none yet (an earlier run's does not count)."""
        file, submitted = self._status_files.get(run, (Path(), 0.0))
        with suppress(OSError, ValueError):
            if file.stat().st_mtime >= submitted:
                return dict(json.loads(file.read_text(encoding="utf-8")))
        return {}

    def server_log(self, run: int, lines: int = 15) -> str:
        """Return the last lines of the ServerApp's output."""
        return "\n".join(self.flower.log(str(run)).splitlines()[-lines:])

    # Sites

    def kill_site(self, name: str, grace: float = 0.0) -> None:
        """Kill a site's SuperNode and all its child processes; with `grace`, it has time to notify the SuperLink."""
        self.processes.kill(name, grace)

    def start_site(self, name: str) -> None:
        """Start a SuperNode and a spare worker without waiting for the site to come online. Register its key first."""
        log, env = self.processes.log(name), {**self._env(), "OMP_NUM_THREADS": str(self.client_threads)}
        has_policy = "policy" in dict(self.sites[name].node_config)
        env = (
            guarded_environment(env, self.folder / ("guard" if has_policy else "guard-without-policy"), has_policy)
            if self._is_guarded(name)
            else unguarded_environment(env, self.folder / "own", self._own_waits)
        )
        self._log_starts[name] = log.stat().st_size if log.exists() else 0
        port, secret = self._site_ports[name], write_secret(self.folder / "keys" / f"{name}.superexec")
        link, config = self.fleet_address(name), self._write_node_config(name)
        command = supernode_command(link, self.folder / "ca.crt", self._key(name), port, config, secret)
        superexec = start_isolated(self.processes, name, command, env, port, secret)
        site = parse_site(tomllib.loads(self._node_file(name).read_text(encoding="utf-8")))
        if not self._own_waits:  # unmodified Flower has no worker, whose CPU seconds would distort the comparison
            start_spare(site, superexec, self.processes.marked(name, env))

    def fleet_address(self, name: str) -> str:
        """Return the address at which a site reaches the server; a subclass may put a line of its own in between."""
        return f"127.0.0.1:{self._fleet_port}"

    def online(self, name: str) -> bool:
        """Return whether the SuperLink has accepted the site. Raises LaunchError if its SuperNode has exited."""
        self._require_alive(name)
        return ONLINE.encode() in self.processes.log(name).read_bytes()[self._log_starts[name] :]

    def last_error(self, name: str) -> str:
        """Return the last exception in a site's log, or ""."""
        return named_error(self.processes.log(name).read_text(errors="replace"))

    # Start and stop

    def stop(self) -> None:
        """Stop everything, and remove a temporary folder."""
        self.processes.stop()
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _prepare(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        for name in ("logs", "keys", "flower", "sites"):
            (self.folder / name).mkdir(mode=0o700, exist_ok=True)
        write_tls(self.folder)
        for name in self.sites:
            write_node_key(self._key(name))
        self._control_port, self._fleet_port, *ports = free_ports(2 + len(self.sites))
        self._site_ports = dict(zip(self.sites, ports, strict=True))
        home, address = self.folder / "flower", f"127.0.0.1:{self._control_port}"
        write_connection(home, address, self.folder / "ca.crt")
        write_registry(self.folder / "registry", {name: self._key(name) for name in self.sites}, home, address)
        self._write_signing_files()
        self.flower = FlowerCli(home, processes=self.processes, env=self._env())

    def _is_guarded(self, name: str) -> bool:
        return "policy" in dict(self.sites[name].node_config) or (self._guarded and not self._own_waits)

    def _write_signing_files(self) -> None:
        """Write the instruction key, the guarded sites' signing keys, the pinned-keys file, and signers.json."""
        guarded = [name for name in self.sites if self._is_guarded(name)]
        if not guarded or not self._signed:
            return
        public = instruction_key_files.draw_keys(self.folder)
        federation = secrets.token_hex(16)
        write_atomic(self.folder / INSTRUCTION_KEYS, InstructionKeys(federation, public).to_toml().encode())
        signers = {name: SiteSigner("", "", "registered", False) for name in self.sites}
        for name in guarded:
            file = self._signing_key(name)
            if file.parent == self.folder / "keys":  # otherwise the site has its own
                write_atomic(file, os.urandom(crypto.KEY_BYTES))
            signers[name] = SiteSigner("", instruction_key_files.public_key(file), "registered", True)
        self._signers = SiteSigners(federation, len(guarded) == len(self.sites), signers)
        write_atomic(instruction_key_files.signers_file(self.folder), self._signers.to_bytes())

    def _list_nodes(self) -> None:
        """Add each site's node ID to signers.json once all sites are registered."""
        if self._signers is None:
            return
        sites = {name: replace(signer, node=self._nodes[name]) for name, signer in self._signers.sites.items()}
        content = replace(self._signers, sites=sites).to_bytes()
        write_atomic(instruction_key_files.signers_file(self.folder), content)

    def _signing_env(self) -> dict[str, str]:
        return instruction_key_files.signing_environment(self.folder, self._signers is not None)

    def _signing_key(self, name: str) -> Path:
        own = dict(self.sites[name].node_config).get("signing-key")
        return Path(str(own)) if own else self.folder / "keys" / f"{name}.signing"

    def start_superlink(self) -> None:
        """Start the SuperLink; after a kill, it resumes from its state on disk."""
        port, ca, secret = self._control_port, self.folder / "ca.crt", write_secret(self.folder / "superlink.superexec")
        folder, fleet = self.folder, f"127.0.0.1:{self._fleet_port}"
        command = superlink_command(folder, folder / "registry", folder, port, fleet, self._database, secret)
        if self._own_waits:  # the app under comparison can be any Flower app, whose replies have other records
            command.append("--without-fleet-checks")
        env = self._env() | self._signing_env()
        start_isolated(self.processes, SUPERLINK, command, env, port, secret, ca)
        self._until(lambda: is_port_open(port) and is_port_open(self._fleet_port), SUPERLINK)

    def _start_sites(self) -> None:
        """Register each site's key, then start its SuperNode, several sites at a time."""
        waiting, registering, starting = deque(self.sites), set[str](), set[str]()
        deadline = time.monotonic() + self._start_timeout
        while waiting or registering or starting:
            while waiting and len(registering) < 2 * count_cores():
                registering.add(self._register(waiting.popleft()))
            for name in [n for n in registering if self._registered(n)]:
                registering.remove(name)
                starting.add(name)
                self.start_site(name)
            starting = {name for name in starting if not self.online(name)}
            self._require_alive(SUPERLINK)
            if time.monotonic() > deadline:
                late = min(starting or registering)
                raise LaunchError(
                    f"{late}: not online within {self._start_timeout:.0f} s; its log ends: {self.processes.tail(late)}"
                )
            time.sleep(0.1)
        self._list_nodes()

    def _register(self, name: str) -> str:
        command = ["flwr", "supernode", "register", f"{self._key(name)}.pub", CONNECTION, "--name", name]
        command += ["--format", "json"]
        self.processes.start(f"register-{name}", command, self._env(), cwd=self.folder / "flower")
        return name

    def _registered(self, name: str) -> bool:
        code = self.processes.ended(f"register-{name}")
        if code:
            raise LaunchError(f"{name}: its key could not be registered: {self.processes.tail(f'register-{name}')}")
        if code == 0:
            self._nodes[name] = self._node_number(name)
        return code == 0

    def _node_number(self, name: str) -> str:
        """Return Flower's ID for a site's node, from the response to its registration."""
        answer = self.processes.log(f"register-{name}").read_text(errors="replace")
        if not (number := re.search(r'"node-id": *"?(\d{1,20})"?', answer)):
            raise LaunchError(f"{name}: expected its node ID, found {answer.strip()[-300:]!r}")
        return number[1]

    # Helpers

    def _ended(self, run: int, flower_status: str, seconds: float) -> RunOutcome:
        status = self.status(run)
        completed = flower_status == "finished:completed" and status.get("state", "completed") == "completed"
        reason = str(status.get("reason") or "")
        if status.get("state") == "running" and process_exit.is_dead(self._status_files[run][0].parent):
            reason = (
                f"its ServerApp ended without a message: {process_exit.describe_ending(status.get('process') or {})}"
            )
        if not completed and not reason:
            with suppress(LaunchError):
                log = self.server_log(run, 60)
                reason = named_error(log) or " | ".join(log.splitlines()[-3:])
        return RunOutcome(completed, reason or flower_status, seconds)

    def _env(self) -> dict[str, str]:
        env = {
            **flower_environment(self.folder / "flower"),
            "HF_HUB_OFFLINE": "1",
            process_exit.TEMPORARY: "1" * self._temporary,
        }
        return single_user_environment(
            env | dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1"), self.folder / "ports"
        )

    def _key(self, name: str) -> Path:
        return self.folder / "keys" / name

    def _write_node_config(self, name: str) -> Path:
        """Write the node config to a file, because `--node-config` key=value pairs do not support every path."""
        site = self.sites[name]
        folder = self.folder / "sites" / name
        folder.mkdir(mode=0o700, exist_ok=True)
        config: dict[str, Value] = {"site": name, "state-dir": str(folder), "device": self.device}
        config["simulated"] = True
        config |= {"partition-id": list(self.sites).index(name), "num-partitions": len(self.sites)}
        if site.data is not None:  # sites may share the folder, so no ID is written there
            config |= {"data": str(site.data.absolute()), "data-set": name}
        if self._is_guarded(name) and self._signed:
            pinned = self.folder / INSTRUCTION_KEYS
            config |= {"signing-key": str(self._signing_key(name)), "instruction-keys": str(pinned)}
        file = self._node_file(name)
        file.write_text(format_toml({**config, **dict(site.node_config)}), encoding="utf-8")
        return file

    def _node_file(self, name: str) -> Path:
        return self.folder / "sites" / f"{name}.toml"

    def _until(self, ready: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + self._start_timeout
        while not ready():
            self._require_alive(name)
            if time.monotonic() > deadline:
                tail = self.processes.tail(name)
                raise LaunchError(f"{name}: not ready within {self._start_timeout:.0f} s; its log ends: {tail}")
            time.sleep(0.05)

    def _require_alive(self, name: str) -> None:
        code = self.processes.ended(name)
        if code is not None:
            part = self.processes.ended_part(name)
            raise LaunchError(f"{part}: ended with exit code {code}; its log ends: {self.processes.tail(name)}")
