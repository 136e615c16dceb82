"""In which of our methods sites send different entries, and which of them leave entries of a secure sum to one site.

The contract suite compares any method with its uploads, in the clear and under secure aggregation.
"""

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


@pytest.mark.parametrize("name", [*ALWAYS, *NEVER, *BY_FIELDS])
def test_only_entries_that_sites_draw_for_themselves_may_be_of_one_site_in_a_sum(name):
    for fields in BY_FIELDS.get(name, (("",),))[0]:
        assert strategies.create_method(name, fields).has_single_site_entries == (name == "random_binary")


def test_the_server_plans_entries_where_sites_would_send_different_ones():
    for name in BY_FIELDS:
        for fields in BY_FIELDS[name][0]:
            assert strategies.create_method(name, fields).plans_entries == (name != "random_binary")
    for name in (*ALWAYS, *NEVER):
        assert not strategies.create_method(name).plans_entries
    assert not strategies.create_method("hetlora").plans_entries
    assert not strategies.create_method("fedqsn", "client_rate = 0.0\nserver_rate = 0.0").plans_entries
