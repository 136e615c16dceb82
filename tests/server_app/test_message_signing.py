"""Instructions and replies between the ServerApp and the guard at a site, with everything in between on the other side.

The adversary of the property tests is the SuperLink: it may change any value of any record, metadata, run config and
bundle on the way, and answer in a site's name with whatever it has seen.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given
from hypothesis import strategies as st

from fedveil.contract.message_address import MessageAddress
from fedveil.errors import ConfigError, PolicyError, StateError, WireError
from fedveil.federation.message_signatures import claims, environment
from fedveil.federation.message_signatures.digests import digest_content
from fedveil.federation.message_signatures.key_files import InstructionKeys, SiteSigner, SiteSigners
from fedveil.federation.secagg import crypto
from fedveil.guard import instruction_check
from fedveil.guard.instruction_check import VerifiedInstruction, verify_instruction
from fedveil.server_app import message_signing
from fedveil.server_app.message_signing import MessageSigner, SignerFile
from fedveil.wire import chunking, header, statement_envelope

NODE, RUN, APP, FEDERATION = 7, 11, "5f" * 32, "0a" * 16
INSTRUCTION_KEY, SITE_KEY, OTHER_KEY = (bytes([i]) * 32 for i in (1, 2, 3))
CONFIG = {"run.rounds": 3, "dp.clip-norm": 1.5, "task.name": "text-generation", "secure.enabled": False}
HEAD = f"4:{'cd' * 32}"


def public(private: bytes) -> str:
    return crypto.verifying_key(private).hex()


def statement(data: bytes) -> bytes:
    return statement_envelope.pack_statement(data, 3, "up", MessageAddress("r-0a1b2c3d", 1, "north"))


def slices_of(data: bytes, size: int = 100) -> ArrayRecord:
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    arrays = {chunking.slice_key(i): Array("uint8", (len(part),), chunking.STYPE, part) for i, part in enumerate(parts)}
    return ArrayRecord(arrays)


def order_of(**changes: Any) -> ConfigRecord:
    order = {
        "round": 3, "is-new": True, "site": "north", "run": "r-0a1b2c3d", "attempt": 1, "method": "fedavg",
        "fields": "{}", "log": f"3:{'ab' * 32}", "last": "", "seconds": 900.0,
    }  # fmt: skip
    return ConfigRecord(order | changes)


def message_of(content: RecordDict, kind: str = "train", node: int = NODE) -> Message:
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    return Message(content, node, kind, ttl=900.0)


@dataclass
class Federation:
    """A server and a site, in one folder."""

    folder: Path
    signers: SiteSigners = SiteSigners(
        FEDERATION, True, {"north": SiteSigner(str(NODE), public(SITE_KEY), "registered", True)}
    )
    context: Any = field(default_factory=lambda: SimpleNamespace(node_id=NODE, run_config=dict(CONFIG)))
    content: RecordDict = field(default_factory=RecordDict)

    def __post_init__(self) -> None:
        self.list_signers(self.signers)
        for name, private in (("instruction.key", INSTRUCTION_KEY), ("signing.key", SITE_KEY)):
            (self.folder / name).write_bytes(private)
            (self.folder / name).chmod(0o600)
        keys = InstructionKeys(FEDERATION, (public(INSTRUCTION_KEY), public(OTHER_KEY)))
        (self.folder / "instruction-keys.toml").write_text(keys.to_toml())
        self.site = SimpleNamespace(
            site="north",
            instruction_keys=str(self.folder / "instruction-keys.toml"),
            signing_key=str(self.folder / "signing.key"),
        )
        self.signer = MessageSigner(
            INSTRUCTION_KEY, SignerFile(self.folder / "signers.json"), RUN, APP, dict(reversed(CONFIG.items()))
        )

    def list_signers(self, signers: SiteSigners) -> None:
        (self.folder / "signers.json.new").write_bytes(signers.to_bytes())
        (self.folder / "signers.json.new").replace(self.folder / "signers.json")

    def change_north(self, **changes: Any) -> None:
        self.list_signers(replace(self.signers, sites={"north": replace(self.signers.sites["north"], **changes)}))

    def send(self, kind: str = "train", **order: Any) -> Message:
        content = RecordDict(
            {
                "fedveil": slices_of(statement(bytes(500))),
                "order": order_of(**order),
                "config": ConfigRecord({"lr": 1.0}),
            }
        )
        message = message_of(content, kind)
        self.asked = self.signer.sign("north", message, {})
        return message

    def refusal(self, site: str, node: int) -> str:
        """Return why a site is not asked."""
        content = RecordDict({"fedveil": slices_of(statement(b"x")), "order": order_of(), "config": ConfigRecord()})
        with pytest.raises((WireError, StateError)) as refused:
            self.signer.sign(site, message_of(content, node=node), {})
        assert "signature" not in content
        return str(refused.value)

    def take(self, message: Message, required: bool = True, **changes: Any) -> VerifiedInstruction | None:
        given = {"flower_run": RUN, "app": APP, "site": "north"} | changes
        site = SimpleNamespace(**vars(self.site) | {"site": given["site"]})
        return verify_instruction(message, self.context, given["flower_run"], given["app"], site, required)

    def answer(self, taken: VerifiedInstruction, upload: bytes, head: str = HEAD) -> dict[str, Any]:
        return taken.sign_reply(digest_content([upload]), head)

    def count(self, upload: bytes, head: str, record: Mapping[str, Any] | None, node: int = NODE) -> Any:
        return self.signer.verify("north", node, self.asked, bytearray(upload), head, record)


@pytest.fixture
def federation(tmp_path) -> Federation:
    return Federation(tmp_path)


@pytest.mark.parametrize("kind", ["train", "query.secure"])
def test_an_instruction_and_its_reply_verify_and_both_sides_keep_the_evidence(federation, kind):
    taken = federation.take(federation.send(kind))
    assert taken is not None
    upload = statement(b"upload")
    counted = federation.count(upload, HEAD, federation.answer(taken, upload))
    evidence = dict(counted)
    signature = {name: evidence.pop(name) for name in ("key", "signature")}
    assert claims.is_signed(claims.ReplyClaims(**evidence), public(SITE_KEY), signature)
    assert evidence["instruction"] == federation.asked.digest
    evidence = dict(taken.evidence)
    signature = {name: evidence.pop(name) for name in ("key", "signature")}
    assert claims.is_signed(claims.InstructionClaims(**evidence), public(INSTRUCTION_KEY), signature)


def test_a_site_takes_an_instruction_by_the_standby_key(federation):
    federation.signer = MessageSigner(OTHER_KEY, SignerFile(federation.folder / "signers.json"), RUN, APP, CONFIG)
    assert federation.take(federation.send()) is not None


VALUES = st.one_of(st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False), st.text(max_size=8))


@pytest.mark.long
@given(st.data())
def test_no_change_of_the_superlink_is_taken_for_the_servers_instruction(tmp_path_factory, data):
    federation = Federation(tmp_path_factory.mktemp("federation"))
    message = federation.send()
    assert federation.take(message) is not None
    records, more = message.content, {}
    where = data.draw(st.sampled_from(["order", "config", "signature", "run", "message", "cut", "more", "type"]))
    match where:
        case "order" | "config" | "signature":
            record = records.config_records[where]
            name = data.draw(st.sampled_from([*sorted(record), "another"]))
            before = record.get(name)
            record[name] = data.draw(VALUES.filter(lambda v: (type(v), v) != (type(before), before)))
        case "run":
            name = data.draw(st.sampled_from([*sorted(CONFIG), "another"]))
            before = CONFIG.get(name)
            value = data.draw(VALUES.filter(lambda v: (type(v), v) != (type(before), before)))
            federation.context.run_config[name] = value
        case "message":
            array = records.array_records["fedveil"]
            key, at = data.draw(st.sampled_from(sorted(array))), data.draw(st.integers(0, 99))
            old = array[key].data
            at %= len(old)
            new = old[:at] + bytes([old[at] ^ data.draw(st.integers(1, 255))]) + old[at + 1 :]
            array[key] = Array("uint8", (len(new),), chunking.STYPE, new)
        case "cut":
            array = records.array_records["fedveil"]
            del array[sorted(array)[-1]]
        case "more":
            more = data.draw(
                st.sampled_from(
                    [{"flower_run": 12}, {"app": "5e" * 32}, {"site": "south"}, {"site": "North"}, {"site": ""}]
                )
            )
        case "type":
            message.metadata.message_type = data.draw(st.sampled_from(["query.secure", "query", "evaluate", "train.x"]))
    with pytest.raises((PolicyError, WireError)):
        federation.take(message, **more)


def test_an_old_instruction_or_one_of_an_unknown_key_is_not_hashed(federation, monkeypatch):
    message, now = federation.send(), int(time.time())
    monkeypatch.setattr(instruction_check, "time", SimpleNamespace(time=lambda: now + 10_000))
    monkeypatch.setattr(instruction_check.digests, "digest_content", lambda slices: pytest.fail("it was hashed"))
    with pytest.raises(PolicyError, match="expired"):
        federation.take(message)
    monkeypatch.setattr(instruction_check, "time", SimpleNamespace(time=lambda: now))
    message.content.config_records["signature"]["key"] = "0a" * 8
    with pytest.raises(PolicyError, match="it has no valid signature"):
        federation.take(message)


def test_a_reply_is_not_parsed_before_its_signature_is_verified(federation, monkeypatch):
    """A header of 16 MB that 16 kB expand to cost 6.7 s of CPU, by no key."""
    federation.take(federation.send())
    monkeypatch.setattr(header, "read_header", lambda *of: pytest.fail("it was parsed"))
    text = zlib.compress(b'{"report":{"a":[' + b"[]," * 5_000_000 + b"[]]}}", 9)
    bomb = header.MAGIC + len(text).to_bytes(4, "little") + xxhash.xxh3_64_digest(text)[::-1] + bytes(16) + text
    assert len(bomb) < 20_000
    with pytest.raises(WireError, match="is not a signature of this reply"):
        federation.count(bomb, HEAD, {"version": 1, "key": "0a" * 8, "signature": "00" * 64})


def test_another_node_is_not_asked_in_this_ones_place(federation):
    message = federation.send()
    federation.context.node_id = NODE + 1
    with pytest.raises(PolicyError, match="signature"):
        federation.take(message)


@pytest.mark.long
@given(st.data())
def test_no_reply_counts_but_the_one_that_the_site_signed(tmp_path_factory, data):
    federation = Federation(tmp_path_factory.mktemp("federation"))
    other = federation.take(federation.send(round=2))
    taken = federation.take(federation.send())
    assert taken is not None
    assert other is not None
    upload = statement(b"upload")
    record = federation.answer(taken, upload)
    counted_upload, head, signature = upload, HEAD, dict(record)
    where = data.draw(st.sampled_from(["upload", "head", "other round", "other key", "none", "record", "instruction"]))
    match where:
        case "upload":
            counted_upload = statement(data.draw(st.binary(max_size=20).filter(lambda b: b != b"upload")))
        case "head":
            head = data.draw(st.sampled_from(["", f"5:{'cd' * 32}", f"4:{'ce' * 32}"]))
        case "other round":
            signature = federation.answer(other, upload)
        case "other key":
            signature = claims.sign(claims.answer_claims(taken.claims, digest_content([upload]), HEAD), OTHER_KEY)
        case "none":
            signature = None
        case "record":
            name = data.draw(st.sampled_from(sorted(record)))
            signature[name] = data.draw(VALUES.filter(lambda v: v != record[name]))
        case "instruction":
            signature = claims.sign(taken.claims, SITE_KEY)
    with pytest.raises(WireError, match="signature"):
        federation.count(counted_upload, head, signature)
    assert federation.count(upload, HEAD, record)


@pytest.mark.parametrize(("clock", "refused"), [(-299, ""), (299, ""), (-301, "ahead of"), (900 + 301, "expired")])
def test_a_clock_may_differ_by_five_minutes(federation, monkeypatch, clock, refused):
    message, now = federation.send(), int(time.time())
    monkeypatch.setattr(instruction_check, "time", SimpleNamespace(time=lambda: now + clock))
    if not refused:
        assert federation.take(message) is not None
        return
    with pytest.raises(PolicyError, match=refused):
        federation.take(message)


@pytest.mark.parametrize("delay", [840, 900, 900 + 299])  # the deadline, `until`, and the clocks' difference
def test_a_superlink_that_delays_an_instruction_within_its_time_gains_no_reply_after_the_attempt(
    federation, monkeypatch, delay
):
    """A site cannot know that it is late. The server counts its reply while it waits for this very instruction."""
    message, sent, upload = federation.send(), int(time.time()), statement(b"upload")
    monkeypatch.setattr(instruction_check, "time", SimpleNamespace(time=lambda: sent + delay))
    taken = federation.take(message)
    assert taken is not None
    record = federation.answer(taken, upload)
    assert federation.count(upload, HEAD, record)["instruction"] == federation.asked.digest
    for later in ({"attempt": 2}, {"round": 4}, {}):  # the last: the same again
        federation.send(**later)
        with pytest.raises(WireError, match="is not a signature of this reply"):
            federation.count(upload, HEAD, record)


def test_a_reply_to_an_equal_instruction_does_not_count_for_this_one(federation):
    earlier, upload = federation.take(federation.send()), statement(b"upload")
    record = federation.answer(earlier, upload)
    federation.send()  # the same round and attempt, of a server that was restored from a backup
    with pytest.raises(WireError, match="is not a signature of this reply"):
        federation.count(upload, HEAD, record)


def test_a_reply_to_an_earlier_attempt_does_not_count_and_neither_does_one_after_a_resume(federation):
    taken, upload = federation.take(federation.send()), statement(b"upload")
    record = federation.answer(taken, upload)
    federation.send(attempt=2)
    with pytest.raises(WireError, match="is not a signature of this reply"):
        federation.count(upload, HEAD, record)
    federation.signer = MessageSigner(
        INSTRUCTION_KEY, SignerFile(federation.folder / "signers.json"), RUN + 1, APP, CONFIG
    )
    federation.send()
    with pytest.raises(WireError, match="is not a signature of this reply"):
        federation.count(upload, HEAD, record)


@pytest.mark.parametrize("required", [True, False])
def test_a_site_without_pinned_keys_takes_instructions_where_its_policy_lets_it(federation, required):
    federation.site.instruction_keys = ""
    if required:
        with pytest.raises(PolicyError, match="pins no key"):
            federation.take(federation.send(), required)
    else:
        assert federation.take(federation.send(), required) is None


def test_an_unsigned_instruction_is_taken_only_where_the_policy_says_so(federation):
    message = federation.send()
    del message.content["signature"]
    with pytest.raises(PolicyError, match="signature is missing"):
        federation.take(message, required=True)
    assert federation.take(message, required=False) is None


def test_a_site_that_could_not_sign_its_reply_refuses_the_instruction(federation):
    message = federation.send()
    federation.site.signing_key = ""
    with pytest.raises(PolicyError, match="signing-key"):
        federation.take(message)
    federation.site.signing_key = str(federation.folder / "none.key")
    with pytest.raises(ConfigError, match="signing-key"):
        federation.take(message)


def test_a_site_that_the_server_lists_with_another_signing_key_refuses_before_it_trains(federation):
    federation.change_north(signing=public(OTHER_KEY))
    message = federation.send()
    listed, own = claims.key_id(public(OTHER_KEY)), claims.key_id(public(SITE_KEY))
    assert message.content.config_records["order"]["signing-key"] == listed
    with pytest.raises(PolicyError, match=f"signing-key: the server lists {listed} .* signing.key has {own}; restore"):
        federation.take(message)
    federation.list_signers(federation.signers)
    assert federation.take(federation.send()) is not None


@pytest.mark.parametrize("state", ["revoked", "expired", "invited"])
def test_a_site_that_is_revoked_in_the_middle_of_a_round_counts_no_more(federation, state):
    taken, upload = federation.take(federation.send()), statement(b"upload")
    record = federation.answer(taken, upload)
    federation.change_north(state=state)
    with pytest.raises(WireError, match=state):
        federation.count(upload, HEAD, record)
    assert state in federation.refusal("north", NODE)


def test_a_site_past_its_last_day_counts_no_more_without_a_command(federation):
    taken, upload = federation.take(federation.send()), statement(b"upload")
    record = federation.answer(taken, upload)
    federation.change_north(until="2099-01-01T00:00:00+00:00")
    assert federation.count(upload, HEAD, record)
    federation.change_north(until="2026-01-01T00:00:00+00:00")
    with pytest.raises(WireError, match="expired on 2026-01-01"):
        federation.count(upload, HEAD, record)
    assert "expired on" in federation.refusal("north", NODE)


def test_a_reply_from_another_node_or_by_a_replaced_key_does_not_count(federation):
    taken, upload = federation.take(federation.send()), statement(b"upload")
    record = federation.answer(taken, upload)
    with pytest.raises(WireError, match="node"):
        federation.count(upload, HEAD, record, node=NODE + 1)
    federation.change_north(signing=public(OTHER_KEY))
    with pytest.raises(WireError, match="is not a signature of this reply"):
        federation.count(upload, HEAD, record)


@pytest.mark.parametrize("damage", ["{", "", "[]", '{"federation": 1}'])
def test_nothing_counts_while_the_list_cannot_be_read(federation, damage):
    taken, upload = federation.take(federation.send()), statement(b"upload")
    record = federation.answer(taken, upload)
    (federation.folder / "signers.json").write_text(damage)
    with pytest.raises(WireError, match="signing keys"):
        federation.count(upload, HEAD, record)
    assert "signing keys" in federation.refusal("north", NODE)
    federation.list_signers(federation.signers)
    assert federation.count(upload, HEAD, record)


@pytest.mark.parametrize("which", ["file", "folder"])
def test_nothing_counts_while_other_users_may_write_the_list(federation, which):
    taken, upload = federation.take(federation.send()), statement(b"upload")
    record = federation.answer(taken, upload)
    file = federation.folder / "signers.json"
    path, before = (file, 0o644) if which == "file" else (federation.folder, 0o700)
    path.chmod(before | 0o020)  # its bytes and its time stay
    with pytest.raises(WireError, match=f"only this user may be able to change the keys, but {path} has mode"):
        federation.count(upload, HEAD, record)
    assert "chmod go-w" in federation.refusal("north", NODE)
    path.chmod(before)
    assert federation.count(upload, HEAD, record)


def test_a_site_with_an_older_kit_is_asked_unsigned_where_signatures_are_optional(federation):
    federation.change_north(signs=False)
    assert "too old and lacks the instruction keys" in federation.refusal("north", NODE)
    optional = replace(federation.signers, required=False)
    federation.list_signers(replace(optional, sites={"north": replace(optional.sites["north"], signs=False)}))
    message = federation.send()
    assert "signature" not in message.content
    assert federation.asked is None
    assert federation.count(statement(b"upload"), "", None) == {}


@pytest.mark.parametrize("site", ["south", "North", ""])
def test_a_site_that_is_not_in_the_list_is_not_asked(federation, site):
    assert "not registered" in federation.refusal(site, NODE)


def test_a_signing_site_without_a_registered_key_is_not_asked(federation):
    federation.change_north(signing="")
    assert "signing key" in federation.refusal("north", NODE)


def test_equal_messages_are_hashed_once_and_every_instruction_has_its_own_nonce(federation, monkeypatch):
    hashed = []
    monkeypatch.setattr(
        message_signing.digests, "digest_content", lambda slices: hashed.append(1) or digest_content(slices)
    )
    shared, contents = slices_of(statement(bytes(500))), dict[int, str]()
    messages = [
        message_of(RecordDict({"fedveil": shared, "order": order_of(), "config": ConfigRecord()})) for _ in range(3)
    ]
    nonces = {federation.signer.sign("north", message, contents).nonce for message in messages}
    assert (len(hashed), len(nonces)) == (1, 3)


def test_the_environment_names_both_files_or_none(federation, monkeypatch):
    for name in (environment.KEY_VARIABLE, environment.SIGNERS_VARIABLE, environment.APP_DIGEST_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert MessageSigner.from_environment(RUN, APP, CONFIG) is None
    monkeypatch.setenv(environment.KEY_VARIABLE, str(federation.folder / "instruction.key"))
    with pytest.raises(ConfigError, match=environment.SIGNERS_VARIABLE):
        MessageSigner.from_environment(RUN, APP, CONFIG)
    monkeypatch.setenv(environment.SIGNERS_VARIABLE, str(federation.folder / "signers.json"))
    for measured in ("", "5e" * 32):  # the SuperLink names another bundle than it has sent
        monkeypatch.setenv(environment.APP_DIGEST_VARIABLE, measured)
        with pytest.raises(ConfigError, match="app digest"):
            MessageSigner.from_environment(RUN, APP, CONFIG)
    monkeypatch.setenv(environment.APP_DIGEST_VARIABLE, APP)
    federation.signer = MessageSigner.from_environment(RUN, APP, CONFIG)
    assert federation.take(federation.send()) is not None
    (federation.folder / "instruction.key").chmod(0o644)
    with pytest.raises(ConfigError, match="only by its owner"):
        MessageSigner.from_environment(RUN, APP, CONFIG)
    (federation.folder / "instruction.key").chmod(0o600)
    (federation.folder / "signers.json").unlink()
    with pytest.raises(StateError, match="signing keys"):
        MessageSigner.from_environment(RUN, APP, CONFIG)
