"""Opens the two dashboards: of a folder of runs, and of a site."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.types import ASGIApp

from fedveil.console.dashboard import server_views, site_views
from fedveil.console.dashboard.gate import Entry
from fedveil.console.dashboard.pages import Site, app
from fedveil.console.dashboard.serving import serve
from fedveil.console.provisioning.federation import Members
from fedveil.errors import ConfigError

Ending = Callable[[], bool]


def server(runs: Path, federations: Sequence[Path], host: str, port: int) -> int:
    """Serves the runs in a folder. Raises ConfigError where a federation, the address or the port cannot be."""
    for folder in federations:
        Members(folder)  # there, or an error that names it
    return serve(host, port, lambda entry, ending: of_server(runs, federations, entry, ending))


def site(state_dir: Path, policy: str, key_file: str, host: str, port: int) -> int:
    """Serves a site's state folder. Raises ConfigError where it is none, or the address or port cannot be."""
    if not state_dir.expanduser().is_dir():
        raise ConfigError(f"--state-dir: expected a site's own folder, found none at {state_dir}; name it")
    return serve(host, port, lambda entry, ending: of_site(state_dir, policy, key_file, entry, ending))


def of_server(runs: Path, federations: Sequence[Path], entry: Entry, ending: Ending) -> ASGIApp:
    """The pages about runs and federations, without the gate before them."""
    views = server_views.ServerViews(runs, federations, entry.base)
    return app(Site("FedVeil", server_views.LINKS, views.view, views.state), entry, ending)


def of_site(state_dir: Path, policy: str, key_file: str, entry: Entry, ending: Ending) -> ASGIApp:
    """The pages about a site, without the gate before them."""
    views = site_views.SiteViews(state_dir, policy, key_file)
    return app(Site("FedVeil site", site_views.LINKS, views.view, views.state), entry, ending)
