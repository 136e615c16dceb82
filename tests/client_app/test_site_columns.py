"""A site's own column names: the run's config with them, what is refused, and a client round on such a file."""

from __future__ import annotations

import json
import tomllib

import pytest
from flwr.common.config import flatten_dict

from fedveil.adapters.lora import LoraAdapter
from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.node_config import SiteConfig, parse_site
from fedveil.client_app.site_columns import apply_site_columns, describe_site_columns, name_site_columns
from fedveil.config import parse, parse_source_template
from fedveil.console.doctor import data_checks
from fedveil.console.flower.machine import format_toml
from fedveil.errors import ConfigError, TaskError
from fedveil.tasks import load_task

COLUMNS = {"source": "Befund", "target": "Diagnose"}


def test_a_node_config_file_names_them_through_flower():
    text = 'site = "north"\ncolumns = {source = "Befund", "in put" = "a.b"}\n'
    site = parse_site(flatten_dict(tomllib.loads(text)))  # as SuperNode reads it
    assert site.columns == {"source": "Befund", "in put": "a.b"}
    written = format_toml(site.model_dump(mode="json", by_alias=True, exclude_unset=True))
    assert parse_site(flatten_dict(tomllib.loads(written))) == site
    assert parse_site(tomllib.loads(written)) == site


@pytest.mark.parametrize(
    "columns", [{"source": ""}, {"source": "{x}"}, {"source": 3}, {"": "x"}, {"source": "x" * 201}]
)
def test_names_that_are_none_are_refused(columns):
    with pytest.raises(ConfigError, match=r"node config: columns"):
        parse_site({f"columns.{name}": own for name, own in columns.items()})


def test_each_role_is_the_run_s_key():
    run = {"task.source-column": "mr", "task.target-column": "ref", "dp.unit-column": "patient", "dp.unit-rows": 4}
    own = {"source": "a", "target": "b", "image": "c", "label": "d", "hint": "e", "unit": "f"}
    config = apply_site_columns(parse(run), own)
    assert (config.task.source_column, config.task.target_column, config.task.image_column) == ("a", "b", "c")
    assert (config.task.label_column, config.dp.unit_column) == ("d", "f")
    assert config.task.hint_column == ""  # the run has none
    assert apply_site_columns(parse(run), {}) == parse(run)
    load_task(config, LoraAdapter())  # a name that the run's task does not read stops no run


def test_the_columns_of_a_template_are_names_too():
    config = parse({"task.source-template": "{{Q}} {question}: {target}"})
    own = apply_site_columns(config, {"question": "Frage", "target": "Ziel"})
    assert parse_source_template(own.task.source_template) == (("{Q} ", "Frage"), (": ", "Ziel"), ("", ""))
    assert own.task.target_column == "ref"  # "target" is a column of the template


def test_a_name_for_no_column_of_the_run_is_refused_with_both():
    with pytest.raises(ConfigError, match='columns: "sorce" .for "Befund".*source, target'):
        apply_site_columns(parse({}), {"sorce": "Befund"})


def test_an_error_about_the_data_has_both_names():
    said = r'lacks it \(columns in the node config: the run\'s "mr" is "Befund" here'
    with pytest.raises(TaskError, match=said), name_site_columns(parse({}), SiteConfig(columns=COLUMNS)):
        raise TaskError("lacks it")
    with pytest.raises(TaskError, match="^lacks it$"), name_site_columns(parse({}), SiteConfig()):
        raise TaskError("lacks it")
    assert describe_site_columns(parse({}), {}) == ""


def test_doctor_reads_a_site_s_data_under_its_names(tmp_path):
    (tmp_path / "train.csv").write_text("Befund,Diagnose\nHusten,Grippe\nFieber,Grippe\n")
    counted: list[int] = []
    check = data_checks.check_site_data(SiteConfig(data=str(tmp_path), columns=COLUMNS), parse({}), counted)
    assert (check.verdict, counted) == ("ok", [2])
    assert check.text.endswith('the run\'s "mr" is "Befund" here, "ref" is "Diagnose" here')
    with pytest.raises(ConfigError, match='expected column "mr"'):
        data_checks.check_site_data(SiteConfig(data=str(tmp_path)), parse({}), [])


def test_the_assignment_keeps_the_run_s_config_and_survives_a_worker(tmp_path):
    order = {"round": 0, "is-new": True, "site": "north", "run": "r", "method": "fedavg", "fields": "{}"}
    node = {"site": "north", "columns.source": "Befund", "state-dir": str(tmp_path)}
    assignment = ClientAssignment.from_instruction(order, {"task.source-column": "mr"}, node)
    again = ClientAssignment.from_json(assignment.to_json())
    assert again == assignment
    assert (again.config.task.source_column, again.site_config.task.source_column) == ("mr", "Befund")
    assert json.loads(assignment.to_json())["config"]["task.source-column"] == "mr"


def test_source_is_left_out_where_the_run_reads_none():
    captions = parse({"task.name": "vision-language"})
    assert apply_site_columns(captions, COLUMNS | {"image": "Bild"}).task.source_column == "mr"  # still no question
    assert describe_site_columns(captions, COLUMNS) == 'columns in the node config: the run\'s "ref" is "Diagnose" here'
    for keys in ({"task.source-column": "question"}, {"task.choices-column": "choices"}):
        asks = parse({"task.name": "vision-language"} | keys)
        assert apply_site_columns(asks, COLUMNS).task.source_column == "Befund"


def test_a_column_of_conversations_has_a_name_of_its_own():
    task = apply_site_columns(parse({"task.messages-column": "messages"}), COLUMNS | {"messages": "Verlauf"}).task
    assert (task.messages_column, task.source_column, task.target_column) == ("Verlauf", "mr", "ref")
    assert apply_site_columns(parse({}), {"messages": "Verlauf"}).task.messages_column == ""
