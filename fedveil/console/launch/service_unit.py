"""The text of a systemd unit that runs a server or a site as a service, with as few rights as it can work with.

systemd reads a value in double quotes, in which a backslash precedes a quote or a backslash, and `%%` stands for a
percent sign. `ExecStart=:` keeps `$` as it is. A control character, such as a newline, would end the line or begin a
setting of its own, so text with one is refused.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fedveil.errors import ConfigError

__all__ = ["ServiceUnit", "format_unit", "quote_value"]

WATCHDOG_SECONDS = 600
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,30}")
_SHARED_USERS = ("root", "nobody")  # other programs run as these users too
_UNSAFE = "\"'\\"  # systemd refuses a program whose path has one of these
_HOMES = ("/home", "/root", "/run/user")  # the folders that ProtectHome= covers
_TEMPORARY = ("/tmp", "/var/tmp")  # the folders that PrivateTmp= replaces
# Control characters, text that is not UTF-8, and the two separators that some programs take for the end of a line.
_REFUSED = ("Cc", "Cs", "Zl", "Zp")
_MOST_CHARACTERS = 4096

_TEXT = """\
# {title}: written by fedveil; see docs/deploy/operate.md.
[Unit]
Description={title}
# The machine's network first. The program itself waits for the other end, however long that takes.
Wants=network-online.target
After=network-online.target
# The disks of these files and folders first too.
{mounts}
# The program restarts what it supervises. If it ends itself, systemd starts it again,
{limit}

[Service]
# The program reports when it is up. Its children cannot report in its name.
Type=notify
NotifyAccess=main
ExecStart=:{command}
User={user}
TimeoutStartSec=10min
# The program reports every minute while {watched}.
# Without a report, it is stopped as below and started again.
WatchdogSec={watchdog}
WatchdogSignal=SIGTERM
# A minute between starts, so that the cause has time to go away.
Restart=on-failure
RestartSec=1min
# Only the program gets the signal. Like Ctrl-C, it stops its processes in order and ends with code 130.
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec=1min
SuccessExitStatus=130
# If the kernel kills a worker for lack of memory, the program starts another; the default would stop the service.
OOMPolicy=continue

# Rows, paths and messages are UTF-8, whatever the system's locale is.
Environment=PYTHONUTF8=1
# Libraries that want a cache in the home folder, such as Triton's, get the private /tmp, as in FedVeil's image.
Environment=HOME=/tmp
# Private state, keys and logs are for this user alone.
UMask=0077
# A connection needs a descriptor, and so does each file of a run; the usual 1,024 are too few for many sites.
LimitNOFILE=65536
# A core dump would hold rows, weights and keys.
LimitCORE=0

# No program started here gains rights, by setuid or otherwise.
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
RestrictSUIDSGID=yes
# The whole system is read-only, except for these folders. They must exist before the service starts.
ProtectSystem=strict
{paths}
# {home_why}
ProtectHome={home}
# Temporary files of other programs are out of sight, and these out of theirs.
PrivateTmp=yes
# TCP to the other end and between the processes; Unix sockets to the worker and systemd; netlink lists this machine's
# interfaces, which torch needs when several processes train together.
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
# Not needed: new namespaces, real-time scheduling, and the system calls of another system or processor. Each has helped
# attackers to reach flaws in the kernel, or to take all of the processor's time.
RestrictNamespaces=yes
RestrictRealtime=yes
LockPersonality=yes
SystemCallArchitectures=native
# Not needed either: to change the kernel's settings, modules, control groups or host name, or to read its log.
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectHostname=yes
# Left out on purpose:
# MemoryDenyWriteExecute: torch's CPU kernels are compiled at run time, and a convolution fails with it.
# PrivateDevices, ProtectClock: either one hides the GPUs. No capability is left that could set the clock.
# ProtectProc, ProcSubset: the program finds its processes, and the user of a connection, in /proc; one of its processes
# hides from debuggers, and with ProtectProc it would hide from the program too.

[Install]
WantedBy=multi-user.target
"""


_LIMIT = """\
# at most 30 times in two hours.
StartLimitIntervalSec=2h
StartLimitBurst=30"""
_NO_LIMIT = """\
# however often: the cause may be outside this machine, such as a key that is not registered yet.
StartLimitIntervalSec=0"""


@dataclass(frozen=True)
class ServiceUnit:
    """The program of a service, its user, and the folders that it needs.

    Attributes:
        title: one line for people, of the characters in names of sites and federations.
        command: absolute path of the program, and its arguments.
        user: the system user that runs it.
        watched: the condition under which the program reports to systemd, as the end of a sentence.
        writes: folders in which the program writes.
        keeps: folders inside `writes` that the program only reads.
        hides: folders inside `writes` that the program must not read.
        reads: other files and folders that it reads, such as on another disk or below a home folder.
        keeps_trying: systemd starts it again without a limit, because another machine may be the cause of its end.
    """

    title: str
    command: tuple[str, ...]
    user: str
    watched: str
    writes: tuple[Path, ...]
    keeps: tuple[Path, ...] = ()
    hides: tuple[Path, ...] = ()
    reads: tuple[Path, ...] = ()
    keeps_trying: bool = False


def format_unit(unit: ServiceUnit) -> str:
    """Return the unit file's text.

    Raises:
        ConfigError: the user is shared with other programs or not a system user's name; the program's path has a quote;
            or a path is relative, has a control character, or is in a folder that PrivateTmp= replaces.
    """
    _require_user(unit.user)
    paths = [Path(unit.command[0]), *unit.writes, *unit.keeps, *unit.hides, *unit.reads]
    for path in paths:
        _require_usable(path)
    if any(character in _UNSAFE for character in unit.command[0]):
        raise ConfigError(
            f"install-service: expected a Python whose path has no quotes and no backslash, because systemd starts no "
            f"other, found {unit.command[0][:200]!a}; install FedVeil in another folder"
        )
    in_home = any(_is_below(path, _HOMES) for path in paths)
    lines = [f"ReadWritePaths={quote_value(str(path))}" for path in unit.writes]
    # A folder that does not exist yet needs no protection; "-" keeps systemd from failing for it.
    lines += [f"ReadOnlyPaths={quote_value(f'-{path}')}" for path in unit.keeps]
    lines += [f"InaccessiblePaths={quote_value(f'-{path}')}" for path in unit.hides]
    why = "Some of its folders are below a home folder, so these stay visible" if in_home else "It needs no home folder"
    mounts = [f"RequiresMountsFor={quote_value(str(path))}" for path in dict.fromkeys([*unit.writes, *unit.reads])]
    return _TEXT.format(
        mounts="\n".join(mounts),
        limit=_NO_LIMIT if unit.keeps_trying else _LIMIT,
        title=unit.title,
        command=" ".join(quote_value(word) for word in unit.command),
        user=unit.user,
        watched=unit.watched,
        watchdog=WATCHDOG_SECONDS,
        paths="\n".join(lines),
        home_why=why,
        home="read-only" if in_home else "yes",
    )


def quote_value(text: str) -> str:
    """Return text as one quoted word of a unit file. Raises ConfigError for long text or a control character."""
    if len(text) > _MOST_CHARACTERS or any(unicodedata.category(character) in _REFUSED for character in text):
        raise ConfigError(
            f"install-service: expected text of at most {_MOST_CHARACTERS} characters without control characters, "
            f"found {text[:200]!a}; rename the file or folder"
        )
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def _require_user(user: str) -> None:
    if not _USER.fullmatch(user) or user in _SHARED_USERS:
        raise ConfigError(
            f"--user: expected a system user for this service alone, such as fedveil, found {user[:80]!a}; create one: "
            "useradd --system --no-create-home --shell /usr/sbin/nologin fedveil"
        )


def _require_usable(path: Path) -> None:
    if not path.is_absolute():
        raise ConfigError(f"install-service: expected an absolute path, found {str(path)[:200]!a}")
    if _is_below(path, _TEMPORARY):
        raise ConfigError(
            f"install-service: expected a path that outlasts a reboot, found {str(path)[:200]!a}; the service has a "
            "/tmp of its own, so move the folder, for example to /srv"
        )


def _is_below(path: Path, folders: tuple[str, ...]) -> bool:
    return any(PurePosixPath(path).is_relative_to(folder) for folder in folders)
