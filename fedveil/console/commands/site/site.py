"""`fedveil site`: makes keys; starts, shows, encrypts, backs up or purges a site.

A site runs Flower's SuperNode and a warm worker process for training.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fedveil.client_app.node_config import SiteConfig, parse_site
from fedveil.console.backup import site_actions
from fedveil.console.doctor import policy_actions
from fedveil.console.flower.instruction_key_files import keys_fingerprint
from fedveil.console.flower.site_process import start_spare, write_programs
from fedveil.console.launch import service_install, site_options
from fedveil.console.launch import site as site_start
from fedveil.console.launch.service_notify import ServiceNotifier
from fedveil.console.provisioning import enrollment, kit_reader
from fedveil.console.runs import ledger_actions, re_encrypt, unit_actions
from fedveil.console.runs.dataset_cache import list_cached_datasets
from fedveil.console.runs.ledger_summary import ledger_lines
from fedveil.console.runs.retained_state import list_retained, offer_purge, purge_line
from fedveil.console.runs.secagg_summary import secagg_of_site
from fedveil.console.runs.site_permissions import read_permissions
from fedveil.console.runs.workers import describe_worker, follow_worker, last_failures, list_workers
from fedveil.console.terminal import ask_to_delete, make_console, say
from fedveil.encrypted_files import FileSeal, make_key
from fedveil.errors import ConfigError
from fedveil.federation.message_signatures.key_files import INSTRUCTION_KEYS, InstructionKeys
from fedveil.guard import last_heartbeat, poll_backoff
from fedveil.records.atomic_files import write_atomic
from fedveil.sanitize import sanitize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _starting(actions)
    init = actions.add_parser("init", help="make this site's keys and a registration request for the operator")
    init.add_argument(
        "--kit", type=Path, default=Path(), metavar="FOLDER", help="the unpacked start-up kit; default: ."
    )
    init.add_argument("--out", type=Path, metavar="FOLDER", help="folder for the keys; default: keys in the kit")
    init.add_argument(
        "--secret", type=Path, metavar="FILE", help="file for the SuperExec's secret; signing.key goes next to it; "
        "default: in the key folder",
    )  # fmt: skip
    init.add_argument("--print", action="store_true", help="print the request to stdout and messages to stderr")
    init.add_argument(
        "--renew",
        action="store_true",
        help="make a new node key; keeps signing.key, and the old node key as node.key.old",
    )
    init.add_argument(
        "--renew-signing",
        action="store_true",
        help="also make a new signing key; all sites' policies then need the new roster",
    )
    init.set_defaults(run=_init)
    trust = actions.add_parser(
        "trust", help="replace the server's instruction keys in the kit, if the new ones have the given fingerprint"
    )
    trust.add_argument("file", type=Path, metavar="FILE", help="instruction-keys.toml from the operator")
    trust.add_argument(
        "--kit", type=Path, default=Path(), metavar="FOLDER", help="the unpacked start-up kit; default: ."
    )
    trust.add_argument("--fingerprint", required=True, help="SHA256:..., as the operator read it to you by phone")
    trust.set_defaults(run=_trust)
    guard = actions.add_parser(
        "guard", help="write the entry point that makes decisions before bundled code runs, for an image"
    )
    guard.add_argument(
        "--bin", required=True, type=Path, metavar="FOLDER", help="folder to put first on the SuperExec's PATH"
    )
    guard.add_argument(
        "--own-ports", action="store_true",
        help="for shared hosts: also write a flower-superlink and a flower-supernode that serve only this user",
    )  # fmt: skip
    guard.set_defaults(run=_guard)
    status = actions.add_parser("status", help="show the workers, private state and ledgers of this machine's sites")
    status.add_argument("--follow", action="store_true", help="keep running and show training progress")
    status.add_argument(
        "--policy", default="", metavar="FILE", help="needed only if fedveil site start did not record it"
    )
    status.add_argument(
        "--key-file",
        default="",
        metavar="FILE",
        help="key of an encrypted state, if fedveil site start did not record it",
    )
    status.set_defaults(run=_in_own_folder(_status))
    warm = actions.add_parser("warm", help="start a worker before the first message, for a container entry point")
    warm.add_argument("--name", required=True, help="the site's name")
    warm.add_argument(
        "--owner", required=True, type=int, help="PID of the SuperNode or SuperExec; the worker exits when it ends"
    )
    warm.set_defaults(run=_in_own_folder(_warm))
    key = actions.add_parser("key", help="make a key file for encrypting a site's private state and ledger")
    key.add_argument("file", type=Path, metavar="NEWFILE", help="the new file: 32 bytes that only this user can read")
    key.set_defaults(run=_key)
    seal, purge = _keeping(actions)
    ledgers = ledger_actions.add_actions(actions, _in_own_folder)
    persons = unit_actions.add_actions(actions, _in_own_folder)
    backups = site_actions.add_actions(actions, _in_own_folder)
    policy_actions.add_actions(actions)
    dashboard = actions.add_parser(
        "dashboard", help="show uploads, refusals, ledger and worker in a browser on this machine"
    )
    dashboard.add_argument(
        "--policy", default="", metavar="FILE", help="needed only if fedveil site start did not record it"
    )
    dashboard.add_argument(
        "--key-file",
        default="",
        metavar="FILE",
        help="key of an encrypted state, if fedveil site start did not record it",
    )
    dashboard.add_argument("--port", type=int, default=8051, metavar="N", help="default: 8051; 0 = any free port")
    dashboard.add_argument("--host", default="127.0.0.1", help="only 127.0.0.1 is allowed")
    dashboard.add_argument(
        "--metrics-token", type=Path, metavar="FILE",
        help="also serve /metrics for Prometheus, with the bearer token in this file, which is created if missing",
    )  # fmt: skip
    dashboard.set_defaults(run=_in_own_folder(_dashboard))
    for action in (status, seal, purge, dashboard, *ledgers, *persons, *backups):
        action.add_argument(
            "--kit",
            type=Path,
            metavar="FOLDER",
            help="the unpacked start-up kit, which tells where the state folder is",
        )
    for action in (status, warm, seal, purge, dashboard, *ledgers, *persons, *backups):
        action.add_argument(
            "--state-dir", type=Path, help=f"the site's state folder; default: {SiteConfig().state_dir}"
        )


def _starting(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    start = actions.add_parser("start", help="start the site's SuperNode and a warm worker; Ctrl-C stops both")
    start.add_argument(
        "--kit",
        type=Path,
        metavar="FOLDER",
        help="the unpacked start-up kit, which has all settings; the options below override it",
    )
    start.add_argument("--superlink", metavar="HOST:PORT", help="the server's fleet port")
    start.add_argument("--ca", metavar="FILE", help="the server's ca.crt")
    start.add_argument("--key", metavar="FILE", help="this site's private key; the public key must be registered")
    start.add_argument("--name", help="the site's name, as registered")
    site_options.add_site_options(start)
    start.add_argument(
        "--poll-seconds", type=float, metavar="S",
        help="initial delay between polls of the server; "
        f"default: {poll_backoff.DEFAULT}; for N > 40 sites, use N / 200",
    )  # fmt: skip
    start.set_defaults(run=_start)
    install = actions.add_parser(
        "install-service", help="print or write a systemd unit that runs fedveil site start with few rights"
    )
    install.add_argument("kit", type=Path, metavar="FOLDER", help="the unpacked start-up kit, with the site's keys")
    service_install.add_service_options(install)
    install.set_defaults(run=_install_service)


def _keeping(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> Sequence[argparse.ArgumentParser]:
    seal = actions.add_parser(
        "seal", help="encrypt a stopped site's state with a key, change the key, or decrypt the state"
    )
    seal.add_argument("--key-file", default="", metavar="FILE", help="the new key; if omitted, the state is decrypted")
    seal.add_argument(
        "--old-key-file", default="", metavar="FILE", help="the key with which the state is encrypted now"
    )
    seal.set_defaults(run=_in_own_folder(_seal))
    purge = actions.add_parser("purge", help="delete the private state of old runs; the ledger and the logs are kept")
    purge.add_argument(
        "--older-than", type=float, metavar="DAYS", help="select runs without a client round for this many days"
    )
    purge.add_argument(
        "--run", dest="runs", action="append", default=[], metavar="NAME", help="select this run; repeatable"
    )
    purge.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    purge.set_defaults(run=_in_own_folder(_purge))
    return seal, purge


def _start(args: argparse.Namespace) -> int:
    names = ("superlink", "ca", "key", "name", "poll-seconds", *site_start.NODE_OPTIONS)
    given = {name: getattr(args, name.replace("-", "_")) for name in names}
    notifier = ServiceNotifier.from_environment(os.environ, os.getpid())
    return site_start.run(site_start.resolve_site(given, args.kit, args.permit_everything), notifier)


def _install_service(args: argparse.Namespace) -> int:
    unit = service_install.describe_site(args.kit, args.user)
    name = f"fedveil-site-{kit_reader.read_kit(args.kit).site}"
    return service_install.install_unit(unit, name, args.out, args.kit)


def _in_own_folder(action: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Wrap an action to use the state folder from --state-dir, from the kit, or by default."""

    def run(args: argparse.Namespace) -> int:
        kits = kit_reader.node_config(args.kit) if getattr(args, "kit", None) else SiteConfig()
        return action(argparse.Namespace(**{**vars(args), "state_dir": args.state_dir or kits.state_dir}))

    return run


def _warm(args: argparse.Namespace) -> int:
    site = parse_site({"site": args.name, "state-dir": str(args.state_dir)})
    card = start_spare(site, args.owner, os.environ)
    say(f"worker {card.pid} is warm, for site {args.name} under process {args.owner}")
    return 0


def _init(args: argparse.Namespace) -> int:
    kit = kit_reader.read_kit(args.kit)
    about = {"federation": kit.federation, "site": kit.site}
    try:
        ca = (args.kit / "ca.crt").read_bytes()
    except OSError as error:
        raise ConfigError(f"--kit: expected ca.crt in {args.kit}, found none ({error}); unpack it") from None
    folder = args.out or args.kit / "keys"
    places_ = enrollment.KeyPaths(folder, args.secret or folder / "superexec-secret")
    file = args.kit / INSTRUCTION_KEYS
    keys = InstructionKeys.from_file(file) if file.exists() else None  # kits made before 0.2 have none
    request, fingerprint = enrollment.make_site_keys(
        places_, about, ca, args.renew, args.renew_signing, instructions=keys.digest if keys else ""
    )
    words = sys.stderr if args.print else sys.stdout
    if args.print:
        print(request.read_text())
    say(
        f"site {sanitize(about['site'], 80)} of {sanitize(about['federation'], 80)}: keys created; they stay here",
        file=words,
    )
    if keys:
        say(
            "compare this fingerprint of the server's instruction keys with the operator's, by phone: "
            f"{keys_fingerprint(keys.federation, keys.keys)}",
            file=words,
        )
    what = request.name if args.print else request  # containers print it, because their files are hard to reach
    say(f"send {what} to the operator, and read this fingerprint to them by phone: {fingerprint}", file=words)
    return 0


def _trust(args: argparse.Namespace) -> int:
    kit_reader.read_kit(args.kit)  # raises an error if this is no kit
    new, file = InstructionKeys.from_file(args.file), args.kit / INSTRUCTION_KEYS
    old = _pinned(file)
    if old is not None and old.federation != new.federation:
        raise ConfigError(
            f"{args.file}: federation: expected {old.federation}, as in {file}, found {new.federation}; "
            "another federation's keys come in its own kit"
        )
    for title, keys in (("pinned now", old.keys if old else ()), ("in the file", new.keys)):
        say(f"{title}: {', '.join(enrollment.short_key(key) for key in keys) or 'no keys'}")
    fingerprint = keys_fingerprint(new.federation, new.keys)
    if args.fingerprint != fingerprint:
        raise ConfigError(
            # Don't print the file's own fingerprint: the user would copy it instead of asking the operator by phone.
            f"--fingerprint: expected the fingerprint of the keys in {args.file}, found a different one: "
            f"{sanitize(args.fingerprint, 100)}; have the operator read it out; if it still differs, keep the old keys"
        )
    write_atomic(file, new.to_toml().encode())
    file.chmod(0o644)  # public, and read by another user in containers
    say(f"{file}: starting with its next message, the site accepts only instructions signed with these keys")
    say("in containers, a restart is needed first: docker compose restart clientapp")
    for name in (kit_reader.NODE_CONFIG, "containers.toml"):
        if (args.kit / name).is_file() and not kit_reader.names_instruction_keys(args.kit / name):
            say(f"{args.kit / name} does not name this file, so nothing is verified: take {name} from the new kit")
    return 0


def _pinned(file: Path) -> InstructionKeys | None:
    """Return the kit's keys; None if the kit has no keys file, or an unreadable one."""
    try:
        return InstructionKeys.from_file(file)
    except ConfigError:
        return None


def _guard(args: argparse.Namespace) -> int:
    guard = write_programs(args.bin, args.own_ports)
    say(f'{guard}: set PATH="{args.bin}:$PATH" for the SuperExec; without a policy it refuses every run')
    return 0


def _key(args: argparse.Namespace) -> int:
    say(f"{args.file}: key {make_key(args.file).id}. Keep a copy elsewhere: without it, encrypted files cannot be read")
    return 0


def _seal(args: argparse.Namespace) -> int:
    if not args.key_file and not args.old_key_file:
        raise ConfigError(
            "--key-file: expected this option or --old-key-file, found neither; make a key: fedveil site key"
        )
    new = FileSeal.from_key_file(args.key_file)
    written = re_encrypt.re_encrypt_files(args.state_dir, FileSeal.from_key_file(args.old_key_file), new)
    say(f"{len(written)} files {f'encrypted with key {new.id}' if new.id else 'decrypted'}")
    return 0


def _dashboard(args: argparse.Namespace) -> int:
    from fedveil.console.web import apps  # imports the web server and the plots

    return apps.open_site_dashboard(
        args.state_dir, args.policy, args.key_file, args.host, args.port, args.metrics_token,
        args.kit / "ca.crt" if args.kit else None,
    )  # fmt: skip


def _purge(args: argparse.Namespace) -> int:
    return offer_purge(args.state_dir, args.runs, args.older_than, lambda: args.yes or ask_to_delete())


def _status(args: argparse.Namespace) -> int:
    console = make_console()
    if args.follow:
        try:
            follow_worker(console, args.state_dir)
        except KeyboardInterrupt:
            console.print()
        return 0
    workers = list_workers(args.state_dir)
    for name, said in last_heartbeat.describe_sites(args.state_dir).items():
        say(f"site {sanitize(name, 80)}: {said}")
    say(read_permissions(args.state_dir, args.policy).words)
    for run in [run for run in list_retained(args.state_dir) if run.bytes]:
        say(purge_line(run))
        for words in secagg_of_site(args.state_dir, run, args.policy, args.key_file):
            say(f"  {words}")
    for words in ledger_lines(args.state_dir, args.policy, args.key_file):
        say(words)
    for words in unit_actions.withdrawn_lines(args.state_dir, args.key_file):
        say(words)
    for failure in last_failures(args.state_dir):
        say(failure)
    if sets := list_cached_datasets(args.state_dir):
        say(f"prepared examples: {sum(of.bytes for of in sets):,} bytes in {len(sets)} data sets")
    if not workers:
        say(f"no worker in {args.state_dir.expanduser()}: the site is not running, or its worker stopped when idle")
        return 1
    for worker in workers:
        console.print(describe_worker(worker), soft_wrap=True)
    return 0
