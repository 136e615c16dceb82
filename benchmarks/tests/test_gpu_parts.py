"""make gpu: a preset imports no more distributions than its part declares."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tools import gpu, wheels


@pytest.mark.long
@pytest.mark.parametrize("part", gpu.PARTS, ids=lambda part: part.name)
def test_a_part_needs_no_more_than_it_says(part):
    """What it imports at first, with every other distribution that the project asks for out of reach."""
    ranges, here = wheels.promised(ROOT / "pyproject.toml"), wheels.installed()
    assert wheels.lacking(part.needs, ranges, here) == {}
    imports = "import tests.conftest, tests.fedveil.training.test_on_gpu, tests.strategies.test_on_gpu"
    if part.name != "tests":
        imports = (
            "import importlib, tomllib, fedveil_bench.command\n"
            f"preset = tomllib.load(open('benchmarks/presets/{part.name}.toml', 'rb'))\n"
            "importlib.import_module('fedveil_bench.' + preset['runner'])"
        )
    code = f"""
import importlib.metadata, re, sys
blocked = {sorted(set(ranges) - set(part.needs))!r}
own = importlib.metadata.packages_distributions()
tops = {{top for top, names in own.items() if {{re.sub(r"[-_.]+", "-", n).lower() for n in names}} <= set(blocked)}}
sys.modules |= dict.fromkeys(tops)  # an import raises, and who only asks whether it is there finds nothing
{imports}
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
