"""The ServerApp. It checks the run before it contacts any node; `run` says the steps.

The reason of a refusal is one line in the run's log and in the run folder's status.json.
"""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """One run."""
    # Imported here: Flower imports this module also where no run starts, and what a run needs is heavy.
    from fedveil.server_app.run import run_federation

    run_federation(grid, context.run_config, context.run_id)
