"""The programs that a site or server is started with: written while others of them begin."""

from __future__ import annotations

import shutil
import subprocess
import threading

import pytest
from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType

from fedveil.console.flower import site_process


def test_a_program_is_whole_whenever_it_is_read(tmp_path):
    """A federation writes its programs again with each process that it starts; the one before may not have read its
    own by then. Python runs an empty file without a word, with exit code 0.
    """
    site_process.write_own_ports(tmp_path)
    script = tmp_path / "flower-supernode"
    whole, ended = script.read_bytes(), threading.Event()

    def write() -> None:
        while not ended.is_set():
            site_process.write_own_ports(tmp_path)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = {script.read_bytes() for _ in range(3000)}
    finally:
        ended.set()
        writer.join()
    assert seen == {whole}
    assert script.stat().st_mode & 0o777 == 0o755
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "flower-superexec", "flower-superlink", "flower-supernode", "flwr-agentapp", "flwr-connector", "flwr-model",
        "flwr-serverapp", "flwr-simulation",
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("program", ["flower-superexec", "flwr-serverapp"])
def test_a_servers_own_programs_are_flowers_with_what_outlives_an_answer(tmp_path, program):
    site_process.write_superlink(tmp_path)
    done = subprocess.run([tmp_path / program, "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"usage: {program}" in done.stdout


GUARDED = {"flwr-clientapp": "fedveil.guard.clientapp", "flwr-serverapp": "fedveil.guard.serverapp"}


@pytest.mark.parametrize(
    ("write", "guarded"),
    [
        (lambda folder: site_process.guarded_environment({"PATH": ""}, folder), {"flwr-clientapp"}),
        (lambda folder: site_process.guarded_environment({"PATH": ""}, folder, False), {"flwr-clientapp"}),
        (lambda folder: [site_process.write_own_ports(folder), site_process.write_guard(folder)], {"flwr-clientapp"}),
        (lambda folder: site_process.single_user_environment({"PATH": ""}, folder), {"flwr-serverapp"}),
        (site_process.write_superlink, {"flwr-serverapp"}),
        (lambda folder: site_process.write_programs(folder, False), {"flwr-clientapp", "flwr-serverapp"}),
        (lambda folder: site_process.write_programs(folder, True), {"flwr-clientapp", "flwr-serverapp"}),
    ],
    ids=["site", "site without a policy", "host of a site", "server", "superlink", "image", "host"],
)
def test_the_program_of_each_type_of_task_is_guarded_or_refuses(tmp_path, write, guarded):
    write(tmp_path)
    for kind in TaskType:
        name = TASK_TYPE_TO_COMMAND[kind]
        program = shutil.which(name, path=str(tmp_path))
        if program is None:  # a server has no flwr-clientapp, which needs a policy: its SuperExec asks for none
            assert (name, guarded) == ("flwr-clientapp", {"flwr-serverapp"})
        elif name in guarded:
            assert f"from {GUARDED[name]} import main" in (tmp_path / name).read_text()
        else:
            done = subprocess.run([program, "--token", "x"], capture_output=True, text=True, timeout=60, check=False)
            assert (done.returncode, done.stdout) == (2, ""), name
            assert done.stderr.startswith(f"{name}: this installation runs only flwr-"), name
            assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_each_superexec_is_told_which_type_of_task_it_starts(tmp_path, monkeypatch, platform):
    monkeypatch.setattr("sys.platform", platform)
    is_linux = platform == "linux"

    def ends(written: object) -> str:
        text = (tmp_path / "flower-superexec").read_text().partition("from fedveil.")[2].strip()
        first, exempted, rest = text.partition("proxies.exempt_loopback(os.environ, sys.argv)\n")
        assert exempted
        return first + rest

    image = "guard.process_zygote import main\n\nmain(is_image=True)"
    client = "guard.superexec import main\n\nmain('flwr-clientapp')"
    site = "guard.process_zygote import main\n\nmain(require_policy=True)"
    unguarded = "guard.process_zygote import main\n\nmain(guarded=False)"
    assert ends(site_process.write_own_ports(tmp_path)) == "guard.superexec import main\n\nmain('flwr-serverapp')"
    assert ends(site_process.write_guard(tmp_path)) == (site if is_linux else client)
    for own_ports in (True, False):
        expected = image if is_linux else "guard.superexec import main\n\nmain(None)"
        assert ends(site_process.write_programs(tmp_path, own_ports)) == expected
    assert ends(site_process.unguarded_environment({"PATH": ""}, tmp_path)) == (unguarded if is_linux else client)
    assert ends(site_process.unguarded_environment({"PATH": ""}, tmp_path, own_waits=True)) == client
