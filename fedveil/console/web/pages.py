"""The page frame, its two static files, and the lookup, refusal and refresh of pages."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp

from fedveil import paths
from fedveil.console.web.auth import METRICS_PATH, DashboardCredentials
from fedveil.console.web.metrics import CONTENT_TYPE, GaugeSample, render_metrics
from fedveil.console.web.report import html
from fedveil.console.web.server_sent_events import EventStreams
from fedveil.errors import FedVeilError
from fedveil.sanitize import sanitize

_ROOM = "console/web"
_FILES = {"page.css": "text/css", "live.js": "text/javascript"}
_LONGEST_PATH = 512
_LONGEST_QUERY, _MOST_FIELDS = 12_000, 100  # of an address: characters, and values
PageQuery = Mapping[str, Sequence[str]]  # the values of an address's query, by name


class PageNotFound(Exception):
    """Raised when a page is not found; the page shows the text."""


@dataclass(frozen=True)
class PageView:
    """A page: its template, title and template variables."""

    template: str
    title: str
    about: Mapping[str, Any]


@dataclass(frozen=True)
class DashboardPages:
    """All pages of a dashboard.

    Attributes:
        name: the heading on every page.
        links: path and label of each page linked from every page.
        view: builds the page for a path's components and a query. Raises PageNotFound or FedVeilError.
        state: returns a digest of everything that pages show; while it is unchanged, so are the pages.
        metrics: returns the samples for /metrics.
    """

    name: str
    links: Sequence[tuple[str, str]]
    view: Callable[[Sequence[str], PageQuery], PageView]
    state: Callable[[], str]
    metrics: Callable[[], Iterable[GaugeSample]] = tuple


def make_app(site: DashboardPages, entry: DashboardCredentials, ending: Callable[[], bool]) -> ASGIApp:
    """Return the app that serves the pages under the secret path in `entry`."""
    templates = html.template_environment(f"{_ROOM}/templates", "console/web/report/templates")
    streams = EventStreams(ending)

    def rendered(view: PageView, status: int, path: str, state: str) -> Response:
        frame = {"site": site, "base": entry.base, "here": path, "seen": state, "now": _now()}
        text = templates.get_template(view.template).render(
            table=html.html_table, title=view.title, **frame, **view.about
        )
        return HTMLResponse(text, status)

    def show(request: Request) -> Response:
        path = request.path_params["path"][:_LONGEST_PATH]
        state = site.state()
        try:
            query = parse_query(request.url.query)
            return rendered(site.view(path.split("/") if path else [], query), 200, path, state)
        except PageNotFound as error:
            return rendered(_sorry("Page not found", str(error)), 404, "", state)
        except (FedVeilError, OSError) as error:
            return rendered(_sorry("This page cannot be shown", sanitize(error)), 500, "", state)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
            words = f"expected files written by FedVeil, found {sanitize(repr(error))}"
            return rendered(_sorry("This page cannot be shown", words), 500, "", state)

    def events(request: Request) -> Response:
        return streams.of(site.state, request.query_params.get("seen", "")[:64])

    async def lost(request: Request, error: Exception) -> Response:
        return rendered(_sorry("Page not found", "no such page; use the links above"), 404, "", "")

    def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _FILES:
            raise HTTPException(404)
        return Response(_file(name), media_type=_FILES[name])

    def scrape(request: Request) -> Response:
        return Response(render_metrics(site.metrics()), media_type=CONTENT_TYPE)

    async def followed(request: Request) -> Response:
        return events(request)

    routes = [Route("/events", followed), Route("/static/{name}", file), Route("/{path:path}", show)]
    mounted: list[BaseRoute] = [Mount(entry.base, routes=routes)]
    if entry.scrape_token:  # without a token, nobody may read them, so there is no such path
        mounted.append(Route(METRICS_PATH, scrape))
    return Starlette(routes=mounted, exception_handlers={404: lost})


def parse_query(text: str) -> PageQuery:
    """Return the values of an address's query by name. Raises PageNotFound for one that is too long."""
    try:
        if len(text) > _LONGEST_QUERY:
            raise ValueError
        return parse_qs(text, max_num_fields=_MOST_FIELDS)
    except ValueError:
        raise PageNotFound("this address asks for too much at once; use the links and forms on the pages") from None


def first_value(query: PageQuery, name: str) -> str:
    """Return the first value of a name in a query; "" if there is none."""
    return next(iter(query.get(name, ())), "")


def page_digest(parts: object) -> str:
    """Return a digest of the pages' content, computed from its stamps, `parts`."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def _now() -> str:
    return f"{datetime.now(UTC):%H:%M:%S} UTC"


def _sorry(title: str, words: str) -> PageView:
    return PageView("sorry.html", title, {"words": words})


@functools.cache
def _file(name: str) -> str:
    own = (paths.find_folder(f"{_ROOM}/static") / name).read_text(encoding="utf-8")
    return html.STYLE + own if name == "page.css" else own
