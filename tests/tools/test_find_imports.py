"""Imports that pyright does not find: those of this project count, those of other packages do not."""

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
    with pytest.raises(ValueError, match="it read no project files"):
        find_imports.unresolved(report(files=0))


def test_what_is_no_report_is_an_error(capsys):
    assert find_imports.main(["echo"]) == 2
    assert "its output is not JSON" in capsys.readouterr().err


def test_a_copy_has_every_import_on_its_line_and_nothing_else():
    lines = ("import a", "", "def f():", "    try:", "        from .b import (", "            c,", "        )",
             "    except E: import d; x = 1")  # fmt: skip
    source = "\n".join(lines)
    assert find_imports.keep_imports(source) == "import a\n\n\n\nfrom .b import c\n\n\nimport d\n"
    assert find_imports.keep_imports("x = 1") == "\n"


def test_linked_folders_are_copied_and_hidden_ones_are_not(tmp_path):
    root, to = tmp_path / "root", tmp_path / "to"
    for name in ("apps/a.py", ".venv/b.py", "fedveil/c.py", "build/d.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("import x\ny = x.z()\n")
    (root / "fedveil" / "linked").symlink_to("../apps")
    (root / "pyproject.toml").write_text("[tool]")
    find_imports.copy_imports(root, to)
    copied = {str(file.relative_to(to)): file.read_text() for file in to.rglob("*.*") if file.is_file()}
    one = "import x\n"
    assert copied == {
        "apps/a.py": one, "fedveil/c.py": one, "fedveil/linked/a.py": one, "pyproject.toml": "[tool]",
    }  # fmt: skip
