"""A federation in one process, built from a run config and one data folder per site, for research and notebooks.

    from fedveil.local import LocalFederation

    local = LocalFederation.from_config("run.toml", {"north": "rows/north", "south": "rows/south"})
    local.run()
    local.metrics_frame()                         # a pandas DataFrame, one line per round
    local.evaluate("rows/test")                   # the server's model
    local.evaluate("rows/test", site="north")     # one site's own model
    local.audit(non_members="rows/test").show()   # after a run with run.capture-messages = true
    local.report("report.html")
    local.save("final")                           # loads in PEFT or transformers, with the privacy card

It uses neither Flower nor any other process, and sites have no policies or ledgers; the privacy card says so. It
encodes, draws and sums the same values as a run over gRPC (`fedveil.federation.in_process`). With `run.name`, the run
folder is kept, as on a server; without it, the folder is temporary and is deleted along with the object.
"""

from __future__ import annotations

from fedveil.local.local_federation import LocalFederation

__all__ = ["LocalFederation"]
