"""`fedveil push`: what a Hub gets, asked of one on this machine, and what is refused before it is asked."""

from __future__ import annotations

import base64
import http.server
import json
import threading
from pathlib import Path

import pytest

from fedveil.cards import card as cards
from fedveil.cards.signing import in_toto
from fedveil.console.main import main

TOKEN = "hf_secret"


class Hub(http.server.ThreadingHTTPServer):
    """A Hub with one repository at most."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.is_private: bool | None = None  # of the repository, None if there is none
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.tokens: set[str | None] = set()
        self.refuses = False
        self.yaml_errors: list[str] = []  # in the front matter of README.md

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(http.server.BaseHTTPRequestHandler):
    server: Hub

    def _answer(self, content: dict, code: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self._handle(b"")

    def do_POST(self):
        self._handle(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def _handle(self, body: bytes) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        hub.asked.append(f"{self.command} {path}")
        if path != "/api/agent-harnesses":  # a public list that huggingface_hub reads
            hub.tokens.add(self.headers.get("Authorization"))
        url = f"{hub.address}/me/model"
        if hub.refuses:
            self._answer({"error": "no write permission"}, 403)
        elif path == "/api/repos/create":
            if hub.is_private is not None:
                self._answer({"error": "exists", "url": url}, 409)
            else:
                asked = json.loads(body)
                hub.is_private = asked.get("visibility") == "private" or asked.get("private", False)
                self._answer({"url": url})
        elif path == "/api/models/me/model":
            self._answer(
                {"id": "me/model", "modelId": "me/model", "private": hub.is_private, "sha": "0" * 40, "tags": []}
            )
        elif path == "/api/validate-yaml":
            errors = [{"message": each} for each in hub.yaml_errors]
            self._answer({"errors": errors, "warnings": []}, 400 if errors else 200)
        elif "/preupload/" in path:
            names = [each["path"] for each in json.loads(body)["files"]]
            each = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            self._answer({"files": each})
        elif "/commit/" in path:
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer({"success": True, "commitOid": "1" * 40, "commitUrl": f"{url}/commit/{'1' * 40}"})
        else:
            self._answer({"error": f"unknown: {path}"}, 404)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    from huggingface_hub import constants

    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield hub
    hub.shutdown()
    hub.server_close()
    thread.join()


@pytest.fixture
def run(make_run) -> Path:
    """A run folder with a small model and its card."""
    folder = make_run()
    (folder / "id").write_text("0a1b2c3d 00\n")
    (folder / "final" / "processor").mkdir(parents=True)
    (folder / "final" / "adapter_config.json").write_text("{}")
    (folder / "final" / "adapter_model.safetensors").write_bytes(bytes(range(40)))
    (folder / "final" / "processor" / "config.json").write_text('{"a": 1}')
    assert main(["card", "make", str(folder)]) == 0
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_hub_gets_every_file_of_final_in_a_private_repository(hub, run, capsys):
    capsys.readouterr()
    assert main(["push", str(run), "me/model"]) == 0
    assert capsys.readouterr().out == f"{hub.address}/me/model/commit/{'1' * 40}\n"
    assert hub.files == files_of(run / "final")
    assert {cards.NAME, cards.PAGE, "README.md", "processor/config.json"} <= set(hub.files)
    assert hub.is_private is True
    assert hub.tokens == {f"Bearer {TOKEN}"}

    (run / "final" / "adapter_config.json").write_text('{"r": 4}')  # again, into the same repository
    assert main(["push", str(run / "final"), "me/model"]) == 0
    assert hub.files["adapter_config.json"] == b'{"r": 4}'


def test_a_public_repository_is_only_taken_if_that_is_said(hub, run, capsys):
    hub.is_private = False
    assert main(["push", str(run), "me/model"]) == 2
    assert "it is public, not private; add --public" in capsys.readouterr().err
    assert hub.files == {}
    assert main(["push", str(run), "me/model", "--public"]) == 0
    assert hub.files
    hub.is_private = True
    assert main(["push", str(run), "me/model", "--public"]) == 2
    assert "it is private, not public; leave out --public" in capsys.readouterr().err


def test_a_token_is_given_or_nothing_is_asked(hub, run, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", " ")
    stored = tmp_path / "stored"
    stored.write_text("hf_stored")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(stored))  # what `hf auth login` leaves
    assert main(["push", str(run), "me/model"]) == 2
    assert "set HF_TOKEN or give --token-file" in capsys.readouterr().err
    for wrong in (tmp_path / "none", tmp_path):
        assert main(["push", str(run), "me/model", "--token-file", str(wrong)]) == 2
        assert "--token-file: expected a file with a token" in capsys.readouterr().err
    (tmp_path / "two").write_text("hf_a\nhf_b")
    assert main(["push", str(run), "me/model", "--token-file", str(tmp_path / "two")]) == 2
    assert "hf_a" not in capsys.readouterr().err
    assert hub.asked == []
    (tmp_path / "token").write_text("hf_file\n")
    assert main(["push", str(run), "me/model", "--token-file", str(tmp_path / "token")]) == 0
    assert hub.tokens == {"Bearer hf_file"}


def test_what_is_not_a_whole_model_is_refused_before_the_hub_is_asked(hub, run, capsys, tmp_path):
    final = run / "final"

    def refused(folder=run, repo="me/model") -> str:
        assert main(["push", str(folder), repo]) == 2
        assert hub.asked == []
        return capsys.readouterr().err

    assert "fedveil card make" in refused(tmp_path)
    assert 'expected "owner/name"' in refused(repo="model")
    assert "repository: " in refused(repo="../x/y")
    page = (final / cards.PAGE).read_bytes()
    (final / cards.PAGE).unlink()
    assert f"{cards.PAGE} is missing" in refused()
    (final / cards.PAGE).write_bytes(page)
    (final / "link").symlink_to("/etc/hostname")
    assert "link is not a plain file" in refused()


def test_files_that_differ_from_what_was_signed_are_not_published(hub, run, capsys, tmp_path):
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    form, plain = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    (tmp_path / "key").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    assert main(["card", "sign", "--key", str(tmp_path / "key"), str(run)]) == 0
    assert main(["push", str(run), "me/model"]) == 0
    assert hub.files == files_of(run / "final")
    assert in_toto.NAME in hub.files
    hub.asked.clear()
    (run / "final" / "adapter_model.safetensors").write_bytes(b"other")
    assert main(["push", str(run), "me/model"]) == 2
    assert "adapter_model.safetensors" in capsys.readouterr().err
    assert hub.asked == []


def test_a_hub_that_refuses_or_is_away_is_named_without_the_token(hub, run, capsys, monkeypatch):
    hub.refuses = True
    assert main(["push", str(run), "me/model"]) == 2
    said = capsys.readouterr().err
    assert "repository me/model: the upload to the Hub failed" in said
    assert TOKEN not in said
    hub.refuses, hub.yaml_errors = False, ["unknown license"]
    assert main(["push", str(run), "me/model"]) == 2
    assert "unknown license" in capsys.readouterr().err
    assert hub.files == {}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["push", str(run), "me/model"]) == 2
    assert "HF_HUB_OFFLINE" in capsys.readouterr().err
