"""Measure the cost of secure aggregation: at a site, at the server, on the wire, and over gRPC versus a clear run.

The keys, shares and signatures of all sites are real, and so are one site's masked vector and the entire unmasking. The
other sites' vectors are zeros, because the server's work does not depend on their contents.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from fedveil import resources
from fedveil.attacks.statistics import confidence_interval
from fedveil.errors import ConfigError
from fedveil.testing.secagg import (
    KEY_BYTES,
    AgreeRequest,
    AgreeResponse,
    FixedPointRing,
    InProcessSecureSums,
    MaskStream,
    OpenRequest,
    OpenResponse,
    SecAggConfig,
    UnmaskingAttempt,
    add_masks,
    sign_statement,
)
from fedveil_bench.runner import BenchOptions, BenchOutcome

_GB = 1e9


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Measure a row per number of sites, weights and silent sites, one for the masks, and two or three over gRPC."""
    rows = [_masking(settings["weights"][-1])]
    for weights in settings["weights"]:
        for sites in settings["sites"]:
            for silent in sorted({0, 1, (sites - 1) // 3}):  # sites refuse a sum if more of them are missing
                if sites - silent >= 3:
                    rows.append(_apart(sites, weights, silent))
                    options.say(json.dumps(rows[-1]))
    verdicts = _verdicts(rows)
    if options.launch is not None:
        for sites in settings["over_grpc"]:
            found = _over_grpc(sites, settings, options)
            rows += found
            verdicts.append(describe_rounds(sites, *(row["metrics"]["seconds_a_round"]["median"] for row in found)))
    return BenchOutcome(rows, verdicts)


def describe_rounds(sites: int, clear: float, secure: float, silent: float | None = None) -> str:
    """Compare the seconds of a round in the clear, under secure aggregation, and the latter with one silent site."""
    words = (
        f"Over gRPC with {sites} sites a secure round takes {secure - clear:.1f} s more than the clear one's "
        f"{clear:.1f} s (asked: at most 6 s at 8 sites)"
    )
    if silent is None:
        return f"{words}."
    return f"{words}; with one site that sends no upload, {silent - secure:.1f} s more than that (asked: at most 3 s)."


def _masking(weights: int) -> dict[str, Any]:
    """Measure GB of vector per second on one core, for applying one mask and for converting one vector to integers."""
    torch.set_num_threads(1)
    ring = FixedPointRing(32, 8, 1, 64.0)
    values, vector = torch.randn(weights), np.zeros(weights, ring.dtype)
    speeds: dict[str, list[float]] = {"mask_gb_per_second": [], "encode_gb_per_second": []}
    for _ in range(5):
        started = time.perf_counter()
        ring.encode(values, 1, None, vector)
        speeds["encode_gb_per_second"].append(vector.nbytes / _GB / (time.perf_counter() - started))
        started = time.perf_counter()
        add_masks(vector, [MaskStream(os.urandom(KEY_BYTES), 1)])
        speeds["mask_gb_per_second"].append(vector.nbytes / _GB / (time.perf_counter() - started))
    return {"name": f"one core, {weights} weights", "metrics": {k: confidence_interval(v) for k, v in speeds.items()}}


def _apart(sites: int, weights: int, silent: int) -> dict[str, Any]:
    """Measure the row for one size in a separate process, so that only its own memory is counted."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        found: Mapping[str, float] = pool.apply(measure_attempt, (sites, weights, silent))
    metrics = {name: {"mean": value, "low": value, "high": value, "n": 1} for name, value in found.items()}
    return {"name": f"{sites} sites, {weights} weights, {silent} silent", "metrics": metrics}


def measure_attempt(sites: int, weights: int, silent: int) -> dict[str, float]:
    """Measure seconds, bytes and memory of one attempt.

    CPU seconds are used where other load on the machine would affect wall-clock seconds.
    """
    torch.set_num_threads(1)
    names = [f"site-{i:05}" for i in range(sites)]
    local = InProcessSecureSums("cost", SecAggConfig(least=3), names)
    setup = time.process_time()
    attempt = local.begin(0, 0, names)
    setup = time.process_time() - setup
    plan, first = attempt.plan, names[0]
    values, vector = torch.zeros(weights), np.zeros(weights, FixedPointRing.from_plan(plan).dtype)
    started = time.process_time()
    FixedPointRing.from_plan(plan).encode(values, 1, None, vector)
    attached = {first: local.mask(first, plan, vector)}
    site = time.process_time() - started
    del values
    empty = np.zeros(weights, vector.dtype)
    of_zeros = {"vector": hashlib.sha256(empty.data).hexdigest()}
    before = _memory_mb()
    added: list[float] = []
    for name in names[: sites - silent]:
        if name not in attached:
            unsigned = local.mask(name, plan, np.zeros(1, vector.dtype)).model_copy(update=of_zeros)
            attached[name] = sign_statement(unsigned, name, local.sites[name].signing_key)
        started = time.process_time()
        attempt.add(name, vector if name == first else empty, attached[name])
        added.append(time.process_time() - started)
    memory = _memory_mb() - before
    agree_bytes, agree_seconds = _agreed(local, attempt)
    open_bytes, open_seconds = _opened(local, attempt)
    started = time.process_time()
    attempt.total()
    unmasked = time.process_time() - started
    upload = vector.nbytes + len(attached[first].to_bytes())
    return {
        "setup_seconds_a_site": setup / sites,
        "site_seconds": site,
        "upload_bytes": upload,
        "upload_bytes_beyond_the_vector": upload - vector.nbytes,
        "plan_bytes": len(plan.to_bytes()),
        "add_seconds_an_upload": statistics.median(added),
        "agree_seconds_a_site": agree_seconds,
        "agree_bytes_a_site": agree_bytes,
        "open_seconds_a_site": open_seconds,
        "open_bytes_a_site": open_bytes,
        "unmask_seconds": unmasked,
        "server_memory_mb": memory,
    }


def _agreed(local: InProcessSecureSums, attempt: UnmaskingAttempt) -> tuple[float, float]:
    """Have all sites in the list sign it, if a site is missing. Returns values like `_opened`; zeros if none sign."""
    attempt.close()
    sizes, seconds = [0], [0.0]
    for site, asked in attempt.agree_requests().items() if attempt.needs_agreement else ():
        data = asked.to_bytes()
        started = time.process_time()
        answer = local.sites[site].agree(AgreeRequest.from_bytes(data)).to_bytes()
        seconds.append(time.process_time() - started)
        attempt.take_agreement(site, AgreeResponse.from_bytes(answer))
        sizes.append(len(data) + len(answer))
    return statistics.median(sizes), statistics.median(seconds)


def _opened(local: InProcessSecureSums, attempt: UnmaskingAttempt) -> tuple[float, float]:
    """Have all sites in the list open their shares. Returns medians per site: request and answer bytes, CPU seconds."""
    sizes, seconds = [], []
    for holder, asked in attempt.open_requests().items():
        data = asked.to_bytes()
        started = time.process_time()
        answer = local.sites[holder].open(OpenRequest.from_bytes(data)).to_bytes()
        seconds.append(time.process_time() - started)
        attempt.take_opening(holder, OpenResponse.from_bytes(answer))
        sizes.append(len(data) + len(answer))
    return statistics.median(sizes), statistics.median(seconds)


def _memory_mb() -> float:
    return float(psutil.Process().memory_info().rss) / 1e6


def _verdicts(rows: list[dict[str, Any]]) -> list[str]:
    speed = rows[0]["metrics"]
    both = [speed[name]["mean"] for name in ("mask_gb_per_second", "encode_gb_per_second")]
    memory = {row["name"]: row["metrics"]["server_memory_mb"]["mean"] for row in rows[1:]}
    return [
        f"One core masks at {both[0]:.2f} GB/s, and makes integers of weights at {both[1]:.2f} GB/s (asked: 0.8).",
        f"The server's memory beyond one upload, MB: {', '.join(f'{k}: {v:.0f}' for k, v in memory.items())}.",
    ]


def _over_grpc(sites: int, settings: dict[str, Any], options: BenchOptions) -> list[dict[str, Any]]:
    """Measure a round in the clear and a secure one; if a sum can do without a site, also one without its upload."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        with options.launch.LocalDeployment(_sites(sites, options)) as federation:
            for kind in ("clear", "secure"):
                rows.append(_measure_rounds(federation, kind, sites, 0, scratch, settings))
                options.say(json.dumps(rows[-1]))
        if sites - 1 >= max(3, SecAggConfig(least=3).quorum(sites)):
            # A site without rows announces its key, and then fails before it masks.
            (empty := Path(scratch) / "empty").mkdir()
            with options.launch.LocalDeployment(_sites(sites, options, empty)) as federation:
                rows.append(_measure_rounds(federation, "secure, 1 silent", sites, 1, scratch, settings))
                options.say(json.dumps(rows[-1]))
    return rows


def _sites(sites: int, options: BenchOptions, data_of_last: Path | None = None) -> list[Any]:
    own = [resources.data_folder("e2e")] * (sites - 1) + [data_of_last or resources.data_folder("e2e")]
    return [
        options.launch.LocalSite(f"site-{i}", folder, (("partition-id", i), ("num-partitions", sites)))
        for i, folder in enumerate(own)
    ]


def _measure_rounds(
    federation: Any, kind: str, sites: int, silent: int, scratch: str, settings: dict[str, Any]
) -> dict[str, Any]:
    name = kind.replace(", ", "-").replace(" ", "-")
    config = settings["config"] | {"run.dir": scratch, "run.name": name, "run.rounds": settings["rounds"] + 1}
    config |= {"cohort.sites": sites, "cohort.min-sites": sites - silent, "secure.enabled": kind != "clear"}
    ended = federation.wait(federation.run(None, config), timeout=1800)
    if not ended.completed:
        raise ConfigError(f"{kind}: expected a completed run, found: {ended.reason}")
    lines = (Path(scratch) / name / "metrics.jsonl").read_text().splitlines()
    metrics = [m for m in map(json.loads, lines) if m.get("accepted")]
    if any(len(m["accepted"]) != sites - silent for m in metrics):
        raise ConfigError(f"{kind}: expected {sites - silent} uploads in each round, found {metrics[-1]['accepted']}")
    seconds = [m["seconds"] for m in metrics][1:]  # the first round waits for the sites' keys
    found = {"seconds_a_round": {**confidence_interval(seconds), "median": statistics.median(seconds)}}
    about = {"upload_bytes": metrics[-1]["upload_bytes"] // (sites - silent), "rounds": len(seconds)}
    return {"name": f"over gRPC, {sites} sites, {kind}", "metrics": found, **about}
