"""README's Python, its audit and its federation are run as they stand there, in the places that it names.

What a reader has to put in is put in here: ports, a fingerprint, a folder of rows, the tiny base, a CPU, and a site
policy that permits the run; and for the sake of time fewer rounds, steps and rows.
tests/deployment/test_containers.py has README's containers.
"""

from __future__ import annotations

import json
import re
import textwrap

import pytest

from fedveil import paths
from fedveil.console.flower.app_bundle import bundle_digest
from fedveil.console.flower.machine import free_ports
from tests.conftest import ROOT
from tests.deployment.test_tutorials import printed

README = (ROOT / "README.md").read_text()
LESS = " --rounds 2 --sites 2 --set train.max-steps=5 --set evaluate.eval-examples=10"
# A site runs nothing that its policy does not permit, README says: here what was agreed on, as in the tutorial.
POLICY = """methods = ["fedrand"]
tasks = ["text-generation"]
models = ["tiny"]
max-rounds = 2
max-bytes-a-round = 20_000_000
min-examples = 50
min-batch = 4
"""
# "said TEXT NAME PID" waits until NAME.log has the text; where that process has ended, or time is over, it shows the
# log and ends the script.
SAID = """
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
said() { { set +x; } 2>/dev/null
    for second in $(seq 200); do
        grep -q "$1" "$2.log" && { set -x; return; }
        kill -0 $3 && sleep 1 || break
    done; echo "no '$1' within $second s: $(cat "$2.log")" >&2; exit 1; }
"""


def blocks(heading: str) -> list[list[str]]:
    """The commands of each indented block under a heading of README: continued lines joined, comments left out."""
    text = re.sub(r"\\\n\s*", "", README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0])
    code_blocks = re.findall(r"(?:^ {4}\S.*\n)+", text, re.MULTILINE)
    lines = [[re.split(r"(?:^|\s+)# ", line.strip())[0] for line in block.splitlines()] for block in code_blocks]
    return [[line for line in block if line] for block in lines]


def with_own(command: str, **own: str) -> str:
    """A command of README's with somebody's own values in the place of those that it shows."""
    for placeholder, value in own.items():
        assert placeholder in command, f"README shows {placeholder} no more: {command}"
        command = command.replace(placeholder, value)
    return command


@pytest.mark.long
def test_the_python_runs_as_shown(tmp_path):
    (tmp_path / "data").symlink_to(ROOT / "data")
    section = README.partition("\n## Use it in Python\n")[2].partition("\nThis is one process")[0]
    code = with_own(textwrap.dedent(section), **{'"run.rounds": 2': '"run.rounds": 1, "train.max-steps": 2'})
    (tmp_path / "readme.py").write_text(code)
    assert re.search(r"'loss': \d", printed("python readme.py", tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_the_audit_of_a_demo_runs_as_shown(tmp_path):
    (tmp_path / "data").symlink_to(ROOT / "data")  # README's commands are for the folder of a clone
    ((demo, audit, report),) = blocks("Audit a run")
    demo = with_own(demo, **{"examples-per-site=300": "examples-per-site=60"}) + LESS
    output = printed(f"{demo}\n{audit} --max-rows 20\n{report}", tmp_path)
    run = tmp_path / audit.split()[2]
    assert json.loads((run / "audit.json").read_text())["findings"]
    assert output.endswith("\nreport.html\n")
    assert "What attacks found" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_the_federation_of_five_commands_runs_as_shown(tmp_path):
    (provision, serve, init, register, start), (submit, dashboard, generate) = blocks("Run a federation")
    fleet, control, page = free_ports(3)
    rows = (paths.find_folder("data/e2e") / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text("".join(rows[:64]))
    (tmp_path / "policy").write_text(f'{POLICY}app-digests = ["{bundle_digest(None)}"]\n')
    submit = with_own(submit, **{"/models/llama": "tiny", "run.rounds=20": "run.rounds=2"})
    asked = " ".join(re.findall(r"--set (?:'[^']*'|\S+)", submit))
    register = with_own(register, **{"request.json": "$site.json", "SHA256:...": '"$fingerprint"'})
    start = with_own(start, **{"/data/reports": f"{tmp_path}/rows", "cuda": "cpu"})
    script = f"""{SAID}
        mkdir server && cd server
        printf 'name = "pilot"\\nserver = ["localhost"]\\nsites = ["north", "south"]\\n' >federation.toml
        printf 'fleet-port = {fleet}\\ncontrol-port = {control}\\n' >>federation.toml
        {provision}
        {serve} >../server.log 2>&1 &
        said "next: fedveil submit" ../server $!
        for site in north south; do
            tar xzf pilot/kits/$site.tar.gz -C ..
            fingerprint=$(cd ../pilot-$site && {init} | grep -o 'SHA256:[^ ]*' | tail -1)
            cp ../pilot-$site/keys/request.json $site.json
            {register}
            {{ cat ../policy && fedveil explain --permits {asked}; }} >../pilot-$site/site-policy.toml
            (cd ../pilot-$site && exec {start}) >../$site.log 2>&1 &
            said "online" ../$site $!
        done
        timeout 400 {submit}
        {dashboard} --port {page} >../dashboard.log 2>&1 &
        said "http://127.0.0.1:{page}/" ../dashboard $!
        {generate}
    """
    assert "completed" in printed(script, tmp_path)
    folder = generate.split()[2]
    assert (tmp_path / "server" / folder / "final" / "adapter_config.json").is_file()
    assert f"{folder}/final is a folder that PEFT loads" in README
