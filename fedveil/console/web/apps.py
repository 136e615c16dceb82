"""Open the two dashboards: one for a folder of runs, and one for a site."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from starlette.types import ASGIApp

from fedveil.console.web import server_views, site_views
from fedveil.console.web.auth import DashboardCredentials
from fedveil.console.web.federations import name_federations
from fedveil.console.web.pages import DashboardPages, make_app
from fedveil.console.web.serving import serve_dashboard
from fedveil.errors import ConfigError

Ending = Callable[[], bool]


def open_runs_dashboard(
    runs: Path | None, federations: Sequence[Path], host: str, port: int, metrics_token: Path | None = None
) -> int:
    """Serve the dashboard for a folder of runs. Raises ConfigError for an invalid federation, address or port.

    If `runs` is None, it shows the runs inside the federations' folders. `metrics_token`: see `serve_dashboard`.
    """
    names = name_federations(federations)

    def app_of(entry: DashboardCredentials, ending: Ending) -> ASGIApp:
        return server_app(run_folders(runs, names), names, entry, ending)

    return serve_dashboard(host, port, app_of, metrics_token)


def run_folders(runs: Path | None, federations: Mapping[str, Path]) -> dict[str, Path]:
    """Return the run folders to show, by federation ("" if there is only one, or if it is unknown).

    A federation's own folder is included even before its first run creates it, so that the page will show that run.
    """
    own = {name: folder / "runs" for name, folder in federations.items()}
    if runs is None:
        return own if len(own) > 1 else {"": next(iter(own.values()), Path("runs"))}
    is_own = [name for name, folder in own.items() if len(own) > 1 and folder.resolve() == runs.resolve()]
    return {is_own[0] if is_own else "": runs}


def open_site_dashboard(
    state_dir: Path,
    policy: str,
    key_file: str,
    host: str,
    port: int,
    metrics_token: Path | None = None,
    ca: Path | None = None,
) -> int:
    """Serve the dashboard for a site's state folder. Raises ConfigError for an invalid folder, address or port.

    `metrics_token`: see `serve_dashboard`; `ca`: the kit's ca.crt, whose days left are a metric.
    """
    if not state_dir.expanduser().is_dir():
        raise ConfigError(f"--state-dir: expected a site's state folder, found none at {state_dir}; correct the path")

    def app_of(entry: DashboardCredentials, ending: Ending) -> ASGIApp:
        return site_app(state_dir, policy, key_file, entry, ending, ca)

    return serve_dashboard(host, port, app_of, metrics_token)


def server_app(
    runs: Mapping[str, Path], federations: Mapping[str, Path], entry: DashboardCredentials, ending: Ending
) -> ASGIApp:
    """Return the pages about runs and federations, without authentication."""
    views = server_views.ServerViews(runs, federations, entry.base)
    return make_app(
        DashboardPages("FedVeil", server_views.LINKS, views.view, views.state, views.metrics), entry, ending
    )


def site_app(
    state_dir: Path, policy: str, key_file: str, entry: DashboardCredentials, ending: Ending, ca: Path | None = None
) -> ASGIApp:
    """Return the pages about a site, without authentication."""
    views = site_views.SiteViews(state_dir, policy, key_file, ca)
    return make_app(
        DashboardPages("FedVeil site", site_views.LINKS, views.view, views.state, views.metrics), entry, ending
    )
