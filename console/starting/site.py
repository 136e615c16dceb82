"""What a site is started with: its kit's files, and the options that go before them."""

from __future__ import annotations

import os
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedveil.client_app.site import policy as policies
from fedveil.client_app.site.node_config import Site, parse_site
from fedveil.client_app.site.secure import read_key
from fedveil.console.flower.keys import write_secret
from fedveil.console.flower.machine import free_ports, toml
from fedveil.console.flower.processes import Processes, environment
from fedveil.console.flower.programs import supernode
from fedveil.console.flower.site_process import alone, guarded, start_isolated, start_spare
from fedveil.console.provisioning import checks, policy_checks, slurm, unpacked
from fedveil.console.runs import noted, sealing
from fedveil.console.starting import device, online, running
from fedveil.errors import ConfigError, PolicyError
from fedveil.foreign import meant, shown
from fedveil.guard import pace
from fedveil.sealed import Seal

NODE_OPTIONS = (
    "data", "policy", "key-file", "signing-key", "state-dir", "device", "processes", "shard-base",
    "worker-idle-seconds", "worker-memory-mb",
)  # fmt: skip
WIRED = ("superlink", "ca", "key", "name")
_PATHS = ("data", "policy", "key-file", "signing-key", "state-dir")
_OF_KIT = "take that file alone out of the kit again (tar xzf KIT.tar.gz PATH), for the others are filled in"
_MADE = {"key": "fedveil site init makes it", "signing-key": "fedveil site init makes it, or --renew-signing both keys"}


@dataclass(frozen=True)
class Start:
    """A site about to be started.

    Attributes:
        superlink: HOST:PORT of the server's fleet port.
        ca, key: files: whom to trust as the server, and this site's private key.
        node: its node config; every path in it is absolute.
        poll_seconds: the first wait of its SuperNode between two questions.
        federation: its name as the kit has it; "" without a kit.
    """

    superlink: str
    ca: Path
    key: Path
    node: Site
    poll_seconds: float
    federation: str = ""


def settled(
    options: Mapping[str, Any], kit: Path | None, permit_everything: bool, need: Sequence[str] = WIRED
) -> Start:
    """The kit's values with `options` before them, checked; nothing is started and nothing asked.

    Args:
        options: by name without dashes in front; None = not given.
        need: what must be there; without "superlink", the site has no connection, nor a use for keys of one.

    Raises:
        ConfigError, PolicyError: a value is missing or does not fit; it names the option or the file.
    """
    given = {name: value for name, value in options.items() if value is not None}
    about = {} if kit is None else of_kit(kit)
    if missing := [f"--{name}" for name in need if name not in {**about, **given}]:
        here = "; this folder has one: --kit ." if Path("site.toml").is_file() else ""
        raise ConfigError(
            f"--kit: expected the unpacked start-up kit, or {listed(need)}, found no {', '.join(missing)}{here}"
        )
    both = {**about, **given}
    wired = "superlink" in need
    node = _node(given, unpacked.node_config(kit) if kit else Site(), str(both["name"]), permit_everything)
    if not wired and "signing-key" not in given:
        node = node.model_copy(update={"signing_key": ""})  # for secure aggregation, which such a site takes no part in
    ca, key, poll = Path(both.get("ca", "")), Path(both.get("key", "")), float(both.get("poll-seconds", pace.DEFAULT))
    federation = str(about.get("federation", ""))
    found = Start(str(both.get("superlink", "")), ca.absolute(), key.absolute(), node, poll, federation)
    _require_files(found, given, kit, wired)
    if node.signing_key:
        read_key(Path(node.signing_key))
    require_poll(found.poll_seconds)
    slurm.require_one_task(os.environ)
    if bool(node.policy) == permit_everything:
        raise ConfigError(
            "--policy: expected a policy file, or --permit-everything in place of one, found "
            f"{'both' if node.policy else 'neither'}; `fedveil explain --permits` prints what a run needs"
        )
    return found


def listed(names: Sequence[str]) -> str:
    """Options in words: "--ca, --key and --name"."""
    first, last = [f"--{name}" for name in names[:-1]], f"--{names[-1]}"
    return f"{', '.join(first)} and {last}" if first else last


def of_kit(folder: Path) -> dict[str, Any]:
    """What a kit says of the connection, by the names of the options. Raises ConfigError."""
    kit = unpacked.read(folder)
    files = {"ca": folder / "ca.crt", "key": folder / "keys" / "node.key"}
    about = {"superlink": kit.superlink, "name": kit.site, "poll-seconds": kit.poll_seconds}
    return {**about, "federation": kit.federation, **files}


def _node(given: Mapping[str, Any], kits: Site, name: str, permit_everything: bool) -> Site:
    """The node config: the kit's, the options before it."""
    own = {key: given[key] for key in NODE_OPTIONS if key in given}
    own |= {key: str(Path(value).expanduser().absolute()) for key, value in own.items() if key in _PATHS and value}
    both = {**kits.model_dump(mode="json", by_alias=True, exclude_unset=True), **own, "site": name}
    if permit_everything and "policy" not in given:
        both.pop("policy", None)
    both["state-dir"] = str(Path(both.get("state-dir", Site().state_dir)).expanduser().absolute())
    return parse_site(both)


def _require_files(start: Start, given: Mapping[str, Any], kit: Path | None, wired: bool) -> None:
    node = start.node
    files = {"ca": str(start.ca), "key": str(start.key)} if wired else {}
    files |= {"policy": node.policy, "key-file": node.key_file, "signing-key": node.signing_key}
    for name, file in files.items():
        if file and not Path(file).is_file():
            hint = "see docs/deploy.md" if kit is None or name in given else _MADE.get(name, _OF_KIT)
            raise ConfigError(f"{_option(name, given, kit)}: expected a file, found none at {file}; {hint}")
    if node.data and not Path(node.data).exists():
        hint = "correct the path" if kit is None else "put the rows there, or name another folder with --data"
        raise ConfigError(
            f"{_option('data', given, kit)}: expected a folder of rows, or a file, found none at {node.data}; {hint}"
        )
    if node.data and Path(node.data).is_file() and not Path(node.data).stat().st_size:
        raise ConfigError(f"{_option('data', given, kit)}: expected rows, found an empty file at {node.data}; fill it")
    if node.data and Path(node.data).is_dir() and not _has_files(Path(node.data)):
        raise ConfigError(
            f"{_option('data', given, kit)}: expected rows, found the folder {node.data} without a file; put "
            "train.jsonl there, and fedveil doctor says whether it can be read"
        )


def _has_files(folder: Path) -> bool:
    return any(path.is_symlink() or not path.is_dir() for path in folder.rglob("*"))


def _option(name: str, given: Mapping[str, Any], kit: Path | None) -> str:
    """Where a value comes from, in words."""
    return f"--{name}" if kit is None or name in given else f"{kit}: {name}"


def require_poll(seconds: float) -> None:
    """Raises ConfigError for a first wait that a SuperNode cannot have."""
    if not pace.LEAST <= seconds <= 60.0:
        raise ConfigError(f"--poll-seconds: expected {pace.LEAST} to 60, found {seconds}")


def require_usable(start: Start) -> None:
    """Raises ConfigError or PolicyError for what Flower would not say, or not in words: keys, policy, device."""
    require_link(start.ca, start.key)
    require_policy(start.node)
    device.require(start.node.device)


def require_link(ca: Path, key: Path) -> None:
    """The same of a certificate and a node key alone."""
    if (own := checks.private_key(key)).verdict == "fail":
        raise ConfigError(f"--key: {own.text}, and make a new key if others could read it: fedveil site init --renew")
    found = checks.guarded("certificate", lambda: checks.certificate(ca))
    if found.verdict == "fail":
        raise ConfigError(
            f"{ca}: expected a certificate that is valid now, found another: {found.text}; {_OF_KIT}, or ask the "
            "operator for it"
        )


def require_policy(node: Site) -> None:
    """Raises ConfigError for a policy that cannot be read; a site without one passes."""
    if not node.policy:
        return
    file = Path(node.policy)
    try:
        tomllib.loads(file.read_text())
        policy = policies.of_site(node)
    except (PolicyError, ValueError) as error:
        found = _unknown_key(error.__cause__) or f"something else: {error}"
        raise ConfigError(f"{file}: expected a site policy, found {found}; as it is, it refuses every run") from None
    if empty := policy_checks.empty(policy):
        print(
            f"site {node.site}: {file} permits nothing as it stands ({empty} empty): every run is refused; fill in "
            "what is agreed on (fedveil explain --permits prints what a run needs)",
            flush=True,
        )
    if strange := policy_checks.unfamiliar(policy):
        print(f"site {node.site}: {file}: {strange}", flush=True)


def _unknown_key(error: BaseException | None) -> str:
    """What is said of a key that no policy has; "" where that is not what is wrong."""
    first = error.errors()[0] if isinstance(error, ValidationError) else None
    if first is None or first["type"] != "extra_forbidden":
        return ""
    key = shown(".".join(map(str, first["loc"])), 80)
    known = [about.alias or name for name, about in policies.Policy.model_fields.items()]
    return f"the key {key}, which no policy has; {meant(key, known)}It may have: {', '.join(known)}"


def prepared(start: Start) -> tuple[Path, dict[str, str]]:
    """Makes the site's folders and programs: the file of its node config, and what its processes find around them."""
    name, state = start.node.site, start.node.state_dir
    running.state_folder(state)
    config = state / f"{name}.toml"
    config.write_text(toml(start.node.model_dump(mode="json", by_alias=True, exclude_unset=True)))
    noted.note_federation(state, name, start.federation)
    (state / "logs").mkdir(mode=0o700, exist_ok=True)
    env = alone({**environment(state / "flower"), pace.VARIABLE: str(start.poll_seconds)}, state / "guard")
    return config, guarded(env, state / "guard", require_policy=bool(start.node.policy))


def run(start: Start) -> int:
    """Starts the SuperNode and a warm worker, and stays until the SuperNode ends; that raises, with the reason."""
    name, state = start.node.site, start.node.state_dir
    sealing.require(state, Seal.of(start.node.key_file))
    require_usable(start)
    processes = Processes(state / "logs")
    with running.alone(state, name, processes):
        return _taken(start, processes)


def _taken(start: Start, processes: Processes) -> int:
    """Asks again while the server may still hold a killed start of this site for online."""
    until: float | None = None
    while True:
        watched = online.Watch.of(processes, start.node.site, start.node.state_dir, start.superlink, start.ca)
        watched.look()
        try:
            return _started(start, watched)
        except online.HeldError as error:
            if until is None:
                until = time.monotonic() + online.HELD_SECONDS
                print(
                    f"{error}. A killed site stays online there for about a minute: asking again for up to "
                    f"{online.HELD_SECONDS:g} s",
                    flush=True,
                )
            elif time.monotonic() > until:
                raise
        time.sleep(online.HELD_POLL_SECONDS)


def _started(start: Start, watched: online.Watch) -> int:
    name, state, processes = start.node.site, start.node.state_dir, watched.processes
    config, env = prepared(start)
    log = processes.log(name)
    (port,), secret = free_ports(1), write_secret(state / f"{name}.superexec")
    command = supernode(start.superlink, start.ca, start.key, port, config, secret)
    try:
        superexec = start_isolated(processes, name, command, env, port, secret)
        print(f"site {name}: SuperNode for {start.superlink}, log {log}", flush=True)
        card = start_spare(start.node, superexec, env)
        follow = f"fedveil site status --state-dir {state} --follow"
        print(f"site {name}: worker {card.pid} is warm; {follow} shows it", flush=True)
        return watched.until_ended()
    finally:
        processes.stop()
