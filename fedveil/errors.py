"""Every error that FedVeil raises on purpose.

    FedVeilError
    ├── ConfigError      a run config, a method's fields or a site's config: refused before any node is contacted
    ├── TaskError        a base model or a data file that is missing or does not fit
    ├── WireError        bytes that are not the message they should be
    ├── UploadRefused    a well-formed upload that the intake gate keeps out of the sums
    ├── QuorumError      too few uploads, more often than the run allows
    ├── WorkerError      the site's worker process cannot be started, or it ended in a turn
    │   ├── OutOfMemoryError   it needs more memory than it may have
    │   └── RankError          one of the processes that train together has ended, or failed
    ├── UnreachableError the SuperLink gives the ServerApp no answers
    ├── StateError       a checkpoint, private state or run folder that cannot be read or written
    │   └── LedgerError  a site's privacy ledger that is damaged, older than its witness, or another one
    └── PolicyError      this site does not permit what was asked
        └── BudgetError  a record would be charged more privacy than its budget allows

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
        rule: number of the rule of secure aggregation that was broken (federation/secagg/plan_checks.py); "" = none.
    """

    rule = ""


class ConfigError(FedVeilError):
    """A configuration that cannot be run."""


class TaskError(FedVeilError):
    """A base model or a data file that is missing or does not fit."""


class WireError(FedVeilError):
    """Bytes that are not the message they should be."""


class UploadRefused(FedVeilError):
    """A well-formed upload that the intake gate keeps out of the sums."""


class QuorumError(FedVeilError):
    """Too few uploads, more often than the run allows."""


class UnreachableError(FedVeilError):
    """The SuperLink gives the ServerApp no answers."""


class StateError(FedVeilError):
    """A checkpoint, private state or run folder that cannot be read or written."""


class LedgerError(StateError):
    """A site's privacy ledger that is damaged, older than its witness, or another one: a person must repair it."""


class PolicyError(FedVeilError):
    """This site does not permit what was asked."""


class BudgetError(PolicyError):
    """A record would be charged more privacy than its budget allows."""


class WorkerError(FedVeilError):
    """The site's worker process cannot be started, or it ended in a turn."""


class OutOfMemoryError(WorkerError):
    """The site's worker needs more memory than it may have."""


class RankError(WorkerError):
    """One of the processes that train together has ended, or failed."""
