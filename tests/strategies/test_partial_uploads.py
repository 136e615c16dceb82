"""Which of our methods leave entries of a sum to one site. The contract suite compares any method with its uploads."""

from __future__ import annotations

import pytest

from fedveil import strategies

ALWAYS = ("fedper",)
RANKS = ("ranks = {north = 4}", "")
BY_FIELDS = {
    "fedqsn": (("", "client_rate = 0.1\nserver_rate = 0.0"), ("client_rate = 0.0",)),
    "fedrand": (("", "rho = 0.01"), ("rho = 0.0", "rho = 1.0")),
    "flora": (RANKS[:1], RANKS[1:]),
    "hetlora": (RANKS[:1], RANKS[1:]),
    "random_binary": (
        ("", 'mask_period = "never"', 'rate = {"attn" = 0.5, "mlp" = 0.0}'),
        ("rate = 0.0", "rate = 1.0", 'rate = {"attn" = 1.0}'),
    ),
}
NEVER = (
    "dp_fpl", "fedavg", "fedex_lora", "fedlpp", "fedotp", "fedpara", "fedpgp", "fedprox", "fedsa_lora", "fedsp",
    "ffa_lora", "fixed_position", "la_lora", "promptfl", "rolora", "scaffold",
)  # fmt: skip


@pytest.mark.parametrize("name", ALWAYS)
def test_a_method_whose_sites_may_always_send_different_entries(name):
    assert strategies.create_method(name).has_partial_uploads


@pytest.mark.parametrize("name", NEVER)
def test_a_method_whose_sites_all_send_every_entry_of_a_round(name):
    method = strategies.create_method(name)
    assert not method.has_partial_uploads
    assert not method.has_masked_terms


@pytest.mark.parametrize("name", BY_FIELDS)
def test_a_method_in_which_it_is_for_the_fields_to_say(name):
    some, all_ = BY_FIELDS[name]
    assert [strategies.create_method(name, fields).has_partial_uploads for fields in some] == [True] * len(some)
    assert [strategies.create_method(name, fields).has_partial_uploads for fields in all_] == [False] * len(all_)
