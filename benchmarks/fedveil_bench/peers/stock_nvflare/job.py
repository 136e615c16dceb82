"""Write the job: NVFlare's FedAvg over LoRA factors, using its recipe. `python job.py TASK OUT SITES ROUNDS FOLDER`"""

import sys
from pathlib import Path

from noted import Noted
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe


def main(task: str, out: str, sites: str, rounds: str, folder: str) -> None:
    """Write the job to `folder`; the run will write its notes to `out`."""
    recipe = FedAvgRecipe(
        name="tuned",
        model={"class_path": "factors.Factors", "args": {"file": str(Path(task) / "initial.safetensors")}},
        min_clients=int(sites),
        num_rounds=int(rounds),
        train_script="client.py",
        train_args=f"--task {task}",
    )
    recipe.add_client_file("training.py")
    recipe.add_server_file("factors.py")
    recipe.add_server_input_filter(Noted(out), tasks=["train"])
    recipe.export(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
