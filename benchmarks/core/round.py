"""A round that trains nothing, over gRPC: ours beside stock Flower's with the same payload, one after the other.

Stock Flower has a federation with its own programs and waits. The first round of each is left out: it waits for the
sites.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from fedveil import places
from fedveil.benchmarks.run import Options, Outcome, interval
from fedveil.errors import ConfigError
from fedveil.records import disclosure


def run(settings: dict[str, Any], options: Options) -> Outcome:
    """The rows "fedveil" and "flower", with seconds a round and the bytes beyond the payload.

    Raises:
        ConfigError: no launcher, or a run that did not complete.
    """
    if options.launch is None:
        raise ConfigError("core/round: expected a launcher, found none; run it as `fedveil bench core/round`")
    sites, rounds = settings["sites"], settings["rounds"] + 1
    shares = [(("partition-id", i), ("num-partitions", sites)) for i in range(sites)]
    named = [options.launch.LocalSite(f"site-{i}", places.folder("data/e2e"), share) for i, share in enumerate(shares)]
    with tempfile.TemporaryDirectory() as scratch, options.launch.LocalFederation(named) as federation:
        folder = Path(scratch)
        overrides = settings["config"] | {"run.rounds": rounds, "run.dir": scratch, "run.name": "ours"}
        overrides |= {"cohort.min-sites": sites, "cohort.sites": sites}
        _finish(federation, None, overrides)
        metrics = [json.loads(x) for x in (folder / "ours" / "metrics.jsonl").read_text().splitlines()]
        ledger = disclosure.messages(folder / "ours" / disclosure.NAME)
        payload = ledger[-1]["payload_bytes"]
        options.say(f"fedveil: {[m['seconds'] for m in metrics]}; payload {payload} bytes")
    with tempfile.TemporaryDirectory() as scratch, options.launch.LocalFederation(named, own_waits=True) as federation:
        folder = Path(scratch)
        stock = {"bytes": payload, "rounds": rounds, "sites": sites, "out": str(folder / "stock.json")}
        _finish(federation, places.folder("benchmarks/core/stock_flower"), stock)
        stock_seconds = json.loads((folder / "stock.json").read_text())
    ours, theirs = [m["seconds"] for m in metrics][1:], stock_seconds[1:]
    beyond = [x["bytes"] - x["payload_bytes"] for x in ledger]
    rows = [
        {
            "name": name,
            "metrics": {"seconds_a_round": {**interval(s), "median": statistics.median(s)}},
            "rounds": len(s),
        }
        for name, s in (("fedveil", ours), ("flower", theirs))
    ]
    rows[0] |= {"upload_bytes": ledger[-1]["bytes"], "payload_bytes": payload}
    more = statistics.median(ours) - statistics.median(theirs)
    return Outcome(
        rows,
        [
            f"A round that trains nothing takes {more:+.1f} s beside stock Flower's with the same {payload} bytes.",
            f"A message has at most {max(beyond)} bytes beyond its payload: {max(beyond) / payload:.3%} (asked: below "
            "1 % at 1 MB).",
        ],
    )


def _finish(federation: Any, app: Path | None, overrides: dict[str, Any]) -> None:
    ended = federation.wait(federation.run(app, overrides), timeout=900)
    if not ended.completed:
        raise ConfigError(f"{(app.name if app else 'fedveil')}: expected a completed run, found: {ended.reason}")
