"""All errors that FedVeil raises deliberately.

    FedVeilError
    ├── ConfigError      a run config, method parameters or a site's config, refused before any node is contacted
    ├── TaskError        a base model or a data file that is missing or does not fit
    ├── WireError        bytes that are not the expected message
    ├── UploadRefused    a well-formed upload that upload validation keeps out of the sums
    ├── QuorumError      too few uploads, more often than the run allows
    ├── WorkerError      the site's worker process cannot be started, or it ended during a client round
    │   ├── OutOfMemoryError   it needs more memory than it is allowed
    │   └── RankError          one of the processes that train together has ended or failed
    ├── UnreachableError the SuperLink does not answer the ServerApp
    ├── StateError       a checkpoint, private state or run folder that cannot be read or written
    │   └── LedgerError  a site's privacy ledger that is damaged, older than its witness, or the wrong one
    └── PolicyError      this site does not permit the request
        └── BudgetError  a record would be charged more epsilon than its budget allows

A message names the field, what was expected, what was found, and the next step.
"""

__all__ = [
    "BudgetError",
    "ConfigError",
    "FedVeilError",
    "LedgerError",
    "OutOfMemoryError",
    "PolicyError",
    "QuorumError",
    "RankError",
    "StateError",
    "TaskError",
    "UnreachableError",
    "UploadRefused",
    "WireError",
    "WorkerError",
]


class FedVeilError(Exception):
    """Root of the tree.

    Attributes:
        rule: number of the secure-aggregation rule that was violated (federation/secagg/plan_checks.py); "" = none.
    """

    rule = ""


class ConfigError(FedVeilError):
    """A configuration that cannot be run."""


class TaskError(FedVeilError):
    """A base model or a data file that is missing or unsuitable."""


class WireError(FedVeilError):
    """Bytes that are not the expected message."""


class UploadRefused(FedVeilError):
    """A well-formed upload that upload validation keeps out of the sums."""


class QuorumError(FedVeilError):
    """Too few uploads, more often than the run allows."""


class UnreachableError(FedVeilError):
    """The SuperLink does not answer the ServerApp."""


class StateError(FedVeilError):
    """A checkpoint, private state or run folder that cannot be read or written."""


class LedgerError(StateError):
    """A site's privacy ledger that is damaged, older than its witness, or the wrong one: a person must repair it."""


class PolicyError(FedVeilError):
    """This site does not permit the request."""


class BudgetError(PolicyError):
    """A record would be charged more epsilon than its budget allows."""


class WorkerError(FedVeilError):
    """The site's worker process cannot be started, or it ended during a client round."""


class OutOfMemoryError(WorkerError):
    """The site's worker needs more memory than it is allowed."""


class RankError(WorkerError):
    """One of the processes that train together has ended or failed."""
