"""FedVeil and its peers at the same work: E2E with LoRA on the same base, rows by site, steps, rounds and optimiser.

Each run has a federation of its own on this machine. Whoever trained, FedVeil scores the server's last factors on the
same test rows.

| metric | |
|---|---|
| loss | of the server's model, nats a token |
| s a round | at the server, all but the first; FedVeil's without its scoring and checkpoint, which peers have not |
| s | the whole run, from its submission; the federation runs already |
| MB up, MB down | all that passed between sites and server in the run, TLS and heartbeats included (watch/relay.py) |
| server MB, site MB | the most PSS at a time of all processes of the server, of one site |
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

from fedveil import places
from fedveil.benchmarks.common import resampling, verdicts
from fedveil.benchmarks.fedrand.on_texts import figures_of
from fedveil.benchmarks.peers import environments, nvflare
from fedveil.benchmarks.peers.costs import COSTS, TIMEOUT, Costs, Run, watched
from fedveil.benchmarks.peers.nvflare import NVFLARE
from fedveil.benchmarks.peers.shared import Shared, factors
from fedveil.benchmarks.run import Options, Outcome
from fedveil.benchmarks.watch.relay import Relay, through
from fedveil.contract.spec import Weights
from fedveil.errors import ConfigError
from fedveil.records import disclosure
from fedveil.records.state import load_state

FLOWER, BEFORE = "Flower FedAvg", "before training"
PEERS = (FLOWER, NVFLARE)
_SITE, _SERVER = "site-0", "superlink"  # whose memory is watched


def run(settings: dict[str, Any], options: Options) -> Outcome:
    """A row for each way, over the seeds.

    Raises:
        ConfigError: no launcher, settings that a peer has not, or a run that did not complete.
    """
    seeds = [Shared(settings, seed, options) for seed in range(options.seeds or settings["seeds"])]
    if options.launch is None:
        raise ConfigError("peers/e2e: expected a launcher, found none; run it as `fedveil bench peers/e2e`")
    environment = environments.found(nvflare.PEER, os.environ)
    if environment.said:
        options.say(environment.said)
    done: dict[str, list[Run]] = {BEFORE: []}
    for seed, shared in enumerate(seeds):
        done[BEFORE].append(Run({"loss": shared.initial_loss}, []))
        for label in (*settings["methods"], FLOWER, *([NVFLARE] if environment.python else [])):
            with tempfile.TemporaryDirectory() as scratch:
                if label == NVFLARE and environment.python:
                    found = nvflare.run(shared, settings, Path(scratch), options, environment.python)
                else:
                    one = _stock if label == FLOWER else _ours
                    found = one(shared, settings, label, Path(scratch), options)
            done.setdefault(label, []).append(found)
            told = ", ".join(f"{name} {value:.4g}" for name, value in found.scores.items())
            options.say(f"seed {seed}: {label}: {told}")
    return outcome(done, settings, environment.said)


def _ours(shared: Shared, settings: Mapping[str, Any], label: str, scratch: Path, options: Options) -> Run:
    method, sites, folder = settings["methods"][label], settings["sites"], scratch / "run"
    config = shared.flat | {"method.name": method["name"], "method.fields": method.get("fields", "")}
    config |= {"run.dir": str(scratch), "run.name": "run", "cohort.sites": sites, "cohort.min-sites": sites}
    ran = _run(None, config, shared.data, settings, options)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["seconds"] for line in lines if line["round"] >= 0]
    weights: Weights = load_state(folder / "final" / "server.safetensors").tensors
    uploads = [m for m in disclosure.messages(folder / disclosure.NAME) if m["direction"] == "up"]
    seen = [factors(field[0] for field in message["fields"]) for message in uploads]
    return Run(ran.scores(shared.loss(weights), seconds), seen)


def _stock(shared: Shared, settings: Mapping[str, Any], label: str, scratch: Path, options: Options) -> Run:
    shared.write(scratch / "task")
    rounds = settings["config"]["run.rounds"]
    config = {"task": str(scratch / "task"), "rounds": rounds, "sites": settings["sites"], "out": str(scratch)}
    app = places.folder("benchmarks/peers/stock_flower")
    ran = _run(app, config, None, settings, options)
    noted = json.loads((scratch / "server.json").read_text())
    loss = shared.loss(shared.read(scratch / "weights.safetensors"))
    return Run(ran.scores(loss, noted["seconds"]), [factors(names) for names in noted["seen"]])


def _run(
    app: Path | None, config: Mapping[str, Any], data: Path | None, settings: Mapping[str, Any], options: Options
) -> Costs:
    """A run of `app`, or of FedVeil, in a federation of its own; stock Flower has its own programs and waits."""
    launch = options.launch
    sites = [launch.LocalSite(f"site-{i}", data) for i in range(settings["sites"])]
    with through(launch.LocalFederation, Relay)(sites, own_waits=app is not None) as federation:
        ended, found = watched(
            federation, _SERVER, _SITE, lambda: federation.wait(federation.run(app, config), TIMEOUT)
        )
        if not ended.completed:
            raise ConfigError(f"{app.name if app else 'fedveil'}: expected a completed run, found: {ended.reason}")
    return found


def outcome(done: Mapping[str, Sequence[Run]], settings: Mapping[str, Any], note: str = "") -> Outcome:
    """Rows and verdicts of the runs, by way and seed; what a peer does with less is said as the claims are.

    Args:
        note: on NVFlare's environment; of a peer that is left out, no claim is made.
    """
    figures = {label: figures_of([run.scores for run in runs]) for label, runs in done.items()}
    rows = []
    for label, runs in done.items():
        metrics = {name: resampling.interval(figure) for name, figure in figures[label].items()}
        seen = Counter(what for run in runs for what in run.seen)
        rows.append({"name": label, "metrics": metrics, **({"server_sees": dict(seen)} if seen else {})})
    peers = [peer for peer in PEERS if peer in done]
    out = set(PEERS) - set(peers)
    claims = [claim for claim in settings["claims"] if not {claim["row"], claim["than"]} & out]
    said = verdicts.compared(figures, claims, "+.4f")
    for label, peer, cost in itertools.product(settings["methods"], peers, COSTS):
        mine, theirs = figures[label][cost], figures[peer][cost]
        less = resampling.less(mine, theirs)
        text = f"{cost}: {label} {mine.value:.4g}, {peer} {theirs.value:.4g}, the difference {_shown(less)}"
        said.append((text, verdicts.told(less, "FedVeil is ahead", f"{peer} is ahead")))
    sees = [f"The server sees of a site: {label}: {_uploads(runs)}." for label, runs in done.items() if label != BEFORE]
    return Outcome(rows, [*verdicts.table(said, len(done[FLOWER])), *sees, *([f"{note}."] if note else [])])


def _shown(figure: resampling.Figure) -> str:
    return resampling.shown(resampling.interval(figure), "+.3g")


def _uploads(runs: Sequence[Run]) -> str:
    seen = Counter(what for run in runs for what in run.seen)
    whole = sum(seen.values())
    return ", ".join(f"trained {what} in {n} of {whole} uploads" for what, n in sorted(seen.items()))
