"""What this site permits: a TOML file that only the site writes. Decided before any data is touched; fails closed.

    methods = ["fedrand", "fedavg"]
    tasks = ["text-generation"]
    models = ["tiny"]
    max-rounds = 50

| case | what happens |
|---|---|
| no file named | everything is permitted |
| the file is missing, is not TOML or has an unknown key | PolicyError |
| a key is absent | it restricts nothing |
| an empty list | nothing is permitted |
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from client_app.assignment import Assignment
from fedveil.errors import PolicyError


class Policy(BaseModel):
    """What is permitted; None restricts nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=lambda n: n.replace("_", "-"))

    methods: list[str] | None = None
    tasks: list[str] | None = None
    models: list[str] | None = None
    max_rounds: int | None = Field(None, ge=1)


def check(assignment: Assignment) -> None:
    """Raises PolicyError naming what the site does not permit."""
    if not assignment.site.policy:
        return
    policy = _read(Path(assignment.site.policy).expanduser())
    config = assignment.config
    asked = (
        ("method.name", assignment.order.method, policy.methods),
        ("task.name", config.task.name, policy.tasks),
        ("task.model", config.task.model, policy.models),
    )
    for key, found, permitted in asked:
        if permitted is not None and found not in permitted:
            raise PolicyError(f'{key}: this site permits {permitted}, found "{found}"; agree on it with the site')
    rounds = max(config.run.rounds, assignment.order.round + 1)
    if policy.max_rounds is not None and rounds > policy.max_rounds:
        raise PolicyError(f"run.rounds: this site permits at most {policy.max_rounds}, found {rounds}; ask for fewer")


def _read(path: Path) -> Policy:
    try:
        return Policy.model_validate(tomllib.loads(path.read_text()))
    except (OSError, ValueError) as error:  # ValidationError and TOMLDecodeError are ValueErrors
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        else:
            what = type(error).__name__
        raise PolicyError(
            f"policy: expected a readable policy file, found none ({what}); the site must mend it"
        ) from error
