"""The table of compatible features, pinned cell by cell, so that every change is noticed."""

from __future__ import annotations

import pytest

from fedveil import strategies
from tools import reference
from tools.pages import composition

NOISY, SECURE, SUM, SERVER, BUFFER, MEDIAN, KRUM = composition.COLUMNS
GRADIENTS = {"fixed_position", "random_binary", "scaffold"}
PRODUCTS = {"fedex_lora", "flora"}
KEEPS = {"fedotp", "fedpara", "fedper", "fedpgp", "fedrand", "fedsa_lora"}
PERSONAL = {"apfl", "ditto"}
PROMPTS = {"fedotp", "fedpgp", "promptfl"}
LORA = {"fedex_lora", "fedprox", "fedsa_lora", "ffa_lora", "flora", "hetlora", "la_lora", "rolora", "scaffold"}


def refused(column: str) -> dict[str, str]:
    cells_by_method = {name: composition.cell(name, column) for name in strategies.list_methods()}
    assert all(word.startswith(("yes", "no: ")) for word in cells_by_method.values())
    return {name: word for name, word in cells_by_method.items() if word.startswith("no: ")}


def test_noisy_steps_go_with_all_that_trains_and_adds_no_noise_itself():
    assert set(refused(NOISY)) == GRADIENTS | {"dp_fpl"}
    assert refused(NOISY)["scaffold"] == "no: scaffold, which asks for plain gradients"


def test_every_method_is_summed_unseen_and_by_the_median():
    assert refused(SECURE) == {}
    assert refused(MEDIAN) == {}


def test_a_server_optimizer_goes_with_all_that_do_not_complete_their_mean_in_the_base():
    reasons = refused(SERVER)
    assert set(reasons) == {"fedex_lora", "flora"}
    assert reasons["fedex_lora"].startswith("no: one that would move the factors away from the residual")


def test_a_buffer_of_late_uploads_goes_with_what_is_moved_from_one_state_to_another():
    reasons = refused(BUFFER)
    assert set(reasons) == {"dp_fpl", "fedex_lora", "fedper", "flora", "hetlora", "rolora", "scaffold"}
    assert reasons["rolora"].startswith(
        "no: a method that trains one factor in even rounds and the other in odd rounds"
    )


def test_noise_in_the_sum_goes_with_what_sends_one_step_as_it_is_and_keeps_nothing():
    reasons = refused(SUM)
    assert set(reasons) == GRADIENTS | KEEPS | PRODUCTS | {"fedsp"} | PERSONAL
    assert {reasons[name] for name in KEEPS} == {"no: one that keeps state at the site"}
    assert all(reasons[name].startswith("no: one that changes h.") for name in PRODUCTS)


def test_multi_krum_goes_with_uploads_of_one_kind():
    assert set(refused(KRUM)) == {"fedper", "fedqsn", "fedrand", "random_binary", "rolora"}


def test_all_that_send_trained_weights_send_codes_but_for_scaffold():
    cells_by_method = {name: composition.cell(name, composition.CODES) for name in strategies.list_methods()}
    assert {name for name, word in cells_by_method.items() if word == "yes: `upload_bits`"} == LORA - {
        "scaffold"
    } | PROMPTS | PERSONAL | {
        "fedavg",
        "fedpara",
        "fedper",
        "fedqsn",
        "fedrand",
        "fedsp",
    }


@pytest.mark.parametrize("message,found", [("x: expected a, found b c; do", "b c"), ("found b", "b"), ("odd", "odd")])
def test_the_reason_is_what_was_found(message, found):
    assert composition._reason(message) == found


def test_a_method_whose_codes_never_reach_the_wire_is_no_yes(monkeypatch):
    monkeypatch.setattr(composition, "_sends_codes", lambda method: False)
    with pytest.raises(AssertionError, match="puts no codes on the wire"):
        composition._codes("fedrand", strategies.create_method("fedrand"))


def test_the_page_has_a_row_a_method_and_every_column():
    lines = [line for line in reference.composed().splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(strategies.list_methods())
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == [
        "method",
        *composition.COLUMNS,
        composition.CODES,
    ]
    assert "| no: one that keeps state at the site |" in next(line for line in lines if "fedsa_lora" in line)
