"""Refuse to build where the links of the package are text files; pyproject.toml has everything else.

Such a tree is a clone with core.symlinks=false, or an archive unpacked by a program that knows no links. A wheel of it
would lack five folders without a word.
"""

from pathlib import Path

from setuptools import setup

_LINKS = ("attacks", "client_app", "demo_data", "server_app", "strategies")

_missing = [name for name in _LINKS if not (Path(__file__).parent / "fedveil" / name).is_dir()]
if _missing:
    raise SystemExit(
        f"fedveil/{_missing[0]}: expected a folder or a link to one, found a text file or nothing; clone with "
        "core.symlinks=true, or unpack the archive with a program that keeps links, such as unzip or tar"
    )
setup()
