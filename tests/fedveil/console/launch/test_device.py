"""A GPU that a site names is one that torch finds, or nothing is started."""

from __future__ import annotations

import subprocess

import pytest

from fedveil.console.launch import site
from fedveil.errors import ConfigError


def counting(monkeypatch, said: str) -> None:
    done = subprocess.CompletedProcess([], 0, stdout=said, stderr="")
    monkeypatch.setattr(site.subprocess, "run", lambda *args, **more: done)


def test_what_is_no_gpu_is_asked_of_nobody(monkeypatch):
    monkeypatch.setattr(site.subprocess, "run", lambda *args, **more: pytest.fail("a process was started"))
    for name in ("auto", "cpu"):
        site.require_device(name)


def test_a_gpu_that_torch_finds_is_taken_and_another_one_is_refused(monkeypatch):
    counting(monkeypatch, "a line of somebody's\n2\n")
    for name in ("cuda", "cuda:0", "cuda:1"):
        site.require_device(name)
    with pytest.raises(ConfigError, match=r'one of the 2 GPUs that torch finds here, found "cuda:2"; --device auto'):
        site.require_device("cuda:2")


@pytest.mark.parametrize("name", ["cuda:x", "cuda:-1", "cuda:\u00b2"])
def test_an_index_that_is_no_number_is_refused(monkeypatch, name):
    counting(monkeypatch, "2\n")
    with pytest.raises(ConfigError, match=r'expected "auto", "cpu", "cuda" or "cuda:0"'):
        site.require_device(name)


def test_a_torch_that_does_not_answer_is_named(monkeypatch):
    counting(monkeypatch, "none")
    with pytest.raises(ConfigError, match="torch cannot count the GPUs, which 'cuda' needs"):
        site.require_device("cuda")
