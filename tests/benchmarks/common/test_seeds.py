"""A seed in a process of its own: what it answers, and what becomes of its errors."""

from __future__ import annotations

import io

from fedveil.benchmarks.common import seeds
from fedveil.errors import ConfigError


def test_an_error_of_a_seed_is_one_line(monkeypatch):
    def failing(settings, seed, options):
        raise ConfigError(f"no data for {settings['name']}")

    asked = '{"settings": {"name": "x"}, "seed": 0, "quick": true, "device": "cpu"}'
    monkeypatch.setattr("sys.stdin", io.StringIO(asked))
    said = []
    monkeypatch.setattr("sys.stdout", type("Out", (), {"write": said.append, "flush": lambda self: None})())
    seeds.serve(failing)
    assert said == ['{"error": "no data for x"}\n']
