"""Run everything that needs a GPU with one command: the tests marked gpu and the GPU presets, with a table at the end.

    make gpu                            # on a machine with CUDA, in less than 10 minutes; installs nothing
    make gpu ARGS=--dry-run             # the same on the CPU: quick presets, and three times the time limit
    make gpu ARGS="--only core/training tests"

It needs only Python to start: FedVeil need not be installed, and the output lists missing requirements and how to copy
them. A part with a missing requirement is "not run", never "passed". Each part gets a share of the time, and unused
time goes to later parts. A part that takes too long is killed with all its child processes. The summary file is written
after each part, because a borrowed machine may be taken away.

| exit code | |
|---|---|
| 0 | everything passed |
| 1 | a part failed or exceeded its time limit |
| 2 | there is no CUDA device, or an argument is invalid |
| 3 | nothing failed, but a part was not run |

make itself prints "Error 1" and so on, and exits with 2 for every code except 0.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools import wheels
from tools.gpu_parts import CONSOLE, Part, Place, Row, run_part
from tools.sbom import canonical

ROOT = Path(__file__).resolve().parent.parent
_SECONDS = 560.0  # for all parts together, so that the total stays below 10 minutes
_SUMMARY = "summary.json"
_SLOWER = 3.0  # time factor on a CPU, for a dry run

_MODELS = (
    "dp-accounting",
    "httpx",
    "huggingface-hub",
    "jaxtyping",
    "numpy",
    "peft",
    "safetensors",
    "scipy",
    "torch",
    "transformers",
)
_TESTS = ("beartype", "cryptography", "pycryptodome", "pydantic", "pytest", "typing-extensions", "xxhash", *_MODELS)
_FEDERATION = (*CONSOLE, *_MODELS, "datasets", "flwr", "flwr-datasets", "grpcio", "pillow")
# `quick`: the full form exceeded its share of the time on a machine that we measured, or needs a base that is not
# bundled.
PARTS = (
    Part("tests", 105, _TESTS),
    Part("fedqsn/speed", 60, (*CONSOLE, *_MODELS), quick=True),
    Part("random_binary/speed", 15, (*CONSOLE, "jaxtyping", "numpy", "scipy", "torch")),
    Part("dp_fpl/speed", 60, (*CONSOLE, *_MODELS, "datasets", "opacus", "pillow"), quick=True, data="caltech101"),
    Part("core/training", 115, (*CONSOLE, *_MODELS)),
    Part("core/planned", 75, (*CONSOLE, *_MODELS, "bitsandbytes")),
    Part("core/worker", 130, _FEDERATION, quick=True),
)

_PROBE = """
import json
about = {"torch": None, "cuda": None, "device": None}
try:
    import torch
    about |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        of = torch.cuda.get_device_properties(0)
        about |= {"device": of.name, "memory_gb": round(of.total_memory / 1e9, 1), "devices": torch.cuda.device_count()}
        about |= {"capability": f"{of.major}.{of.minor}", "bf16": torch.cuda.is_bf16_supported()}
except Exception as error:  # the machine's owner must see why torch does not work
    about["error"] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(about))
"""


@dataclass(frozen=True)
class Chosen:
    """Options from the command line."""

    out: Path
    is_dry: bool
    is_quick: bool
    seconds: float
    parts: tuple[Part, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts and print the table; see the exit codes above."""
    chosen = _chosen(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that running parts are stopped, as after Ctrl-C
    chosen.out.mkdir(parents=True, exist_ok=True)
    place = Place(ROOT, chosen.out, "cpu" if chosen.is_dry else "cuda", chosen.is_dry or chosen.is_quick)
    machine = about_machine(place)
    print("\n".join(f"{name:<10} {value}" for name, value in machine.items()))
    if machine["device"] is None and not chosen.is_dry:
        problem = machine.get("error") or f"none (torch {machine['torch']}, built for CUDA {machine['cuda']})"
        print(
            f"error: device: expected one that torch can use, found {problem}; check the driver with nvidia-smi, or "
            "run: make gpu ARGS=--dry-run",
            file=sys.stderr,
        )
        return 2
    ranges, versions = wheels.promised(ROOT / "pyproject.toml"), wheels.installed()
    lacks = wheels.lacking({name for part in chosen.parts for name in part.needs}, ranges, versions)
    _say_what_is_missing(lacks, chosen, wheels.to_carry(ROOT / "lock", ranges, versions) if lacks else {})
    rows = run_all(chosen.parts, place, chosen.seconds, lacks, lambda rows: _keep(chosen, machine, lacks, rows))
    _summary(chosen, rows)
    return exit_code(rows)


def _chosen(argv: Sequence[str] | None) -> Chosen:
    parser = argparse.ArgumentParser(prog="make gpu", description="Run everything that needs a GPU.")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with quick presets")
    parser.add_argument("--quick", action="store_true", help="every preset's quick form, for a slower GPU")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], metavar="PART", help="these parts")
    parser.add_argument("--seconds", type=float, help=f"time limit for everything; default: {_SECONDS:.0f}")
    parser.add_argument("--out", type=Path, help="folder for the JSON; default: benchmarks/results/gpu")
    args = parser.parse_args(argv)
    if args.seconds is not None and args.seconds <= 0:
        parser.error(f"--seconds: expected more than 0, found {args.seconds:g}; leave it out for {_SECONDS:.0f}")
    default = ROOT / ("runs/gpu-dry-run" if args.dry_run else "benchmarks/results/gpu")
    return Chosen(
        (args.out or default).absolute(),
        args.dry_run,
        args.quick,
        args.seconds or _SECONDS * (_SLOWER if args.dry_run else 1),
        tuple(part for part in PARTS if not args.only or part.name in args.only),
    )


def about_machine(place: Place) -> dict[str, Any]:
    """Return the versions of Python, torch, CUDA and the driver, and the device.

    A separate process queries torch, so that its memory is freed.
    """
    log = place.out / "machine.log"
    ended = place.child([sys.executable, "-c", _PROBE], log, 60)
    lines = log.read_text(errors="replace").splitlines()
    about: dict[str, Any] = {"torch": None, "cuda": None, "device": None}
    if ended.code == 0:
        about |= json.loads(lines[-1])
    else:
        about["error"] = f"the torch query ended with {ended.code}: {' '.join(lines[-1:])}"
    return {"python": platform.python_version(), **about, "driver": _driver(), "cores": len(os.sched_getaffinity(0))}


def _driver() -> str | None:
    """Return the driver version from the kernel module, which also works without nvidia-smi."""
    file = Path("/proc/driver/nvidia/version")
    return file.read_text().splitlines()[0].strip() if file.is_file() else None


def _say_what_is_missing(lacks: dict[str, str], chosen: Chosen, blocks: dict[str, str]) -> None:
    if not lacks:
        print("wheels     all that is needed is here")
        return
    print("\nNot as promised here:")
    for name, why in lacks.items():
        wanted_by = ", ".join(part.name for part in chosen.parts if name in part.needs)
        pin = next((pin for pin in blocks if canonical(pin.partition("==")[0]) == name), "")
        carried = f"carry {pin}" if pin else "comes with the machine's CUDA; ask its owner"
        print(f"  {name}: {why}; {carried}; for {wanted_by}")
    if not blocks:
        return
    file = chosen.out / "wheels.txt"
    file.write_text("".join(blocks.values()))
    print(f"{len(blocks)} wheels, with what these need themselves, are listed in {file}. To bring them:")
    print("\n".join(f"  {line}" for line in wheels.advice(file, platform.python_version())))


def run_all(
    parts: Sequence[Part],
    place: Place,
    seconds: float,
    lacks: dict[str, str],
    keep: Callable[[list[Row]], None] = lambda rows: None,
) -> list[Row]:
    """Run the parts in order. Each part gets its share of `seconds`, plus any time left over from earlier parts.

    `keep` is called after each part with all rows so far.
    """
    ends = time.monotonic() + seconds
    stretched = seconds / sum(part.seconds for part in PARTS)
    rows: list[Row] = []
    for i, part in enumerate(parts):
        later = stretched * sum(other.seconds for other in parts[i + 1 :])
        part_rows = run_part(part, place, ends - time.monotonic() - later, lacks)
        for row in part_rows:
            print(f"{row.name}: {row.result}{f': {row.detail}' if row.detail else ''}", flush=True)
        rows += part_rows
        keep(rows)
    return rows


def exit_code(rows: Sequence[Row]) -> int:
    """Return 1 if a part failed or exceeded its time limit, 3 if a part was not run, and 0 otherwise."""
    results = {row.result for row in rows}
    if results - {"passed", "not run"}:
        return 1
    return 0 if results == {"passed"} else 3


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text, with each column as wide as its widest cell."""
    cells = [("what", "result", "seconds", "file")]  # file names only, because other people see the results
    for row in rows:
        result = f"{row.result}: {row.detail}" if row.detail else row.result
        cells.append((row.name, result, f"{row.seconds:.1f}", row.file))
    wide = [max(len(line[i]) for line in cells) for i in range(4)]
    wide[1] = min(wide[1], 60)  # a long reason makes only its own line longer
    return "\n".join("  ".join(cell.ljust(wide[i]) for i, cell in enumerate(line)).rstrip() for line in cells)


def _keep(chosen: Chosen, machine: dict[str, Any], lacks: dict[str, str], rows: list[Row]) -> None:
    """Write the summary file; until every part has a row, its exit code means "not run".

    Parts that have not started do not have a row yet.
    """
    are_all = {part.name for part in chosen.parts} <= {row.name for row in rows}
    code = exit_code(rows) or (0 if are_all else 3)
    summary = {"dry_run": chosen.is_dry, "machine": machine, "not_as_promised": lacks, "exit_code": code}
    text = json.dumps(summary | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n"
    (chosen.out / _SUMMARY).write_text(text)


def _summary(chosen: Chosen, rows: list[Row]) -> None:
    print("\n" + table(rows))
    for row in rows:
        for verdict in row.verdicts:
            print(f"- {row.name}: {verdict}")
    kind = "dry run on the CPU: it says nothing about a GPU" if chosen.is_dry else "run on the GPU"
    print(f"\n{kind}; all files are in {chosen.out}, {_SUMMARY} has the table")


if __name__ == "__main__":
    sys.exit(main())
