"""The user's side of an NVFlare federation, using its session API; KIT is the user's startup kit.

python admin.py ready KIT SITES           waits until SITES sites are connected
python admin.py run KIT FOLDER            submits the job in FOLDER, waits until it ends, prints its ID and status
python admin.py result KIT ID OUT         fetches a job's model, and writes OUT/weights.safetensors
"""

import sys
import time
from pathlib import Path

from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

_EVERY = 0.5  # seconds between polls, as for the other peers


def ready(session: Session, sites: str) -> None:
    """Wait until `sites` sites are connected."""
    while len(session.get_system_info().client_info) < int(sites):
        time.sleep(_EVERY)


def run(session: Session, folder: str) -> None:
    """Run the job; print its ID and its final status, "FINISHED:COMPLETED" on success."""
    job = session.submit_job(folder)
    while not (status := session.get_job_status(job)).startswith("FINISHED"):
        time.sleep(_EVERY)
    print(job, status)  # noqa: T201 - its answer


def result(session: Session, job: str, out: str) -> None:
    """Fetch the job's model. Raises FileNotFoundError if the job did not produce one."""
    import torch  # slow to import, so it is kept out of the time for `run`
    from safetensors.torch import save_file

    found = sorted(Path(session.download_job_result(job)).rglob("FL_global_model.pt"))
    if not found:
        raise FileNotFoundError(f"job {job}: expected FL_global_model.pt in its result, found none")
    model = torch.load(found[0], weights_only=True)["model"]
    save_file({name: torch.as_tensor(value) for name, value in model.items()}, Path(out) / "weights.safetensors")


def main(what: str, kit: str, *more: str) -> None:
    """Run one of the three commands above."""
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
