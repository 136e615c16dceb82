"""NVIDIA FLARE on the same work: stock_nvflare/ is the job, and runs in a separate environment.

The server and sites are provisioned, with keys and mutual TLS, and started with the scripts in their startup kits: each
has one permanent process, and another one per job.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fedveil.errors import ConfigError
from fedveil_bench import folders
from fedveil_bench.peers import environments
from fedveil_bench.peers.costs import TIMEOUT, PeerRun, measure_costs
from fedveil_bench.peers.shared import SharedInputs, describe_factors
from fedveil_bench.process_monitor.relay import TcpRelay
from fedveil_bench.runner import BenchOptions

NVFLARE, VARIABLE = "NVFlare FedAvg", "FEDVEIL_NVFLARE_PYTHON"
JOB = "peers/stock_nvflare"
_USER, _SERVER, _SITE = "lead@bench.org", "localhost", "site-0"
_STORES = "/tmp/nvflare/"  # the folder named in its template
_READY, _PREPARED = 180.0, 300.0
PEER = environments.PeerPackage(NVFLARE, VARIABLE, JOB, ("nvflare.recipe", "peft", "torch", "transformers"))


def build_project(port: int, relay: int, sites: int) -> str:
    """Return NVFlare's description of a federation, as JSON, which is valid YAML; its default scheme would be HTTP.

    Args:
        port: the server's port.
        relay: the port through which sites reach the server.
        sites: number of sites.
    """
    server = {"name": _SERVER, "type": "server", "org": "bench", "fed_learn_port": port, "admin_port": port}
    site = {"type": "client", "org": "bench", "connect_to": {"host": "localhost", "port": relay}}
    user = {"name": _USER, "type": "admin", "org": "bench", "role": "lead"}
    parts = {
        "workspace.WorkspaceBuilder": {"template_file": ["master_template.yml"]},
        "static_file.StaticFileBuilder": {"config_folder": "config", "scheme": "grpc"},
        "cert.CertBuilder": {},
        "signature.SignatureBuilder": {},
    }
    return json.dumps(
        {
            "api_version": 3,
            "name": "peers",
            "participants": [server, *({"name": f"site-{i}", **site} for i in range(sites)), user],
            "builders": [{"path": f"nvflare.lighter.impl.{name}", "args": args} for name, args in parts.items()],
        }
    )


def redirect_stores(resources: str, folder: Path) -> str:
    """Return the server's resources, with jobs and snapshots in `folder`.

    By default, all servers on a machine share a folder, and a server first runs any jobs that a killed server left
    there.

    Raises:
        ConfigError: the resources do not name that default folder.
    """
    if resources.count(_STORES) != 2:
        raise ConfigError(f"resources.json.default: expected {_STORES} for jobs and for snapshots, found other text")
    return resources.replace(_STORES, json.dumps(f"{folder}/")[1:-1])


def variables_of(python: Path, home: Path, threads: int) -> dict[str, str]:
    """Return the environment for NVFlare's processes: their own Python first, and the rest as for other peers."""
    return {
        **environments.select_variables(os.environ),
        "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)]),
        "HOME": str(home),
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "MALLOC_MMAP_THRESHOLD_": "1048576",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1"),
    }


def run_federation(
    shared: SharedInputs, settings: Mapping[str, Any], scratch: Path, options: BenchOptions, python: Path
) -> PeerRun:
    """Run one separate federation. Raises ConfigError or the launcher's error if it does not complete."""
    out, sites = scratch / "out", settings["sites"]
    out.mkdir()
    shared.write(scratch / "task")
    with NVFlareFederation(options.launch, python, sites, scratch / "nvflare") as federation:
        job = federation.export(scratch / "task", out, settings["config"]["run.rounds"])
        said, costs = measure_costs(federation, _SERVER, _SITE, lambda: federation.admin("run", job, timeout=TIMEOUT))
        name, status = parse_job_status(said)
        if status != "FINISHED:COMPLETED":
            raise ConfigError(f"{NVFLARE}: expected a completed run, found: {status}; {federation.tails()}")
        federation.admin("result", name, out, timeout=_READY)
    seconds, seen = parse_notes((out / "server.json").read_text(), settings["config"]["run.rounds"], sites)
    loss = shared.loss(shared.read(out / "weights.safetensors"))
    return PeerRun(costs.scores(loss, seconds), seen)


def parse_job_status(said: str) -> tuple[str, str]:
    """Return the job's ID and status, from the last line of the console's output."""
    last = said.strip().splitlines()[-1:] or [""]
    name, _, status = last[0].partition(" ")
    if not status.startswith("FINISHED"):
        raise ConfigError(f"{NVFLARE}: expected the job's id and how it finished, found {last[0]!r}")
    return name, status


def parse_notes(text: str, rounds: int, sites: int) -> tuple[list[float], list[str]]:
    """Return the seconds of each round and the observed uploads. Raises ConfigError if any are missing."""
    notes = json.loads(text)
    seconds, seen = notes["seconds"], [describe_factors(names) for names in notes["seen"]]
    if (len(seconds), len(seen)) != (rounds, rounds * sites):
        raise ConfigError(
            f"server.json: expected {rounds} rounds and {rounds * sites} uploads, found {len(seconds)} and "
            f"{len(seen)}; a site has failed, and its rows are missing"
        )
    return seconds, seen


class NVFlareFederation:
    """NVFlare's server and sites on this machine. No process outlives the `with` block.

    Args:
        launch: `BenchOptions.launch`, which provides processes and free ports.
        python: the Python interpreter of the environment with NVFlare.
        sites: number of sites, "site-0" and so on.
        folder: a new folder for keys, logs and the job.

    Attributes:
        processes: the processes, by the names of their startup kits.
        relay: the relay between sites and server.
    """

    def __init__(self, launch: Any, python: Path, sites: int, folder: Path) -> None:
        (folder / "logs").mkdir(parents=True)
        self._folder, self._sites = folder, [f"site-{i}" for i in range(sites)]
        self._env = variables_of(python, folder, max(1, launch.count_cores() // sites))
        self.processes = launch.ProcessGroup(folder / "logs")
        (self._port,) = launch.free_ports(1)

    def __enter__(self) -> Self:
        self.relay = TcpRelay(self._port)
        try:
            (self._folder / "project.yml").write_text(build_project(self._port, self.relay.port, len(self._sites)))
            self._call("provision", "-p", "project.yml", "-w", "kits", program="nvflare", timeout=_PREPARED)
            resources = self._kit(_SERVER) / "local" / "resources.json.default"
            resources.write_text(redirect_stores(resources.read_text(), self._folder))
            for name in (_SERVER, *self._sites):
                # --once: the process itself, without the loop that restarts it when it ends.
                script = self._kit(name) / "startup" / "sub_start.sh"
                self.processes.start(name, ["bash", str(script), "--once"], self._env, cwd=self._folder)
            self.admin("ready", len(self._sites), timeout=_READY)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.processes.stop()
        self.relay.close()

    def export(self, task: Path, out: Path, rounds: int) -> Path:
        """Create the job with its job.py, and return its folder."""
        source = self._folder / "source"
        shutil.copytree(folders.find_folder(JOB), source)
        shutil.copy(folders.find_folder("peers/stock_flower") / "tuned" / "training.py", source)
        arguments = (task, out, len(self._sites), rounds, self._folder / "job")
        self._call("job.py", *arguments, timeout=_PREPARED, cwd=source)
        (found,) = (self._folder / "job").iterdir()
        return found

    def admin(self, what: str, *more: object, timeout: float) -> str:
        """Run admin.py; return its output."""
        script = folders.find_folder(JOB) / "admin.py"
        return self._call(script, what, self._kit(_USER), *more, timeout=timeout)

    def tails(self) -> str:
        """Return the ends of the logs."""
        return "; ".join(f"the log of {name} ends: {self.processes.tail(name)}" for name in (_SERVER, _SITE))

    def _call(self, *command: object, program: str = "python3", timeout: float, cwd: Path | None = None) -> str:
        words = [program, *map(str, command)]
        return str(self.processes.call("admin", words, self._env, timeout, cwd or self._folder))

    def _kit(self, name: str) -> Path:
        return self._folder / "kits" / "peers" / "prod_00" / name
