"""What a site keeps, where its node config names a key file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.policy.site_policy import SitePolicy
from fedveil.client_app.state.client_state import NOT_RUNS, ClientStateStore, open_ledger
from fedveil.client_app.state.replay_guard import ReplayGuard
from fedveil.config import parse
from fedveil.contract.codec import raw_bytes
from fedveil.encrypted_files import FileSeal, is_sealed, make_key
from fedveil.errors import ConfigError, StateError, WireError
from fedveil.wire import header
from tests.client_app.test_ledger import assignment, take  # noqa: F401  # a fixture


@pytest.fixture
def seal(tmp_path) -> FileSeal:
    return make_key(tmp_path / "key")


def with_key(what: ClientAssignment, file: Path) -> ClientAssignment:
    return dataclasses.replace(what, site=what.site.model_copy(update={"key_file": str(file)}))


def turn_of(upload: bytes) -> str:
    return str(header.header_of_slices([upload])["turn"])


def after(last: str, what: ClientAssignment) -> ClientAssignment:
    """The assignment of a server whose state has the upload of that turn."""
    return dataclasses.replace(what, order=dataclasses.replace(what.order, last=last))


def everything(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_no_file_of_an_encrypted_site_has_anything_of_its_state_secret_or_ledger(tmp_path, take, seal):  # noqa: F811
    """And the same search finds all of it where nothing is encrypted."""
    clear = tmp_path / "other"
    clear.mkdir()
    for folder, key in ((tmp_path, "key"), (clear, "")):
        last = ""
        for round_ in range(2):
            what = after(last, assignment(folder, round_))
            last = turn_of(take(with_key(what, folder / key) if key else what))
    assert len(kept_in(clear / "state", FileSeal())) == 3
    assert kept_in(tmp_path / "state", seal) == set()
    files = everything(tmp_path / "state")
    assert sorted(f.name.split("-")[0] for f in files if is_sealed(f)) == [
        "ledger.json",
        "received.json",
        "secret",
        "turn",
        "turn",
    ]
    assert {f.name for f in files if not is_sealed(f)} <= {"ledger.lock", "served.json", "served.lock", "turn.lock"}


def kept_in(state: Path, seal: FileSeal) -> set[str]:
    """What of a site's private things is found in the bytes below its state folder."""
    store, ledger = ClientStateStore.open(state, "r", "s", seal), open_ledger(state, seal)
    turns = [file.stem.removeprefix("turn-") for file in store.folder.glob("turn-*")]
    tensors = [tensor for turn in turns for tensor in store.load(turn).tensors.values()]
    assert tensors
    what = {
        "state": [bytes(raw_bytes(t))[:24] for t in tensors],
        "secret": [store.secret(0, "s", False)],
        "ledger": [ledger.read(SitePolicy().budget).tag.encode()],
    }
    contents = everything(state).values()
    return {name for name, needles in what.items() if any(needle in data for data in contents for needle in needles)}


def test_a_turn_goes_on_from_what_was_encrypted_and_refuses_another_key_and_none(tmp_path, take, seal):  # noqa: F811
    last = turn_of(take(with_key(assignment(tmp_path), tmp_path / "key")))
    before, second = everything(tmp_path / "state"), after(last, assignment(tmp_path, 1))
    make_key(tmp_path / "other")
    with pytest.raises(StateError, match="encrypted, but no key file is set"):
        take(second)
    with pytest.raises(
        StateError, match=r"this file is encrypted under key [0-9a-f]{16}, not [0-9a-f]{16}; name that key's file"
    ):
        take(with_key(second, tmp_path / "other"))
    assert {file: before[file] for file in before} == everything(tmp_path / "state")
    take(with_key(second, tmp_path / "key"))


def test_files_in_the_clear_are_no_way_into_an_encrypted_site(tmp_path, take, seal):  # noqa: F811
    """Who can write the disk, and has no key, puts a state, a secret or an empty ledger of his own there."""
    last = turn_of(take(assignment(tmp_path)))
    with pytest.raises(StateError, match="not encrypted under key .* stop the site and run fedveil site seal"):
        take(with_key(after(last, assignment(tmp_path, 1)), tmp_path / "key"))


def test_two_encrypted_files_of_a_site_do_not_change_places(tmp_path, take, seal):  # noqa: F811
    key, last = tmp_path / "key", {}
    for run in ("one", "two"):
        last[run] = turn_of(take(with_key(assignment(tmp_path, run=run), key)))
    last["again"] = turn_of(take(with_key(after(last["one"], assignment(tmp_path, 1, run="one")), key)))
    folders = {run: tmp_path / "state" / run / "s" for run in ("one", "two")}
    first = folders["one"] / f"turn-{last['one']}.safetensors"
    others = (
        (first, folders["two"] / f"turn-{last['two']}.safetensors"),
        (first, folders["one"] / f"turn-{last['again']}.safetensors"),
        (folders["one"] / "secret", folders["two"] / "secret"),
    )
    again = with_key(after(last["one"], assignment(tmp_path, 1, run="one")), key)
    for mine, other in others:
        sealed_content = mine.read_bytes()
        mine.write_bytes(other.read_bytes())
        with pytest.raises(StateError, match="files were swapped"):
            take(again)
        mine.write_bytes(sealed_content)
    take(again)
    ledger = tmp_path / "state" / ".ledger"
    (ledger / "ledger.json").write_bytes((folders["one"] / "secret").read_bytes())
    with pytest.raises(StateError, match="this is the encrypted file of 'secret/one/s', not of 'ledger/ledger'"):
        take(with_key(assignment(tmp_path, 2, run="one"), key))


def test_nothing_on_the_wire_names_a_key_file(tmp_path):
    order = {"round": 0, "is-new": True, "site": "s", "run": "r", "method": "fedavg", "fields": "{}"}
    with pytest.raises(WireError, match="the instruction is not in the format of this version"):
        ClientAssignment.from_instruction({**order, "key-file": "/etc/shadow"}, {}, {})
    for key in ("key-file", "site.key-file", "run.key-file", "client.key-file"):
        with pytest.raises(ConfigError):
            parse({key: "/etc/shadow"})
    passed = ClientAssignment.from_instruction(order, {}, {"key-file": "/keys/state"})
    assert ClientAssignment.from_json(passed.to_json()).site.key_file == "/keys/state"


def test_no_run_has_the_name_of_a_folder_that_is_something_else(tmp_path):
    for name in NOT_RUNS:
        for of in (ClientStateStore.open, ReplayGuard.open):
            with pytest.raises(ConfigError, match="run.name: .* is one of the reserved names"):
                of(tmp_path, name, "s")


def test_a_turn_keeps_others_from_changing_its_folder_and_not_another_turn(tmp_path):
    store = ClientStateStore.open(tmp_path, "r", "s")
    with store.in_turn(), store.in_turn(), store.alone() as alone:
        assert not alone
    with store.alone() as alone:
        assert alone
