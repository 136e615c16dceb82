"""The offline bundle: made with a network, installed in a container that has none."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from fedveil.console.main import main
from tests.deployment.engine import IMAGE, docker, require_image

pytestmark = [pytest.mark.containers, pytest.mark.timeout(2400)]

INSTALL = """
set -e
if python3 -c 'import urllib.request as u; u.urlopen("https://pypi.org", timeout=5)' 2>/dev/null; then exit 9; fi
unset PIP_FIND_LINKS
cd /bundle
sha256sum --quiet -c SHA256SUMS
python3 -m venv /venv
/venv/bin/pip install --quiet --require-hashes --no-deps --no-index --find-links wheels -r requirements.txt
/venv/bin/pip check
/venv/bin/fedveil bundle verify .
cd /tmp && /venv/bin/fedveil explain --set method.name=fedrand
"""


def test_installation_with_no_network_at_all():
    require_image()
    with tempfile.TemporaryDirectory(prefix="fedveil-bundle-") as folder:
        bundle = Path(folder) / "carry"
        assert main(["bundle", "make", str(bundle)]) == 0
        assert main(["bundle", "verify", str(bundle)]) == 0
        done = docker(
            "run", "--rm", "--network", "none", "-v", f"{bundle}:/bundle:ro", "python:3.11-slim-bookworm",
            "sh", "-c", INSTALL, timeout=1200,
        )  # fmt: skip
        assert "files, all unchanged" in done.stdout
        assert "fedrand" in done.stdout
        (image,) = (bundle / "images").iterdir()
        assert IMAGE in docker("load", "-i", str(image), timeout=600).stdout
