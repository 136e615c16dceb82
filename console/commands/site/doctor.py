"""`fedveil doctor`: checks whether a machine is ready to be site or server.

It looks at certificates, keys, clock, ports, versions, GPU, CPUs, other users, disk, data, policy, roster, the server's
program and health, and changes nothing. Each line says what to do next. The exit code is 1 where a check fails.

With `--set task.data=FOLDER`, task.evaluation or task.server-data it looks whether the rows are there that a run would
read. With `--set task.model=FOLDER` it plans a run on that base before anything is loaded: memory by part, seconds,
bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fedveil.console.provisioning import checks, host_checks
from fedveil.console.provisioning.checks import Check
from fedveil.console.run_config import overrides
from fedveil.errors import ConfigError
from fedveil.foreign import shown
from fedveil.records import audit_log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--kit", type=Path, metavar="FOLDER", help="at a site: the unpacked start-up kit")
    parser.add_argument(
        "--keys", type=Path, metavar="FOLDER", help="with --kit: where the keys are; default: keys, in it"
    )
    parser.add_argument("--node-config", type=Path, metavar="FILE", help="with --kit: default: node-config.toml, in it")
    parser.add_argument("--federation", type=Path, metavar="FOLDER", help="at the server: what fedveil provision made")
    parser.add_argument("--health", default="", metavar="HOST:PORT", help="ask a --health-server-address")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of the run config: task.data=FOLDER looks at the rows; task.model=FOLDER plans a run on that base",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="the same from a TOML file, as submit takes it")
    planning = parser.add_argument_group("planning, with --set task.model=FOLDER")
    planning.add_argument(
        "--gpu-gb", type=float, default=0, metavar="GB", help="for a GPU of so many GB, not this machine"
    )
    planning.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="and for so many of them: processes of the node config"
    )
    planning.add_argument("--shard-base", action="store_true", help="with --gpus: the base divided among them")
    planning.add_argument(
        "--tflops", type=float, default=0, metavar="X", help="that one sustains; default: measured here"
    )
    planning.add_argument(
        "--rows", type=int, default=0, metavar="N", help="of a site; default: of its data, task.max-examples, or 1000"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0; 1 where a check fails. With --health alone, that check alone."""
    config = overrides(args.config, args.set)
    if "task.model" not in config and (args.gpu_gb or args.gpus != 1 or args.shard_base or args.tflops or args.rows):
        raise ConfigError(
            "--gpu-gb, --gpus, --shard-base, --tflops, --rows: expected --set task.model=FOLDER beside them, found none"
        )
    found: list[Check] = []
    counted: list[int] = []
    if args.kit:
        found += _site(args, counted)
    if config:
        found += _data(config, counted)
    if args.federation:
        for name in ("ca.crt", "server.pem"):
            check = partial(checks.certificate, args.federation / "server" / name)
            found.append(checks.guarded(f"certificate {name}", check))
        found.append(checks.guarded("superlink", host_checks.superlink))
        found.append(checks.guarded("roster", partial(_registered, args.federation)))
    if not args.health or args.kit or args.federation:
        found += [
            checks.guarded(check.__name__, check) for check in (checks.clock, checks.versions, checks.entry_point)
        ]
    if args.health:
        found.append(checks.health(args.health))
    plan: list[str] = []
    if "task.model" in config:
        found.append(checks.guarded("memory", lambda: _planned(args, config, counted, plan)))
    for finding in found:
        print(f"{finding.verdict:<5} {finding.name:<22} {shown(finding.text)}")
    for line in plan:
        print(shown(line, 1000))
    return int(any(finding.verdict == "fail" for finding in found))


def _data(flat: Mapping[str, Any], counted: list[int]) -> list[Check]:
    """Of the data that the run config names. Raises ConfigError for a key or value that a run would refuse."""
    from fedveil.config import parse  # as in _site

    task = parse(flat).task
    if not (task.data or task.evaluation or task.server_data):
        return []
    from fedveil.console.provisioning import data_checks

    return list(data_checks.of_run(task, counted))


def _planned(args: argparse.Namespace, flat: Mapping[str, Any], counted: list[int], plan: list[str]) -> Check:
    """Whether the run fits; its lines go into `plan`. `counted`: the rows of the data that was looked at."""
    from fedveil.config import parse  # as in _site
    from fedveil.console.provisioning import planned
    from fedveil.models.planning import memory

    config = parse(flat)
    run = planned.Planned.of(config)
    ranks = memory.Ranks(args.gpus, args.shard_base)
    machine = planned.machine(args.gpu_gb, ranks, args.tflops, config.train.precision == "bf16")
    found = planned.verdict(run, machine)
    plan += planned.lines(run, machine, args.rows, counted[0] if counted else 0)
    return found


def _registered(folder: Path) -> Check:
    from fedveil.console.provisioning import secure_checks  # as in _site

    return secure_checks.registered(folder)


def _site(args: argparse.Namespace, counted: list[int]) -> list[Check]:
    # Not above, for pydantic: --health, which a container asks every ten seconds, does without.
    from fedveil.config import parse
    from fedveil.console.provisioning import data_checks, policy_checks, secure_checks, unpacked

    kit, site = unpacked.read(args.kit), unpacked.node_config(args.kit, args.node_config)
    superlink = kit.superlink
    task, ca, state = parse(overrides(args.config, args.set)).task, args.kit / "ca.crt", site.state_dir.expanduser()
    host, keys = superlink.rpartition(":")[0].strip("[]"), args.keys or args.kit / "keys"
    todo = {
        "certificate ca.crt": lambda: checks.certificate(ca),
        "key": lambda: checks.private_key(keys / "node.key"),
        "signing key": lambda: secure_checks.signing_key(site, keys),
        "fleet port": lambda: checks.fleet(superlink, ca),
        "control port": lambda: checks.closed(host, kit.control_port, "control port"),
        "gpu": lambda: checks.gpu(site.device, site.processes),
        "cpus": host_checks.cpus,
        "other users": host_checks.other_users,
        "disk": lambda: checks.disk(state),
        "data": lambda: data_checks.enough(data_checks.of_site(site.data, task, counted), site.policy, counted),
        "policy": lambda: policy_checks.policy(site.policy),
        "roster": lambda: secure_checks.roster(site),
        "key file": lambda: checks.key_file(site.key_file, state),
        "audit log": lambda: checks.audit_log(state / audit_log.NAME),
    }
    return [checks.guarded(name, check) for name, check in todo.items()]
