"""FedVeil and its peers on the same work: E2E with LoRA and the same base, rows per site, steps, rounds, optimizer.

Each run has a separate federation on this machine. For every peer, FedVeil scores the server's final factors on the
same test rows.

| metric | meaning |
|---|---|
| loss | of the server's model, nats per token |
| s a round | at the server, without the first round; for FedVeil, without scoring and checkpoints (peers have none) |
| s | the whole run, from its submission; the federation is already running |
| MB up, MB down | all traffic between sites and server, including TLS and heartbeats (process_monitor/relay.py) |
| server MB, site MB | maximum PSS at one time of all processes of the server, and of one site |
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedveil.contract.param_spec import Weights
from fedveil.errors import ConfigError
from fedveil.records import disclosure_ledger
from fedveil.testing.training import load_state
from fedveil_bench import folders
from fedveil_bench.common import resampling, verdicts
from fedveil_bench.fedrand.on_texts import figures_of
from fedveil_bench.peers import environments, nvflare
from fedveil_bench.peers.costs import COSTS, TIMEOUT, PeerCosts, PeerRun, measure_costs
from fedveil_bench.peers.nvflare import NVFLARE
from fedveil_bench.peers.shared import SharedInputs, describe_factors
from fedveil_bench.process_monitor.relay import TcpRelay, insert_relay
from fedveil_bench.runner import BenchOptions, BenchOutcome

FLOWER, BEFORE = "Flower FedAvg", "before training"
PEERS = (FLOWER, NVFLARE)
_SITE, _SERVER = "site-0", "superlink"  # the processes whose memory is watched


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return a row for each system, over the seeds.

    Raises:
        ConfigError: there is no launcher, a peer does not support the settings, or a run did not complete.
    """
    seeds = [SharedInputs(settings, seed, options) for seed in range(options.seeds or settings["seeds"])]
    if options.launch is None:
        raise ConfigError("peers/e2e: expected a launcher, found none; run it as `fedveil bench peers/e2e`")
    environment = environments.find_environment(nvflare.PEER, os.environ)
    if environment.said:
        options.say(environment.said)
    done: dict[str, list[PeerRun]] = {BEFORE: []}
    for seed, shared in enumerate(seeds):
        done[BEFORE].append(PeerRun({"loss": shared.initial_loss}, []))
        for label in (*settings["methods"], FLOWER, *([NVFLARE] if environment.python else [])):
            with tempfile.TemporaryDirectory() as scratch:
                if label == NVFLARE and environment.python:
                    found = nvflare.run_federation(shared, settings, Path(scratch), options, environment.python)
                else:
                    one = _stock if label == FLOWER else _ours
                    found = one(shared, settings, label, Path(scratch), options)
            done.setdefault(label, []).append(found)
            told = ", ".join(f"{name} {value:.4g}" for name, value in found.scores.items())
            options.say(f"seed {seed}: {label}: {told}")
    return build_outcome(done, settings, environment.said)


def _ours(
    shared: SharedInputs, settings: Mapping[str, Any], label: str, scratch: Path, options: BenchOptions
) -> PeerRun:
    method, sites, folder = settings["methods"][label], settings["sites"], scratch / "run"
    config = shared.flat | {"method.name": method["name"], "method.params": method.get("fields", "")}
    config |= {"run.dir": str(scratch), "run.name": "run", "cohort.sites": sites, "cohort.min-sites": sites}
    ran = _run(None, config, shared.data, settings, options)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["seconds"] for line in lines if line["round"] >= 0]
    weights: Weights = load_state(folder / "final" / "server.safetensors").tensors
    uploads = [m for m in disclosure_ledger.read_messages(folder / disclosure_ledger.NAME) if m["direction"] == "up"]
    seen = [describe_factors(field[0] for field in message["fields"]) for message in uploads]
    return PeerRun(ran.scores(shared.loss(weights), seconds), seen)


def _stock(
    shared: SharedInputs, settings: Mapping[str, Any], label: str, scratch: Path, options: BenchOptions
) -> PeerRun:
    shared.write(scratch / "task")
    rounds = settings["config"]["run.rounds"]
    config = {"task": str(scratch / "task"), "rounds": rounds, "sites": settings["sites"], "out": str(scratch)}
    app = folders.find_folder("peers/stock_flower")
    ran = _run(app, config, None, settings, options)
    noted = json.loads((scratch / "server.json").read_text())
    loss = shared.loss(shared.read(scratch / "weights.safetensors"))
    return PeerRun(ran.scores(loss, noted["seconds"]), [describe_factors(names) for names in noted["seen"]])


def _run(
    app: Path | None, config: Mapping[str, Any], data: Path | None, settings: Mapping[str, Any], options: BenchOptions
) -> PeerCosts:
    """Run `app`, or FedVeil, in a separate federation; stock Flower has its own programs and waiting times."""
    launch = options.launch
    sites = [launch.LocalSite(f"site-{i}", data) for i in range(settings["sites"])]
    with insert_relay(launch.LocalDeployment, TcpRelay)(sites, own_waits=app is not None) as federation:
        ended, found = measure_costs(
            federation, _SERVER, _SITE, lambda: federation.wait(federation.run(app, config), TIMEOUT)
        )
        if not ended.completed:
            raise ConfigError(f"{app.name if app else 'fedveil'}: expected a completed run, found: {ended.reason}")
    return found


def build_outcome(done: Mapping[str, Sequence[PeerRun]], settings: Mapping[str, Any], note: str = "") -> BenchOutcome:
    """Return the rows and verdicts for the runs, by system and seed; the verdicts also state where a peer is better.

    Args:
        note: a sentence about NVFlare's environment; there is no claim about an omitted peer.
    """
    figures = {label: figures_of([run.scores for run in runs]) for label, runs in done.items()}
    rows = []
    for label, runs in done.items():
        metrics = {name: resampling.compute_interval(figure) for name, figure in figures[label].items()}
        seen = Counter(what for run in runs for what in run.seen)
        rows.append({"name": label, "metrics": metrics, **({"server_sees": dict(seen)} if seen else {})})
    peers = [peer for peer in PEERS if peer in done]
    out = set(PEERS) - set(peers)
    claims = [claim for claim in settings["claims"] if not {claim["row"], claim["than"]} & out]
    said = verdicts.judge_claims(figures, claims, "+.4f")
    for label, peer, cost in itertools.product(settings["methods"], peers, COSTS):
        mine, theirs = figures[label][cost], figures[peer][cost]
        less = resampling.subtract_metrics(mine, theirs)
        text = f"{cost}: {label} {mine.value:.4g}, {peer} {theirs.value:.4g}, the difference {_shown(less)}"
        said.append((text, verdicts.judge_sign(less, "FedVeil is ahead", f"{peer} is ahead")))
    sees = [f"The server sees of a site: {label}: {_uploads(runs)}." for label, runs in done.items() if label != BEFORE]
    return BenchOutcome(
        rows, [*verdicts.list_verdicts(said, len(done[FLOWER]), verdicts.SEEDS), *sees, *([f"{note}."] if note else [])]
    )


def _shown(figure: resampling.ResampledMetric) -> str:
    return resampling.format_interval(resampling.compute_interval(figure), "+.3g")


def _uploads(runs: Sequence[PeerRun]) -> str:
    seen = Counter(what for run in runs for what in run.seen)
    whole = sum(seen.values())
    return ", ".join(f"trained {what} in {n} of {whole} uploads" for what, n in sorted(seen.items()))
