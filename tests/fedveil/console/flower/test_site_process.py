"""The programs that a site or server is started with: written while others of them begin."""

from __future__ import annotations

import subprocess
import threading

import pytest

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
        "flower-superexec", "flower-superlink", "flower-supernode", "flwr-serverapp",
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("program", ["flower-superexec", "flwr-serverapp"])
def test_a_servers_own_programs_are_flowers_with_what_outlives_an_answer(tmp_path, program):
    site_process.write_superlink(tmp_path)
    done = subprocess.run([tmp_path / program, "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"usage: {program}" in done.stdout
