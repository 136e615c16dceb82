"""Helpers shared by small tables of DP-FPL."""

from __future__ import annotations

import os

import numpy as np
import pytest

from fedveil_bench.common import resampling
from fedveil_bench.common.resampling import ResampledMetric

needs_data = pytest.mark.skipif("FEDVEIL_DATA" not in os.environ, reason="needs the real data")


def around(value: float, width: float = 0.1) -> ResampledMetric:
    rng = np.random.default_rng(int(abs(value) * 1000))
    return ResampledMetric(value, value + width * rng.normal(size=resampling.REPLICATES), 10)


def settings(rows) -> dict:
    config = {"task.model": "tiny", "train.batch-size": 4, "train.max-steps": 2, "train.epochs": 2, "run.rounds": 1}
    return {
        "data": "caltech101",
        "clients": 3,
        "classes": 6,
        "rows_read": 60,
        "shadows": 4,
        "rows": rows,
        "config": config,
    }
