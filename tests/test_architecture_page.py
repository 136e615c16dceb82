"""docs/architecture.md against the source: its rooms, their order, and the files and decisions that it names."""

from __future__ import annotations

import re
import tomllib

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def layers() -> list[set[str]]:
    """The rooms from the lowest to the highest, as `make check` holds imports to them."""
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    (rooms,) = [one for one in contracts if one["name"].startswith("Rooms:")]
    layer_sets = [{room.removeprefix("fedveil.") for room in layer.split(" | ")} for layer in reversed(rooms["layers"])]
    assert len(layer_sets) > 3
    return layer_sets


def test_the_rooms_stand_in_the_order_of_their_imports():
    named = re.findall(r"^\| `(?:fedveil/|benchmarks/)?(\w+)/` \|", PAGE.partition("## The packages")[2], re.MULTILINE)
    assert named[0] == "fedveil"
    place = {room: number for number, layer in enumerate(layers()) for room in layer}
    assert [place[room] for room in named[1:]] == sorted(place[room] for room in named[1:])
    assert set(named[1:]) == set(place)


def test_the_packages_that_strategies_import_are_those_that_it_lists():
    cell = re.search(r"^\| `strategies/` \| [^|]+ \| ([^|]+) \|", PAGE, re.MULTILINE)[1]
    listed = set(re.findall(r"`(\w+)`", cell.partition(", and single files")[0])) - {"fedveil"}
    text = "".join(file.read_text() for file in (ROOT / "strategies").glob("*.py"))
    imported = set(re.findall(r"^from fedveil\.(\w+)[. ]", text, re.MULTILINE))
    imported |= set(re.findall(r"^from fedveil import (\w+)", text, re.MULTILINE))
    assert listed == {name for name in imported if (ROOT / "fedveil" / name).is_dir()}
    (rule,) = [one for one in PROJECT["tool"]["importlinter"]["contracts"] if one["name"].startswith("A method sees")]
    assert not {f"fedveil.{name}" for name in listed} & set(rule["forbidden_modules"])


def test_files_that_it_names_are_there_and_so_is_every_decision():
    for name in re.findall(r"`((?:server_app|client_app|strategies|fedveil)/[\w/.]*)`", PAGE):
        assert (ROOT / name).exists(), name
    decisions = {file.name for file in (ROOT / "docs" / "decisions").glob("0*.md")}
    assert decisions == set(re.findall(r"\(decisions/(0[^)]*)\)", PAGE))


def test_it_is_in_the_contents_and_on_the_front_page():
    assert "\narchitecture\n" in (ROOT / "docs" / "index.md").read_text()
    assert "(docs/architecture.md)" in (ROOT / "README.md").read_text()
