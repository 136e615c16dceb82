"""docs/wire.md says of every codec what the code says."""

from __future__ import annotations

import importlib
import pkgutil
import re

from fedveil import wire
from fedveil.wire.header import MAGIC
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "wire.md").read_text()
METHODS = ("name", "nbytes", "encode", "decode")  # of fedveil.contract.codec.Codec


def codecs() -> set[str]:
    """The modules of fedveil/wire that have a codec."""
    module_names = set()
    for module in pkgutil.iter_modules(wire.__path__):
        of = importlib.import_module(f"fedveil.wire.{module.name}")
        own = [c for c in vars(of).values() if isinstance(c, type) and c.__module__ == of.__name__]
        module_names |= {module.name for one in own if all(hasattr(one, method) for method in METHODS)}
    return module_names


def test_the_page_has_every_codec_with_its_file():
    rows = re.findall(r"^\| `([a-z]+)` \| .* \| .* \| `fedveil/wire/([a-z_]+)\.py` \|$", PAGE, re.MULTILINE)
    assert len(codecs()) > 4
    assert {file for _, file in rows} == codecs()
    assert len({name for name, _ in rows}) == len(rows)


def test_the_page_has_the_magic_of_this_version():
    assert f"`{MAGIC.decode()}`" in PAGE
