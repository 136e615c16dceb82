"""`fedveil server`: starts a server, also as a service; renames, backs up, purges.

A server is Flower's SuperLink, behind FedVeil's checks, plus the SuperExec that runs apps. Ports, certificates
and members come from the folder made by fedveil provision. With containers, use the folder's compose file instead.

A folder can be moved, also to another machine. If sites then reach the server under another name, `rename` issues a
certificate for that name and rewrites the kits with the new address.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from fedveil.console.backup import server_actions
from fedveil.console.launch import server, service_install
from fedveil.console.launch.service_notify import ServiceNotifier
from fedveil.console.provisioning import instruction_keys, startup_kit
from fedveil.console.provisioning.federation_folder import SiteRegistry
from fedveil.console.provisioning.server_certificate import issue_certificate
from fedveil.console.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    start = actions.add_parser("start", help="start SuperLink and SuperExec; Ctrl-C stops both")
    start.set_defaults(run=_start)
    install = actions.add_parser(
        "install-service", help="print or write a systemd unit that runs fedveil server start with few rights"
    )
    install.set_defaults(run=_install_service)
    for action in (start, install):
        action.add_argument("folder", type=Path, help="the folder made by fedveil provision")
        action.add_argument(
            "--listen", metavar="HOST:PORT",
            help="address for sites; default: all addresses of this machine, on fleet-port",
        )  # fmt: skip
        action.add_argument(
            "--state-dir", type=Path, metavar="FOLDER",
            help="folder for the database and logs; default: server in FOLDER",
        )  # fmt: skip
    service_install.add_service_options(install)
    rename = actions.add_parser(
        "rename", help="change the name under which sites reach the server: new certificate, kits with the new address"
    )
    rename.add_argument("folder", type=Path, help="the folder made by fedveil provision")
    rename.add_argument("name", nargs="+", metavar="NAME", help="a host name or address; the kits use the first")
    rename.add_argument(
        "--only", action="store_true", help="drop the previous names; by default, the certificate keeps them"
    )
    rename.add_argument("--ca-key", type=Path, help="path of ca.key if it is no longer in the folder")
    rename.set_defaults(run=_rename)
    server_actions.add_actions(actions)


def _start(args: argparse.Namespace) -> int:
    notifier = ServiceNotifier.from_environment(os.environ, os.getpid())
    return server.run(server.resolve_server(args.folder, args.listen, args.state_dir), notifier)


def _install_service(args: argparse.Namespace) -> int:
    unit = service_install.describe_server(args.folder, args.user, args.listen, args.state_dir)
    name = SiteRegistry(args.folder).federation.name
    return service_install.install_unit(unit, f"fedveil-server-{name}", args.out, args.folder)


def _rename(args: argparse.Namespace) -> int:
    with SiteRegistry.locked(args.folder) as members:
        federation = members.with_server(args.name, args.only)
        issue_certificate(args.folder, federation, args.ca_key)  # may be refused, so before the registry changes
        members.rename_server(federation)
        keys, ca = instruction_keys.pinned_keys(members), (args.folder / "server" / "ca.crt").read_bytes()
        # A kit lists the instruction keys; a site whose kit has none yet gets them with fedveil members kit.
        sites = [site for site in sorted(members.sites) if members.signs(site)]
        (args.folder / "kits").mkdir(mode=0o700, exist_ok=True)
        for site in sites:
            startup_kit.write_kit(args.folder / "kits" / f"{site}.tar.gz", federation, site, ca, keys)
    say(f"{args.folder / 'server'}: new server.pem and server.key for {', '.join(federation.server)}")
    say(f"{args.folder / 'kits'}: {len(sites)} kits rewritten with {federation.superlink}")
    say(f"next: restart the server (fedveil server start {args.folder}) and send each site its kit")
    say(startup_kit.ADDRESS_AT_SITE)
    return 0
