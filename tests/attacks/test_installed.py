"""The attacks that `fedveil audit` runs: those in this repository, and those that another package provides."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedveil.attacks import base
from fedveil.errors import ConfigError

PACKAGE = """
from fedveil.attacks.base import ModelAttack

class Surprise(ModelAttack):
    def score(self, answer):
        return {"surprise": -answer.loss}

nothing = "no attack"
"""


@pytest.fixture
def other_package(tmp_path, monkeypatch):
    """Installs a package of a few lines that offers `offered` as an attack."""

    def install(offered: str) -> None:
        (tmp_path / "surprising.py").write_text(PACKAGE)
        about = tmp_path / "surprising-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: surprising\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[{base.ENTRY_POINTS}]\nsurprise = surprising:{offered}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


def names() -> list[str]:
    return [attack.name for attack in base.list_attacks()]


def test_the_attacks_of_the_files_are_found():
    assert names() == ["Alignment", "FedMia", "Loss", "Calibrated", "MaxRenyi", "Projection"]


def test_an_attack_of_another_package_is_found(other_package):
    other_package("Surprise")
    assert names() == ["Alignment", "FedMia", "Loss", "Calibrated", "MaxRenyi", "Projection", "Surprise"]


@pytest.mark.parametrize("offered", ["nothing", "ModelAttack"])
def test_what_is_no_attack_is_refused_by_name(other_package, offered):
    other_package(offered)
    with pytest.raises(
        ConfigError, match=r"entry point surprise of fedveil\.attacks: .* is not a ModelAttack or Upload"
    ):
        base.list_attacks()


@pytest.mark.parametrize("attack", base.list_attacks(), ids=lambda attack: type(attack).__name__)
def test_an_attack_has_both_controls_and_a_test_of_its_own(attack):
    """A control to win and one to lose. Its tests lie where its file lies."""
    assert attack.must_win == base.OVERFITTED
    assert set(attack.must_lose) <= {base.ROUND_0, base.OTHER_ROWS, base.WRONG_SITE}
    assert base.OTHER_ROWS in attack.must_lose
    room, name = type(attack).__module__.split(".")[-2:]
    assert (Path(__file__).parent / room / f"test_{name}.py").is_file()
