"""Every method gives the same sum with and without secure aggregation, whichever sites are silent."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fedveil import strategies
from fedveil.config import SecureConfig
from fedveil.contract.entry_table import EntryTable
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.errors import ConfigError, QuorumError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.secagg.entry_plan import plan_entries
from fedveil.federation.secagg.fixed_point import FixedPointRing
from fedveil.federation.secagg.in_process import InProcessSecureSums, secagg_config_of
from fedveil.federation.secagg.masked_upload import MaskedUploadCodec
from fedveil.ops.server_optimizer import ServerOptimizer
from tests.conftest import ToyTrainer
from tests.contract.test_contract import METHODS, SECRET, as_upload, spec_for, start

SITES = list("abcde")  # q = t = 4
MOST_EXAMPLES = 10
# Silent before the upload, deaf afterwards, round by round: nobody, or one of them, as many as there may be.
PATTERNS = [("", ""), ("b", ""), ("", "b"), ("c", "c"), ("", "d")]
VARIANTS = {
    "fedavg": [{"wire_dtype": "bfloat16"}, {"upload_bits": 4}],
    "fedotp": [{"upload_bits": 4}],
    "fedpara": [{"upload_bits": 4}],
    "fedex_lora": [{"wire_dtype": "bfloat16"}, {"upload_bits": 4}],
    "flora": [{"ranks": {"b": 3, "e": 1}}, {"upload_bits": 4}],
    "hetlora": [{"ranks": {"b": 3, "e": 1}}, {"upload_bits": 4}],
    "fedlpp": [{"update": "replace", "bits": 4}],
    "fedper": [{"layers": 1}, {"upload_bits": 4}],
    "fedqsn": [
        {"upload_bits": 2},
        {"exact": True},
        {"client_rate": 0.5, "server_rate": 0.4, "mask_targets": "all"},
        {"update": "replace"},
        {"client_rate": 0.0},
        {"embeddings": "open"},
    ],
    "fedprox": [{"upload_bits": 4}],
    "fedsa_lora": [{"upload_bits": 4}],
    "ffa_lora": [{"upload_bits": 4}, {"wire_dtype": "bfloat16"}],
    "la_lora": [{"upload_bits": 4}],
    "rolora": [{"upload_bits": 4}],
    "scaffold": [{"wire_dtype": "bfloat16"}],
    "fedrand": [{"downlink": "selected"}, {"rho": 0.9}, {"upload_bits": 4}, {"init_factors": "independent"}],
    "fedsp": [{"proxy": "shared", "distil_steps": 0}],
    "fixed_position": [{"weighted": True}, {"exchange": "epoch"}],
    "random_binary": [
        {"wire": "implicit"},
        {"wire": "seeded"},
        {"weighted": True, "mask_period": "batch"},
        {"rate": {"a": 0.25, ".": 0.75}},
        {"rate": {"^[a-m]": 0.5}},
        {"rate": 0.0},
        {"rate": 1.0},
        {"optimiser": "adam", "exchange": "epoch"},
        {"wire_dtype": "bfloat16"},
    ],
    "dp_fpl": [{"exchange": "epoch"}, {"clipped": "texts", "residual": False}],
}


def exchange_of(name: str, fields) -> MessageExchange:
    method = strategies.create_from_json(name, json.dumps(fields))
    return MessageExchange(method, name, spec_for(method))


class Both:
    """A run whose rounds are summed twice, in the clear and unseen; it goes on from what was summed unseen."""

    def __init__(self, exchange: MessageExchange, ring_bits: int = 32) -> None:
        # Noise of standard deviation 10; products of factors.
        bound = {"dp_fpl": 256.0, "fedex_lora": 4096.0, "flora": 4096.0}.get(exchange.name, 16.0)
        config = SecureConfig(enabled=True, max_weight=MOST_EXAMPLES, clip_bound=bound, ring_bits=ring_bits)
        self.exchange, self.server, self.bits = exchange, start(exchange), ring_bits
        self.local, self.config = InProcessSecureSums("run-31415", secagg_config_of(config), SITES), config
        self.private: dict[str, FederatedState | None] = {}

    def entries(self, round_: int) -> EntryTable | None:
        """Who sends what in a round, in the clear too: both sums are of the same uploads."""
        return plan_entries(self.exchange, self.config, SITES, RoundContext(round_, "", False, SECRET, True))

    def attempt(self, round_: int, silent: str, seeded: bool = True):
        """One attempt's uploads, of both kinds: the attempt, what is summed, uploads in the clear, words in clear."""
        uploads, clear, entries = [], {}, self.entries(round_)
        attempt = self.local.begin(round_, 0, SITES, entries)
        summed = MaskedUploadCodec.from_exchange(self.exchange, round_, self.bits)
        for i, site in enumerate(SITES):
            if site in silent:
                continue
            private, is_new = self.private.get(site), site not in self.private
            ours = RoundContext(round_, site, is_new, SECRET, seeded, entries=entries)
            theirs = RoundContext(round_, site, is_new, bytes([i + 7]) * 32, seeded, entries=entries)
            down = self.exchange.broadcast(self.server, ours)
            trainer = ToyTrainer(self.exchange.spec, 3 + i, 0.25 + 0.375 * i)
            _, parts = self.exchange.participate(down, private, trainer, theirs)
            uploads.append(as_upload(self.exchange, b"".join(parts), ours))
            turn = summed.of_site(self.local.sites[site], attempt.plan, self.terms(attempt))
            self.private[site], parts = turn(down, private, trainer, theirs, "")
            message, vector, attached = summed.receive(b"".join(parts))
            attempt.add(site, vector, attached)
            clear[site] = dict(message.payload.scalars)
        return attempt, summed, uploads, clear

    def terms(self, attempt):
        """What every site knows of a client round."""
        return self.local.terms(attempt.plan, attempt.table, self.exchange.method.plans_entries)

    def round(self, round_: int, silent: str, deaf: str) -> tuple[FederatedState, FederatedState, float]:
        """The server's next state either way, and by how much rounding may part them."""
        attempt, summed, uploads, clear = self.attempt(round_, silent)
        sums = self.local.sums(attempt, summed, clear, deaf)
        sums.check(1e6)
        wanted = self.exchange.aggregate(self.server, uploads)
        secure_state = self.exchange.server_update(
            self.server, sums, RoundContext(round_, "", False, SECRET, True, entries=self.entries(round_))
        )
        self.server = secure_state
        return secure_state, wanted, len(SITES) / (2 * FixedPointRing.from_plan(attempt.plan).scale)


def agree(found: FederatedState, wanted: FederatedState, error: float) -> None:
    """Of sums whose weights are at least 1; what a method makes of a mean moves by at most a few times as much."""
    assert found.scalars == wanted.scalars
    assert found.tensors.keys() == wanted.tensors.keys()
    for name, tensor in wanted.tensors.items():
        if name.startswith("step."):  # factors of the last change: a sum that is rounded has none, see fedex_lora
            continue
        other = found.tensors[name]
        assert (other.shape, other.dtype) == (tensor.shape, tensor.dtype), name
        fine = torch.finfo(tensor.dtype).eps if tensor.dtype.is_floating_point else 0
        torch.testing.assert_close(other, tensor, atol=4 * error, rtol=8 * fine, msg=lambda m, n=name: f"{n}: {m}")


CASES = [(name, {}) for name in METHODS] + [(name, fields) for name in VARIANTS for fields in VARIANTS[name]]


@pytest.mark.long
@pytest.mark.parametrize(("name", "fields"), CASES, ids=[f"{n}-{','.join(map(str, f))}" for n, f in CASES])
def test_the_sum_unseen_is_the_sum_in_the_clear(name, fields):
    """Round after round with private state; a variant for two rounds, the defaults for every pattern of silence."""
    both = Both(exchange_of(name, fields))
    for round_, (silent, deaf) in enumerate(PATTERNS if not fields else PATTERNS[2:4]):
        agree(*both.round(round_, silent, deaf))


@pytest.mark.parametrize("name", ["fedavg", "fedqsn", "random_binary"])
def test_in_64_bits_the_sum_is_the_clear_one_to_fp32(name):
    both = Both(exchange_of(name, {}), ring_bits=64)
    secure_state, wanted, error = both.round(0, "", "")
    assert error < 1e-14
    agree(secure_state, wanted, 2**-26)


@pytest.mark.parametrize("kind", ["fedavgm", "fedadam"])
@pytest.mark.parametrize("name", ["fedavg", "fedrand"])
def test_a_server_optimizer_steps_along_the_sum_unseen_as_along_the_clear_one(name, kind):
    """It reads the sum alone. tau = 1 keeps Adam from enlarging what the ring has rounded."""
    exchange = exchange_of(name, {})
    both = Both(replace(exchange, optimizer=ServerOptimizer(kind, 0.5, tau=1.0)))
    for round_, (silent, deaf) in enumerate(PATTERNS[:3]):
        found, wanted, error = both.round(round_, silent, deaf)
        agree(found, wanted, error)
        assert found.moments.keys() == wanted.moments.keys() != set()


@pytest.mark.parametrize("name", METHODS)
def test_below_the_least_or_the_threshold_nothing_is_opened(name):
    both = Both(exchange_of(name, {}))
    attempt, summed, _, clear = both.attempt(0, "abc")
    with pytest.raises(QuorumError, match="min-sites"):
        both.local.sums(attempt, summed, clear)
    assert all(both.local.sites[site].store.load().live.phase == "masked" for site in "de")
    attempt, summed, _, clear = both.attempt(1, "b")
    with pytest.raises(QuorumError, match="threshold"):
        both.local.sums(attempt, summed, clear, deaf="ab")
    assert all(both.local.sites[site].store.load().live.phase != "opened" for site in "acde")


@pytest.mark.parametrize("name", METHODS)
def test_an_upload_says_nothing_beside_its_sum(name):
    """Neither examples nor report nor variant; and whatever the draw, as many bytes of payload."""
    exchange = exchange_of(name, {})
    both, sizes = Both(exchange), set()
    entries = both.entries(0)
    attempt = both.local.begin(0, 0, SITES, entries)
    summed = MaskedUploadCodec.from_exchange(exchange, 0, 32)
    for i, site in enumerate(SITES):
        down = exchange.broadcast(both.server, RoundContext(0, site, True, SECRET, True, entries=entries))
        ctx = RoundContext(0, site, True, bytes([i + 7]) * 32, True)  # it gets the table with the plan
        turn = summed.of_site(both.local.sites[site], attempt.plan, both.terms(attempt))
        _, parts = turn(down, None, ToyTrainer(exchange.spec, 3 + i), ctx, "")
        message, vector, _ = summed.receive(b"".join(parts))
        assert (message.num_examples, message.report, message.payload.variant) == (None, {}, "")
        assert len(vector) == summed.slots.length
        sizes.add(message.payload_bytes)
    assert len(sizes) == 1


@pytest.mark.parametrize("mode", ["paper", "code"])
def test_what_needs_a_sites_own_number_is_refused_with_its_name(mode):
    """DP-FPL's server divides its noise by each site's batch."""
    both = Both(exchange_of("dp_fpl", {"mode": mode, "epsilon": 3.0}))
    with pytest.raises(
        ConfigError, match=r"secure.enabled: .*dp_fpl, which sends rows_a_step of each site in the clear"
    ):
        both.attempt(0, "", seeded=False)
