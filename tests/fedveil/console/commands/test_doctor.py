"""`fedveil doctor`: every check once where it is right and once where it is not."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from datasets import ClassLabel, Dataset, Features, Sequence, Value
from PIL import Image
from transformers import ByT5Tokenizer

from fedveil.client_app.node_config import SiteConfig
from fedveil.config import parse
from fedveil.console.doctor import checks, data_checks, example_preview, host_checks, policy_checks
from fedveil.console.flower.certificates import new_ca, write_certificate, write_node_key, write_server, write_tls
from fedveil.console.main import main
from fedveil.contract.task import Example
from fedveil.data import file_probe
from fedveil.errors import TaskError
from fedveil.guard import flower
from fedveil.models import bundled, loading
from fedveil.records import audit_log
from fedveil.server_app.validation_split import mark_held_out
from tests.conftest import ROOT
from tests.fedveil.console.tls import tls_server


def test_the_fleet_port_must_show_a_certificate_of_this_ca(tmp_path):
    write_tls(tmp_path)
    with tls_server(tmp_path) as address:
        assert checks.check_fleet_port(address, tmp_path / "ca.crt").verdict == "ok"
    forbidden, not_it = b"HTTP/1.1 403 Forbidden\r\n\r\n{}", b"HTTP/1.1 200 OK\r\n\r\nthis port serves sites"
    for says in (forbidden, not_it, b"x" * 10**6, b""):
        with tls_server(tmp_path, ("http/1.1",), says) as address:  # as the control port is
            result = checks.check_fleet_port(address, tmp_path / "ca.crt")
        assert (result.verdict, "speaks TLS and an unknown protocol, but" in result.text) == ("fail", True), result
    other, _ = new_ca("FedVeil CA", timedelta(days=1))  # of the same name
    write_certificate(tmp_path / "other.crt", other)
    with tls_server(tmp_path) as address:
        result = checks.check_fleet_port(address, tmp_path / "other.crt")
    assert result.verdict == "fail"
    assert "check that ca.crt is this federation's" in result.text


@pytest.mark.parametrize("here", flower.LINES)
@pytest.mark.parametrize("there", flower.LINES)
def test_a_server_with_the_other_flower_is_named_as_such(here, there, tmp_path, monkeypatch):
    write_tls(tmp_path)
    monkeypatch.setattr(flower, "installed_release", lambda: here)
    with tls_server(tmp_path, ("h2",) if there.speaks == "gRPC" else ("http/1.1",)) as address:
        result = checks.check_fleet_port(address, tmp_path / "ca.crt")
    assert result.verdict == ("ok" if here.speaks == there.speaks else "fail")
    if here.speaks != there.speaks:
        assert f"speaks TLS and {there.speaks}, but Flower {here.release} here speaks {here.speaks}" in result.text
        known = " or ".join(line.release for line in flower.LINES if line.speaks == there.speaks)
        assert f"A server with Flower {known} speaks {there.speaks}." in result.text


def test_the_fleet_port_must_have_the_name_that_the_site_uses_and_a_valid_certificate(tmp_path):
    for names, days, reason in ((["fl.example.org"], 1, "mismatch"), (["localhost"], -1, "expired")):
        ca, key = new_ca("CA", timedelta(days=2))
        write_certificate(tmp_path / "ca.crt", ca)
        if days < 0:
            write_expired(tmp_path, ca, key)
        else:
            write_server(tmp_path, ca, key, names, timedelta(days=days))
        with tls_server(tmp_path) as address:
            result = checks.check_fleet_port(address, tmp_path / "ca.crt")
        assert (result.verdict, reason in result.text) == ("fail", True), result
    write_server(tmp_path, ca, key, ["localhost"], timedelta(days=1))
    with tls_server(tmp_path) as address:  # the certificate is valid, and not for this way to the server
        assert (
            "mismatch" in checks.check_fleet_port(address.replace("localhost", "127.0.0.1"), tmp_path / "ca.crt").text
        )


def write_expired(folder: Path, ca, key) -> None:
    """Valid from five minutes ago until one second after: the past."""
    write_server(folder, ca, key, ["localhost"], timedelta(minutes=-4))


def test_what_does_not_listen_or_is_plain_is_said(tmp_path):
    write_tls(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert checks.check_closed_port("127.0.0.1", port, "control port").verdict == "fail"
    assert checks.check_closed_port("127.0.0.1", port, "control port").verdict == "ok"
    assert "the firewall must allow" in checks.check_fleet_port(f"127.0.0.1:{port}", tmp_path / "ca.crt").text
    assert checks.run_check("fleet port", lambda: checks.check_fleet_port("host", tmp_path / "ca.crt")).text.endswith(
        "found 'host'"
    )


def test_a_certificate_is_judged_by_its_days(tmp_path):
    ca, _ = new_ca("CA", timedelta(days=90))
    write_certificate(tmp_path / "ca.crt", ca)
    now = datetime.now(UTC)
    for days, verdict in ((-1, "fail"), (0, "ok"), (59, "ok"), (61, "warn"), (91, "fail")):
        assert checks.check_certificate(tmp_path / "ca.crt", now + timedelta(days=days)).verdict == verdict, days
    assert (
        "provision the federation again" in checks.check_certificate(tmp_path / "ca.crt", now + timedelta(days=91)).text
    )
    write_tls(tmp_path)  # with a certificate of the server, which the CA signed
    ends = checks.check_certificate(tmp_path / "server.pem", now + timedelta(days=99999))
    assert (ends.verdict, "members renew-server" in ends.text) == ("fail", True)


def test_a_key_must_be_p384_and_its_owners_alone(tmp_path):
    write_node_key(tmp_path / "key")
    assert checks.private_key(tmp_path / "key").verdict == "ok"
    (tmp_path / "key").chmod(0o640)
    assert "mode 640" in checks.private_key(tmp_path / "key").text
    assert checks.run_check("key", lambda: checks.private_key(tmp_path / "none")).verdict == "fail"


@pytest.mark.parametrize("answer,verdict", [(b"\x08\x01", "ok"), (b"\x08\x02", "fail"), (b"", "fail")])
def test_the_health_check_is_the_standard_one(answer, verdict):
    server = grpc.server(ThreadPoolExecutor(1))
    check = grpc.unary_unary_rpc_method_handler(lambda request, context: answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert checks.check_health(f"127.0.0.1:{port}").verdict == verdict
        assert main(["doctor", "--health", f"127.0.0.1:{port}"]) == (verdict == "fail")
    finally:
        server.stop(None).wait()
    assert checks.check_health(f"127.0.0.1:{port}").text.endswith("UNAVAILABLE")


def test_a_site_that_the_server_has_not_heard_for_75_seconds_fails_the_check(tmp_path, capsys):
    file = tmp_path / "heartbeat"
    for ago, verdict, words in (
        (None, "warn", "the server has answered no heartbeat yet"), (3, "ok", "heard by the server 3 s ago"),
        (70, "ok", "s ago"), (80, "fail", "not heard by the server since"),
    ):  # fmt: skip
        if ago is not None:
            file.touch()
            os.utime(file, (time.time() - ago,) * 2)
        assert main(["doctor", "--heartbeat", str(file)]) == (verdict == "fail")
        (line,) = capsys.readouterr().out.splitlines()  # of no other check
        assert line.startswith(f"{verdict:<5} heartbeat")
        assert words in line


def test_the_policy_check_warns_of_one_that_names_no_app(tmp_path):
    file = tmp_path / "site-policy.toml"
    for text, verdict, words in (
        ('methods = ["fedrand"]', "warn", "neither app-digests nor signers"),
        (f'app-digests = ["{"ab" * 32}"]', "warn", "has no [permits]"),
        (f'app-digests = ["{"ab" * 32}"]\n[permits]\n', "ok", "is readable"),
        ("app-digests = []\n[permits]\n", "warn", "permits nothing yet (empty: app-digests)"),
        (
            f'methods = ["fedrnd", "fedavg"]\ntasks = ["sorting"]\napp-digests = ["{"ab" * 32}"]\n[permits]\n',
            "warn",
            "methods permits fedrnd, which is not installed here; did you mean fedrand?; tasks permits sorting, which",
        ),
        (f'app-digests = ["{"ab" * 32}"]\ndelta = 0.5\n[permits]\n', "warn", "delta 0.5 is at least 0.01"),
        (f'app-digests = ["{"ab" * 32}"]\nmin-noise-multiplier = 1e-9\n[permits]\n', "warn", "hides nothing"),
        (f'app-digests = ["{"ab" * 32}"]\nmax-epsilon = 8.5\n[permits]\n', "warn", "use 3, or at most 8"),
        (f'app-digests = ["{"ab" * 32}"]\nmax-epsilon = 8\n[permits]\n', "ok", "is readable"),
        (
            f'app-digests = ["{"ab" * 32}"]\nmax-epsilon = 3\nmin-examples = 200\ndelta = 0.006\n[permits]\n',
            "warn",
            "delta 0.006 is above 1 / 200",
        ),
    ):
        file.write_text(text)
        result = policy_checks.check_policy_file(str(file))
        assert (result.verdict, words in result.text) == (verdict, True), result
    file.write_text("methods = 3")
    assert checks.run_check("policy", lambda: policy_checks.check_policy_file(str(file))).verdict == "fail"
    assert policy_checks.check_policy_file("").verdict == "warn"


def test_versions_clock_disk_and_entry_point_of_this_machine(tmp_path, monkeypatch):
    from fedveil.console.flower.site_process import write_guard

    assert checks.check_versions().verdict == "ok"
    assert checks.check_clock().verdict in ("ok", "warn")
    assert checks.check_disk(tmp_path / "not" / "yet").text.endswith(f"free at {tmp_path}")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 5e8})())
    assert checks.check_disk(tmp_path).verdict == "fail"
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.40.0")  # which nobody has tried
    assert checks.check_versions().verdict == "fail"
    assert checks.entry_point().verdict == "warn"
    write_guard(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert checks.entry_point().verdict == "ok"


def test_other_users_are_a_finding_where_the_kernel_names_no_owners_and_there_is_no_container(monkeypatch):
    person = type("Entry", (), {"pw_name": "ann", "pw_uid": 4711, "pw_shell": "/bin/bash"})
    daemon = type("Entry", (), {"pw_name": "www", "pw_uid": 4712, "pw_shell": "/usr/sbin/nologin"})
    monkeypatch.setattr(host_checks, "_CONTAINER_MARKS", ())
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("pwd.getpwall", lambda: [person, daemon])
    assert (
        host_checks.check_other_users().verdict,
        "the kernel reports the owner" in host_checks.check_other_users().text,
    ) == (
        "ok",
        True,
    )
    monkeypatch.setattr(host_checks, "_kernel_names_owners", lambda: False)
    result = host_checks.check_other_users()
    assert (result.verdict, "1 other users can log in (ann)" in result.text) == ("warn", True), result
    monkeypatch.setattr("pwd.getpwall", lambda: [daemon])
    assert host_checks.check_other_users().verdict == "ok"
    monkeypatch.setattr("pwd.getpwall", lambda: [person])
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert host_checks.check_other_users().verdict == "ok"


def test_the_kernel_is_asked_whose_a_connection_is(monkeypatch):
    assert host_checks._kernel_names_owners()
    monkeypatch.setattr("os.geteuid", lambda: 4711)
    assert not host_checks._kernel_names_owners()


def test_more_cpus_than_there_are_would_be_refused_by_the_engine(monkeypatch):
    monkeypatch.delenv("FEDVEIL_CPUS", raising=False)
    assert f"cpus: ${{FEDVEIL_CPUS:-{host_checks._CPUS}}}" in (ROOT / "compose.yaml").read_text()
    for asked, there, verdict in (("", 1, "warn"), ("", 2, "ok"), ("1", 1, "ok"), ("4", 2, "warn"), ("1.5", 1, "warn")):
        monkeypatch.setenv("FEDVEIL_CPUS", asked)
        monkeypatch.setattr("os.cpu_count", lambda there=there: there)
        assert host_checks.check_cpu_limit().verdict == verdict, (asked, there)
    assert "FEDVEIL_CPUS=1 " in host_checks.check_cpu_limit().text
    monkeypatch.setenv("FEDVEIL_CPUS", "many")
    assert checks.run_check("cpus", host_checks.check_cpu_limit).verdict == "fail"


def test_at_the_server_flowers_own_superlink_is_a_finding(tmp_path, monkeypatch, capsys):
    from fedveil.console.flower.site_process import write_own_ports, write_superlink

    monkeypatch.setattr("psutil.process_iter", lambda attributes: [])
    for folder, write in (("fleet", write_superlink), ("own", write_own_ports)):
        write(tmp_path / folder)
        monkeypatch.setenv("PATH", str(tmp_path / folder))
        assert host_checks.check_superlink().verdict == "ok"
    flowers = tmp_path / "flowers" / "flower-superlink"
    flowers.parent.mkdir()
    flowers.write_text("#!/usr/bin/python\nfrom flwr.superlink.cli import flower_superlink\n")
    flowers.chmod(0o755)
    monkeypatch.setenv("PATH", str(flowers.parent))
    assert (host_checks.check_superlink().verdict, "is Flower's own" in host_checks.check_superlink().text) == (
        "warn",
        True,
    )
    main(["doctor", "--federation", str(tmp_path)])
    assert "warn  superlink " in capsys.readouterr().out
    monkeypatch.setenv("PATH", str(tmp_path / "own"))  # what runs counts, not what would be started
    process = type("Process", (), {"pid": 0, "info": {"cmdline": ["python", str(flowers), "--host"]}})
    monkeypatch.setattr("psutil.process_iter", lambda attributes: [process])
    assert host_checks.check_superlink().verdict == "warn"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("psutil.process_iter", lambda attributes: [])
    assert "run this check where the server runs" in host_checks.check_superlink().text


@pytest.mark.parametrize(
    ("settings", "verdict", "line"),
    [
        (["task.data=DATA"], "ok", "3 examples in DATA/train.jsonl, with mr, ref"),
        (["task.data=DATA", "task.source-column=note"], "fail", 'expected column "note" in "DATA/train.jsonl"'),
        (["task.data=/nope"], "fail", 'there is no folder or file of rows at "/nope"'),
        (["task.evaluation=DATA"], "fail", '  expected a file of the split "test" in "DATA", such as test.jsonl'),
        (["task.server-data=DATA/train.jsonl"], "ok", "3 examples in DATA/train.jsonl"),
        (["task.data=DATA/large"], "ok", "2 examples or more in DATA/large/train.jsonl"),
        (["task.data=DATA/large", "task.target-column=late"], "fail", 'expected column "late" in'),
        (["task.data=DATA", "task.name=clip-prompt", "task.target-column=ref"], "fail", 'expected column "image" in'),
    ],
)
def test_the_data_of_a_run_is_looked_at_without_its_model(settings, verdict, line, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(file_probe, "_MOST_BYTES", 100)
    monkeypatch.setattr(loading, "load_causal", None)
    (tmp_path / "train.jsonl").write_text('{"mr": "a", "ref": "b"}\n' * 3)
    (tmp_path / "large").mkdir()
    rows = [{"mr": "a" * 20, "ref": "b"}] * 2 + [{"mr": "a" * 20, "late": "b"}]
    (tmp_path / "large" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [part for text in settings for part in ("--set", text.replace("DATA", str(tmp_path)))]
    assert main(["doctor", *options]) == int(verdict == "fail")
    output_line = next(row for row in capsys.readouterr().out.splitlines() if "task." in row)
    assert output_line.startswith(verdict)
    assert line.replace("DATA", str(tmp_path)) in output_line


def test_a_servers_examples_that_choose_the_model_are_counted(tmp_path, capsys):
    (tmp_path / "test.jsonl").write_text("".join(json.dumps({"mr": str(i), "ref": "b"}) + "\n" for i in range(40)))
    keys = {"task.evaluation": str(tmp_path), "evaluate.validation-share": 0.3, "evaluate.select-model": "best"}
    options = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
    assert main(["doctor", *options]) == 0
    line = next(row for row in capsys.readouterr().out.splitlines() if "validation-share" in row)
    held = sum(mark_held_out([Example({"mr": str(i), "ref": "b"}) for i in range(40)], parse(keys)))
    assert (
        line.split()
        == (
            f"ok evaluate.validation-share {held} of 40 test examples choose the model, "
            f"and the other {40 - held} test it"
        ).split()
    )
    (tmp_path / "dev.jsonl").write_text('{"mr": "a", "ref": "b"}\n')
    main(["doctor", *options])
    assert "the validation split chooses the model, so no test example is held out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("share", "scores", "words"),
    [
        (0.5, 7, "about 100 of 200 examples are held out, for at most 7 scores (max-scores)"),
        (0.1, 7, "fewer than 64 of its examples would be held out; it trains on all of them"),
        (0.5, 0, "its policy permits no scores of held-out examples (max-scores); no example is held out"),
    ],
)
def test_a_sites_examples_that_would_be_held_out_are_counted(share, scores, words, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"mr": "a", "ref": "b"}\n' * 200)
    (tmp_path / "policy.toml").write_text(f"max-scores = {scores}\n")
    site = SiteConfig.model_validate({"data": str(tmp_path), "policy": str(tmp_path / "policy.toml")})
    config = parse({"evaluate.validation-share": share, "evaluate.select-model": "best"})
    assert data_checks.check_site_data(site, config, []).text.endswith(f"; evaluate.validation-share: {words}")
    of_server = parse({**config.flat(), "task.evaluation": "x"})
    assert "validation-share" not in data_checks.check_site_data(site, of_server, []).text


def test_class_folders_and_parquet_are_counted_by_their_names(tmp_path, capsys):
    for name in ("a/1.png", "b/2.png", "b/note.txt"):
        (tmp_path / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2)).save(tmp_path / "train" / name, "PNG")
    look = ["doctor", "--set", "task.name=clip-prompt", "--set", f"task.data={tmp_path}"]
    assert main(look) == 0
    assert f"2 images in the folders of {tmp_path}/train; 1 files were not read: .txt (1)" in capsys.readouterr().out
    assert main(look) == 0
    assert 'unless the base names these classes, a run needs task.class-names = "a,b"' in capsys.readouterr().out
    assert main([*look, "--set", "task.class-names=b,a"]) == 0
    assert "class-names" not in capsys.readouterr().out
    assert main([*look, "--set", "task.class-names=a,c"]) == 1
    assert "among the 2 of the run (a, c), found 2 (a, b); the unknown ones are b" in capsys.readouterr().out
    image = io.BytesIO()
    Image.new("L", (2, 2)).save(image, "PNG")
    named = Features({"image": Value("binary"), "ref": ClassLabel(names=["x", "y"])})
    table = Dataset.from_dict({"image": [image.getvalue()], "ref": [1]}, features=named)
    table.to_parquet(tmp_path / "named.parquet")
    assert main(["doctor", "--set", "task.name=clip-prompt", "--set", f"task.data={tmp_path}/named.parquet"]) == 0
    assert 'a run needs task.class-names = "x,y"' in capsys.readouterr().out
    (tmp_path / "train" / "b" / "2.png").write_bytes(b"")
    assert main(look) == 1
    assert f"cannot decode the image in {tmp_path}/train/b/2.png" in capsys.readouterr().out
    Dataset.from_dict({"mr": ["a", "b"], "ref": ["c", "d"]}).to_parquet(tmp_path / "rows.parquet")
    assert main(["doctor", "--set", f"task.data={tmp_path}/rows.parquet"]) == 0
    assert "2 examples in" in capsys.readouterr().out
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    assert main(["doctor", "--set", f"task.data={tmp_path}/rows.parquet"]) == 1
    assert "as Parquet" in capsys.readouterr().out


def test_an_unknown_key_is_refused(capsys):
    assert main(["doctor", "--set", "train.epoch=3"]) == 2
    assert "error: train.epoch: unknown key" in capsys.readouterr().err


def test_a_site_from_its_kit(tmp_path, capsys):
    kit = tmp_path / "kit"
    kit.mkdir()
    write_tls(kit)
    (kit / "keys").mkdir()
    write_node_key(kit / "keys" / "node.key")
    (kit / "site.toml").write_text('federation = "p"\nsite = "north"\nsuperlink = "127.0.0.1:1"\n')
    (kit / "site-policy.toml").write_text(f'app-digests = ["{"ab" * 32}"]\n[permits]\n')
    rows = [json.dumps({"mr": f"name[{i}]", "ref": "text"}) for i in range(3)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    node = {
        "site": "north",
        "state-dir": str(tmp_path / "state"),
        "data": str(tmp_path),
        "policy": str(kit / "site-policy.toml"),
    }
    (kit / "node-config.toml").write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in node.items()))
    audit_log.append_entry(tmp_path / "state" / audit_log.NAME, "sent", {})
    assert main(["doctor", "--kit", str(kit)]) == 1
    verdicts = {line[6:28].strip(): line[:5].strip() for line in capsys.readouterr().out.splitlines()}
    assert (verdicts["fleet port"], verdicts["certificate ca.crt"]) == ("fail", "warn")  # a demo's CA lasts 30 days
    assert {verdicts[name] for name in ("key", "control port", "policy", "audit log", "data", "versions")} == {"ok"}
    (tmp_path / "state" / audit_log.NAME).write_text("{}\n")
    assert main(["doctor", "--kit", str(kit), "--set", "task.source-column=nothing"]) == 1
    stdout = capsys.readouterr().out
    assert 'expected column "nothing"' in stdout
    assert "line 1: expected a whole line with its own hash" in stdout
    (tmp_path / "run.toml").write_text('[task]\nsource-column = "nothing"\n')
    assert main(["doctor", "--kit", str(kit), "--config", str(tmp_path / "run.toml")]) == 1
    assert 'expected column "nothing"' in capsys.readouterr().out
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    assert main(["doctor", "--kit", str(kit)]) == 1
    assert "give the run's task with --config or --set" in capsys.readouterr().out
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    for text, words in (("min-examples = 3", ""), ("min-examples = 4", "fewer than min-examples = 4 in"), ("x", "")):
        (kit / "site-policy.toml").write_text(text)
        assert main(["doctor", "--kit", str(kit)]) == 1
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line[6:28].strip() == "data")
        assert (line.startswith("fail"), words in line, "3 examples in" in line) == (bool(words), True, True)
    assert main(["doctor", "--kit", str(ROOT)]) == 2


def test_examples_are_shown_as_they_are_trained_with_what_is_empty_cut_and_refused(tmp_path, capsys, caplog):
    rows = [{"mr": f"name[The Mill {i}]", "ref": "The Mill is a pub."} for i in range(4)]
    rows += [{"mr": "name[The Mill] " * 30, "ref": "x"}, {"mr": "name[Z]", "ref": " "}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--set", f"task.data={tmp_path}", "--set", "task.max-tokens=40"]
    assert main(["doctor", *given]) == 1
    said = capsys.readouterr().out
    assert (
        "fail  task.data as trained   of the first 6 rows, 1 are empty and 1 are refused; 1 of 5 examples are truncated"
        in said
    )
    assert "found an empty text in row 6 of" in said
    assert '  prompt  "name[The Mill 0]\\n"' in said
    assert '  answer  "The Mill is a pub.<|endoftext|>"' in said
    assert said.count("\nexample ") == 3
    assert main(["doctor", *given, "--set", 'task.empty-texts="drop"']) == 0
    assert (
        "warn  task.data as trained   of the first 6 rows, 1 are empty and 0 are refused; 1 of 5 examples are truncated"
        in capsys.readouterr().out
    )
    assert caplog.messages == []  # nothing of it is logged


def test_the_preview_has_the_prompt_of_the_bases_own_chat_template(tmp_path):
    from transformers import AutoTokenizer

    base = tmp_path / "base"
    shutil.copytree(bundled.bundled_folder("text-generation"), base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer.save_pretrained(base)
    (base / "model.safetensors").unlink()  # no weights are loaded
    (tmp_path / "train.jsonl").write_text(json.dumps({"mr": "name[X]", "ref": "X is a pub."}) + "\n")
    for chats, prompt in ((False, "name[X]\\n"), (True, "<user>name[X]<|endoftext|><assistant>")):
        config = parse({"task.model": str(base), "task.chat-template": chats})
        preview = example_preview.preview_examples("data", config, tmp_path, "train")
        assert preview.result.verdict == "ok"
        assert f'  prompt  "{prompt}"' in preview.lines
        own = '"<user>name[X]<|endoftext|><assistant>"'
        assert f"  the base's own chat template would give this prompt: {own}" in preview.lines


@pytest.mark.parametrize("is_small", [True, False], ids=["small", "large"])
@pytest.mark.parametrize("classes", ["O,B-DRUG,I-DRUG,B-DOSE,I-DOSE", "DRUG,DOSE", "DRUG,SITE"])
def test_the_preview_reads_tags_by_the_names_that_the_file_stores(tmp_path, monkeypatch, classes, is_small):
    if not is_small:
        monkeypatch.setattr(file_probe, "_MOST_BYTES", 0)
    names = ["O", "B-DOSE", "I-DOSE", "B-DRUG", "I-DRUG"]
    features = Features({"tokens": Sequence(Value("string")), "ner_tags": Sequence(ClassLabel(names=names))})
    row = {"tokens": ["folic", "acid", "5"], "ner_tags": [3, 4, 1]}
    Dataset.from_list([row], features=features).to_parquet(str(tmp_path / "train.parquet"))
    config = parse({
        "task.name": "token-classification", "task.source-column": "tokens", "task.target-column": "ner_tags",
        "task.class-names": classes,
    })  # fmt: skip
    preview = example_preview.preview_examples("data", config, tmp_path, "train")
    if "SITE" in classes:  # as training refuses it
        assert preview.result.verdict == "fail"
        assert "the unknown ones are B-DOSE, I-DOSE" in preview.result.text
    else:
        assert preview.result.verdict == "ok"
        assert preview.lines[1:] == ['  words   "folic/B-DRUG acid/I-DRUG 5/B-DOSE"']


@pytest.mark.parametrize("is_small", [True, False], ids=["small", "large"])
def test_the_preview_reads_classes_by_the_names_that_the_file_stores(tmp_path, monkeypatch, is_small):
    if not is_small:
        monkeypatch.setattr(file_probe, "_MOST_BYTES", 0)
    features = Features({"note": Value("string"), "ward": ClassLabel(names=["lung", "heart"])})
    Dataset.from_list([{"note": "short breath", "ward": 0}], features=features).to_parquet(
        str(tmp_path / "train.parquet")
    )
    config = parse({
        "task.name": "text-classification", "task.source-column": "note", "task.target-column": "ward",
        "task.class-names": "heart,lung",
    })  # fmt: skip
    preview = example_preview.preview_examples("data", config, tmp_path, "train")
    assert preview.lines[1:] == ['  text    "short breath"', "  classes lung"]


def test_the_preview_refuses_a_tokenizer_without_places_of_tokens_as_a_run_does(tmp_path):
    base = tmp_path / "base"
    shutil.copytree(bundled.bundled_folder("token-classification"), base)
    for file in base.glob("*token*"):
        file.unlink()
    ByT5Tokenizer().save_pretrained(base)
    (tmp_path / "train.conll").write_text("cough B-SIGN\n")
    config = parse({
        "task.name": "token-classification", "task.source-column": "tokens", "task.target-column": "ner_tags",
        "task.class-names": "SIGN", "task.model": str(base),
    })  # fmt: skip
    with pytest.raises(TaskError, match="the tokenizer ByT5Tokenizer in"):
        example_preview.preview_examples("data", config, tmp_path, "train")


@pytest.mark.long
def test_the_preview_of_images_and_of_classes(tmp_path):
    Image.new("RGB", (32, 32), (200, 0, 0)).save(tmp_path / "a.png")
    (tmp_path / "train.jsonl").write_text(
        json.dumps({"image": "a.png", "caption": ["a red tile", "red"], "note": "short breath", "ward": "lung"}) + "\n"
    )
    seeing = {"task.name": "vision-language", "task.target-column": "caption"}
    preview = example_preview.preview_examples("data", parse(seeing), tmp_path, "train")
    assert preview.result.verdict == "ok"
    assert [line.count("a red tile") for line in preview.lines if "answer" in line] == [1, 0]  # of two examples
    classes = {
        "task.name": "text-classification", "task.source-column": "note", "task.target-column": "ward",
        "task.class-names": "heart,lung",
    }  # fmt: skip
    preview = example_preview.preview_examples("data", parse(classes), tmp_path, "train")
    assert preview.result.verdict == "ok"
    assert preview.lines[1:] == ['  text    "short breath"', "  classes lung"]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "train.conll").write_text("short O\nbreath B-SIGN\n\ncough O\n\ncough I-SIGN\n")
    words = {
        "task.name": "token-classification", "task.source-column": "tokens", "task.target-column": "ner_tags",
        "task.class-names": "SIGN",
    }  # fmt: skip
    preview = example_preview.preview_examples("data", parse(words), tmp_path / "notes", "train")
    assert preview.result.verdict == "fail"
    assert "of the first 3 rows, 0 are empty and 1 are refused" in preview.result.text
    assert "row 3 of" in preview.result.text
    assert [line for line in preview.lines if "words" in line] == [
        '  words   "short/O breath/B-SIGN"', '  words   "cough/O"',
    ]  # fmt: skip
    pictures = {"task.name": "image-classification", "task.target-column": "ward", "task.class-names": "heart,lung"}
    assert example_preview.preview_examples("data", parse(pictures), tmp_path, "train") is None
