"""A small generated data folder of texts, and a preset's settings for it."""

from __future__ import annotations

import json
from pathlib import Path

FOODS = ("Thai", "French", "Indian", "Italian", "Fast food", "Chinese")


def write(folder: Path) -> None:
    """E2E-like rows, and some of DART."""
    for split in ("train", "validation", "test"):
        lines = [
            {"mr": f"name[{split} {i}], food[{f}]", "ref": f"{split} {i} serves {f}."} for i, f in enumerate(FOODS)
        ]
        (folder / "e2e_nlg").mkdir(exist_ok=True)
        (folder / "e2e_nlg" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "dart").mkdir()
    for part in ("dev", "test"):
        lines = [{"tripleset": [["a", "b", str(i)], ["c", "d", "e"]], "refs": ["one", "two"]} for i in range(8)]
        (folder / "dart" / f"{part}.jsonl").write_text("\n".join(map(json.dumps, lines)))


def settings(methods, **more):
    return {
        "data": ["e2e_nlg"], "clients": 2, "clients_scored": 1, "rows": 4, "server_rows": 2, "validation_sources": 2,
        "test_sources": 3, "references": 2, "seeds": 1, "methods": methods,
        "config": {
            "task.model": "tiny", "train.max-steps": 1, "train.batch-size": 2, "run.rounds": 2,
            "train.learning-rate": 1e-3, "evaluate.max-new-tokens": 3,
        }, **more,
    }  # fmt: skip
