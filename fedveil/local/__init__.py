"""A federation in one process, from a run config and the folders of its sites: for research, and for notebooks.

    from fedveil.local import LocalFederation

    local = LocalFederation.from_config("run.toml", {"north": "rows/north", "south": "rows/south"})
    local.run()
    local.metrics_frame()                         # a pandas DataFrame, one line per round
    local.evaluate("rows/test")                   # the server's model
    local.evaluate("rows/test", site="north")     # that of one site
    local.audit(non_members="rows/test").show()   # after a run with run.capture-messages = true
    local.report("report.html")
    local.save("final")                           # loads in PEFT or transformers, with the privacy card

Neither Flower nor any other process takes part, and no site has a policy or a ledger of its own; the privacy card says
so. It encodes, draws and sums the same values as a run over gRPC (`fedveil.federation.in_process`). With `run.name` the
run folder stays, as a server leaves it; without, it is temporary and ends with the object.
"""

from __future__ import annotations

from fedveil.local.local_federation import LocalFederation

__all__ = ["LocalFederation"]
