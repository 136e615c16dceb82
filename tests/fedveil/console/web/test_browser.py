"""The dashboards in a real browser: `pytest -m browser tests/fedveil/console/web`.

    apt-get install chromium                    # Debian's
    python -m pip install playwright==1.65.2    # without a browser of its own; in no lock, for nothing else needs it

FEDVEIL_PICTURES=FOLDER keeps a picture of every page there, light and dark, 390 and 1280 pixels wide.
FEDVEIL_AXE=axe.min.js (npm pack axe-core) also lets axe-core judge every page but the standalone report.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
import unicodedata
from pathlib import Path

import pytest

from fedveil.console.runs.run_reader import load_run
from fedveil.console.web.apps import run_folders, server_app, site_app
from fedveil.console.web.federations import name_federations
from fedveil.console.web.report import run_page
from fedveil.console.web.serving import DashboardServer
from tests.fedveil.console.conftest import write_run
from tests.fedveil.console.web.report.test_tradeoff import made_arms  # noqa: F401  # a fixture
from tests.fedveil.console.web.test_federations import flower, pilot, two  # noqa: F401  # fixtures
from tests.fedveil.console.web.test_pages import goes_on
from tests.fedveil.console.web.test_site_pages import state  # noqa: F401  # a fixture

pytestmark = pytest.mark.browser

WIDTHS = (390, 1280)
STATE = "document.getElementById('main').dataset.state"
BEYOND = "[...document.querySelectorAll('.wide')].filter((one) => one.scrollWidth > one.clientWidth).length"
NOWHERE = "runs/nowhere"  # a page that is not there


@pytest.fixture(scope="module")
def chromium():
    api = pytest.importorskip("playwright.sync_api", reason="python -m pip install playwright==1.65.2")
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser_path:
        pytest.skip("apt-get install chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def serve():
    """Serves an app; returns its server, until the end of the test."""
    servers: list[tuple[DashboardServer, threading.Thread]] = []

    def start(app_of) -> DashboardServer:
        server = DashboardServer(0, app_of)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        servers.append((server, thread))
        return server

    yield start
    for server, thread in servers:
        server.end()
        thread.join(30)


@pytest.fixture
def page(chromium):
    """A page that fails the test where it breaks its own policy, or its script fails; a 404 asked for is no failure."""
    context = chromium.new_context()
    made, wrong = context.new_page(), []
    made.on("pageerror", lambda error: wrong.append(str(error)))
    made.on("console", lambda said: wrong.append(said.text) if is_error(said) else None)
    made.on("dialog", lambda dialog: wrong.append(dialog.message))
    yield made
    context.close()
    assert wrong == []


def is_error(said) -> bool:
    return said.type == "error" and not (said.location["url"].endswith(f"/{NOWHERE}") and "404" in said.text)


def opened(page, server: DashboardServer, path: str = "") -> None:
    page.goto(server.entry.link)
    assert "token" not in page.url
    page.goto(f"http://127.0.0.1:{server.entry.port}{server.entry.base}/{path}")
    until(page, "document.getElementById('live').textContent === 'live, page as of'")


def until(page, expression: str) -> None:
    """Playwright's own waiting evaluates text in the page, which the page's policy forbids."""
    deadline = time.monotonic() + 30
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(50)


def settled(page) -> str:
    """The page's state once what takes seconds to find out stands in it: two of its looks long it is the same."""
    for _ in range(20):
        seen = page.evaluate(STATE)
        page.wait_for_timeout(2500)
        if page.evaluate(STATE) == seen:
            return seen
    raise AssertionError("the page goes on changing")


def of_runs(folder: Path):
    return lambda entry, ending: server_app({"": folder}, {}, entry, ending)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_fits_and_is_readable(serve, page, runs, hostile, state, two, scheme, width):  # noqa: F811
    refused = {"east": "its policy", "west": "its ledger"}
    goes_on(two[0] / "runs", "waits", phase="waiting", there=1, waiting=[], refused=refused)
    goes_on(two[1] / "runs", "goes-on", waiting=["south", "west"])
    names = name_federations(two)
    federated = serve(lambda entry, ending: server_app(run_folders(None, names), names, entry, ending))
    site = serve(lambda entry, ending: site_app(state, "", "", entry, ending))
    server, other = serve(of_runs(runs)), serve(of_runs(hostile))
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 844})
    paths = {
        "runs": "",
        "run": "runs/fedrand",
        "compare": "compare?run=fedrand&run=fedavg",
        "sites": "sites",
        "log": "logs/runs",
        "report": "runs/fedrand/report",
    }
    pages = [(server, name, path) for name, path in paths.items()]
    paths = {"home": "", "waits": "runs/pilot%3Awaits", "goes-on": "runs/trial%3Agoes-on", "federated-sites": "sites",
             "logs": "logs", "control": "logs/trial%3Aruns", "error": NOWHERE}  # fmt: skip
    pages += [(federated, name, path) for name, path in paths.items()]
    pages += [(site, "site", ""), (site, "site-log", "log"), (other, "hostile", "sites")]
    for one, name, path in pages:
        opened(page, one, path)
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), name
        assert page.evaluate(CONTRAST) == [], name
        assert page.evaluate(SMALL_TARGETS) == [], name
        assert page.evaluate(SKIPPED_HEADINGS) == [], name
        if (axe := os.environ.get("FEDVEIL_AXE")) and name != "report":
            page.evaluate(Path(axe).read_text() + "; 0")
            assert page.evaluate("axe.run().then((all) => all.violations.map((one) => one.id))") == [], name
        if (name, width) == ("home", 1280):  # what a round waits for stands in its last column
            assert page.evaluate(BEYOND) == 0
        if folder := os.environ.get("FEDVEIL_PICTURES"):
            page.screenshot(path=Path(folder) / f"{name}-{scheme}-{width}.png", full_page=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_report_of_a_demo_fits_and_is_readable(page, made_arms, tmp_path, scheme, width):  # noqa: F811
    """A file of its own, with the picture of what several runs gained."""
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 844})
    file = tmp_path / "report.html"
    made_arms()
    runs = [load_run(tmp_path / "demo-0" / name) for name in ("fedavg", "fedavg-secure", "fedavg-dp")]
    file.write_text(run_page.run_page_html(runs))
    page.goto(file.as_uri())
    assert page.locator("h1").inner_text().startswith("FedVeil: what an attacker learns, and what protection costs")
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(SMALL_TARGETS) == []
    if folder := os.environ.get("FEDVEIL_PICTURES"):
        page.screenshot(path=Path(folder) / f"demo-{scheme}-{width}.png", full_page=True)


def test_on_paper_a_report_keeps_every_column_and_folded_part(page, made_arms, tmp_path):  # noqa: F811
    """What the PDF says is what the page says, the folded tables too."""
    reader = pytest.importorskip("pypdf", reason="python -m pip install pypdf==7.1.1")
    file, paper = tmp_path / "report.html", tmp_path / "report.pdf"
    made_arms()
    runs = [load_run(tmp_path / "demo-0" / name) for name in ("fedavg", "fedavg-secure", "fedavg-dp")]
    file.write_text(run_page.run_page_html(runs))
    page.goto(file.as_uri())
    cells = page.evaluate("[...document.querySelectorAll('td, th')].map((one) => one.textContent)")
    page.pdf(path=paper, format="A4")
    extracted = "".join(part.extract_text() for part in reader.PdfReader(paper).pages)
    shown = unicodedata.normalize("NFKC", extracted)  # some fonts have ligatures
    words = {word for cell in cells for word in cell.split() if word.isascii() and word.isalnum() and len(word) > 2}
    lost = sorted(word for word in words if word not in re.sub(r"\s+", "", shown) and word not in shown)
    assert len(words) > 50
    assert lost == []


def test_a_run_that_goes_on_is_followed_and_what_was_open_stays_open(serve, page, tmp_path):
    run = write_run(tmp_path / "runs", rounds=2, state="running")
    opened(page, serve(of_runs(tmp_path / "runs")), "runs/fedrand")
    assert page.locator("progress").get_attribute("value") == "2"
    page.locator("summary").first.click()
    page.locator("summary").first.focus()
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]) | {"round": 2}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    until(page, "document.querySelector('progress').value === 3")
    assert page.locator("details").first.get_attribute("open") is not None
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    page.locator("#hold").click()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line | {"round": 3}) + "\n")
    page.wait_for_timeout(3000)
    assert page.locator("progress").get_attribute("value") == "3"
    page.locator("#hold").click()
    until(page, "document.querySelector('progress').value === 4")


def test_the_seconds_of_a_round_go_on_by_themselves_until_paused(serve, page, runs):
    goes_on(runs, "goes-on")
    opened(page, serve(of_runs(runs)), "runs/goes-on")
    seconds = "Number(document.querySelector('[data-step]').textContent)"
    seen, first = settled(page), page.evaluate(seconds)
    assert 41 <= first < 90
    until(page, f"{seconds} >= {first + 3}")
    assert page.evaluate(STATE) == seen  # no page was fetched for it
    page.locator("#hold").click()
    paused_seconds = page.evaluate(seconds)
    page.wait_for_timeout(2500)
    assert page.evaluate(seconds) == paused_seconds
    page.locator("#hold").click()
    until(page, f"{seconds} >= {paused_seconds + 3}")


def test_the_keyboard_reaches_everything_and_shows_where_it_is(serve, page, runs):
    opened(page, serve(of_runs(runs)), "runs/fedrand")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.locator(".skip").bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Progress"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.tagName"))
    assert {"Sites in this run", "Disclosure by site", "SUMMARY"} <= seen


def test_without_its_script_a_page_is_whole(serve, chromium, runs):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    server = serve(of_runs(runs))
    page.goto(server.entry.link)
    page.locator("td a", has_text="fedrand").click()
    assert page.locator("svg").count() == 2
    assert page.locator("#hold").is_hidden()
    context.close()


def test_without_its_script_runs_are_filtered_ticked_and_compared(serve, chromium, runs):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(serve(of_runs(runs)).entry.link)
    assert page.locator("h2").first.inner_text() == "In progress"
    page.get_by_label("Name, method or protection").fill("fedavg")
    page.get_by_label("Sort by").select_option("name")
    page.get_by_role("button", name="Show").click()
    assert page.locator("td[data-label=run]").all_inner_texts() == ["fedavg"]
    page.get_by_role("link", name="all 3").click()
    page.get_by_label("Name, method or protection").fill("")
    page.get_by_role("button", name="Show").click()
    page.get_by_label("Compare fedavg").check()
    page.get_by_label("Compare demo:fedqsn").check()
    page.get_by_role("button", name="Compare ticked runs").first.click()
    assert page.locator(".lead").inner_text() == "demo:fedqsn, fedavg"
    assert page.get_by_label("Compare fedavg").is_checked()
    context.close()


def test_what_is_ticked_or_being_typed_outlives_an_update(serve, page, runs):
    goes_on(runs, "goes-on")
    opened(page, serve(of_runs(runs)))
    settled(page)
    page.get_by_label("Compare fedavg").check()
    page.get_by_label("Name, method or protection").press_sequentially("fed")
    seen = page.evaluate(STATE)
    line = json.loads((runs / "goes-on" / "metrics.jsonl").read_text().splitlines()[-1]) | {"round": 3}
    with (runs / "goes-on" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    page.wait_for_timeout(3000)
    assert page.evaluate(STATE) == seen  # nothing is replaced below the hands of a reader who is typing
    page.get_by_label("Compare fedrand").focus()
    until(page, "document.querySelector('progress').value === 4")
    assert page.get_by_label("Compare fedavg").is_checked()
    assert page.get_by_label("Name, method or protection").input_value() == "fed"
    assert page.evaluate("document.activeElement.value") == "fedrand"


def test_a_command_is_copied(serve, page, runs):
    opened(page, serve(of_runs(runs)), "runs/fedavg")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator(".next .command button").click()
    until(page, "document.querySelector('.next .command button').textContent === 'Copied'")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("fedveil evaluate ")
    assert copied == page.locator(".next code").inner_text()


def test_a_hostile_run_runs_nothing(serve, page, hostile):
    opened(page, serve(of_runs(hostile)))
    page.locator("main a").first.click()
    assert "<script>alert(271828)" in page.locator("main").inner_text()
    assert page.locator("script").count() == 1


# Text against the first opaque ground below it, as WCAG 2.2 counts: 4.5, for large text 3.
CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const rgb = (over, under) => {
    canvas.fillStyle = under; canvas.fillRect(0, 0, 1, 1); canvas.fillStyle = over; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (c) => { const [r, g, b] = c.map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const wrong = [];
  for (const one of document.querySelectorAll("body *")) {
    const own = [...one.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    const box = one.getBoundingClientRect();
    if (!own || box.width < 2 || box.right < 0 || one.closest("svg")) continue;
    const grounds = [];
    for (let up = one; up; up = up.parentElement) grounds.push(getComputedStyle(up).backgroundColor);
    let under = dark ? "#121212" : "#ffffff";
    for (const ground of grounds.reverse()) { const [r, g, b] = rgb(ground, under); under = `rgb(${r},${g},${b})`; }
    const a = light(rgb(getComputedStyle(one).color, under)), b = light(rgb(under, under));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const large = parseFloat(getComputedStyle(one).fontSize) >= 24;
    if (ratio < (large ? 3 : 4.5)) wrong.push(`${one.tagName} ${ratio.toFixed(2)} ${one.textContent.slice(0, 30)}`);
  }
  return wrong;
}"""
# A heading two levels below the one before it.
SKIPPED_HEADINGS = """() => [...document.querySelectorAll("h1, h2, h3, h4")].filter((one, i, all) =>
  i && Number(one.tagName[1]) > Number(all[i - 1].tagName[1]) + 1).map((one) => one.textContent)"""
# Links that stand alone, buttons and summaries: 24 pixels high at least.
SMALL_TARGETS = """() => [...document.querySelectorAll("nav a, button, summary, td > a:only-child")]
  .filter((one) => one.offsetParent && one.getBoundingClientRect().height < 24)
  .map((one) => `${one.tagName} ${one.textContent} ${one.getBoundingClientRect().height}`)"""
