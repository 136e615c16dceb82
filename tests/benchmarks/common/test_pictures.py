"""The pictures of the presets: which of them the federated data have."""

from __future__ import annotations

import pytest

from fedveil.benchmarks.common import pictures
from fedveil.errors import ConfigError


def test_public_pictures_are_nobody_s():
    try:
        rows = pictures.examples("caltech-caption", "train")
    except ConfigError:
        pytest.skip("the benchmark's data are not here")
    assert len(rows) == 1957  # of 2454, 497 are what the base has seen
    first = pictures.examples("caltech-choice", "test")[0]
    assert first["choices"][first["answer"]] == first["label"]
