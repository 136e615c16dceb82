"""Flower's FedAvg, timed by its own evaluate_fn."""

import itertools
import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Write the seconds of each round, as JSON, to the file that the config names."""
    config, times = context.run_config, []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        times.append(time.monotonic())
        return MetricRecord({"round": server_round})

    sites = int(config["sites"])
    weights = np.random.default_rng(0).random(int(config["bytes"]) // 4, np.float32)  # equal chunks are sent only once
    arrays = ArrayRecord({"w": Array(weights)})
    strategy = FedAvg(fraction_evaluate=0.0, min_evaluate_nodes=0, min_train_nodes=sites, min_available_nodes=sites)
    strategy.start(grid, arrays, num_rounds=int(config["rounds"]), evaluate_fn=evaluate)
    seconds = [later - earlier for earlier, later in itertools.pairwise(times)]
    Path(str(config["out"])).write_text(json.dumps(seconds))
