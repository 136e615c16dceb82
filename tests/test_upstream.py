"""docs/decisions/upstream: each draft has a script, which finds what it says in the Flower that is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

FOLDER = ROOT / "docs" / "decisions" / "upstream"
HELPERS = {"node", "stock"}
SCRIPTS = sorted(file for file in FOLDER.glob("*.py") if file.stem not in HELPERS)


SECURITY = "**Script** none. This is a security issue: report it privately first."


def test_every_draft_has_its_script_or_is_a_security_issue_and_stands_in_the_table():
    texts = {file.stem: file.read_text() for file in FOLDER.glob("*.md") if file.stem != "README"}
    scripts = {script.stem.replace("_", "-"): script.name for script in SCRIPTS}
    assert scripts.keys() <= texts.keys()
    rows = re.findall(
        r"^\| (\d+) \| \[(.+)\]\(([a-z-]+)\.md\) \| (\S+) \|", (FOLDER / "README.md").read_text(), re.MULTILINE
    )
    assert [int(number) for number, *_ in rows] == list(range(1, len(texts) + 1))
    assert {draft: (title, script) for _, title, draft, script in rows} == {
        draft: (text.splitlines()[0].removeprefix("# "), f"`{scripts[draft]}`" if draft in scripts else "none")
        for draft, text in texts.items()
    }
    for draft, text in texts.items():
        assert f"**Script** `{scripts[draft]}`" in text if draft in scripts else SECURITY in text


def test_a_security_draft_has_no_code():
    """A reader who has no fix yet must not find an exploit here."""
    drafts = [file for file in FOLDER.glob("*.md") if SECURITY in file.read_text()]
    assert len(drafts) == 10
    for draft in drafts:
        assert not re.search(r"```|^    \S|^import ", draft.read_text(), re.MULTILINE), draft
        assert not draft.with_name(f"{draft.stem.replace('-', '_')}.py").exists()


def test_every_file_that_replaces_something_at_run_time_stands_in_the_table():
    """By what an assignment to an attribute of a module or class of others looks like."""
    assigned = re.compile(
        r"^\s+(setattr\((grpc|module|self\._runtime|loaded|importlib\.import_module\(module\)), "
        r"|(module(\.AutoExecPlugin)?|state|client|grpc|uvicorn\.\w+|NodeAuth\w+|importlib\..*)\.\w+ = "
        r"|link_states\.patch_link_states\()",
        re.MULTILINE,
    )
    folders = ("fedveil/guard", "fedveil/relay", "fedveil/console", "fedveil/records", "server_app", "client_app")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    replacing = {str(file.relative_to(ROOT)) for file in files if assigned.search(file.read_text())}
    table = re.findall(r"^\| `(fedveil/\S+\.py)` \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(replacing) == sorted(table)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_flower_still_does_what_a_draft_says(script):
    """Red where a release has mended it: then the guard's part, and the draft, can go."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-1500:]}{done.stderr[-1500:]}"
