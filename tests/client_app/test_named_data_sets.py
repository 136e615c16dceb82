"""Several data sets at one site, of which a run chooses one by name."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from fedveil.client_app.instruction import ClientAssignment, TrainInstruction
from fedveil.client_app.node_config import parse_site
from fedveil.client_app.policy import decisions
from fedveil.client_app.policy.run_config_rules import check_run_config
from fedveil.client_app.policy.site_policy import SitePolicy
from fedveil.client_app.state.replay_guard import ReplayGuard
from fedveil.config import parse
from fedveil.console.doctor.data_checks import list_data_checks
from fedveil.console.flower.machine import format_toml
from fedveil.console.provisioning import kit_reader
from fedveil.errors import ConfigError, PolicyError

NESTED = {
    "site": "north",
    "data-sets": {
        "icu": {"data": "/d/icu", "unit-column": "patient"},
        "radiology": {"data": "/d/radiology", "columns": {"source": "Befund"}, "data-set": "ct-2025"},
    },
}


def flattened(table, prefix=""):
    """What Flower makes of a node config."""
    flat = {}
    for key, value in table.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def assignment(config, node=NESTED):
    order = TrainInstruction(0, True, "north", "first", "fedavg", "{}")
    return ClientAssignment.from_instruction(asdict(order), config, flattened(node))


def test_flowers_flat_keys_and_a_files_tables_are_read_alike():
    site = parse_site(flattened(NESTED))
    assert site == parse_site(NESTED)
    assert site.data_sets["radiology"].columns == {"source": "Befund"}
    assert parse_site(json.loads(site.model_dump_json(by_alias=True))) == site


def test_a_run_gets_the_data_set_that_it_names_with_its_columns_and_unit():
    chosen = assignment({"task.data-set": "radiology"})
    assert chosen.data == "/d/radiology"
    assert (chosen.site.data_set, chosen.site.unit_column) == ("ct-2025", "")
    assert chosen.site_config.task.source_column == "Befund"
    assert assignment({"task.data-set": "icu"}).site.unit_column == "patient"
    assert ClientAssignment.from_json(chosen.to_json()) == chosen


@pytest.mark.parametrize(
    "name,node,data",
    [
        ("", {"site": "north", "data": "/d/all"}, "/d/all"),
        ("", NESTED | {"data": "/d/all"}, "/d/all"),
        ("icu", NESTED | {"data": "/d/all"}, "/d/icu"),
        ("", NESTED, "several data sets, and the run names none"),
        ("icu", {"site": "north", "data": "/d/all"}, "no data set of this name"),
        ("ICU", NESTED, "no data set of this name"),
        ("", {"site": "north"}, ""),
    ],
)
def test_the_table_of_choices(name, node, data, tmp_path):
    config = {"task.data-set": name}
    if data.startswith("/") or not data:
        assert assignment(config, node).data == data
        return
    (refused,) = decisions.list_refusals(assignment(config, node | {"state-dir": str(tmp_path)}), None, 0)
    assert data in str(refused)
    with pytest.raises(ConfigError, match=data) as caught:
        assignment(config, node).data  # noqa: B018  # no default data in its place
    assert "icu" not in str(caught.value).replace("ICU", "")  # the server reads this
    assert "radiology" not in str(caught.value)


@pytest.mark.parametrize(
    "node",
    [
        {"data-sets": {"i.cu": {"data": "/d"}}},
        {"data-sets": {"icu": {"columns": {"source": "x"}}}},
        {"data-sets": {"icu": {"data": "/d", "policy": "p.toml"}}},
        {"data-sets": {"icu": {"data": ""}}},
        {"data-sets": {f"d{number}": {"data": "/d"} for number in range(33)}},
        {"data-sets": "icu"},
        {"data-sets": {"icu": {"data": "/d"}}, "columns": {"source": "x"}},
        {"data-sets": {"icu": {"data": "/d"}}, "data-set": "north"},
        {"data-sets": {"icu": {"data": "/d", "data-set": "a"}, "ct": {"data": "/e", "data-set": "a"}}},
        {"data": "/d", "data-set": "a", "data-sets": {"icu": {"data": "/e", "data-set": "a"}}},
    ],
)
def test_a_wrong_table_is_refused(node):
    with pytest.raises(ConfigError, match=r"node config: (data-sets|columns and data-set|data-set: two)"):
        parse_site(flattened(node))
    with pytest.raises(ConfigError, match=r"node config: (data-sets|columns and data-set|data-set: two)"):
        parse_site(node)


def test_the_policy_decides_which_names_a_server_may_choose():
    run = parse({"task.data-set": "icu"})
    with pytest.raises(PolicyError, match=r"task\.data-set: this site permits ''"):
        check_run_config(SitePolicy().permits, SitePolicy().named, run)
    policy = SitePolicy.model_validate({"permits": {"task.data-set": ["icu"]}})
    check_run_config(policy.permits, policy.named, run)
    with pytest.raises(PolicyError, match=r"task\.data-set"):
        check_run_config(policy.permits, policy.named, parse({"task.data-set": "radiology"}))


def test_a_server_cannot_probe_names_that_the_policy_does_not_permit(tmp_path):
    policy = tmp_path / "site-policy.toml"
    policy.write_text('[permits]\n"task.data-set" = "icu"\n')
    node = NESTED | {"policy": str(policy), "state-dir": str(tmp_path)}
    said = {}
    for name in ("radiology", "missing"):
        with pytest.raises(PolicyError) as caught:
            decisions.check_run(assignment({"task.data-set": name}, node))
        said[name] = str(caught.value).replace(name, "NAME")
    assert said["radiology"] == said["missing"]
    decisions.check_run(assignment({"task.data-set": "icu"}, node))


def test_a_run_keeps_to_its_first_data_set_whatever_the_policy_permits(tmp_path):
    policy = tmp_path / "site-policy.toml"
    policy.write_text('[permits]\n"task.data-set" = ["icu", "radiology"]\n')
    node = NESTED | {"policy": str(policy), "state-dir": str(tmp_path)}
    decisions.count_round(assignment({"task.data-set": "icu"}, node))
    decisions.check_run(assignment({"task.data-set": "icu"}, node))
    for act in (decisions.check_run, decisions.count_round):
        with pytest.raises(PolicyError, match=r'task\.data-set: expected "icu", with which this run began'):
            act(assignment({"task.data-set": "radiology"}, node))
    again = ReplayGuard.open(tmp_path, "first", "north")
    again.count(1, 3, 3, data_set="icu")
    with pytest.raises(PolicyError, match=r"task\.data-set"):
        again.check(2, 3, 3, data_set="")


def test_a_round_from_before_there_were_data_sets_goes_on(tmp_path):
    guard = ReplayGuard.open(tmp_path, "first", "north")
    guard.count(0, 3, 3)
    assert b"data-set" not in (guard.folder / "served.json").read_bytes()
    guard.count(1, 3, 3)
    with pytest.raises(PolicyError, match=r"task\.data-set"):
        guard.count(2, 3, 3, data_set="icu")


def test_the_sites_unit_column_protects_every_data_set():
    node = NESTED | {"unit-column": "person"}
    assert assignment({"task.data-set": "radiology"}, node).site.unit_column == "person"
    assert assignment({"task.data-set": "icu"}, node).site.unit_column == "patient"


def test_the_log_names_the_data_set():
    assert assignment({"task.data-set": "icu"}).described()["data_set"] == "icu"
    assert "data_set" not in assignment({}, {"site": "north", "data": "/d"}).described()


def kit(folder, text):
    folder.mkdir()
    (folder / "node-config.toml").write_text(text)
    return folder


def test_paths_in_a_kit_are_relative_to_it(tmp_path):
    text = 'site = "north"\n[data-sets.icu]\ndata = "icu"\n[data-sets.ct]\ndata = "/mnt/ct"\n'
    site = kit_reader.node_config(kit(tmp_path / "kit", text))
    assert site.data_sets["icu"].data == str(tmp_path / "kit" / "icu")
    assert site.data_sets["ct"].data == "/mnt/ct"
    written = kit(tmp_path / "again", format_toml(site.model_dump(mode="json", by_alias=True, exclude_unset=True)))
    assert kit_reader.node_config(written) == site


def test_doctor_checks_each_data_set_or_the_runs_own(tmp_path):
    for name, rows in (("icu", 3), ("ct", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text('{"mr": "a", "ref": "b"}\n' * rows)
    tables = {name: {"data": str(tmp_path / name)} for name in ("icu", "ct", "none")}
    site = parse_site({"site": "north", "data-sets": tables})
    checked = list_data_checks(site, parse({}), [])
    assert sorted(checked) == ["data ct", "data icu", "data none"]
    assert "3 examples" in checked["data icu"]().text
    with pytest.raises(ConfigError, match="none"):
        checked["data none"]()
    counted: list[int] = []
    (check,) = list_data_checks(site, parse({"task.data-set": "ct"}), counted).values()
    assert "2 examples" in check().text
    assert counted == [2]
