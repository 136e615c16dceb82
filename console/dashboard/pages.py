"""The frame of every page, the two files beside them, and how pages are found, refused and followed."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from fedveil import places
from fedveil.console.dashboard.events import Streams
from fedveil.console.dashboard.gate import Entry
from fedveil.console.report import page
from fedveil.errors import FedVeilError
from fedveil.foreign import shown

_ROOM = "console/dashboard"
_FILES = {"page.css": "text/css", "live.js": "text/javascript"}
_LONGEST_PATH = 512


class NotFound(Exception):
    """There is no such page; the text is shown."""


@dataclass(frozen=True)
class View:
    """One page: its template, its title and what the template is given."""

    template: str
    title: str
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Site:
    """All pages of a dashboard.

    Attributes:
        name: what stands above each.
        links: path below the dashboard and words of each page that is linked from every one.
        view: makes the page at the components of a path. Raises NotFound, FedVeilError.
        state: of all that pages show; while it is the same, the pages are.
    """

    name: str
    links: Sequence[tuple[str, str]]
    view: Callable[[Sequence[str]], View]
    state: Callable[[], str]


def app(site: Site, entry: Entry, ending: Callable[[], bool]) -> ASGIApp:
    """The pages below the entry's place."""
    templates = page.environment(f"{_ROOM}/templates", "console/report/templates")
    streams = Streams(ending)

    def rendered(view: View, status: int, path: str, state: str) -> Response:
        frame = {"site": site, "base": entry.base, "here": path, "seen": state, "now": _now()}
        text = templates.get_template(view.template).render(table=page.table, title=view.title, **frame, **view.about)
        return HTMLResponse(text, status)

    def show(request: Request) -> Response:
        path = request.path_params["path"][:_LONGEST_PATH]
        state = site.state()
        try:
            return rendered(site.view(path.split("/") if path else []), 200, path, state)
        except NotFound as error:
            return rendered(_sorry("There is no such page", str(error)), 404, "", state)
        except (FedVeilError, OSError) as error:
            return rendered(_sorry("This cannot be shown", shown(error)), 500, "", state)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
            words = f"expected files as FedVeil writes them, found {shown(repr(error))}"
            return rendered(_sorry("This cannot be shown", words), 500, "", state)

    def events(request: Request) -> Response:
        return streams.of(site.state, request.query_params.get("seen", "")[:64])

    async def lost(request: Request, error: Exception) -> Response:
        return rendered(_sorry("There is no such page", "expected a page that is linked, found none"), 404, "", "")

    def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _FILES:
            raise HTTPException(404)
        return Response(_file(name), media_type=_FILES[name])

    async def followed(request: Request) -> Response:
        return events(request)

    routes = [Route("/events", followed), Route("/static/{name}", file), Route("/{path:path}", show)]
    return Starlette(routes=[Mount(entry.base, routes=routes)], exception_handlers={404: lost})


def digest(parts: object) -> str:
    """Of what pages show, by its stamps."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def _now() -> str:
    return f"{datetime.now(UTC):%H:%M:%S} UTC"


def _sorry(title: str, words: str) -> View:
    return View("sorry.html", title, {"words": words})


@functools.cache
def _file(name: str) -> str:
    own = (places.folder(f"{_ROOM}/static") / name).read_text(encoding="utf-8")
    return page.STYLE + own if name == "page.css" else own
