"""The entry point against Flower's own installation of a bundle, without a network."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import sys
import types
import warnings
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.cli.install import install_from_fab
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedveil import rng
from fedveil.client_app.policy.policy_copies import find_copy
from fedveil.client_app.state.replay_guard import ReplayGuard
from fedveil.console.commands.federation import app as console_app
from fedveil.console.flower.site_process import write_guard
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import param_specs_of
from fedveil.federation.exchange import MessageExchange
from fedveil.guard import clientapp, run_signature
from fedveil.guard.clientapp import MessageGuard, MessageRefused
from fedveil.records import audit_log
from fedveil.strategies.fedavg import FedAvg
from fedveil.wire import chunking
from tests.conftest import ROOT, ToyTrainer

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


@pytest.fixture(scope="module")
def app(tmp_path_factory) -> Path:
    """A small app: Flower bundles the real one just so."""
    root = tmp_path_factory.mktemp("app") / "app"
    (root / "client_app").mkdir(parents=True)
    shutil.copy(ROOT / "client_app" / "app.py", root / "client_app")
    (root / "client_app" / "server.py").write_text("app = 1\n")
    (root / "client_app" / "__init__.py").touch()
    (root / "pyproject.toml").write_text(
        '[project]\nname = "toy"\nversion = "0.1.0"\nlicense = "Apache-2.0"\ndependencies = []\n'
        '[tool.flwr.app]\npublisher = "us"\n'
        '[tool.flwr.app.components]\nserverapp = "client_app.server:app"\nclientapp = "fedveil.client_app.app:app"\n'
    )
    return root


def bundled(app: Path) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Flower's own, of the library that it matches paths with
        return build_fab_from_disk(app)


@pytest.fixture(scope="module")
def fab(app) -> bytes:
    return bundled(app)


class Site:
    """A guard on a runtime that holds one message, as SuperNode would hand it over."""

    def __init__(self, tmp_path: Path, monkeypatch, fab: bytes, policy: str | None, **changes) -> None:
        monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
        monkeypatch.setattr(clientapp, "unload_modules", lambda: None)  # this process needs its modules
        monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)
        for name in ("FEDVEIL_APP_DIGEST", "FEDVEIL_APP_MODULE", "FEDVEIL_APP_SIGNER", "PYTHONDONTWRITEBYTECODE"):
            monkeypatch.setenv(name, "")
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        node: dict[str, object] = {"site": "north", "state-dir": str(tmp_path / "state")}
        node |= changes.pop("node", {})
        if policy is not None:
            (tmp_path / "site-policy.toml").write_text(policy)
            node["policy"] = str(tmp_path / "site-policy.toml")
        self.fab, self.sent, self.log = fab, [], tmp_path / "state" / audit_log.NAME
        order = {"round": 0, "is-new": True, "site": "north", "run": "r-0a1b2c3d", "method": "fedavg", "fields": "{}"}
        order |= {"log": f"3:{'ab' * 32}", **changes.pop("order", {})}
        down = ArrayRecord({chunking.slice_key(0): Array("uint8", (1000,), chunking.STYPE, bytes(1000))})
        content = RecordDict({"fedveil": down, "order": ConfigRecord(order)})
        message = Message(content, 7, changes.pop("message_type", MessageType.TRAIN))
        message.metadata.__dict__["_message_id"] = "m1"
        config = changes.pop("run_config", {}) | ({"method.name": "fedavg"} if "methods" in (policy or "") else {})
        context = Context(1, 7, node, RecordDict(), config)
        run = Run.create_empty(11)
        digest = hashlib.sha256(fab).hexdigest()
        run.fab_id, run.fab_version, run.fab_hash = "us/toy", "0.1.0", digest
        named = changes.pop("hash_str", digest)
        for key, value in changes.items():
            setattr(run, key, value)
        self.runtime = types.SimpleNamespace(
            pull_task_input=lambda client: (message, context, run, Fab(named, fab, {})),
            pull_and_inflate_object_from_tree=pull_and_inflate_object_from_tree,
            install_from_fab=install_from_fab,
            push_message=lambda client, message, context: self.sent.append(message),
        )
        self.guard = MessageGuard(self.runtime, require_policy=True)
        assert self.runtime.install_from_fab is install_from_fab  # nothing is changed by making one
        self.guard.install()
        self.message = self.runtime.pull_task_input(None)[0]

    @property
    def folder(self) -> Path:
        return next((self.log.parents[1] / "flower" / "apps").iterdir())

    def install(self) -> Path:
        return self.runtime.install_from_fab(self.fab, skip_prompt=True)

    def assert_refused(self, reason: str) -> None:
        """The run is refused, nothing is on the disk but the log's line, and the server learns the reason."""
        with pytest.raises(MessageRefused, match=reason):
            self.install()
        self.runtime.push_message(None, Message(Error(2, "anything"), reply_to=self.message), None)
        assert self.sent[-1].error.reason.startswith("PolicyError: ")
        line = audit_log.read_log(self.log)[-1]
        assert line["event"] == "refused"
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(line["reason"])

    def push(self, upload: bytes) -> Message:
        arrays = {chunking.slice_key(0): Array("uint8", (len(upload),), chunking.STYPE, upload)}
        self.runtime.push_message(
            None, Message(RecordDict({"fedveil": ArrayRecord(arrays)}), reply_to=self.message), None
        )
        return self.sent[-1]


class Tells(ToyTrainer):
    """A bundle's own trainer, which says what it likes."""

    def train(self, *given, **named):
        return replace(super().train(*given, **named), report={"loss_held_out": 0.5, "rows_held_out": 64.0})


def upload(lora_spec, lora_weights, trainer=ToyTrainer) -> bytes:
    exchange = MessageExchange(FedAvg(), "fedavg", lora_spec)
    state = FedAvg().init(param_specs_of(lora_weights), lora_weights, rng.initial_stream(0, "weights"))
    ctx = RoundContext(0, "north", True, b"s" * 32)
    _, parts = exchange.participate(exchange.broadcast(state, ctx), None, trainer(lora_spec, 3), ctx)
    return b"".join(parts)


def test_a_permitted_bundle_is_installed_and_the_log_says_who_what_and_how_much(
    tmp_path, monkeypatch, fab, lora_spec, lora_weights
):
    digest = hashlib.sha256(fab).hexdigest()
    tomorrow = datetime.now(UTC).date() + timedelta(days=1)
    signed = {"run.name": "r", "run.signature": run_signature.sign_run(KEY, "r", tomorrow, digest)}
    policy = f'app-digests = ["{digest}"]\nsigners = ["{PUBLIC} of-the-consortium"]\nmethods = ["fedavg"]'
    site = Site(tmp_path, monkeypatch, fab, policy, run_config=signed)
    assert (site.install() / "client_app" / "app.py").is_file()
    data = upload(lora_spec, lora_weights)
    reply = site.push(data)
    admitted, sent = audit_log.read_log(site.log)
    assert (admitted["event"], admitted["app"], admitted["signer"], admitted["flower_run"]) == (
        "admitted",
        digest,
        PUBLIC,
        "11",
    )
    assert (admitted["site"], admitted["down_bytes"], admitted["server_log"]) == ("north", 1000, f"3:{'ab' * 32}")
    assert admitted["policy"] == hashlib.sha256(policy.encode()).hexdigest()
    assert find_copy(site.log.parent, admitted["policy"]).read_text() == policy
    assert (sent["event"], sent["up_bytes"]) == ("sent", len(data))
    assert sent["fields"] == [[name, 4 * w.numel()] for name, w in lora_weights.items()]
    assert sent["figures"] == ["loss_trained", "steps"]
    assert str(reply.content["log"]["head"]) == str(audit_log.verify_log(site.log))
    assert {"FEDVEIL_APP_DIGEST": digest, "FEDVEIL_APP_SIGNER": PUBLIC}.items() <= dict(clientapp.os.environ).items()


@pytest.mark.parametrize(
    "policy,reason",
    [
        (None, "requires a policy, but its node config names none"),
        ('methods = ["fedrand"]', "method.name: this site permits"),
        (f'app-digests = ["{"0" * 64}"]', "app digest: this site permits .* to app-digests in its policy"),
        (f'signers = ["{PUBLIC}"]', "app signer: .* found none verified"),
        ("max-bytes-a-round = 999", "at most 999, found 1184 in the server's message alone"),
        ("methods = fedavg", "policy: the site's policy file is invalid"),
        ("hours = []", "hours: this site trains only at"),
        ("require-secure = true", "secure.enabled: this site permits only masked uploads"),
    ],
)
def test_a_refusal_comes_before_anything_of_the_bundle_is_on_the_disk(tmp_path, monkeypatch, fab, policy, reason):
    site = Site(tmp_path, monkeypatch, fab, policy)
    site.assert_refused(reason)
    assert not (tmp_path / "flower").exists()


@pytest.mark.parametrize(
    "policy,reason",
    [
        (f'app-digests = ["{"0" * 64}"]', "app digest: this site permits .* to app-digests in its policy"),
        ('methods = ["fedavg"]', "message: it lacks FedVeil's records order and fedveil .found numbers, settings"),
        (None, "requires a policy, but its node config names none"),
        ("methods = fedavg", "policy: the site's policy file is invalid"),
    ],
)
def test_the_message_of_another_app_is_refused_for_what_it_is(tmp_path, monkeypatch, fab, policy, reason):
    """The site's log is evidence: it says which bundle was refused and why, and not which name was missing in it."""
    site = Site(tmp_path, monkeypatch, fab, policy)
    site.message.content = RecordDict({"numbers": ArrayRecord(), "settings": ConfigRecord({"lr": 0.1})})
    site.assert_refused(reason)
    line = audit_log.read_log(site.log)[-1]
    assert (line["app"], line["flower_run"]) == (hashlib.sha256(fab).hexdigest(), "11")
    assert not (tmp_path / "flower").exists()


ZEROS = Array("uint8", (3_000_000,), chunking.STYPE, bytes(3_000_000))
BESIDE = {
    "a second record of arrays": {"more": ArrayRecord({"0": ZEROS})},
    "a record of settings": {"more": ConfigRecord({"x": bytes(3_000_000)})},
    "metrics": {"more": MetricRecord({"x": 1.0})},
    "Flower's settings, as arrays": {"config": ArrayRecord({"0": ZEROS})},
    "Flower's settings, large": {"config": ConfigRecord({"x": bytes(3_000_000)})},
    "names of slices": {"fedveil": ArrayRecord({"x" * 3_000_000: Array("uint8", (1,), chunking.STYPE, b"x")})},
    "the message as settings": {"fedveil": ConfigRecord({"x": 1})},
    "the order as arrays": {"order": ArrayRecord({"0": ZEROS})},
}


@pytest.mark.parametrize("beside", BESIDE)
def test_no_byte_of_a_message_escapes_the_bound_of_the_policy(tmp_path, monkeypatch, fab, beside):
    """`max-bytes-a-round` counts all that came, and a record that is not known is refused."""
    site = Site(tmp_path, monkeypatch, fab, "max-bytes-a-round = 1_000_000")
    for name, record in BESIDE[beside].items():
        site.message.content[name] = record
    site.assert_refused(
        "it may contain only .*, but has (more|config|fedveil|order) of type|max-bytes-a-round|1000000|1,000,000"
    )
    assert "KeyError" not in audit_log.read_log(site.log)[-1]["reason"]


def test_flower_s_own_settings_are_a_known_record(tmp_path, monkeypatch, fab):
    site = Site(tmp_path, monkeypatch, fab, "max-bytes-a-round = 1_000_000")
    site.message.content["config"] = ConfigRecord({"server-round": 1})
    assert site.install() == site.folder


@pytest.mark.parametrize("message_type,refused", [("train", True), ("train.default", True), ("query.secure", False)])
def test_a_round_served_too_often_is_refused_by_whatever_name_the_server_asks_for_a_turn(
    tmp_path, monkeypatch, fab, message_type, refused
):
    """Questions about keys and shares count as no serving."""
    ReplayGuard(tmp_path / "state" / "r-0a1b2c3d" / "north").count(0, 3, 1)
    site = Site(tmp_path, monkeypatch, fab, "max-retries = 0", message_type=message_type)
    if refused:
        site.assert_refused("as often as it permits .1 time")
    else:
        site.install()


def test_a_flower_run_has_one_name_and_the_guard_sees_to_it_before_bundled_code(tmp_path, monkeypatch, fab):
    """By that name scores and rounds are counted."""
    Site(tmp_path, monkeypatch, fab, "").install()
    other = {"order": {"run": "r-99999999"}}
    Site(tmp_path, monkeypatch, fab, "", **other).assert_refused("run: this Flower run began with 'r-0a1b2c3d'")
    Site(tmp_path, monkeypatch, fab, "", run_id=12, **other).install()


def test_a_changed_app_has_another_digest_and_is_refused(tmp_path, monkeypatch, app, fab):
    changed = tmp_path / "changed"
    shutil.copytree(app, changed)
    file = changed / "client_app" / "app.py"
    file.write_text(file.read_text() + "#\n")
    other = bundled(changed)
    site = Site(tmp_path, monkeypatch, other, f'app-digests = ["{hashlib.sha256(fab).hexdigest()}"]')
    site.assert_refused(f'found "{hashlib.sha256(other).hexdigest()}"')


@pytest.mark.parametrize(
    "changes,reason",
    [
        ({"hash_str": "0" * 64}, "app digest: the SuperLink names"),
        ({"fab_hash": "0" * 64}, "app digest: the SuperLink names"),
        ({"fab_id": "us/other"}, "instead of us.toy"),
        ({"fab_version": "9"}, "instead of us.toy"),
    ],
)
def test_a_superlink_that_names_another_app_than_it_sends_is_refused(tmp_path, monkeypatch, fab, changes, reason):
    """Flower would install the one and load the other, which may lie there from an earlier run."""
    Site(tmp_path, monkeypatch, fab, "", **changes).assert_refused(reason)


@pytest.mark.parametrize("what", ["changed", "added", "removed", "compiled", "link"])
def test_what_lies_in_the_apps_folder_already_is_not_trusted(tmp_path, monkeypatch, fab, what):
    site = Site(tmp_path, monkeypatch, fab, "")
    folder = site.install()
    file = folder / "client_app" / "app.py"
    if what == "changed":
        file.write_bytes(file.read_bytes()[:-1] + b" ")
    elif what == "added":
        (folder / "flwr.py").write_text("")
    elif what == "removed":
        file.unlink()
    elif what == "link":
        (folder / "more").symlink_to(folder / "client_app", target_is_directory=True)
    else:
        cache = folder / "client_app" / "__pycache__"
        cache.mkdir()
        (cache / "app.cpython-311.pyc").write_bytes(b"not the source")
        assert site.install() == folder
        assert not cache.exists()
        return
    site.assert_refused("the bundle's (own files|file )")


def test_a_bundle_that_is_there_is_compared_and_not_extracted_anew(tmp_path, monkeypatch, fab):
    """Flower extracts all files of the bundle for each message and then returns the folder that is there."""
    site = Site(tmp_path, monkeypatch, fab, "")
    folder, compared = site.install(), []
    again = Site(tmp_path, monkeypatch, fab, "")
    again.guard._install = lambda *args, **kwargs: pytest.fail("extracted anew")
    require_same = again.guard._bundle.require_same
    monkeypatch.setattr(again.guard._bundle, "require_same", lambda *of: compared.append(of) or require_same(*of))
    assert again.install() == folder
    assert compared == [(fab, folder)]


def test_a_folder_elsewhere_that_the_server_names_for_the_apps_is_left_alone(tmp_path, monkeypatch, fab):
    """Before files are compared, compiled code among them is dropped."""
    (tmp_path / "flower" / "apps" / "us.toy.0.1.0").mkdir(parents=True)
    named = "0.1.0/../../../else"
    elsewhere = tmp_path / f"else.{hashlib.sha256(fab).hexdigest()[:8]}"
    cache = elsewhere / "__pycache__"
    cache.mkdir(parents=True)
    Site(tmp_path, monkeypatch, fab, "", fab_version=named).assert_refused("instead of us.toy")
    (tmp_path / "flower" / "apps" / f"us.toy.0.2.0.{elsewhere.name[5:]}").symlink_to(elsewhere)
    Site(tmp_path, monkeypatch, fab, "", fab_version="0.2.0").assert_refused("instead of us.toy")
    assert cache.is_dir()


def test_an_upload_beyond_the_bounds_is_withheld(tmp_path, monkeypatch, fab, lora_spec, lora_weights):
    data = upload(lora_spec, lora_weights)
    for policy, reason in (
        (f"max-bytes-a-round = {999 + len(data)}", f"found {1000 + len(data)}"),
        ("min-examples = 4", "at least 4 examples, found fewer (min-examples of its policy)"),
    ):
        site = Site(tmp_path, monkeypatch, fab, policy)
        site.install()
        reply = site.push(data)
        assert reason in reply.error.reason
        assert (audit_log.read_log(site.log)[-1]["event"], len(site.sent)) == ("withheld", 1)
    site = Site(tmp_path, monkeypatch, fab, f"max-bytes-a-round = {1000 + len(data)}\nmin-examples = 3")
    site.install()
    assert not site.push(data).has_error()


def test_a_score_of_held_out_rows_that_the_site_has_not_counted_is_withheld(
    tmp_path, monkeypatch, fab, lora_spec, lora_weights
):
    for policy in ("", "max-scores = 3"):
        site = Site(tmp_path, monkeypatch, fab, policy)
        site.install()
        reply = site.push(upload(lora_spec, lora_weights, Tells))
        assert "loss_held_out: this site permits" in reply.error.reason
        assert audit_log.read_log(site.log)[-1]["event"] == "withheld"


def test_something_else_than_an_upload_is_withheld_and_the_server_learns_no_text(tmp_path, monkeypatch, fab):
    site = Site(tmp_path, monkeypatch, fab, "")
    site.install()
    site.runtime.push_message(
        None, Message(RecordDict({"rows": ConfigRecord({"name": "Ada"})}), reply_to=site.message), None
    )
    assert site.sent[-1].error.reason.startswith(
        "PolicyError: reply: it must contain the record fedveil and no other, but has 1"
    )
    assert "Ada" not in site.sent[-1].error.reason


def test_where_the_log_cannot_be_written_the_run_is_refused(tmp_path, monkeypatch, fab):
    site = Site(tmp_path, monkeypatch, fab, "")
    site.log.parent.mkdir()
    site.log.write_text("not a line\n")
    with pytest.raises(MessageRefused, match="StateError at the site"):
        site.install()
    assert not (tmp_path / "flower").exists()


@pytest.mark.long
def test_the_modules_of_the_installation_make_room_for_the_bundles():
    code = (
        "import sys; import fedveil.client_app.policy.decisions, fedveil.records.audit_log; "
        "from fedveil.guard.clientapp import unload_modules; unload_modules();"
        "print(sorted(n for n in sys.modules if n.split('.')[0] in ('client_app', 'fedveil', "
        "'strategies')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


@pytest.mark.long
def test_the_entry_point_imports_no_torch_and_refuses_another_flower(tmp_path, monkeypatch):
    script = write_guard(tmp_path / "bin")
    assert script.name == "flwr-clientapp"
    assert script.stat().st_mode & 0o111
    code = (
        f"import sys; sys.argv = ['flwr-clientapp', '--help']; exec(compile(open({str(script)!r}).read(), 'x', 'exec'))"
    )
    wrapped = f"import sys\ntry:\n    exec({code!r})\nexcept SystemExit: pass\n"
    wrapped += "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", wrapped], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "Runtime API" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.40.0")
    with pytest.raises(SystemExit, match="this is version .* but 1.39"):
        clientapp.main()


@pytest.mark.long
def test_the_console_names_the_digest_that_flower_would_send(app, fab, tmp_path, capsys):
    from fedveil.console.main import main

    assert console_app.bundle_digest(app) == hashlib.sha256(fab).hexdigest()
    (tmp_path / "toy.fab").write_bytes(fab)
    (tmp_path / "key").write_bytes(
        KEY.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    )
    sign = ["app", "sign", "--run", "first", "--until", "2999-12-31", "--key"]
    assert main([*sign, str(tmp_path / "key"), str(tmp_path / "toy.fab")]) == 0
    name, text = (json.loads(line.partition("=")[2]) for line in capsys.readouterr().out.splitlines())
    assert name == "first"
    assert run_signature.verify_signer(text, "first", hashlib.sha256(fab).hexdigest(), date(2999, 12, 31)) == PUBLIC
    assert main(["app", "digest", str(tmp_path / "none")]) == 2
    assert main([*sign, str(ROOT / "pyproject.toml"), str(tmp_path / "toy.fab")]) == 2
    for arguments in (["--run", "a/b"], ["--until", "2001-01-01"], ["--until", "soon"]):
        with pytest.raises(SystemExit) if "--until" in arguments else nullcontext():
            assert main([*sign, str(tmp_path / "key"), str(tmp_path / "toy.fab"), *arguments]) == 2
    assert zipfile.is_zipfile(tmp_path / "toy.fab")


OWN = b"import torch\n"
OWN_DIGEST = f"sha256:{hashlib.sha256(OWN).hexdigest()}"


def with_files(fab: bytes, files: dict[str, bytes]) -> bytes:
    """Return the bundle with further files, without their digests: what the guard reads before Flower installs it."""
    out = io.BytesIO(fab)
    with zipfile.ZipFile(out, "a") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


@pytest.mark.parametrize(
    ("files", "policy", "reason"),
    [
        ({"mine.py": OWN}, f'modules = ["sha256:{"0" * 64}"]', "task.module: this site permits .*found .mine. with"),
        ({"mine.py": OWN}, "max-rounds = 9", "task.module: this site permits no own model, found .mine. with the"),
        ({"mine.py": OWN + b"#"}, f'modules = ["{OWN_DIGEST}"]', "task.module: this site permits"),
        (
            {"mine.py": OWN, "other.py": OWN},
            f'modules = ["{OWN_DIGEST}"]',
            "may contain only the file of task.module, but also contains other.py",
        ),
        (
            {"other.py": OWN},
            f'modules = ["{OWN_DIGEST}"]',
            "may contain only the file of task.module, but also contains other.py",
        ),
        ({}, f'modules = ["{OWN_DIGEST}"]', "fedveil/own/mine.py is missing from the bundle"),
        (
            {"mine.py": OWN, "__init__.py": OWN},
            f'modules = ["{OWN_DIGEST}"]',
            "only plain Python files.*__init__.py",
        ),
        (
            {"mine.py": OWN, "mine/__init__.py": OWN},
            f'modules = ["{OWN_DIGEST}"]',
            "only plain Python files.*mine/__init__.py",
        ),
        ({"mine.py": OWN, "mine.so": b"0"}, f'modules = ["{OWN_DIGEST}"]', "only plain Python files.*mine.so"),
    ],
)
def test_an_own_model_runs_only_if_the_policy_names_its_file(files, policy, reason, tmp_path, monkeypatch, fab):
    content = with_files(fab, {f"fedveil/own/{name}": text for name, text in files.items()})
    config = {"task.module": "mine", "task.name": "own-model"}
    site = Site(tmp_path, monkeypatch, content, policy, run_config=config)
    site.assert_refused(reason)


def test_the_log_names_the_file_of_an_own_model(tmp_path, monkeypatch, fab):
    content = with_files(fab, {"fedveil/own/mine.py": OWN, "fedveil/own/__init__.py": b'"""Own models."""'})
    site = Site(
        tmp_path, monkeypatch, content, f'modules = ["{OWN_DIGEST}"]\ntasks = ["own-model"]',
        run_config={"task.module": "mine", "task.name": "own-model"},
    )  # fmt: skip
    assert site.guard._admit(content) == hashlib.sha256(content).hexdigest()
    assert site.guard._about["module"] == f"mine {OWN_DIGEST}"
