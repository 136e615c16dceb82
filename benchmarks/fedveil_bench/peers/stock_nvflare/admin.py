"""The user's side of a federation of NVFlare's, with its session API; KIT is the user's startup kit.

python admin.py ready KIT SITES           waits until SITES sites are connected
python admin.py run KIT FOLDER            submits the job in FOLDER, waits for its end, prints its id and status
python admin.py result KIT ID OUT         fetches the model of a job, and writes OUT/weights.safetensors
"""

import sys
import time
from pathlib import Path

from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

_EVERY = 0.5  # seconds, as of the other peers' ends


def ready(session: Session, sites: str) -> None:
    """Wait until that many sites are connected."""
    while len(session.get_system_info().client_info) < int(sites):
        time.sleep(_EVERY)


def run(session: Session, folder: str) -> None:
    """Print the job's id and how it ended, "FINISHED:COMPLETED" where all went well."""
    job = session.submit_job(folder)
    while not (status := session.get_job_status(job)).startswith("FINISHED"):
        time.sleep(_EVERY)
    print(job, status)  # noqa: T201 - its answer


def result(session: Session, job: str, out: str) -> None:
    """Raises FileNotFoundError for a job that has left no model."""
    import torch  # heavy: not in the seconds of `run`
    from safetensors.torch import save_file

    found = sorted(Path(session.download_job_result(job)).rglob("FL_global_model.pt"))
    if not found:
        raise FileNotFoundError(f"job {job}: expected FL_global_model.pt in its result, found none")
    model = torch.load(found[0], weights_only=True)["model"]
    save_file({name: torch.as_tensor(value) for name, value in model.items()}, Path(out) / "weights.safetensors")


def main(what: str, kit: str, *more: str) -> None:
    """One of the three above."""
    session = new_secure_session(Path(kit).name, kit, timeout=60.0)
    try:
        match what:
            case "ready":
                ready(session, *more)
            case "run":
                run(session, *more)
            case "result":
                result(session, *more)
            case _:
                raise ValueError(f"argument 1: expected ready, run or result, found {what!r}")
    finally:
        session.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
