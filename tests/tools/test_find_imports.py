"""Imports that pyright does not find: ours count, another package's do not."""

from __future__ import annotations

import pytest

from tools import find_imports


def entry(name: str, rule: str = "reportMissingImports") -> dict:
    start = {"line": 8, "character": 5}
    message = f'Import "{name}" could not be resolved'
    return {"file": "a.py", "range": {"start": start}, "message": message, "rule": rule}


def report(*entries: dict, files: int = 3) -> dict:
    return {"generalDiagnostics": list(entries), "summary": {"filesAnalyzed": files}}


def test_only_an_import_of_ours_counts():
    messages = find_imports.unresolved(
        report(entry("fedveil.nowhere"), entry("mlflow.tracking"), entry("fedveil2"), entry("tests.x", "reportOther"))
    )
    assert messages == ['a.py:9: Import "fedveil.nowhere" could not be resolved']


def test_a_check_of_nothing_is_no_check():
    with pytest.raises(ValueError, match="found none"):
        find_imports.unresolved(report(files=0))


def test_what_is_no_report_is_an_error(capsys):
    assert find_imports.main(["echo"]) == 2
    assert "expected JSON" in capsys.readouterr().err
