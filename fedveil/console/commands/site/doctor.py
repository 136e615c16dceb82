"""`fedveil doctor`: checks whether a machine is ready to be a site or server.

It checks certificates, keys, the server's instruction keys, clock, ports, versions, GPU, CPUs, other users, disk, data,
policy, roster, the server program and its health, and changes nothing. A line with a problem says what to do next. The
last line counts the results. The exit code is 1 if a check fails.

With `--set task.data=FOLDER`, task.evaluation or task.server-data, it checks that a run's examples exist, counts rows
that are empty, truncated or refused, and shows three examples as they will be trained, only on this screen. With
`--set task.model=FOLDER`, it plans a run on that base without loading it: memory by part, seconds, and bytes.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fedveil.console.doctor import checks, host_checks
from fedveil.console.doctor.checks import CheckResult
from fedveil.console.run_config_args import parse_overrides
from fedveil.console.terminal import Verdict, say
from fedveil.errors import ConfigError
from fedveil.records import audit_log
from fedveil.sanitize import sanitize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--kit", type=Path, metavar="FOLDER", help="at a site: the unpacked start-up kit")
    parser.add_argument(
        "--keys", type=Path, metavar="FOLDER", help="with --kit: the keys' folder; default: keys in the kit"
    )
    parser.add_argument(
        "--node-config",
        type=Path,
        metavar="FILE",
        help="with --kit: the node config; default: node-config.toml in the kit",
    )
    parser.add_argument(
        "--federation", type=Path, metavar="FOLDER", help="at the server: the folder made by fedveil provision"
    )
    parser.add_argument(
        "--health", default="", metavar="HOST:PORT", help="query the health server at this --health-server-address"
    )
    parser.add_argument(
        "--heartbeat",
        type=Path,
        metavar="FILE",
        help="at a site: check that its SuperNode reaches the server; FILE is the SuperNode's FEDVEIL_HEARTBEAT_FILE",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="run config: task.data=FOLDER checks the examples; task.model=FOLDER plans a run on that base",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with run config overrides")
    planning = parser.add_argument_group("planning, with --set task.model=FOLDER")
    planning.add_argument(
        "--gpu-gb",
        type=float,
        default=0,
        metavar="GB",
        help="plan for a GPU with this much memory instead of this machine",
    )
    planning.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="number of such GPUs (`processes` in the node config)"
    )
    planning.add_argument("--shard-base", action="store_true", help="with --gpus: shard the base across them")
    planning.add_argument(
        "--tflops", type=float, default=0, metavar="X", help="throughput of one GPU; default: as measured here"
    )
    planning.add_argument(
        "--rows",
        type=int,
        default=0,
        metavar="N",
        help="number of examples at a site; default: from its data, task.examples-per-site, or 1000",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return 0, or 1 if a check fails. With only --health or --heartbeat, run only these checks."""
    config = parse_overrides(args.config, args.set)
    if "task.model" not in config and (args.gpu_gb or args.gpus != 1 or args.shard_base or args.tflops or args.rows):
        raise ConfigError(
            "--gpu-gb, --gpus, --shard-base, --tflops, --rows: expected --set task.model=FOLDER with them, found none"
        )
    results: list[CheckResult] = []
    counted: list[int] = []
    if args.kit:
        results += _site(args, counted)
    if config:
        results += _data(config, counted)
    if args.federation:
        for name in ("ca.crt", "server.pem"):
            check = partial(checks.check_certificate, args.federation / "server" / name)
            results.append(checks.run_check(f"certificate {name}", check))
        results.append(checks.run_check("superlink", host_checks.check_superlink))
        results.append(checks.run_check("roster", partial(_registered, args.federation)))
    if not (args.health or args.heartbeat) or args.kit or args.federation:
        named = any(finding.name == "clock" for finding in results)  # already compared with the server's clock
        results += [] if named else [checks.run_check("clock", checks.check_clock)]
        results += [
            checks.run_check("versions", checks.check_versions),
            checks.run_check("entry_point", checks.entry_point),
        ]
    if args.health:
        results.append(checks.check_health(args.health))
    if args.heartbeat:
        results.append(checks.check_heartbeat(args.heartbeat))
    lines: list[str] = []
    longest = _previewed(args, config, results, lines) if config else 0
    plan: list[str] = []
    if "task.model" in config:
        results.append(checks.run_check("memory", lambda: _planned(args, config, counted, longest, plan)))
    for finding in results:
        line = f"{finding.verdict:<5} {finding.name:<22} {sanitize(finding.text)}"
        say(line, hang=29, mark=finding.verdict, verdict=finding.verdict)
    for line in lines:
        say(sanitize(line, 4000))
    for line in plan:
        say(sanitize(line, 1000))
    counts = Counter(finding.verdict for finding in results)
    worst: Verdict = "fail" if counts["fail"] else "warn" if counts["warn"] else "ok"
    words = f"{len(results)} checks: {counts['ok']} ok, {counts['warn']} warn, {counts['fail']} fail"
    if len(results) > 1:  # a container's health check is one
        say(words, mark=f"{counts[worst]} {worst}", verdict=worst)
    return int(any(finding.verdict == "fail" for finding in results))


def _data(flat: Mapping[str, Any], counted: list[int]) -> list[CheckResult]:
    """Check the data named in the run config. Raises ConfigError for a key or value that a run would refuse."""
    from fedveil.config import parse  # as in _site

    config = parse(flat)
    task = config.task
    if not (task.data or task.evaluation or task.server_data):
        return []
    from fedveil.console.doctor import data_checks

    results = list(data_checks.check_run_data(task, counted))
    if config.evaluate.validation_share and task.evaluation:
        check = partial(data_checks.check_validation_share, config)
        results.append(checks.run_check("evaluate.validation-share", check))
    return results


def _previewed(args: argparse.Namespace, flat: Mapping[str, Any], results: list[CheckResult], lines: list[str]) -> int:
    """Prepare the first examples of readable data; return the longest one's token count, or 0 if unknown.

    Appends problems with them to `results`, and three full examples, which only the site sees, to `lines`.
    """
    from fedveil.client_app.node_config import SiteConfig
    from fedveil.client_app.site_columns import apply_site_columns
    from fedveil.config import parse  # as in _site
    from fedveil.console.doctor import data_checks, example_preview
    from fedveil.console.provisioning import kit_reader

    config, longest = parse(flat), 0
    own = kit_reader.node_config(args.kit, args.node_config) if args.kit else SiteConfig()
    own = own.choose_data(config.task.data_set) if args.kit and config.task.data_set else own
    folders = {"task.data": (config.task.data, "train"), "task.evaluation": (config.task.evaluation, "test")}
    fine = {result.name for result in results if data_checks.is_readable(result)}
    if own.data and "data" in fine:  # otherwise the site's columns do not match the run's
        folders = {"data": (own.data, "train"), **folders}
    for name, (folder, split) in folders.items():
        if not folder or name not in fine:
            continue

        def check(name: str = name, folder: str = folder, split: str = split) -> CheckResult:
            nonlocal longest
            read = apply_site_columns(config, own.columns) if name == "data" else config
            preview = example_preview.preview_examples(name, read, Path(folder), split)
            if preview is None:
                return CheckResult(
                    f"{name} as trained", "ok", "not shown: the task reads no text, or its base is not on this machine"
                )
            longest = max(longest, preview.longest)
            lines.extend(preview.lines)
            return preview.result

        results.append(replace(checks.run_check(name, check), name=f"{name} as trained"))
    return longest


def _planned(
    args: argparse.Namespace, flat: Mapping[str, Any], counted: list[int], longest: int, plan: list[str]
) -> CheckResult:
    """Check whether the run fits in memory, and append the plan's lines to `plan`.

    `counted` holds the number of examples in the checked data; `longest` is the token count of the longest example.
    """
    from fedveil.config import parse  # as in _site
    from fedveil.console.doctor import memory_plan
    from fedveil.models.planning import memory

    config = parse(flat)
    run = memory_plan.PlannedRun.from_config(config, longest)
    ranks = memory.RankLayout(args.gpus, args.shard_base)
    machine = memory_plan.read_machine(args.gpu_gb, ranks, args.tflops, config.train.precision == "bf16")
    result = memory_plan.plan_verdict(run, machine)
    plan += memory_plan.plan_lines(run, machine, args.rows, counted[0] if counted else 0)
    return result


def _registered(folder: Path) -> CheckResult:
    from fedveil.console.doctor import secagg_checks  # as in _site

    return secagg_checks.check_registered_key(folder)


def _clock(superlink: str, ca: Path) -> CheckResult:
    """Compare the clock with the server's; without an answer, ask the kernel whether the clock is synchronized."""
    try:
        return checks.check_server_clock(superlink, ca)
    except (ConfigError, OSError, ValueError):  # the fleet-port check reports the reason
        return checks.check_clock()


def _site(args: argparse.Namespace, counted: list[int]) -> list[CheckResult]:
    # Imported here because --health, which a container runs every ten seconds, does not need pydantic.
    from fedveil.config import parse
    from fedveil.console.doctor import data_checks, policy_checks, secagg_checks, signature_checks
    from fedveil.console.provisioning import kit_reader

    kit, site = kit_reader.read_kit(args.kit), kit_reader.node_config(args.kit, args.node_config)
    superlink = kit.superlink
    config, ca, state = parse(parse_overrides(args.config, args.set)), args.kit / "ca.crt", site.state_dir.expanduser()
    host, keys = superlink.rpartition(":")[0].strip("[]"), args.keys or args.kit / "keys"
    todo = {
        "certificate ca.crt": lambda: checks.check_certificate(ca),
        "key": lambda: checks.private_key(keys / "node.key"),
        "signing key": lambda: secagg_checks.signing_key(site, keys),
        "instruction keys": lambda: signature_checks.check_instruction_keys(site, args.kit),
        "proxy": lambda: checks.check_proxy(superlink),
        "fleet port": lambda: checks.check_fleet_port(superlink, ca),
        "clock": lambda: _clock(superlink, ca),
        "control port": lambda: checks.check_closed_port(host, kit.control_port, "control port"),
        "gpu": lambda: checks.check_gpu(site.device, site.processes),
        "cpus": host_checks.check_cpu_limit,
        "other users": host_checks.check_other_users,
        "disk": lambda: checks.check_disk(state),
        **data_checks.list_data_checks(site, config, counted),
        "policy": lambda: policy_checks.check_policy_file(site.policy),
        "roster": lambda: secagg_checks.check_roster(site),
        "key file": lambda: checks.key_file(site.key_file, state),
        "audit log": lambda: checks.audit_log(state / audit_log.NAME),
    }
    return [checks.run_check(name, check) for name, check in todo.items()]
