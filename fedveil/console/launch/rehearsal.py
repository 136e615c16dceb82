"""A whole pilot on one machine: an operator's folder, one kit per site, keys, policies, and real processes.

Each step runs the `fedveil` command that a person would type, on the same files as a real pilot, so that what is
rehearsed here is what will happen later. Its folder:

    FOLDER/run.toml          the run config that the parties agree on
           site-policy.toml  the policy that permits it, as `fedveil site policy` prints it
           operator/         federation.toml, and the federation's folder
           sites/NAME/       the unpacked kit of a site, with its keys, data, policy, state and logs
           logs/             what the server and each site print
           report.html       the report on the run

The sites are marked as simulated, so that a private run binds no data folder to a rehearsal's ledger.
Each site is a folder of one user on one machine, so the rehearsal shows nothing about firewalls, and the user can read
all keys and data.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fedveil import paths
from fedveil.console.flower.machine import format_toml, free_ports
from fedveil.console.flower.processes import ProcessGroup
from fedveil.errors import ConfigError, FedVeilError
from fedveil.sanitize import sanitize

__all__ = ["FEDERATION", "PilotRehearsal", "RehearsedSite", "list_site_folders"]

FEDERATION = "rehearsal"
SERVER = "server"
_REFUSES = "This policy still refuses the run"  # printed by `fedveil site policy`
_READY = "next: fedveil submit"  # the last line that `fedveil server start` prints before it waits
_START_SECONDS, _POLL_SECONDS = 120.0, 0.5
_STOP_SECONDS = 20.0
_ROWS_A_SITE = 200  # of the bundled texts, where no data is given
_KIT_DATA = 'data = "data"\n'
_FINGERPRINT = re.compile(r"SHA256:[^\s]+")
_SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class RehearsedSite:
    """A site: its name, and its folder with examples; None uses some of the bundled texts."""

    name: str
    data: Path | None = None


def list_site_folders(data: Path) -> list[RehearsedSite]:
    """Return a site for each folder in `data`. Raises ConfigError if there are fewer than two, or for a bad name."""
    try:
        folders = sorted(path for path in data.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise ConfigError(f"--data: {data} cannot be read ({type(error).__name__})") from None
    if len(folders) < 2:
        raise ConfigError(f"--data: {data} has {len(folders)} folders; it needs one per site, and at least two")
    names = [path.name for path in folders]
    if strange := next((name for name in names if not _SITE_NAME.fullmatch(name) or name == SERVER), ""):
        raise ConfigError(
            f"--data: {sanitize(strange, 100)} cannot be a site's name: use letters, digits, '-', '_' and '.', at most "
            f'64, starting with a letter or digit, and not "{SERVER}"'
        )
    return [RehearsedSite(path.name, path.absolute()) for path in folders]


class PilotRehearsal:
    """A pilot in a new folder; all processes end with the `with` block.

    Args:
        folder: a folder that does not exist yet.
        sites: at least two.
        settings: the run config, by dotted key.
        say: called with one line per step.
        device: device of every site, or None to let each choose.
    """

    def __init__(
        self,
        folder: Path,
        sites: Sequence[RehearsedSite],
        settings: Mapping[str, Any],
        say: Callable[[str], None],
        device: str | None = None,
    ) -> None:
        if folder.exists():
            raise ConfigError(f"FOLDER: {folder} exists; a rehearsal needs a new folder: remove it, or name another")
        if settings.get("task.data-set"):
            raise ConfigError("task.data-set: the sites of a rehearsal have one data set each; leave it out")
        self.folder, self._sites, self._say, self._device = folder.absolute(), list(sites), say, device
        self._settings = dict(settings)
        self.operator = self.folder / "operator" / FEDERATION
        self.run_file = self.folder / "run.toml"
        self._env = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
        self._processes = ProcessGroup(self.folder / "logs")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._processes.stop(_STOP_SECONDS)

    def kit(self, site: str) -> Path:
        """Return a site's folder."""
        return self.folder / "sites" / site

    def write_policy(self) -> None:
        """Write the run config and the policy for it. Raises ConfigError if the kit's protections refuse the run."""
        self.folder.mkdir(parents=True)
        self._processes.logs.mkdir()
        self.run_file.write_text(format_toml(self._settings))
        policy = self.folder / "site-policy.toml"
        command = ["fedveil", "site", "policy", "--from", str(self.run_file), "--out", str(policy)]
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            reasons = [line for line in lines if line.startswith(_REFUSES)] or lines[-1:]
            raise ConfigError(
                f"{'; '.join(sanitize(line, 1000) for line in reasons)} (nothing was started; see {self.folder})"
            )
        self._say(f"policy: {policy} permits the run of {self.run_file}; read it")

    def provision(self) -> None:
        """Make the operator's folder and the kits, and start the server."""
        fleet, control = free_ports(2)
        file = self.folder / "operator" / "federation.toml"
        file.parent.mkdir()
        federation = {
            "name": FEDERATION, "server": ["localhost"], "sites": [site.name for site in self._sites],
            "fleet-port": fleet, "control-port": control,
        }  # fmt: skip
        file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in federation.items()))
        self._call("provision", str(file))
        self._say(f"operator: {self.operator} has the certificates, and a kit for each of {len(self._sites)} sites")
        self._processes.start(SERVER, ["fedveil", "server", "start", str(self.operator)], self._env)
        self._wait_for(SERVER, _READY)
        self._say(f"server: started; sites connect to localhost:{fleet}")

    def enroll(self) -> None:
        """Unpack each kit, make the site's keys, register them, and write its data and policy."""
        kits = self.operator / "kits"
        for number, site in enumerate(self._sites):
            kit = self.kit(site.name)
            _unpack(kits / f"{site.name}.tar.gz", kit)
            printed = self._call("site", "init", cwd=kit)
            *_, fingerprint = _FINGERPRINT.findall(printed)  # the last one is that of the site's keys
            self._call(
                "members", "register", str(self.operator), str(kit / "keys" / "request.json"),
                "--fingerprint", fingerprint,
            )  # fmt: skip
            (kit / "site-policy.toml").write_bytes((self.folder / "site-policy.toml").read_bytes())
            with (kit / "node-config.toml").open("a") as node_config:
                node_config.write("simulated = true\n")
            if site.data is None:
                rows = _write_bundled_rows(kit / "data", number, len(self._sites))
                data = f"{rows} of the bundled texts"
            else:
                _point_to(kit / "node-config.toml", site.data)
                data = f"the data in {site.data}"
            self._say(f"{site.name}: keys made and registered ({fingerprint}), {data}")

    def start_sites(self) -> None:
        """Start each site, and wait until it takes messages."""
        device = ["--device", self._device] if self._device else []
        for site in self._sites:
            command = ["fedveil", "site", "start", "--kit", str(self.kit(site.name)), *device]
            self._processes.start(site.name, command, self._env, cwd=self.kit(site.name))
        for site in self._sites:
            self._wait_for(site.name, f"site {site.name}: online")
        self._say(f"sites: {len(self._sites)} online")

    def submit(self) -> int:
        """Submit the run, show its progress in this terminal until it ends, and return the exit code."""
        command = ["fedveil", "submit", "--federation", str(self.operator), "--config", str(self.run_file)]
        self._say(f"run: {' '.join(command[:2])} --federation {self.operator} --config {self.run_file}")
        return subprocess.run(command, env=self._processes.marked("submit", self._env), check=False).returncode

    def report(self) -> None:
        """Write the report, and compare each site's audit log with the server's."""
        run = self.operator / "runs" / str(self._settings["run.name"])
        page = self.folder / "report.html"
        self._call("report", str(run), "--federation", str(self.operator), "--out", str(page))
        for site in self._sites:
            log = self.kit(site.name) / "state" / "audit-log.jsonl"
            server_log = self.operator / "runs" / "audit-log.jsonl"
            self._call("log", "verify", str(log), "--other", str(server_log), "--site", site.name)
        self._say(f"report: {page}; each site's audit log agrees with the server's")

    def wait_for_interrupt(self) -> None:
        """Wait until Ctrl-C, or until a process ends, which raises FedVeilError."""
        with suppress(KeyboardInterrupt):
            while True:
                for name in (SERVER, *(site.name for site in self._sites)):
                    self._require_running(name)
                time.sleep(_POLL_SECONDS)

    def _call(self, *arguments: str, cwd: Path | None = None) -> str:
        return self._processes.call(arguments[0], ["fedveil", *arguments], self._env, 300.0, cwd or self.folder)

    def _wait_for(self, name: str, text: str) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while text not in self._read_log(name):
            self._require_running(name)
            if time.monotonic() > deadline:
                raise FedVeilError(f"{name}: not ready within {_START_SECONDS:.0f} s: {self._processes.tail(name)}")
            time.sleep(_POLL_SECONDS)

    def _read_log(self, name: str) -> str:
        with suppress(OSError):
            return self._processes.log(name).read_text(errors="replace")
        return ""

    def _require_running(self, name: str) -> None:
        if (code := self._processes.ended(name)) is not None:
            raise FedVeilError(f"{name}: ended with exit code {code}: {sanitize(self._processes.tail(name), 1000)}")


def _unpack(archive: Path, kit: Path) -> None:
    """Unpack a kit that `fedveil provision` just made on this machine."""
    kit.mkdir(parents=True)
    with tarfile.open(archive, "r:gz") as packed:
        for entry in packed:
            content = packed.extractfile(entry) if entry.isfile() else None
            if content is not None:
                (kit / Path(entry.name).name).write_bytes(content.read())


def _point_to(node_config: Path, data: Path) -> None:
    text = node_config.read_text()
    if text.count(_KIT_DATA) != 1:
        raise FedVeilError(f"{node_config}: expected the line {_KIT_DATA.strip()} of a new kit, found none")
    node_config.write_text(text.replace(_KIT_DATA, f"data = {json.dumps(str(data))}\n"))


def _write_bundled_rows(folder: Path, number: int, sites: int) -> int:
    """Write a site's share of the bundled texts, which no other site has, and return its number of rows."""
    rows = (paths.find_folder("data/e2e") / "train.jsonl").read_text("utf-8").splitlines()
    mine = rows[number::sites][:_ROWS_A_SITE]
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(mine) + "\n")
    return len(mine)
