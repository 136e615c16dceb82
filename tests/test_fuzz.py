"""Nothing that is not valid is accepted, nothing raises but what it should, and memory stays bounded."""

from __future__ import annotations

import functools
import math
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil import rng, strategies
from fedveil.client_app.policy import site_policy
from fedveil.config import RunConfig, parse, parse_toml
from fedveil.contract.method import AcceptedUpload, RoundContext
from fedveil.errors import ConfigError, PolicyError, StateError, UploadRefused, WireError
from fedveil.federation.exchange import MessageExchange
from fedveil.records import audit_log
from fedveil.server_app.upload_limits import UploadLimits
from fedveil.server_app.upload_validation import judge_upload
from fedveil.wire.envelope import DecodedMessage, EnvelopeStamp, pack_message
from fedveil.wire.header import PREFIX
from tests.conftest import ToyTrainer
from tests.contract.test_contract import weights_for
from tools import forge, fuzz

CTX = RoundContext(0, "east", True, bytes(32))
FIELDS = {
    "fedrand": ("", "upload_bits = 4", 'wire_dtype = "float16"'),
    "fedqsn": ("", "upload_bits = 4", 'wire_dtype = "bfloat16"'),
    "random_binary": ('wire = "explicit"', 'wire = "implicit"', 'wire = "seeded"'),
    "dp_fpl": ("", 'mode = "code"\nepsilon = 8.0'),
}


@functools.cache
def sound() -> list[tuple[MessageExchange, bytes]]:
    """A sound upload of every method and every codec."""
    messages = []
    for name in strategies.list_methods():
        for fields in FIELDS.get(name, ("",)):
            method = strategies.create_method(name, fields)
            exchange = MessageExchange(method, name, dict(method.adapter.example_spec()))
            server = method.init(exchange.spec, weights_for(exchange.spec), rng.initial_stream(0, "method init"))
            _, parts = exchange.participate(exchange.broadcast(server, CTX), None, ToyTrainer(exchange.spec), CTX)
            messages.append((exchange, b"".join(parts)))
    return messages


def verdict(exchange: MessageExchange, data: bytes) -> str:
    """What the whole gate says of a message."""
    try:
        if len(data) > exchange.largest_upload:
            raise WireError("more than the layout can need")  # as `UnmaskingAttempt` does before it gathers
        message = exchange.receive(data, 0)
        upload, _ = judge_upload(exchange, message, CTX, UploadLimits())
    except (WireError, UploadRefused) as error:
        refusal = error
    else:
        check_valid(exchange, data, message, upload)
        return "accepted"
    assert str(refusal).isprintable()  # foreign text stands in it
    assert len(str(refusal)) < 3000
    return type(refusal).__name__


def check_valid(exchange: MessageExchange, data: bytes, message: DecodedMessage, upload: AcceptedUpload) -> None:
    """An accepted message is the one that its content is sent as, and what it adds is bounded."""
    stamp = EnvelopeStamp.from_exchange(exchange.method, exchange.name, 0, "up")
    again = pack_message(exchange.layout, stamp, message.payload, message.num_examples, message.report)
    assert forge.text_of(again) == forge.text_of(data)
    length = lambda d: (PREFIX + int.from_bytes(d[4:8], "little") + 7) // 8 * 8  # noqa: E731
    assert again[length(again) :] == data[length(data) :]
    assert 1 <= upload.num_examples <= UploadLimits().max_examples
    for term in exchange.contributions(upload).tensors:
        assert math.isfinite(norm := float(term.value.double().norm()))
        assert norm <= 1.01 * UploadLimits().max_norm / getattr(exchange.method, "scale", 1.0)


def run(count: int, seed: int) -> Counter[str]:
    """The verdicts on `count` mutations, and a bound on the memory that they took."""
    draw, counts, messages = random.Random(seed), Counter(), sound()
    tracemalloc.start()
    try:
        for i in range(count):
            exchange, data = messages[i % len(messages)]
            mutated = fuzz.message(data, draw)
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            counts[verdict(exchange, mutated)] += 1
            taken = tracemalloc.get_traced_memory()[1] - before
            assert taken < 2_000_000, (i, taken)
    finally:
        tracemalloc.stop()
    return counts


def test_sound_uploads_are_accepted():
    assert {verdict(exchange, data) for exchange, data in sound()} == {"accepted"}


@pytest.mark.long
@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_5000_mutated_messages(seed):
    counts = run(500, seed)
    assert counts["WireError"] > 250
    assert counts["UploadRefused"] > 5  # some come as far as the gate


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(20))
def test_200000_mutated_messages(seed):
    assert sum(run(10_000, 1_000_000 + seed).values()) == 10_000


POLICY = """methods = ["fedavg", "fedrand"]
max-rounds = 20
max-bytes-a-round = 1000000
max-epsilon = 8.0
min-examples = 10
hours = ["08:00-18:00"]
"""
CONFIG = """method.name = "fedrand"
method.params = "rho = 0.5"
train.batch-size = 16
train.learning-rate = 3e-4
cohort.fraction = 0.5
aggregate.rule = "median"
run.rounds = 5
"""


def run_config(text: str) -> RunConfig:
    """The run config of a TOML text, flat as Flower hands it over."""
    flat = {
        f"{section}.{key}": value
        for section, values in parse_toml(text, "run config").items()
        for key, value in (values.items() if isinstance(values, dict) else [("", values)])
    }
    return parse(flat)


def test_the_files_that_are_mutated_are_sound(tmp_path):
    (tmp_path / "policy.toml").write_text(POLICY)
    assert site_policy.policy_of_site(SimpleNamespace(policy=tmp_path / "policy.toml")).max_rounds == 20
    assert run_config(CONFIG).run.rounds == 5


def outcome(read: Callable[[], object], expected: type[Exception]) -> Any:
    """What `read` returns, or the error that it is expected to raise."""
    try:
        return read()
    except expected as error:
        return error


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_mutated_policy_is_read_or_refused(seed, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / "fuzzed-policy.toml"
    file.write_bytes(fuzz.text(POLICY, random.Random(seed)))
    read = outcome(lambda: site_policy.policy_of_site(SimpleNamespace(policy=file)), PolicyError)
    if isinstance(read, PolicyError):
        assert str(read).startswith("policy: the site's policy file")
    else:
        assert read.max_retries >= 0
        assert read.max_rounds is None or read.max_rounds >= 1
        assert 0 < read.delta < 1


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_mutated_run_config_is_read_or_refused(seed):
    data = fuzz.text(CONFIG, random.Random(seed)).decode(errors="replace")
    config = outcome(lambda: run_config(data), ConfigError)
    if isinstance(config, ConfigError):
        assert len(str(config)) < 5000
    else:
        assert parse(config.flat()) == config
        outcome(lambda: strategies.create_method(config.method.name, config.method.params), ConfigError)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_mutated_audit_log_is_the_same_or_refused(seed, tmp_path_factory):
    folder: Path = tmp_path_factory.getbasetemp()
    log_path = folder / "kept-log.jsonl"
    if not log_path.exists():
        for i in range(4):
            audit_log.append_entry(log_path, "sent", {"round": i, "site": "east"})
    mutated, file = fuzz.text(log_path.read_text(), random.Random(seed)), folder / "fuzzed-log.jsonl"
    file.write_bytes(mutated)
    try:
        audit_log.verify_log(file, [audit_log.log_head(log_path)])
    except StateError:
        return
    assert mutated == log_path.read_bytes()
