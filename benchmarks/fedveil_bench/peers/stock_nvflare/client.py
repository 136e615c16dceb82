"""The program that each site runs: NVFlare's client API around PEFT's training."""

import argparse
from pathlib import Path

import nvflare.client as flare
from training import Site  # stock_flower/tuned/training.py, which is packed with the job


def main() -> None:
    """In each round, train the received factors and send all of them back."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", type=Path, required=True, help="folder of the task")
    folder = parser.parse_args().task
    flare.init()
    site = Site(folder, int(flare.get_site_name().removeprefix("site-")))
    while flare.is_running():
        received = flare.receive()
        after, loss = site.trained(received.current_round + 1, received.params)
        # FedAvg weights an upload by this number, and so does Flower's.
        meta = {"NUM_STEPS_CURRENT_ROUND": site.rows}
        flare.send(flare.FLModel(params=after, metrics={"train_loss": loss}, meta=meta))


if __name__ == "__main__":
    main()
