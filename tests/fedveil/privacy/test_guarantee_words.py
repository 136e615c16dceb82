"""The words of a guarantee: what it assumes of others, and what one unit is."""

from __future__ import annotations

import pytest

from fedveil.config import parse
from fedveil.privacy.dp_sgd import DpSgdConfig
from fedveil.privacy.guarantee_words import conditions, describe_unit

CLAIM = DpSgdConfig(1.0, 1.0, 0.1, 3.0)
PUBLIC_NAMES = "each site's class names are public (task.class-names is not set)"


@pytest.mark.parametrize(
    "task, names, is_assumed",
    [("clip-prompt", "", True), ("clip-prompt", "cat, dog", False), ("text-generation", "", False)],
)
def test_class_names_that_each_site_reads_from_its_rows_are_assumed_public(task, names, is_assumed):
    """One row's label can add a class, which changes the loss of every row: no clip bounds that."""
    config = parse({"task.name": task, "task.class-names": names})
    assert (PUBLIC_NAMES in conditions(CLAIM, config)) == is_assumed


def test_a_column_s_name_is_printed_without_control_characters_and_not_at_any_length():
    words = describe_unit(parse({"dp.unit-column": "patient\x1b[31m" + 500 * "x"}))
    assert "\x1b" not in words
    assert len(words) < 300
