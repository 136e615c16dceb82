"""Access to run folders from Python, whether the run went over gRPC or in one process.

from fedveil.runs import Run

run = Run("runs/pilot")
run.state, run.scores            # "completed", {"loss": 1.92}
run.metrics_frame()              # a pandas DataFrame, one line per round
run.epsilon                      # {"north": 7.4, "south": 7.1}; {} without dp.*
run.evaluate("data/test")        # the final model on other examples
audit = run.audit(sites={"north": "data/north", "south": "data/south"}, non_members="data/test")
print(audit.verdict)
run.report("report.html")        # the same page as `fedveil report`
run.save("final")                # loads in PEFT or transformers, with the privacy card
"""

from __future__ import annotations

from fedveil.runs.audit_outcome import AuditOutcome
from fedveil.runs.run import Run

__all__ = ["AuditOutcome", "Run"]
