"""The systemd unit of a server and of a site: what it permits, how paths are written, and what systemd says of it."""

from __future__ import annotations

import json
import re
import shutil
import string
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedveil.console.launch import service_install, service_unit
from fedveil.console.launch.service_unit import ServiceUnit, format_unit, quote_value
from fedveil.console.main import main
from fedveil.errors import ConfigError
from tests.conftest import extract


def find_analyze() -> str | None:
    """systemd-analyze of release 250 or later, which can leave out what it finds in this machine's own units."""
    program = shutil.which("systemd-analyze")
    said = subprocess.run([program, "--version"], capture_output=True, text=True).stdout.split() if program else []
    return program if said[1:2] and said[1].isdigit() and int(said[1]) >= 250 else None


ANALYZE = find_analyze()
STRANGE = "a b%h$X\"\\n;#'ü"
PROGRAM = "a b%h$X;#ü"


@pytest.fixture(autouse=True)
def temporary_folders_are_as_good_as_any(monkeypatch):
    monkeypatch.setattr(service_unit, "_TEMPORARY", ())


@pytest.fixture
def pilot(tmp_path, capsys) -> Path:
    (tmp_path / "federation.toml").write_text('name = "pilot"\nserver = ["localhost"]\nsites = ["north"]\n')
    assert main(["provision", str(tmp_path / "federation.toml")]) == 0
    capsys.readouterr()
    return tmp_path / "pilot"


@pytest.fixture
def kit(pilot) -> Path:
    extract(pilot / "kits" / "north.tar.gz", pilot.parent)
    (pilot.parent / "pilot-north" / "data").mkdir()
    return pilot.parent / "pilot-north"


def read_unit(text: str) -> dict[str, list[str]]:
    """The settings of a unit file, each with its values in order: a reader by systemd.syntax(7), not by our writer."""
    settings: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and line[0] not in "#;[":
            assert not line.endswith("\\")  # it would go on in the next line
            name, _, value = line.partition("=")
            settings.setdefault(name, []).append(value)
    return settings


def read_words(value: str) -> list[str]:
    """Words in double quotes, as systemd reads them: backslash first, then specifiers."""
    words, rest = [], value
    while rest:
        match = re.match(r'"((?:[^"\\]|\\["\\])*)"( |$)', rest)
        assert match, rest
        word = re.sub(r"\\(.)", r"\1", match[1])
        assert not re.search(r"(?<!%)(?:%%)*%(?!%)", word)  # a specifier
        words.append(word.replace("%%", "%"))
        rest = rest[match.end() :]
    return words


def unit_of(**more: object) -> ServiceUnit:
    about = {"title": "t", "command": ("/usr/bin/python3",), "user": "fedveil", "watched": "it works"}
    return ServiceUnit(**{**about, "writes": (Path("/srv/pilot"),), **more})  # type: ignore[arg-type]


printable = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")), max_size=80)


@given(st.lists(printable, min_size=1, max_size=4))
@example([STRANGE])
@example(["%", "%%", "\\", '"', "$HOME", "${X}", "-x", ""])
def test_any_path_and_argument_arrives_as_it_is(words):
    paths = tuple(Path("/srv") / word.replace("/", "_").strip(".") for word in words)
    settings = read_unit(format_unit(unit_of(command=("/usr/bin/p", *words), writes=paths, keeps=paths)))
    (command,) = settings["ExecStart"]
    assert command[0] == ":"  # so that $ is no variable
    assert read_words(command[1:]) == ["/usr/bin/p", *words]
    assert [read_words(value) for value in settings["ReadWritePaths"]] == [[str(path)] for path in paths]
    assert [read_words(value) for value in settings["ReadOnlyPaths"]] == [[f"-{path}"] for path in paths]
    assert [read_words(value) for value in settings["RequiresMountsFor"]] == [
        [str(path)] for path in dict.fromkeys(paths)
    ]


@given(st.text(string.ascii_letters, max_size=5), st.sampled_from("\n\r\0\x1b\x7f\x85\u2028\u2029\ud800\t"), st.text())
def test_a_character_that_could_begin_a_setting_of_its_own_is_refused(before, control, after):
    with pytest.raises(ConfigError, match="without control characters"):
        quote_value(before + control + after)


@pytest.mark.parametrize("part", ["command", "writes", "keeps", "hides", "reads"])
def test_no_part_of_a_unit_is_written_unquoted(part):
    path = "/srv/a\nUser=root"
    value = ("/usr/bin/p", path) if part == "command" else (Path(path),)
    with pytest.raises(ConfigError, match="without control characters"):
        format_unit(unit_of(**{part: value}))


@pytest.mark.parametrize("user", ["root", "nobody", "", "a b", "0", "-x", "Ann", "a" * 32, "a\nUser=root", "%u", "a:b"])
def test_a_user_that_is_not_for_a_service_alone_is_refused(user):
    with pytest.raises(ConfigError, match="--user: expected a system user for this service alone"):
        format_unit(unit_of(user=user))


@pytest.mark.parametrize(
    "path,home",
    [("/srv/x", "yes"), ("/homes/x", "yes"), ("/home/ann/x", "read-only"), ("/root", "read-only"),
     ("/run/user/5", "read-only")],
)  # fmt: skip
@pytest.mark.parametrize("part", ["writes", "reads", "keeps"])
def test_home_folders_are_hidden_unless_the_service_needs_one(path, home, part):
    assert read_unit(format_unit(unit_of(**{part: (Path(path),)})))["ProtectHome"] == [home]


@pytest.mark.parametrize("character", "\"'\\")
def test_a_program_that_systemd_would_not_start_is_refused(character):
    with pytest.raises(ConfigError, match="expected a Python whose path has no quotes and no backslash"):
        format_unit(unit_of(command=(f"/srv/{character}/python", "x")))


def test_a_folder_that_the_private_tmp_would_hide_is_refused(monkeypatch):
    monkeypatch.undo()
    for path in ("/tmp/x", "/var/tmp"):
        with pytest.raises(ConfigError, match=f"outlasts a reboot, found '{path}'"):
            format_unit(unit_of(reads=(Path(path),)))
    with pytest.raises(ConfigError, match="expected an absolute path, found 'x'"):
        format_unit(unit_of(writes=(Path("x"),)))


def test_a_server_writes_in_its_folder_but_not_to_the_registry(pilot, capsys):
    assert main(["server", "install-service", str(pilot), "--user", "fedveil"]) == 0
    out, err = capsys.readouterr()
    settings = read_unit(out)
    (command,) = settings["ExecStart"]
    program = [str(Path(sys.executable).absolute()), "-P", "-m", "fedveil.console.main"]
    assert read_words(command[1:]) == [*program, "server", "start", str(pilot)]
    assert [read_words(value) for value in settings["ReadWritePaths"]] == [[str(pilot)]]
    assert [read_words(value) for value in settings["ReadOnlyPaths"]] == [
        [f"-{pilot}/registry"], [f"-{pilot}/kits"],
    ]  # fmt: skip
    assert [read_words(value) for value in settings["InaccessiblePaths"]] == [[f"-{pilot}/ca"]]
    assert "sudo systemctl enable --now fedveil-server-pilot.service" in err
    assert "sudo -u fedveil fedveil ..." in err
    more = ["--listen", "10.1.0.5:9092", "--state-dir", str(pilot.parent / "state")]
    assert main(["server", "install-service", str(pilot), "--user", "fedveil", *more]) == 0
    out, err = capsys.readouterr()
    assert read_words(read_unit(out)["ExecStart"][0][1:])[-4:] == more
    assert [read_words(value) for value in read_unit(out)["ReadWritePaths"]] == [[str(pilot)], [more[3]]]
    assert f"sudo install -d -m 700 -o fedveil {more[3]}" in err
    assert main(["server", "install-service", str(pilot), "--user", "fedveil", "--listen", "x"]) == 2
    assert main(["server", "install-service", str(pilot.parent), "--user", "fedveil"]) == 2


@pytest.mark.parametrize("first,refused", [(None, True), ("1024\n", True), ("444\n", True), ("443\n", False)])
def test_a_port_that_the_service_may_not_open_is_refused_before_it_starts(first, refused, pilot, tmp_path, monkeypatch):
    monkeypatch.setattr(service_install, "_FIRST_PORT", tmp_path / "first")
    if first:
        (tmp_path / "first").write_text(first)
    assert service_install.describe_server(pilot, "fedveil").user == "fedveil"
    if not refused:
        assert "0.0.0.0:443" in service_install.describe_server(pilot, "fedveil", "0.0.0.0:443").command
        return
    with pytest.raises(ConfigError, match=r"--listen: .* found 443; .* net\.ipv4\.ip_unprivileged_port_start=443"):
        service_install.describe_server(pilot, "fedveil", "0.0.0.0:443")


def test_a_site_keeps_trying_because_the_cause_may_be_elsewhere_and_waits_for_its_disks(kit):
    """A key that is registered after a day ends the site every few minutes until then."""
    unit = service_install.describe_site(kit, "fedveil")
    settings = read_unit(format_unit(unit))
    assert settings["StartLimitIntervalSec"] == ["0"]
    assert "StartLimitBurst" not in settings
    mounts = [word for value in settings["RequiresMountsFor"] for word in read_words(value)]
    assert len(set(mounts)) == len(mounts)
    assert {str(path) for path in (*unit.writes, *unit.reads)} == set(mounts) >= {f"{kit}/state", str(kit), sys.prefix}


def test_a_site_writes_its_state_and_the_mark_in_its_data_and_nothing_else(kit, capsys):
    """Data that several sites share has no mark, and data that the run names is not known here."""
    assert main(["site", "install-service", str(kit), "--user", "fedveil"]) == 0
    settings = read_unit(capsys.readouterr().out)
    assert read_words(settings["ExecStart"][0][1:])[4:] == ["site", "start", "--kit", str(kit)]
    assert [read_words(value) for value in settings["ReadWritePaths"]] == [[f"{kit}/state"], [f"{kit}/data"]]
    node = kit / "node-config.toml"
    text = node.read_text()
    for more, written in (
        ("num-partitions = 2\n", [f"{kit}/state"]),
        ("", [f"{kit}/state", f"{kit}/data"]),
    ):
        node.write_text(text + more)
        unit = service_install.describe_site(kit, "fedveil")
        assert list(map(str, unit.writes)) == written
    (kit / "rows.jsonl").write_text(json.dumps({}))
    node.write_text(text.replace('data = "data"', 'data = "rows.jsonl"'))
    assert list(map(str, service_install.describe_site(kit, "fedveil").writes)) == [f"{kit}/state", str(kit)]
    tables = '[data-sets.icu]\ndata = "icu"\n[data-sets.ct]\ndata = "/mnt/ct"\n'
    node.write_text("".join(line for line in text.splitlines(True) if not line.startswith("data")) + tables)
    unit = service_install.describe_site(kit, "fedveil")
    assert list(map(str, unit.writes)) == [f"{kit}/state", f"{kit}/icu", "/mnt/ct"]
    assert "/mnt/ct" in map(str, unit.reads)
    node.write_text(text.replace('state-dir = "state"', 'state-dir = "~/state"'))
    with pytest.raises(ConfigError, match="found ~ in state-dir; write the whole path"):
        service_install.describe_site(kit, "fedveil")
    node.write_text(text.replace('state-dir = "state"\n', ""))
    with pytest.raises(ConfigError, match="expected state-dir"):
        service_install.describe_site(kit, "fedveil")


def test_a_file_is_written_once(kit, tmp_path, capsys):
    out = tmp_path / "units"
    command = ["site", "install-service", str(kit), "--user", "fedveil", "--out", str(out)]
    assert main(command) == 2
    assert "--out: expected a folder" in capsys.readouterr().err
    out.mkdir()
    assert main(command) == 0
    file = out / "fedveil-site-north.service"
    assert file.stat().st_mode & 0o777 == 0o644
    assert capsys.readouterr().out == f"{file}: written\n"
    before = file.read_text()
    assert main([*command[:4], "other", *command[5:]]) == 2
    assert "expected no fedveil-site-north.service" in capsys.readouterr().err
    assert file.read_text() == before


RIGHTS = {
    "Type": "notify", "NotifyAccess": "main", "Restart": "on-failure", "RestartSec": "1min", "KillMode": "mixed",
    "KillSignal": "SIGTERM", "TimeoutStopSec": "1min", "SuccessExitStatus": "130", "OOMPolicy": "continue",
    "UMask": "0077", "LimitNOFILE": "65536", "LimitCORE": "0", "NoNewPrivileges": "yes", "CapabilityBoundingSet": "",
    "ProtectSystem": "strict", "PrivateTmp": "yes", "WatchdogSec": "600", "WatchdogSignal": "SIGTERM",
    "RestrictAddressFamilies": "AF_UNIX AF_INET AF_INET6 AF_NETLINK", "User": "fedveil",
    "StartLimitIntervalSec": "2h", "StartLimitBurst": "30",
}  # fmt: skip


def test_the_unit_grants_few_rights_and_none_that_torch_or_the_supervision_needs_is_missing():
    settings = read_unit(format_unit(unit_of()))
    assert {name: settings[name] for name in RIGHTS} == {name: [value] for name, value in RIGHTS.items()}
    assert settings["Environment"] == ["PYTHONUTF8=1", "HOME=/tmp"]
    # The first breaks torch, the next two the GPUs, the last two the supervision of processes.
    assert not {"MemoryDenyWriteExecute", "PrivateDevices", "ProtectClock", "ProtectProc", "ProcSubset"} & set(settings)


@pytest.mark.skipif(ANALYZE is None, reason="needs systemd-analyze 250")
@pytest.mark.parametrize("which", ["server", "site", "strange"])
def test_systemd_finds_no_fault(which, pilot, kit, tmp_path):
    """In paths with quotes, spaces, percent and dollar signs too: a program that it cannot find is a fault."""
    if which == "strange":
        program = tmp_path / PROGRAM / "program"
        program.parent.mkdir()
        shutil.copy("/bin/true", program)
        unit = unit_of(command=(str(program), STRANGE), writes=(tmp_path / STRANGE,), keeps=(tmp_path / f"-{STRANGE}",))
    elif which == "server":
        unit = service_install.describe_server(pilot, "fedveil")
    else:
        unit = service_install.describe_site(kit, "fedveil")
    assert verify(tmp_path, format_unit(unit)) == ""


@pytest.mark.skipif(ANALYZE is None, reason="needs systemd-analyze 250")
def test_systemd_finds_the_faults_that_the_test_above_would_show(tmp_path):
    good = format_unit(unit_of(command=("/bin/true",)))
    assert verify(tmp_path, good) == ""
    assert "Unknown key" in verify(tmp_path, good.replace("UMask=", "UMusk="))
    assert "not executable" in verify(tmp_path, good.replace('"/bin/true"', '"/bin/none"'))
    assert "not absolute" in verify(tmp_path, good.replace('"/srv/pilot"', '"srv/pilot"'))
    assert "Failed to extract first word" in verify(tmp_path, good.replace('"/srv/pilot"', '"/srv/pilot'))


def verify(folder: Path, text: str) -> str:
    """What `systemd-analyze verify` says of a unit, without what it says of this machine's own."""
    file = folder / "fedveil-x.service"
    file.write_text(text)
    done = subprocess.run(
        [ANALYZE, "verify", "--man=no", "--recursive-errors=no", str(file)], capture_output=True, text=True
    )
    return "\n".join(line for line in done.stderr.splitlines() if "fedveil-x" in line)
