"""The server's audit log: a line for every message out, and for what came back."""

from __future__ import annotations

import pytest
from flwr.app import ConfigRecord

from fedveil.client_app import app as client
from fedveil.errors import StateError
from fedveil.records import audit_log
from fedveil.server_app.run_folder import RunFolder
from tests.server_app.grid import LocalGrid, use_toy_task
from tests.server_app.test_flower_strategy import initial, strategy

ANCHOR = f"4:{'5f' * 32}"


def logged(tmp_path, monkeypatch, tamper=None, name="pilot"):
    task = use_toy_task(monkeypatch)
    (tmp_path / "site-policy.toml").write_text('methods = ["dp_fpl"]')
    grid = LocalGrid(client.app, ["north", "south", "west"], tmp_path / "state", {"run.deterministic": True}, tamper)
    grid.node_config = {"west": {"policy": str(tmp_path / "site-policy.toml")}}
    folder = RunFolder(tmp_path / "runs" / name)
    ours = strategy(folder=folder)
    ours.start(grid, initial(task), num_rounds=1)
    return grid, folder, audit_log.read_log(tmp_path / "runs" / audit_log.NAME)


def test_every_message_and_every_decision_is_a_line(tmp_path, monkeypatch):
    grid, folder, lines = logged(tmp_path, monkeypatch)
    sent = [line for line in lines if line["event"] == "sent"]
    assert [line["site"] for line in sent] == ["north", "south", "west"]
    assert {line["run"] for line in lines} == {f"pilot-{folder.id}"}
    assert {name for name, _ in sent[0]["fields"]} == {"h.0.lora_A", "h.0.lora_B", "h.1.lora_A", "h.1.lora_B"}
    rest = {line["site"]: line for line in lines if line["event"] != "sent"}
    assert {site: line["event"] for site, line in rest.items()} == {
        "north": "accepted",
        "south": "accepted",
        "west": "failed",
    }
    assert rest["west"]["reason"].startswith("PolicyError: method.name: this site permits")
    assert all(rest[site]["bytes"] > 0 and rest[site]["site_log"] == "" for site in ("north", "south"))
    anchors = [audit_log.LogHead.parse(str(m.content.config_records["order"]["log"])) for m in grid.pushed]
    assert [anchor.lines for anchor in anchors] == [1, 2, 3]
    audit_log.verify_log(tmp_path / "runs" / audit_log.NAME, anchors)


def test_the_next_runs_first_instruction_is_the_receipt_of_the_last_round(tmp_path, monkeypatch):
    """So no message needs to follow a run: `order` is signed, and its anchor covers what the runs before accepted."""
    logged(tmp_path, monkeypatch)
    file = tmp_path / "runs" / audit_log.NAME
    before = file.read_bytes().splitlines(keepends=True)
    grid, _, _ = logged(tmp_path, monkeypatch, name="next")
    receipt = audit_log.LogHead.parse(str(grid.pushed[0].content.config_records["order"]["log"]))
    accepted = [number for number, line in enumerate(before) if b'"accepted"' in line]
    assert len(accepted) == 2
    assert receipt.lines == len(before) + 1 > max(accepted)
    audit_log.verify_log(file, [receipt])
    file.write_bytes(b"".join(before[: max(accepted)]))  # the last acceptance was never written, says the server
    audit_log.verify_log(file)
    with pytest.raises(StateError, match="an anchor records 7 lines"):
        audit_log.verify_log(file, [receipt])


@pytest.mark.parametrize("said,kept", [(ANCHOR, ANCHOR), ("4:5f", ""), ("x" * 5000, "")])
def test_a_sites_anchor_is_kept_and_what_is_none_is_not(said, kept, tmp_path, monkeypatch):
    def with_log(message, reply):
        reply.content["log"] = ConfigRecord({"head": said})
        return reply

    _, _, lines = logged(tmp_path, monkeypatch, {"north": with_log})
    (line,) = [line for line in lines if line["event"] == "accepted" and line["site"] == "north"]
    assert line["site_log"] == kept
