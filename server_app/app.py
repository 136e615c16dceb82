"""The ServerApp. It checks the run before it contacts any node; `run` lists the steps.

If it refuses a run, the reason is one line in the run's log and in the run folder's status.json.
"""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one federated run."""
    # Imported here because Flower also imports this module without starting a run, and a run's imports are slow.
    from fedveil.server_app.run import run_federation

    run_federation(grid, context.run_config, context.run_id)
