"""Find out whether a site is online and, if not, why: explain Flower's exit codes and silent failures."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from fedveil import proxies
from fedveil.console.doctor import checks
from fedveil.console.flower.processes import ProcessGroup
from fedveil.console.flower.programs import ONLINE
from fedveil.console.launch.restarts import own_error
from fedveil.console.launch.service_notify import ServiceNotifier
from fedveil.console.runs.run_reader import new_lines
from fedveil.console.terminal import say
from fedveil.errors import ConfigError, StateError
from fedveil.guard import flower, last_heartbeat
from fedveil.records import audit_log
from fedveil.sanitize import sanitize

_POLL_SECONDS = 0.5
_PROBE_SECONDS = 10.0  # between queries to a server that has not accepted the site yet
_CONNECT_SECONDS = 3.0
HELD_SECONDS = 75.0  # Flower considers a site online until it misses two heartbeats, which are 30 s apart
HELD_POLL_SECONDS = 10.0
_AWAY_SECONDS = 10.0  # a shorter outage is not reported
_MOST_HEARD = 1 << 20  # log bytes per read, because app output is unbounded
_LINK = re.compile(rb"Connection (attempt failed, retrying|successful after)")  # Flower 1.39, 1.41 and 1.42
# The reason why the server asks a site to try again, written by fedveil/guard/flower/retries.py.
_TEMPORARY = re.compile(rb"fedveil: ((?:the site's clock is|this key is registered, but) [^\"\n]{1,300})")
_SAID = re.compile(
    r'details = "(fedveil: [^"\n]{1,400})|^(?:\[code: 0\] )?(fedveil: .{1,400})$', re.MULTILINE
)  # fedveil/guard/site_registry.py
_EXIT_CODE = re.compile(r"ref-exit-codes/(\d+)\.html")
_REFUSED = "305"
_MEANINGS = {
    "302": "the key is not an elliptic-curve key; make one with fedveil site init",
    _REFUSED: "the server does not know the key, or a site with this key is already online; the operator registers a "
    "key with fedveil members register, and a site must not run twice at once",
}
_TROUBLE = {"failed": "failed", "refused": "was refused", "withheld": "was withheld"}


class SiteProcessEndedError(ConfigError):
    """The SuperNode ended for a reason that a restart may fix. `kind` is the same for the same cause."""

    def __init__(self, text: str, kind: str = "") -> None:
        super().__init__(text)
        self.kind = kind or text


class StateLockedError(ConfigError):
    """The server answers but does not accept this key now: it is already online, or unknown for no stated reason."""


def missing_sites(superlink: str, ca: Path) -> str:
    """Return the reason why nothing answers at HOST:PORT, or "" if this federation's server does.

    Raises:
        ConfigError: something else listens there.
    """
    port_check = checks.run_check("fleet port", lambda: checks.check_fleet_port(superlink, ca))
    if port_check.verdict != "fail":
        return wrong_clock(superlink, ca)
    if _answers(superlink):
        raise ConfigError(f"--superlink: expected this federation's server, found something else: {port_check.text}")
    return f"no answer yet: {port_check.text}; check that --superlink (superlink in the kit) is right; retrying"


def wrong_clock(superlink: str, ca: Path) -> str:
    """Return a message with the clock offset if the server refuses this machine's clock, or ""."""
    clock = checks.run_check("clock", lambda: checks.check_server_clock(superlink, ca))
    too_far = clock.verdict == "fail" and "clock is" in clock.text
    return f"{clock.text}; until then the server refuses this site, which keeps retrying" if too_far else ""


def _answers(superlink: str) -> bool:
    try:
        host, port = checks.parse_address(superlink)
        proxy = proxies.find_proxy(host, flower.installed_release().speaks, os.environ)
        proxies.connect(host, port, proxy, _CONNECT_SECONDS).close()
    except (OSError, ConfigError):
        return False
    except ValueError as error:
        raise ConfigError(f"--superlink: {error}; write it as fl.example.org:9092") from None
    return True


@dataclass
class SiteStartWatcher:
    """Follows one start of a site and prints status messages for its users.

    Attributes:
        began: byte offset in the site's log at which this start begins.
        read: byte offset up to which its audit log has been shown.
        heard: byte offset up to which its log has been read for Flower's connection messages.
        away: when the connection was lost, in monotonic and in wall-clock time; None if it is up.
        since: when the site came online, in seconds since 1970; earlier heartbeats do not count.
        was_online: whether an earlier start by this command came online.
        silence_said: whether the last message said that the server does not hear this site.
        temporary: the last reason why the server asked the site to try again.
        notifier: tells the service manager that the site works.
    """

    processes: ProcessGroup
    name: str
    audit: Path
    superlink: str
    ca: Path
    began: int
    read: int
    online: bool = False
    missing: str = ""
    heard: int = 0
    away: tuple[float, str] | None = None
    away_said: bool = False
    since: float = 0.0
    was_online: bool = False
    silence_said: bool = False
    temporary: bytes = b""
    notifier: ServiceNotifier = field(default_factory=ServiceNotifier)

    @classmethod
    def from_processes(cls, processes: ProcessGroup, name: str, state: Path, superlink: str, ca: Path) -> Self:
        """Create a watcher that reads the logs from now on."""
        log, audit = processes.log(name), state / audit_log.NAME
        began, read = (file.stat().st_size if file.exists() else 0 for file in (log, audit))
        return cls(processes, name, audit, superlink, ca, began, read, heard=began)

    def until_ended(
        self, also: Callable[[], None] = lambda: None, part_ended: Callable[[int], None] | None = None
    ) -> int:
        """Follow the SuperNode until it ends, then raise ConfigError with the reason. Call `also` meanwhile.

        If another of the site's processes ends, call `part_ended` with the exit code to restart it; without
        `part_ended`, treat that as the SuperNode's end.
        """
        probed = time.monotonic()
        while True:
            code = self.processes.ended(self.name)
            if code is not None and part_ended and self.processes.ended_part(self.name) != self.name:
                part_ended(code)
                continue
            if code is not None:
                break
            if not self.online and ONLINE.encode() in self.processes.log(self.name).read_bytes()[self.began :]:
                self.online, self.since = True, time.time()
                say(f"site {self.name}: online", flush=True)
            elif not self.online and time.monotonic() - probed >= _PROBE_SECONDS:
                self.look()
                probed = time.monotonic()
            if self.processes.trim_log(self.name):
                self.began = 0
            self.listen()
            self.tell_silence()
            self.tell()
            also()
            self.notifier.tell_alive(self.find_fault, self.status)
            time.sleep(_POLL_SECONDS)
        self.tell()
        also()
        raise self.ended(code)

    def look(self) -> None:
        """Print once why nothing answers. Raises ConfigError like `missing_sites`, unless the site was online before;
        in that case it is this federation's server, even if the connection broke or the server restarted."""
        previous_reason = self.missing
        try:
            self.missing = missing_sites(self.superlink, self.ca)
        except ConfigError as error:
            if not self.was_online:
                raise
            self.missing = f"{error}; retrying"
        if self.missing and self.missing != previous_reason:
            say(f"site {self.name}: {self.missing}", flush=True)

    def listen(self) -> None:
        """Print once when the server that had accepted the site stops answering, and once when it is back."""
        try:
            with self.processes.log(self.name).open("rb") as log:
                self.heard = min(self.heard, log.seek(0, 2))  # continue at the end of a truncated log
                log.seek(self.heard)
                new = log.read(_MOST_HEARD)
        except OSError:  # the log was moved away: the site keeps running, without these messages
            return
        whole = new if len(new) == _MOST_HEARD else new[: new.rfind(b"\n") + 1]
        self.heard += len(whole)
        for why in _TEMPORARY.findall(whole)[-1:]:
            if why != self.temporary:
                text = sanitize(why.decode(errors="replace"), 400)
                say(f"site {self.name}: the server does not serve it yet: {text}; the site keeps retrying", flush=True)
                self.temporary = why
        for link_event in _LINK.findall(whole):
            if link_event.startswith(b"attempt"):
                self.away = self.away or (time.monotonic(), time.strftime("%H:%M:%S"))
                continue
            if self.away_said and self.away:
                waited = time.monotonic() - self.away[0]
                say(f"site {self.name}: the server answers again, after {waited:.0f} s", flush=True)
                self.since = time.time()  # the first heartbeat comes a few seconds later
            self.away, self.away_said = None, False
        if self.online and self.away and not self.away_said and time.monotonic() - self.away[0] >= _AWAY_SECONDS:
            text = f"no answer from the server at {self.superlink} since {self.away[1]}; the site keeps retrying and "
            say(f"site {self.name}: {text}resumes on its own once the server answers", flush=True)
            self.away_said = True

    def tell_silence(self) -> None:
        """Print once when the server stops hearing this site, and once when it hears the site again.

        Only answered heartbeats count, because a SuperNode can keep running without logging anything.
        """
        file = last_heartbeat.heartbeat_file(self.audit.parent, self.name)
        if not self.online or self.away_said:
            return  # the server has not accepted the site yet, or the outage is already reported
        why = "" if time.time() - self.since <= last_heartbeat.SILENT_SECONDS else last_heartbeat.describe_silence(file)
        if why and not self.silence_said:
            clock = wrong_clock(self.superlink, self.ca)
            say(f"site {self.name}: {why}; {clock or 'this site keeps retrying'}", flush=True)
        elif self.silence_said and not why:
            say(f"site {self.name}: the server hears this site again", flush=True)
        self.silence_said = bool(why)

    @property
    def status(self) -> str:
        """Return the site's state in a few words."""
        if not self.online:
            return f"waiting for the server at {self.superlink}"
        return "online, but the server does not answer" if self.away_said or self.silence_said else "online"

    def find_fault(self) -> str:
        """Return what a restart may mend: an ended process, or a server that answers but does not hear this site.

        While the server cannot be reached, or refuses this machine's clock, a restart would only end a client round.
        """
        if self.processes.ended(self.name) is not None:
            return f"{self.processes.ended_part(self.name)} has ended"
        if not self.silence_said:
            return ""
        try:
            is_reachable = not missing_sites(self.superlink, self.ca)
        except ConfigError:  # another program listens at the server's address
            is_reachable = False
        return "the server answers, but does not hear this site" if is_reachable else ""

    def tell(self) -> None:
        """Print what was sent and what failed since the last call, including causes that the server does not learn."""
        try:
            lines, self.read = new_lines(self.audit, self.read)
        except StateError as error:  # report a damaged log once; `fedveil log verify` examines it
            say(f"site {self.name}: {sanitize(error)}; check the log: fedveil log verify {self.audit}", flush=True)
            self.read = self.audit.stat().st_size
            return
        for line in lines:
            if line.get("event") in _TROUBLE:
                say(f"site {self.name}: {explain_exit(line)}", flush=True)
            elif line.get("event") == "sent":
                say(f"site {self.name}: {_sent(line)}", flush=True)

    def ended(self, code: int) -> ConfigError:
        """Return the error for a SuperNode that ended with this exit code, including the reason."""
        kind, why = self._why(code)
        text = f"site {self.name}: {why}"
        return SiteProcessEndedError(text, f"exit code {code}") if kind is SiteProcessEndedError else kind(text)

    def _why(self, code: int) -> tuple[type[ConfigError], str]:
        """Return the error class, which says whether a restart may help, and the reason."""
        log = self.processes.log(self.name).read_bytes()[self.began :].decode(errors="replace")
        if refusals := _SAID.findall(log):
            serves = "no longer serves it" if self.online else "does not serve it"
            return ConfigError, f"the server {serves}: {sanitize(max(refusals[-1]), 500)}"
        if exit_codes := _EXIT_CODE.findall(log):
            refused = exit_codes[-1] == _REFUSED
            if refused and not _answers(self.superlink):
                nobody = f"no answer from {self.superlink}; check that the server is up and the firewall allows it"
                return SiteProcessEndedError, nobody
            meaning = _MEANINGS.get(exit_codes[-1], f"its log ends: {self.processes.tail(self.name)}")
            other = ConfigError if exit_codes[-1] in _MEANINGS and not refused else SiteProcessEndedError
            kind = StateLockedError if refused and not self.online else other
            return kind, f"its SuperNode ended with Flower's exit code {exit_codes[-1]}: {meaning}"
        if code == 0 and self.online:
            return SiteProcessEndedError, (
                "the server refused this site's key, which may have expired or been revoked; on the next start, the "
                "server will say which"
            )
        if code < 0:  # Flower then logs no reason, so the log's last line may be unrelated
            name = signal.strsignal(-code) or "unknown"
            why = f"its SuperNode was killed from outside (signal {-code}: {name})"
            return SiteProcessEndedError, why
        if said_here := own_error(log, code):
            return ConfigError, sanitize(said_here, 1000)
        end = self.processes.tail(self.name)
        return SiteProcessEndedError, f"its SuperNode ended with exit code {code}; its log ends: {end}"


def explain_exit(line: dict[str, Any]) -> str:
    """Describe an audit-log line about a failed client round to the site's users."""
    cause = f": {sanitize(line['cause'], 1000)}" if line.get("cause") else f": {sanitize(line.get('reason', ''), 1000)}"
    return f"{_turn(line)} {_TROUBLE[str(line['event'])]}{cause}"


def _sent(line: dict[str, Any]) -> str:
    return f"{_turn(line)}: sent {sanitize(line.get('up_bytes', '?'), 20)} bytes"


def _turn(line: dict[str, Any]) -> str:
    about = f"round {line['round'] + 1} of " if isinstance(line.get("round"), int) else ""
    return f"{about}{sanitize(line.get('run', 'a run'), 80)}"
