"""A run in one process refuses every value that would have no effect, and reads a config in any form."""

from __future__ import annotations

import pytest

from fedveil.config import RunConfig, parse
from fedveil.errors import ConfigError
from fedveil.local.config_rules import read_config, require_local

PASSED_OVER = {
    "evaluate.held-out": 0.2, "cohort.sites": 3, "cohort.wait-seconds": 5.0, "cohort.deadline-seconds": 5.0,
    "cohort.max-retries": 1, "cohort.max-norm-ratio": 3.0, "secure.roster": "roster.json", "client.worker": False,
    "run.signature": "abc", "task.data": "rows",
}  # fmt: skip


@pytest.mark.parametrize("key", PASSED_OVER)
def test_a_value_that_would_do_nothing_is_refused(key):
    with pytest.raises(ConfigError, match=f"{key}: a run in one process supports only .*, found"):
        require_local(parse({key: PASSED_OVER[key]}), 3, divides_data=False)


@pytest.mark.parametrize(("key", "value"), [("run.dir", "elsewhere"), ("sinks.use", "tensorboard")])
def test_what_is_written_needs_a_folder_that_stays(key, value):
    with pytest.raises(ConfigError, match=f"run.name: {key} = .* requires it"):
        require_local(parse({key: value}), 3, divides_data=False)
    require_local(parse({key: value, "run.name": "study"}), 3, divides_data=False)


def test_a_quorum_that_no_round_reaches_is_refused():
    with pytest.raises(
        ConfigError, match="cohort.min-sites: expected at most 2, the number of sites drawn per round here, found 3"
    ):
        require_local(parse({"cohort.min-sites": 3, "cohort.fraction": 0.5}), 4, divides_data=False)
    require_local(parse({}), 1, divides_data=False)


def test_task_data_is_only_what_sites_divide():
    require_local(parse({"task.data": "rows"}), 3, divides_data=True)
    with pytest.raises(ConfigError, match=r"^task\.data: a run in one process supports only '', found 'rows'"):
        require_local(parse({"task.data": "rows"}), 3, divides_data=False)


def test_a_file_a_mapping_and_sections_are_one_config(tmp_path):
    (tmp_path / "run.toml").write_text('run.rounds = 2\n[method]\nname = "ffa_lora"\n')
    expected = parse({"run.rounds": 2, "method.name": "ffa_lora"})
    for config in (
        tmp_path / "run.toml", str(tmp_path / "run.toml"), {"run": {"rounds": 2}, "method.name": "ffa_lora"}, expected,
    ):  # fmt: skip
        assert read_config(config) == expected
    assert read_config({}) == RunConfig()
    with pytest.raises(ConfigError, match="config: there is no TOML file at"):
        read_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="method.nam"):
        read_config({"method.nam": "fedavg"})
