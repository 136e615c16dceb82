"""A site trains on no row of a withdrawn unit, in runs of every kind, and on nothing if it cannot find those rows."""

from __future__ import annotations

import json
import logging

import pytest

from fedveil.client_app.state.data_sets import PREPARED
from fedveil.client_app.state.withdrawn_units import WithdrawalRecord
from fedveil.data.units import plain_id
from fedveil.encrypted_files import FileSeal, make_key
from fedveil.errors import BudgetError, StateError, TaskError
from tests.client_app.one_site import Server
from tests.client_app.test_units import ROWS, UNITS


def withdraw(at, unit="Secret-1", column="patient", seal=FileSeal()) -> bool:
    return WithdrawalRecord.open(at, seal).add(plain_id(unit), column)


def read(server) -> tuple[list, list]:
    """The examples that the site's last round trained on, and the rows that they come from."""
    prepared = server.turns._rows.prepared
    return list(prepared.rows), [origin.row for origin in prepared.origins()]


@pytest.mark.long
@pytest.mark.parametrize("config", [{}, UNITS], ids=["no claim", "units"])
def test_the_next_round_leaves_out_the_rows_of_a_withdrawn_unit(tmp_path, caplog, config):
    caplog.set_level(logging.INFO)
    server = Server(tmp_path, "", ROWS, **config)
    server.send(server.initial)
    every, _ = read(server)
    assert len(every) == 12
    assert (tmp_path / PREPARED).is_dir()
    assert withdraw(tmp_path, " secret-1")  # written in another way
    assert not withdraw(tmp_path, "Secret-1")
    if config:  # a rate above the reserved one: the run's plan was for five patients
        with pytest.raises(BudgetError, match="expected what its first client round fixed"):
            server.send(server.initial, 1)
    else:
        server.send(server.initial, 1)
    kept = [index for index, row in enumerate(ROWS) if row["patient"] != "Secret-1"]
    assert len(kept) == 9
    assert read(server) == ([every[index] for index in kept], [index + 1 for index in kept])
    assert "this site leaves out 3 of 12 rows" in caplog.text
    assert not (tmp_path / PREPARED).exists()  # it had the rows in the clear
    assert "secret-1" not in caplog.text.lower()
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "train.jsonl"]
    assert not [path for path in written if b"secret-1" in path.read_bytes().lower()]


@pytest.mark.long
def test_a_new_run_by_units_draws_the_others_alone(tmp_path):
    withdraw(tmp_path)
    server = Server(tmp_path, "", ROWS, **UNITS)
    server.send(server.initial)
    assert server.turns._rows.units == ((0, 4, 8), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    "rows,reason",
    [
        ([{"mr": "a", "ref": "b"}] * 4, r'cannot read column "patient".*it has mr, ref'),
        ([*ROWS, {"mr": "a", "ref": "b", "patient": ""}], "row 13 of .* has no id in column"),
        ([*ROWS, {"mr": "a", "ref": "b", "patient": "secret-2"}], "have several spellings"),
        ([row for row in ROWS if row["patient"] == "Secret-1"], "belong to withdrawn units"),
    ],
    ids=["no column", "no id", "two writings", "no other row"],
)
def test_a_site_that_cannot_find_the_rows_trains_on_nothing(tmp_path, rows, reason):
    withdraw(tmp_path)
    server = Server(tmp_path, "", rows)
    with pytest.raises(TaskError, match=reason) as error:
        server.send(server.initial)
    assert server.looked == 0
    assert "secret-1" not in str(error.value).lower()


def test_the_node_config_s_column_holds_for_every_withdrawn_unit(tmp_path, monkeypatch):
    withdraw(tmp_path, column="pid")
    server = Server(tmp_path, "", ROWS)
    with pytest.raises(TaskError, match='cannot read column "pid"'):
        server.send(server.initial)
    asked = server.asked()
    site = asked.site.model_copy(update={"unit_column": "patient"})
    monkeypatch.setattr(server, "asked", lambda round_: type(asked)(asked.order, asked.config, site))
    server.send(server.initial)
    assert len(read(server)[0]) == 9


def test_a_damaged_list_stops_training_and_a_key_seals_it(tmp_path):
    withdraw(tmp_path)
    file = tmp_path / ".withdrawn" / "units.json"
    text = file.read_text()
    assert json.loads(text)["units"][0][0] == "patient"
    server = Server(tmp_path, "", ROWS)
    for damaged in ("{", text.replace('"patient"', '"ref"'), ""):
        file.write_text(damaged)
        with pytest.raises(StateError, match="cannot read the list of withdrawn units"):
            server.send(server.initial)
    seal = make_key(tmp_path / "key")
    withdraw(tmp_path / "encrypted", seal=seal)
    assert b"patient" not in (tmp_path / "encrypted" / ".withdrawn" / "units.json").read_bytes()
    assert WithdrawalRecord.open(tmp_path / "encrypted", seal).read().find(plain_id("Secret-1"))
    with pytest.raises(StateError, match="encrypted"):
        WithdrawalRecord.open(tmp_path / "encrypted").read()
