"""Collect a site's start settings from its kit and the options that override it; check them; start the site."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedveil.client_app.node_config import SiteConfig, parse_site
from fedveil.client_app.policy import site_policy as policies
from fedveil.client_app.secure_round import read_key
from fedveil.client_app.state.client_state import open_ledger
from fedveil.console.doctor import checks, policy_checks
from fedveil.console.flower.certificates import write_secret
from fedveil.console.flower.machine import format_toml, free_ports
from fedveil.console.flower.processes import ProcessGroup, flower_environment
from fedveil.console.flower.programs import supernode_command
from fedveil.console.flower.site_process import (
    SUPEREXEC,
    guarded_environment,
    single_user_environment,
    start_isolated,
    start_spare,
    start_superexec,
)
from fedveil.console.launch import online_watch, site_lock
from fedveil.console.launch.restarts import Restarts
from fedveil.console.launch.service_notify import ServiceNotifier
from fedveil.console.provisioning import enrollment, kit_reader
from fedveil.console.runs import re_encrypt, site_notes
from fedveil.console.terminal import say
from fedveil.encrypted_files import FileSeal
from fedveil.errors import ConfigError, PolicyError
from fedveil.federation.message_signatures.key_files import InstructionKeys
from fedveil.guard import last_heartbeat, poll_backoff
from fedveil.sanitize import sanitize, suggest_name

NODE_OPTIONS = (
    "data", "policy", "key-file", "signing-key", "instruction-keys", "state-dir", "device", "processes", "shard-base",
    "worker-idle-seconds", "worker-memory-mb",
)  # fmt: skip
WIRED = ("superlink", "ca", "key", "name")
_PATHS = ("data", "policy", "key-file", "signing-key", "instruction-keys", "state-dir")
_OF_KIT = "extract only that file from the kit again (tar xzf KIT.tar.gz PATH), to keep the files that you filled in"
_MADE = {
    "key": "fedveil site init makes it",
    "signing-key": "fedveil site init makes it; --renew-signing makes both keys",
}
_ASK_TORCH = "import torch; print(torch.cuda.device_count())"
_ASK_SECONDS = 300.0


@dataclass(frozen=True)
class SiteLauncher:
    """A site that is about to start.

    Attributes:
        superlink: HOST:PORT of the server's fleet port.
        ca, key: files with the server's CA certificate and this site's private key.
        node: its node config, in which all paths are absolute.
        poll_seconds: its SuperNode's first polling interval.
        federation: the federation's name from the kit; "" without a kit.
    """

    superlink: str
    ca: Path
    key: Path
    node: SiteConfig
    poll_seconds: float
    federation: str = ""


def resolve_site(
    options: Mapping[str, Any], kit: Path | None, permit_everything: bool, need: Sequence[str] = WIRED
) -> SiteLauncher:
    """Return the kit's values, overridden by `options` and checked, without starting or contacting anything.

    Args:
        options: values by name without leading dashes; None if not given.
        need: required options; without "superlink", the site has no connection and needs no connection keys.

    Raises:
        ConfigError, PolicyError: a value is missing or unsuitable; the message names the option or the file.
    """
    given = {name: value for name, value in options.items() if value is not None}
    about = {} if kit is None else site_from_kit(kit)
    if missing := [f"--{name}" for name in need if name not in {**about, **given}]:
        here = "; this folder has one: --kit ." if Path("site.toml").is_file() else ""
        raise ConfigError(
            f"--kit: expected the unpacked start-up kit, or {list_settings(need)}, found no {', '.join(missing)}{here}"
        )
    both = {**about, **given}
    wired = "superlink" in need
    node = _node(given, kit_reader.node_config(kit) if kit else SiteConfig(), str(both["name"]), permit_everything)
    if not wired and "signing-key" not in given and not Path(node.signing_key).is_file():
        node = node.model_copy(update={"signing_key": ""})  # its guard refuses instructions that it cannot answer
    ca, key, poll = (
        Path(both.get("ca", "")),
        Path(both.get("key", "")),
        float(both.get("poll-seconds", poll_backoff.DEFAULT)),
    )
    federation = str(about.get("federation", ""))
    launcher = SiteLauncher(str(both.get("superlink", "")), ca.absolute(), key.absolute(), node, poll, federation)
    _require_files(launcher, given, kit, wired)
    if node.signing_key:
        read_key(Path(node.signing_key))
    if node.instruction_keys:
        InstructionKeys.from_file(Path(node.instruction_keys))
    require_poll(launcher.poll_seconds)
    require_one_task(os.environ)
    if bool(node.policy) == permit_everything:
        raise ConfigError(
            "--policy: expected a policy file or --permit-everything, found "
            f"{'both' if node.policy else 'neither'}; `fedveil explain --permits` prints what a run needs"
        )
    return launcher


def list_settings(names: Sequence[str]) -> str:
    """Join options into a phrase such as "--ca, --key and --name"."""
    first, last = [f"--{name}" for name in names[:-1]], f"--{names[-1]}"
    return f"{', '.join(first)} and {last}" if first else last


def site_from_kit(folder: Path) -> dict[str, Any]:
    """Return the connection settings in a kit, by option name. Raises ConfigError if there is no valid kit."""
    kit = kit_reader.read_kit(folder)
    files = {"ca": folder / "ca.crt", "key": folder / "keys" / "node.key"}
    about = {"superlink": kit.superlink, "name": kit.site, "poll-seconds": kit.poll_seconds}
    return {**about, "federation": kit.federation, **files}


def _node(given: Mapping[str, Any], kits: SiteConfig, name: str, permit_everything: bool) -> SiteConfig:
    """Return the kit's node config, overridden by the options."""
    own = {key: given[key] for key in NODE_OPTIONS if key in given}
    own |= {key: str(Path(value).expanduser().absolute()) for key, value in own.items() if key in _PATHS and value}
    both = {**kits.model_dump(mode="json", by_alias=True, exclude_unset=True), **own, "site": name}
    if permit_everything and "policy" not in given:
        both.pop("policy", None)
    both["state-dir"] = str(Path(both.get("state-dir", SiteConfig().state_dir)).expanduser().absolute())
    return parse_site(both)


def _require_files(start: SiteLauncher, given: Mapping[str, Any], kit: Path | None, wired: bool) -> None:
    node = start.node
    files = {"ca": str(start.ca), "key": str(start.key)} if wired else {}
    files |= {"policy": node.policy, "key-file": node.key_file, "signing-key": node.signing_key}
    files |= {"instruction-keys": node.instruction_keys}
    for name, file in files.items():
        if file and not Path(file).is_file():
            hint = "see docs/deploy/provision.md" if kit is None or name in given else _MADE.get(name, _OF_KIT)
            raise ConfigError(f"{_option(name, given, kit)}: expected a file, found none at {file}; {hint}")
    for name, own in node.list_data().items():
        if own.data:
            where = f"{_option('data', given, kit)}" if not name else f"{kit}: data-sets.{name}"
            _require_examples(Path(own.data), where, kit)


def _require_examples(data: Path, where: str, kit: Path | None) -> None:
    """Raise ConfigError unless `data` has files that this user can read. `where`: the key or option that names it."""
    if not data.exists():
        hint = "correct the path" if kit is None else f"put the examples there, or correct {kit_reader.NODE_CONFIG}"
        raise ConfigError(f"{where}: expected a file or folder of examples, found none at {data}; {hint}")
    if data.is_file() and not data.stat().st_size:
        raise ConfigError(f"{where}: expected examples, found an empty file at {data}; add examples")
    if not os.access(data, os.R_OK | (os.X_OK if data.is_dir() else 0)):
        raise ConfigError(
            f"{where}: expected examples that this user can read, found {data} without read permission; chmod or chown "
            "it, or start the site as the user who owns it"
        )
    if data.is_dir() and not _has_files(data):
        raise ConfigError(
            f"{where}: expected examples, found no file in the folder {data}; put train.jsonl there, then check it "
            "with fedveil doctor"
        )


def _has_files(folder: Path) -> bool:
    return any(path.is_symlink() or not path.is_dir() for path in folder.rglob("*"))


def _option(name: str, given: Mapping[str, Any], kit: Path | None) -> str:
    """Describe where a value comes from."""
    return f"--{name}" if kit is None or name in given else f"{kit}: {name}"


def require_poll(seconds: float) -> None:
    """Raise ConfigError for an invalid first polling interval."""
    if not poll_backoff.LEAST <= seconds <= 60.0:
        raise ConfigError(f"--poll-seconds: expected {poll_backoff.LEAST} to 60, found {seconds}")


def require_usable(start: SiteLauncher) -> None:
    """Raise ConfigError or PolicyError for problems that Flower would not explain: keys, policy, device."""
    require_link(start.ca, start.key)
    if start.node.signing_key:
        enrollment.require_requested_signing_key(start.key, Path(start.node.signing_key))
    require_policy(start.node)
    require_device(start.node.device)


def require_link(ca: Path, key: Path) -> None:
    """Raise ConfigError for an unusable certificate or node key."""
    if (own := checks.private_key(key)).verdict == "fail":
        raise ConfigError(f"--key: {own.text}, and make a new key if others could read it: fedveil site init --renew")
    cert_check = checks.run_check("certificate", lambda: checks.check_certificate(ca))
    if cert_check.verdict == "fail":
        raise ConfigError(
            f"{ca}: expected a certificate that is valid now, found a problem: {cert_check.text}; {_OF_KIT}, or ask "
            "the operator for it"
        )


def require_policy(node: SiteConfig) -> None:
    """Raise ConfigError for an invalid policy, and print warnings about it; a site without a policy passes."""
    if not node.policy:
        return
    file = Path(node.policy)
    try:
        tomllib.loads(file.read_text("utf-8-sig"))
        policy = policies.policy_of_site(node)
    except (PolicyError, ValueError, RecursionError) as error:
        problem = _unknown_key(error.__cause__) or f"something else: {error}"
        raise ConfigError(
            f"{file}: expected a site policy, found {problem}; until this is fixed, the site refuses every run"
        ) from None
    if empty := policy_checks.check_empty_policy(policy):
        say(
            f"site {node.site}: {file} permits nothing yet (empty: {empty}), so every run is refused; fill in "
            "the agreed values (fedveil explain --permits prints what a run needs)",
            flush=True,
        )
    if policy.requires_signed_instructions(node) and not node.instruction_keys:
        say(
            f"site {node.site}: {file} requires signed instructions, but the site has no instruction keys to verify "
            "them with, so every run is refused; name the kit's instruction-keys.toml with --instruction-keys",
            flush=True,
        )
    if strange := policy_checks.unknown_names(policy):
        say(f"site {node.site}: {file}: {strange}", flush=True)
    for warning in policy_checks.privacy_limits_warnings(policy):
        say(f"site {node.site}: {file}: {warning}", flush=True)


def require_device(device: str) -> None:
    """Raise ConfigError if `device` names a GPU that torch does not find; "auto" and "cpu" always exist.

    A separate process checks this, because the current one lives as long as the site and does not need torch.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return
    if index and not (index.isascii() and index.isdigit()):
        raise ConfigError(f'device: expected "auto", "cpu", "cuda" or "cuda:0", found "{sanitize(device, 60)}"')
    try:
        asked = subprocess.run(
            [sys.executable, "-P", "-c", _ASK_TORCH], capture_output=True, text=True, timeout=_ASK_SECONDS, check=True
        )
        count = int(asked.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise ConfigError(
            f"device: torch cannot count the GPUs, which {device!r} needs ({sanitize(error, 300)}); run fedveil doctor "
            "for details"
        ) from None
    if int(index or 0) >= count:
        raise ConfigError(
            f'device: expected "auto", "cpu" or one of the {count} GPUs that torch finds here, found "{device}"; '
            "--device auto uses what is available, and fedveil doctor shows details"
        )


def require_one_task(environ: Mapping[str, str]) -> None:
    """Raise ConfigError under srun with several tasks, because each task would be a SuperNode with the same key."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")  # set by srun; a batch script also has SLURM_NTASKS, but runs once
    if tasks != "1":
        raise ConfigError(
            f"srun: expected one task, which starts a process for each GPU, found {tasks}; remove srun from the batch "
            "script, and start the site with --processes N: docs/slurm.md"
        )


def _unknown_key(error: BaseException | None) -> str:
    """Return the message for an unknown policy key; "" for other errors."""
    first = error.errors()[0] if isinstance(error, ValidationError) else None
    if first is None or first["type"] != "extra_forbidden":
        return ""
    key = sanitize(".".join(map(str, first["loc"])), 80)
    known = [about.alias or name for name, about in policies.SitePolicy.model_fields.items()]
    return f"the unknown key {key}; {suggest_name(key, known)}known keys: {', '.join(known)}"


def prepare_site(start: SiteLauncher) -> tuple[Path, dict[str, str]]:
    """Create the site's folders and programs; return its node config file and the environment for its processes."""
    name, state = start.node.site, start.node.state_dir
    site_lock.state_folder(state)
    config = state / f"{name}.toml"
    config.write_text(
        format_toml(start.node.model_dump(mode="json", by_alias=True, exclude_unset=True)), encoding="utf-8"
    )
    site_notes.note_federation(state, name, start.federation)
    (state / "logs").mkdir(mode=0o700, exist_ok=True)
    own = {
        poll_backoff.VARIABLE: str(start.poll_seconds),
        last_heartbeat.VARIABLE: str(last_heartbeat.heartbeat_file(state, name)),
    }
    env = single_user_environment({**flower_environment(state / "flower"), **own}, state / "guard")
    return config, guarded_environment(env, state / "guard", require_policy=bool(start.node.policy))


def run(start: SiteLauncher, notifier: ServiceNotifier | None = None) -> int:
    """Start the SuperNode and a warm worker, and restart them when they exit.

    `notifier`: tells the service manager that both are up, and later that they still work.

    Raises ConfigError or PolicyError, with the reason, if that does not help: the server refuses this site, one of its
    files is no longer valid, or they exited for the same reason ten times in ten minutes.
    """
    name, state = start.node.site, start.node.state_dir
    re_encrypt.require_key(state, FileSeal.from_key_file(start.node.key_file))
    open_ledger(state).require_recovered()
    require_usable(start)
    processes = ProcessGroup(state / "logs")
    with site_lock.hold_folder(state, to_restore=False), site_lock.hold_site_lock(state, name, processes):
        open_ledger(state).require_recovered()  # a restore may have ended since
        return _taken(start, processes, notifier or ServiceNotifier())


def _taken(start: SiteLauncher, processes: ProcessGroup, notifier: ServiceNotifier) -> int:
    """Run the site, restarting ended processes; retry while the server may still consider a killed SuperNode online."""
    until: float | None = None
    restarts, was_online = Restarts(), False
    while True:
        watched = online_watch.SiteStartWatcher.from_processes(
            processes, start.node.site, start.node.state_dir, start.superlink, start.ca
        )
        watched.was_online, watched.notifier = was_online, notifier
        watched.look()
        began = time.monotonic()
        try:
            return _started(start, watched)
        except online_watch.SiteProcessEndedError as error:
            was_online |= watched.online
            delay, until = restarts.delay(error.kind, str(error), time.monotonic() - began), None
            say(f"{error}. Restarting in {delay:g} s", flush=True)
            time.sleep(delay)
            require_usable(start)  # files may have changed meanwhile
            continue
        except online_watch.StateLockedError as error:
            if until is None:
                until = time.monotonic() + online_watch.HELD_SECONDS
                say(
                    f"{error}. The server shows a killed site as online for about a minute: retrying for up to "
                    f"{online_watch.HELD_SECONDS:g} s",
                    flush=True,
                )
            elif time.monotonic() > until:
                raise
        time.sleep(online_watch.HELD_POLL_SECONDS)


def _started(start: SiteLauncher, watched: online_watch.SiteStartWatcher) -> int:
    name, state, processes = start.node.site, start.node.state_dir, watched.processes
    config, env = prepare_site(start)
    log = processes.log(name)
    (port,), secret = free_ports(1), write_secret(state / f"{name}.superexec")
    command = supernode_command(start.superlink, start.ca, start.key, port, config, secret)
    try:
        superexec = start_isolated(processes, name, command, env, port, secret)
        restarts, began = Restarts(), time.monotonic()

        def superexec_ended(code: int) -> None:
            nonlocal began
            reason = f"site {name}: its SuperExec ended with exit code {code}"
            delay = restarts.delay(f"exit code {code}", reason, time.monotonic() - began)
            say(f"{reason}; restarting in {delay:g} s; a client round in progress ended with it", flush=True)
            time.sleep(delay)
            if processes.ended_part(name) == f"{name} {SUPEREXEC}":
                began = time.monotonic()
                start_spare(start.node, start_superexec(processes, name, env, port, secret), env)

        say(f"site {name}: SuperNode for {start.superlink}, log {log}", flush=True)
        card = start_spare(start.node, superexec, env)
        follow = f"fedveil site status --state-dir {state} --follow"
        say(f"site {name}: worker {card.pid} is warm; to follow it: {follow}", flush=True)
        watched.notifier.tell_ready(watched.status)
        return watched.until_ended(part_ended=superexec_ended)
    finally:
        processes.stop()
