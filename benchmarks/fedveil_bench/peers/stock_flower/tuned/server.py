"""Flower's FedAvg over LoRA factors, timed by its own evaluate_fn, with a record of each site's arrays."""

import itertools
import json
import time
from collections.abc import Iterable
from pathlib import Path

from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from safetensors.torch import load_file, save_file

app = ServerApp()


class Noted(FedAvg):
    """FedAvg with unmodified behavior. `seen`: the array names in each reply."""

    def __init__(self, sites: int) -> None:
        super().__init__(fraction_evaluate=0.0, min_evaluate_nodes=0, min_train_nodes=sites, min_available_nodes=sites)
        self.seen: list[list[str]] = []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate. Raises RuntimeError if a site failed, because the comparison would be missing its rows."""
        replies = list(replies)
        for reply in replies:
            if reply.has_error():
                raise RuntimeError(f"round {server_round}: expected an update of every site, found: {reply.error}")
            self.seen.append(list(reply.content.array_records["arrays"]))
        return super().aggregate_train(server_round, replies)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Write the final weights and, as JSON, the seconds of each round and the observations to the folder "out"."""
    config, times = context.run_config, []
    out = Path(str(config["out"]))

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        times.append(time.monotonic())
        return MetricRecord({"round": server_round})

    strategy = Noted(int(config["sites"]))
    initial = ArrayRecord(load_file(Path(str(config["task"])) / "initial.safetensors"))
    result = strategy.start(grid, initial, num_rounds=int(config["rounds"]), evaluate_fn=evaluate)
    save_file(dict(result.arrays.to_torch_state_dict()), out / "weights.safetensors")
    seconds = [later - earlier for earlier, later in itertools.pairwise(times)]
    (out / "server.json").write_text(json.dumps({"seconds": seconds, "seen": strategy.seen}))
