"""`fedveil export`: writes a site's own model from a run in PEFT or transformers format.

It is for methods that keep part of the model at the site, such as half of a factor pair, lower layers, or a prompt.
At the site, the command joins this part with the run's final weights. The server's operator sends these as
the run folder's config.json, id and final/. Nothing leaves the site. OUT contains the part that the site
keeps private, so anyone who gets OUT has it too.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from fedveil import rng, strategies, tasks
from fedveil.client_app.node_config import SiteConfig
from fedveil.client_app.policy import decisions
from fedveil.client_app.policy.site_policy import load_policy
from fedveil.client_app.state.client_state import ClientStateStore
from fedveil.config import RunConfig
from fedveil.console.runs import final_model
from fedveil.console.runs.retained_state import run_folders
from fedveil.console.runs.site_notes import read_site_note
from fedveil.console.terminal import say
from fedveil.contract.method import FederatedState
from fedveil.contract.param_spec import Spec, Weights
from fedveil.encrypted_files import FileSeal
from fedveil.errors import ConfigError, PolicyError, StateError
from fedveil.records import atomic_files, audit_log
from fedveil.sanitize import sanitize

_STATE = Path("~/.local/state/fedveil")
_ID, _ID_BYTES = re.compile(r"[0-9a-f]{4,32}"), 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "folder", type=Path, metavar="RUN", help="the run folder, or a copy of config.json, id and final/"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a new or empty folder")
    parser.add_argument("--site", required=True, metavar="NAME", help="this site's name, as registered")
    parser.add_argument("--state-dir", type=Path, default=_STATE, help=f"the site's state folder; default: {_STATE}")
    parser.add_argument(
        "--policy", default="", metavar="FILE", help="needed only if fedveil site start did not record it"
    )
    parser.add_argument(
        "--key-file",
        default="",
        metavar="FILE",
        help="key file for an encrypted state, if fedveil site start did not record it",
    )
    parser.add_argument(
        "--base", default="", metavar="MODEL", help="path of the base model on this machine (default: task.model)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the complete folder, or nothing."""
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise ConfigError(f"OUT: expected a new or empty folder, found {args.out}, which is not empty; name another")
    model, state_dir = final_model.load_final_model(args.folder, args.base), args.state_dir.expanduser()
    site = read_site_note(state_dir, args.site, args.policy, args.key_file)
    _permitted(site, final_model.load_final_model(args.folder).config)
    method = strategies.create_method(model.config.method.name, model.config.method.params)
    store = ClientStateStore(_kept_at(state_dir, args.site, _id(args.folder)), FileSeal.from_key_file(site.key_file))
    private = _newest(store, args.folder)
    task = tasks.load_task(model.config, method.adapter, "cpu")
    server = method.init(task.spec, _fitting(model.tensors, task.spec), rng.initial_stream(0, "export"))
    own = method.models(server, private).get("client")
    if own is None:
        raise StateError(
            "method.name: expected a method that keeps part of the model at each site, found "
            f"{model.config.method.name}, which keeps none; the shared model is in {args.folder / 'final'}"
        )
    with atomic_files.fill_folder(args.out) as folder:
        task.save({name: own[name] for name in task.spec}, folder)
    audit_log.append_entry(
        state_dir / audit_log.NAME, "exported", {"run": store.folder.parent.name, "file": str(args.out.absolute())}
    )
    say(f"{args.out}: {args.site}'s model; it contains the site's private part, so protect it like the site's examples")
    say("it has no privacy card, because the card in the run's final/ covers only the shared model")
    return 0


def _permitted(site: SiteConfig, config: RunConfig) -> None:
    """Raise PolicyError if the site's policy does not permit a run with this config, regardless of who sent it."""
    if not site.policy:
        return
    policy = load_policy(site)
    named = (
        ("method.name", config.method.name, policy.methods),
        ("task.name", config.task.name, policy.tasks),
        ("task.model", config.task.model, policy.models),
    )
    for key, value, permitted in named:
        if permitted is not None and value not in permitted:
            raise PolicyError(f"{key}: this site permits {permitted}, found {sanitize(value, 80)}; ask for another run")
    decisions.check_run_config(policy, config)


def _id(folder: Path) -> str:
    """Return the run's unique ID, under which sites store their state; it is independent of the run's name."""
    file = folder / "id"
    if not file.is_file():
        raise StateError(f"run folder {folder}: expected a file `id` next to config.json, found none; copy it too")
    with file.open("rb") as data:
        run_id = data.read(_ID_BYTES).partition(b" ")[0].decode("ascii", errors="replace")
    if not _ID.fullmatch(run_id):
        raise StateError(f"{file}: expected the run's ID, found {sanitize(run_id, 80)}; copy the file again")
    return run_id


def _kept_at(state_dir: Path, site: str, run_id: str) -> Path:
    """Return the site's folder for the run. Raises StateError if there is none."""
    for folder in run_folders(state_dir):
        if folder.name == site and folder.parent.name.endswith(f"-{run_id}"):
            return folder
    raise StateError(
        f"--state-dir: expected the state of site {sanitize(site, 80)} for run {run_id} in {state_dir}, found none; "
        "fedveil site status lists the runs with stored state"
    )


def _newest(store: ClientStateStore, folder: Path) -> FederatedState:
    """Return the site's private state from its last client round.

    Raises StateError if there is none, or if a client round is in progress.
    """
    with store.alone() as is_alone:
        if not is_alone:
            raise StateError(f"{store.folder}: expected no client round in progress, found one; wait until it ends")
        private = store.newest()
    if private is None:
        raise StateError(
            f"{store.folder}: expected the private state from a client round, found none: this run's method keeps no "
            f"state at a site, or it was purged; the shared model is in {folder / 'final'}"
        )
    return private


def _fitting(weights: Weights, spec: Spec) -> Weights:
    """Return the weights that the spec lists. Raises StateError if one is missing or has another shape."""
    for name, tensor in spec.items():
        if name not in weights or tuple(weights[name].shape) != tuple(tensor.shape):
            raise StateError(
                f"RUN/final: expected {name} of shape {tuple(tensor.shape)}, found "
                f"{tuple(weights[name].shape) if name in weights else 'none'}; use the run's base model"
            )
    return {name: weights[name] for name in spec}
