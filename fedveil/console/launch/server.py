"""A federation's server without containers: SuperLink and SuperExec, as configured by `fedveil provision`.

| what exits | action of `fedveil server start` |
|---|---|
| the SuperExec | restarts it; the runs' processes ended with it and are resumed as usual |
| the SuperLink, and its SuperExec with it | restarts both; sites reconnect on their own |
| either, and a `resolve_server` check now fails, such as a port in use or an expired certificate | exits |
| either, with a reason printed by its program, such as an unsupported Flower | exits with that reason |
| either, for the same reason ten times in ten minutes (restarts.py) | exits with that reason |
| the SuperLink, before it was ready for the first time | exits with the reason |
"""

from __future__ import annotations

import errno
import socket
import stat
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from fedveil import paths
from fedveil.console.doctor import checks
from fedveil.console.flower import instruction_key_files
from fedveil.console.flower.machine import is_port_open
from fedveil.console.flower.processes import ProcessGroup, flower_environment
from fedveil.console.flower.programs import superlink_command
from fedveil.console.flower.site_process import single_user_environment, start_isolated, start_superexec
from fedveil.console.launch.restarts import Restarts, own_error
from fedveil.console.launch.service_notify import ServiceNotifier
from fedveil.console.provisioning.federation_folder import SiteRegistry, registry_folder
from fedveil.console.terminal import say
from fedveil.errors import ConfigError
from fedveil.records import process_exit
from fedveil.sanitize import sanitize

NAME = "superlink"
_FILES = ("ca.crt", "server.pem", "server.key", "superexec-secret")
_SQLITE = b"SQLite format 3\0"
_READY_SECONDS = 60.0
_POLL_SECONDS = 0.2
_DISK_SECONDS = 10.0
_MOST_READ = 1 << 20  # bytes to read from the end of the log


@dataclass(frozen=True)
class ServerLauncher:
    """A server that is about to start.

    Attributes:
        folder: the folder made by `fedveil provision`; apps run there, so a relative run.dir is inside it.
        name: the federation's name.
        fleet: HOST:PORT at which it listens for sites.
        control_port: its control port on the loopback interface.
        state: folder for the database, the control port's log, and the programs' logs.
    """

    folder: Path
    name: str
    fleet: str
    control_port: int
    state: Path


def resolve_server(folder: Path, listen: str | None = None, state: Path | None = None) -> ServerLauncher:
    """Return the federation's settings, overridden by the options and checked, without starting anything.

    Raises:
        ConfigError: a file is missing or expired, or a port is in use; the message names the file or port.
    """
    federation = SiteRegistry(folder).federation
    for name in _FILES:
        if not (folder / "server" / name).is_file():
            raise ConfigError(
                f"{folder / 'server'}: expected {name}, found none; restore it, or run fedveil members renew-server"
            )
    _require_private(folder / "server" / "server.key")
    _require_signing(SiteRegistry(folder))
    _require_own_lists(folder)
    for name in ("ca.crt", "server.pem"):
        file = folder / "server" / name
        cert_check = checks.run_check(name, lambda file=file: checks.check_certificate(file))  # type: ignore[misc]
        if cert_check.verdict == "fail":
            raise ConfigError(f"{file}: expected a certificate that is valid now, found a problem: {cert_check.text}")
    fleet = listen or f"0.0.0.0:{federation.fleet_port}"
    try:
        host, port = checks.parse_address(fleet)
    except ValueError as error:
        raise ConfigError(f"--listen: {error}; write it as 0.0.0.0:9092") from None
    require_free_ports("fleet-port", host, port)
    require_free_ports("control-port", "127.0.0.1", federation.control_port)
    where = (state or folder / "server").expanduser().absolute()
    _require_database(where / "superlink.db", folder)
    return ServerLauncher(folder.absolute(), federation.name, fleet, federation.control_port, where)


def _require_database(file: Path, folder: Path) -> None:
    """Raise ConfigError if Flower's state file is not a database. There is no such file before the first start."""
    try:
        with file.open("rb") as database:
            head = database.read(len(_SQLITE))
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{file}: expected a database that this user can read, found {error.strerror}") from None
    if head not in (b"", _SQLITE):
        raise ConfigError(
            f"{file}: expected Flower's database, found a damaged or different file; restore it from a backup, or move "
            f"it away, start the server, and re-register the sites: fedveil members sync {folder}"
        )


def _require_private(key: Path) -> None:
    if (mode := stat.S_IMODE(key.stat().st_mode)) & 0o077:
        raise ConfigError(f"{key}: expected a file readable only by its owner, found mode {mode:o}; chmod 600 {key}")


def _require_signing(members: SiteRegistry) -> None:
    """Raise ConfigError if the federation has instruction keys but the server cannot sign with the current key."""
    if not members.instruction_keys:
        if (
            members.federation.signatures == "required"
            and not instruction_key_files.current_file(members.folder).is_file()
        ):
            raise ConfigError(
                "signatures: expected instruction keys, which signatures = required needs, found none in "
                f"{members.folder}; create them, and a site's new kit, with fedveil members kit {members.folder} NAME"
            )
        return
    file = instruction_key_files.current_file(members.folder)
    if not file.is_file():
        raise ConfigError(
            f"{file}: expected the key that signs instructions, found none; restore it, or let the standby key sign: "
            f"fedveil members renew-instruction-key {members.folder}"
        )
    _require_private(file)
    if instruction_key_files.public_key(file) != members.instruction_keys[0]:
        raise ConfigError(
            f"{file}: expected the current key in registry/members.json, which the kits name, found a different one; "
            f"restore it, or let the standby key sign: fedveil members renew-instruction-key {members.folder}"
        )


def _require_own_lists(folder: Path) -> None:
    """Raise ConfigError if other users can change one of the lists, because the ServerApp's process would refuse it."""
    for file in (instruction_key_files.signers_file(folder), instruction_key_files.bundles_file(folder)):
        if file.is_file() and (other := paths.find_other_writer(file, file.stat())):
            raise ConfigError(f"{file}: expected a file that only the server's user can change, but {other}")


def require_free_ports(what: str, host: str, port: int) -> None:
    """Raise ConfigError, with the reason, if the address is not free to listen on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # leftover sockets are not listeners
        try:
            listener.bind((host, port))
        except (OSError, OverflowError) as error:
            used = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            reason = f"one in use: {_listening(port)}" if used else f"one that cannot be used ({error})"
            raise ConfigError(
                f"{what}: expected a free port at {host}:{port}, found {reason}; if this federation's server is still "
                "running there, stop it; otherwise provision the federation with another port"
            ) from None


def _listening(port: int) -> str:
    """Name the process listening on a port, if this user may see it, even if a killed server start left it behind."""
    with suppress(psutil.Error, OSError):
        for conn in psutil.net_connections("tcp"):
            if conn.status == psutil.CONN_LISTEN and conn.laddr.port == port and conn.pid:
                return f"by process {conn.pid} ({sanitize(psutil.Process(conn.pid).name(), 40)}) (kill {conn.pid})"
    return "by another server or program on this machine"


def run(server: ServerLauncher, notifier: ServiceNotifier | None = None) -> int:
    """Start both programs and restart any that ends. Raises ConfigError, with the reason, if that does not help.

    `notifier`: tells the service manager that the server is up, and later that it still answers.
    """
    notifier = notifier or ServiceNotifier()
    paths.private_folder(server.state / "logs")
    programs = _Programs(server, ProcessGroup(server.state / "logs"))
    say("Starting Flower's server; this takes a few seconds", file=sys.stderr, flush=True)
    try:
        programs.start()
        if not programs.become_ready():
            raise ConfigError(f"server: {programs.reason() or programs.slowness()}")
        say(f"server of {server.name}: sites at {server.fleet}, log {programs.processes.log(NAME)}")
        say(f"a relative run.dir is inside {server.folder}; Ctrl-C stops both programs")
        say(f"next: fedveil submit --federation {server.folder} --set method.name=fedrand", flush=True)
        notifier.tell_ready(f"serving sites at {server.fleet}")
        while True:
            if programs.processes.ended(NAME) is not None:
                programs.start_again()
            programs.tell_full_disk()
            programs.trim_log()
            notifier.tell_alive(programs.find_fault)
            time.sleep(_POLL_SECONDS)
    finally:
        programs.processes.stop()


@dataclass
class _Programs:
    """The SuperLink and the SuperExec.

    Attributes:
        began: byte offset in their log at which the last start begins; `since`: time of that start.
        looked: time of the last disk check; `disk_said`: whether the last message said that the disk is full.
    """

    server: ServerLauncher
    processes: ProcessGroup
    restarts: Restarts = field(default_factory=Restarts)
    began: int = 0
    since: float = 0.0
    looked: float = float("-inf")
    disk_said: bool = False

    def start(self) -> None:
        """Start both programs."""
        server, own, env = self.server, self.server.folder / "server", self._env()
        command = superlink_command(
            own, registry_folder(server.folder), server.state, server.control_port, server.fleet, True, self._secret
        )
        self._mark()
        start_isolated(
            self.processes, NAME, command, env, server.control_port, self._secret, own / "ca.crt", server.folder
        )

    def become_ready(self) -> bool:
        """Wait until the control port answers; return False if a program ends first or it takes too long."""
        deadline = time.monotonic() + _READY_SECONDS
        while not is_port_open(self.server.control_port):
            if self.processes.ended(NAME) is not None or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return self.processes.ended(NAME) is None

    def tell_full_disk(self) -> None:
        """Print once when the disk is full, and once when it has space again; the SuperLink itself only answers 500."""
        if time.monotonic() - self.looked < _DISK_SECONDS:
            return
        self.looked = time.monotonic()
        full = process_exit.describe_full_disk(self.server.state)
        if bool(full) != self.disk_said:
            space = f"the disk of {self.server.state} has space again"
            say(f"server: {f'{full}; until then runs fail' if full else space}", file=sys.stderr, flush=True)
            self.disk_said = bool(full)

    def trim_log(self) -> None:
        """Keep the programs' log below its limit."""
        if self.processes.trim_log(NAME):
            self.began = 0

    def find_fault(self) -> str:
        """Return which program ended, or that the SuperLink does not complete a TLS handshake; "" if all is well."""
        if reason := self.reason():
            return reason
        why = checks.find_handshake_fault(self.server.control_port)
        return f"its SuperLink does not answer at the control port: {why}" if why else ""

    def start_again(self) -> None:
        """Restart the ended programs after a delay. Raises ConfigError if a restart cannot help."""
        part, code, reason = self.processes.ended_part(NAME), self.processes.ended(NAME), self.reason()
        if code is not None and (said := own_error(self._log(), code)):
            raise ConfigError(f"server: {sanitize(said, 1000)}")
        delay = self.restarts.delay(f"{part} {code}", f"server: {reason}", time.monotonic() - self.since)
        with_it = (
            "; runs in progress ended with it; fedveil status shows the command to resume them" if part != NAME else ""
        )
        say(f"server: {reason}; restarting in {delay:g} s{with_it}", file=sys.stderr, flush=True)
        if part == NAME:
            self.processes.kill(NAME)  # remaining child processes
        time.sleep(delay)
        if part != NAME and self.processes.ended_part(NAME) == part:
            self._mark()
            own = self.server.folder / "server"
            start_superexec(
                self.processes, NAME, self._env(), self.server.control_port, self._secret, own / "ca.crt",
                self.server.folder,
            )  # fmt: skip
            return
        self.processes.kill(NAME)
        resolve_server(self.server.folder, self.server.fleet, self.server.state)  # files may have changed
        self.start()
        if self.become_ready():
            say("server: serving sites and runs again", file=sys.stderr, flush=True)
        elif not self.reason():
            say(f"server: {self.slowness()}", file=sys.stderr, flush=True)
            self.processes.kill(NAME)  # counts like any other exit

    def reason(self) -> str:
        """Describe which program ended, with its exit code and last output; "" while both run."""
        part, code = self.processes.ended_part(NAME), self.processes.ended(NAME)
        what = "SuperLink" if part == NAME else "SuperExec"
        return f"its {what} ended with exit code {code}: {self._last_words()}" if part else ""

    def slowness(self) -> str:
        """Report that the server has not become ready, with the last lines of its log."""
        return f"not ready within {_READY_SECONDS:.0f} s; its log ends: {self._last_words()}"

    def _last_words(self) -> str:
        return sanitize(self.processes.tail(NAME), 1000)

    @property
    def _secret(self) -> Path:
        return self.server.folder / "server" / "superexec-secret"

    def _env(self) -> dict[str, str]:
        apps = paths.private_folder(self.server.state / "apps")
        env = single_user_environment(flower_environment(apps), self.server.state / "bin")
        members = SiteRegistry(self.server.folder)
        members.write_signers()  # an interrupted command, or a person, may have left a different file
        # A registry restored from an old backup may name no keys, while the sites still require signatures by them.
        signs = bool(members.instruction_keys) or instruction_key_files.current_file(members.folder).is_file()
        return env | instruction_key_files.signing_environment(self.server.folder, signs)

    def _mark(self) -> None:
        log = self.processes.log(NAME)
        self.began, self.since = log.stat().st_size if log.exists() else 0, time.monotonic()

    def _log(self) -> str:
        """Return the programs' output since the last start."""
        try:
            with self.processes.log(NAME).open("rb") as log:
                log.seek(max(self.began, log.seek(0, 2) - _MOST_READ))
                return log.read().decode(errors="replace")
        except OSError:  # the log was moved away, but the exit code is known
            return ""
