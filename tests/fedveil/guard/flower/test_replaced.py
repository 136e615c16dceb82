"""A Flower that has moved what the guard replaces is refused at the start of each process, and the table has it all."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest

from fedveil.errors import ConfigError
from fedveil.guard import clientapp, flower, serverapp, superexec, superlink, supernode, task_programs
from fedveil.guard.flower import replaced
from fedveil.guard.flower.replaced import REPLACED, Process, ReplacedAttribute, require_attributes
from tests.conftest import ROOT

HERE = [one for one in REPLACED if one.speaks in ("", flower.installed_release().speaks)]


@pytest.mark.parametrize("process", typing.get_args(Process))
def test_the_installed_flower_has_all_of_it(process: Process) -> None:
    require_attributes(process)


@pytest.mark.parametrize(
    "fault,words",
    [
        ({"module": "flwr.nowhere"}, "flwr.nowhere"),
        ({"name": "moved"}, r"start_client_internal\.moved"),
        ({"takes": ("anything",)}, "the argument anything of"),
    ],
)
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, fault: dict[str, typing.Any], words: str) -> None:
    about = {"module": "flwr.supernode.start_client_internal", "name": "_push_messages"} | fault
    monkeypatch.setattr(replaced, "REPLACED", (ReplacedAttribute("guard/x.py", "SuperNode", **about),))
    require_attributes("SuperLink")
    with pytest.raises(
        ConfigError, match=f"parts of Flower in a SuperNode .fedveil/guard/x.py., but this Flower lacks .*{words}"
    ):
        require_attributes("SuperNode")


@pytest.mark.parametrize(
    "process,start",
    [
        ("SuperNode", supernode.patch_supernode),
        ("SuperLink", superlink.patch_superlink),
        ("SuperExec", lambda: superexec.patch_superexec(task_programs.SERVER_APP)),
        ("client process", lambda: clientapp.install_guard(True)),
        ("ServerApp process", serverapp.main),
    ],
)
def test_a_process_does_not_start_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], process: Process, start: typing.Any
) -> None:
    monkeypatch.setattr(replaced, "REPLACED", (ReplacedAttribute("guard/x.py", process, "flwr.moved", "it"),))
    with pytest.raises(SystemExit) as ended:
        start()
    assert f"FedVeil replaces parts of Flower in a {process}" in f"{ended.value.code}{capsys.readouterr().err}"


def test_the_table_of_the_documents_has_each_of_them_and_no_other() -> None:
    text = (ROOT / "docs" / "decisions" / "upstream" / "README.md").read_text()
    rows = re.findall(r"^\| `fedveil/(\S+\.py)` \| (.+?) \|", text, re.MULTILINE)
    for file, cell in rows:
        names = {name.rpartition(".")[2] for name in re.findall(r"`([^`]+)`", cell)}
        assert names == {one.name.rpartition(".")[2] for one in REPLACED if one.file == file}, file
    assert {file for file, _ in rows} == {one.file for one in REPLACED}
    assert all((Path(ROOT) / "fedveil" / one.file).is_file() for one in REPLACED)
