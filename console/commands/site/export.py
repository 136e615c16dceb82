"""`fedveil export`: writes a site's own model of a run, as PEFT or transformers load it.

For methods that keep something at the site: half of a pair of factors, lower layers, a prompt. What was kept is joined,
here, with the run's last weights, which the operator of the server sends: config.json, id and final/ of the run folder.
Nothing leaves the site. Whoever gets OUT has what the site kept back.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from fedveil import rng, strategies, tasks
from fedveil.client_app.site import permits
from fedveil.client_app.site import policy as policies
from fedveil.client_app.site.node_config import Site
from fedveil.client_app.site.private import PrivateStore
from fedveil.config import RunConfig
from fedveil.console import final_model
from fedveil.console.runs.kept import run_folders
from fedveil.console.runs.noted import noted
from fedveil.contract.method import State
from fedveil.contract.spec import Spec, Weights
from fedveil.errors import ConfigError, PolicyError, StateError
from fedveil.foreign import shown
from fedveil.records import audit_log, files
from fedveil.sealed import Seal

_STATE = Path("~/.local/state/fedveil")
_ID, _ID_BYTES = re.compile(r"[0-9a-f]{4,32}"), 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="the run folder, or a copy of its three parts")
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder that is new, or empty")
    parser.add_argument("--site", required=True, metavar="NAME", help="this site's name, as registered")
    parser.add_argument("--state-dir", type=Path, default=_STATE, help=f"the site's own folder; default {_STATE}")
    parser.add_argument("--policy", default="", metavar="FILE", help="where fedveil site start has not noted it")
    parser.add_argument("--key-file", default="", metavar="FILE", help="the same, where what it keeps is sealed")
    parser.add_argument("--base", default="", metavar="MODEL", help="the base on this machine (default: task.model)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes the folder whole, or not at all."""
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise ConfigError(f"OUT: expected a new or empty folder, found {args.out} with something in it; name another")
    found, state_dir = final_model.of(args.folder, args.base), args.state_dir.expanduser()
    site = noted(state_dir, args.site, args.policy, args.key_file)
    _permitted(site, final_model.of(args.folder).config)
    method = strategies.create(found.config.method.name, found.config.method.fields)
    store = PrivateStore(_kept_at(state_dir, args.site, _id(args.folder)), Seal.of(site.key_file))
    private = _newest(store, args.folder)
    task = tasks.load(found.config, method.adapter, "cpu")
    server = method.init(task.spec, _fitting(found.tensors, task.spec), rng.initial(0, "export"))
    own = method.deployed(server, private).get("client")
    if own is None:
        raise StateError(
            f"method.name: expected one that keeps a part of a model at a site, found {found.config.method.name}, "
            f"which keeps none; the model for all sites is {args.folder / 'final'}"
        )
    with files.filled(args.out) as folder:
        task.save({name: own[name] for name in task.spec}, folder)
    audit_log.append(
        state_dir / audit_log.NAME, "exported", {"run": store.folder.parent.name, "file": str(args.out.absolute())}
    )
    print(f"{args.out}: the model of site {args.site}; it holds what the site kept back, so treat it as its rows")
    print("it has no privacy card: the run's, in its final/, is of the model for all sites, and says nothing of this")
    return 0


def _permitted(site: Site, config: RunConfig) -> None:
    """Raises PolicyError where the site's policy does not permit a run of this config, whoever has sent it."""
    if not site.policy:
        return
    policy = policies.of(site)
    named = (
        ("method.name", config.method.name, policy.methods),
        ("task.name", config.task.name, policy.tasks),
        ("task.model", config.task.model, policy.models),
    )
    for key, found, permitted in named:
        if permitted is not None and found not in permitted:
            raise PolicyError(f"{key}: this site permits {permitted}, found {shown(found, 80)}; ask for another run")
    permits.check(policy.permits, policy.named, config)


def _id(folder: Path) -> str:
    """By which no two runs are one, whatever they are called: sites keep their states under it."""
    file = folder / "id"
    if not file.is_file():
        raise StateError(f"run folder {folder}: expected the file id beside config.json, found none; fetch it too")
    with file.open("rb") as data:
        found = data.read(_ID_BYTES).partition(b" ")[0].decode("ascii", errors="replace")
    if not _ID.fullmatch(found):
        raise StateError(f"{file}: expected the run's id, found {shown(found, 80)}; fetch it anew")
    return found


def _kept_at(state_dir: Path, site: str, run_id: str) -> Path:
    """The site's folder of the run. Raises StateError where there is none."""
    for folder in run_folders(state_dir):
        if folder.name == site and folder.parent.name.endswith(f"-{run_id}"):
            return folder
    raise StateError(
        f"--state-dir: expected what site {shown(site, 80)} keeps of run {run_id} in {state_dir}, found none; fedveil "
        "site status lists what it keeps, and of which runs"
    )


def _newest(store: PrivateStore, folder: Path) -> State:
    """What the site keeps of its last turn. Raises StateError where that is nothing, or a turn is under way."""
    with store.alone() as is_alone:
        if not is_alone:
            raise StateError(f"{store.folder}: expected no turn under way, found one; wait for its end")
        private = store.newest()
    if private is None:
        raise StateError(
            f"{store.folder}: expected the private state of a turn, found none: this run's method keeps nothing of its "
            f"own at a site, or it was purged; the model for all sites is {folder / 'final'}"
        )
    return private


def _fitting(weights: Weights, spec: Spec) -> Weights:
    """The weights of the spec. Raises StateError where they are others, as of another base."""
    for name, tensor in spec.items():
        if name not in weights or tuple(weights[name].shape) != tuple(tensor.shape):
            raise StateError(
                f"RUN/final: expected {name} of shape {tuple(tensor.shape)}, found "
                f"{tuple(weights[name].shape) if name in weights else 'none'}; take the base that the run had"
            )
    return {name: weights[name] for name in spec}
