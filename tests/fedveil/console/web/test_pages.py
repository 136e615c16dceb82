"""The pages about runs: whole on the server, right by hand, and text whatever is in the files."""

from __future__ import annotations

import json
import re
import time
from html.parser import HTMLParser

import pytest

from fedveil.console.web import safe_files
from fedveil.console.web.components import format_duration
from fedveil.console.web.report import disclosure_section
from fedveil.records import audit_log, process_exit
from tests.fedveil.console.conftest import REFUSED_BYTES, unscored, write_run
from tests.fedveil.console.web.conftest import EVIL, opened
from tests.fedveil.console.web.report.made import audited, found


class Page(HTMLParser):
    """What a page is made of: links, and every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes) -> None:
        self.tags.append((tag, dict(attributes)))

    def of(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


def every_page(client) -> dict[str, str]:
    """All pages that are linked, by path."""
    page_texts: dict[str, str] = {}
    paths = [f"{client.base}/"]
    while paths:
        path = paths.pop()
        if path not in page_texts:
            answer = client.get(path)
            assert answer.status_code == 200, (path, answer.text)
            page_texts[path] = answer.text
            paths += [one["href"] for one in Page(answer.text).of("a") if one["href"].startswith("/")]
    return page_texts


def is_whole(text: str) -> None:
    """A page for keyboard, screen reader and policy: captions, words for figures; no style, no script in it."""
    page = Page(text)
    assert page.of("html") == [{"lang": "en"}]
    assert len(page.of("h1")) == len(page.of("main")) == len(page.of("title")) == 1
    assert page.of("a")[0] == {"class": "skip", "href": "#main"}
    assert all(one.get("scope") == "col" for one in page.of("th"))
    assert all(one.get("aria-label") for one in page.of("svg") + page.of("nav") + page.of("progress"))
    assert all(one["tabindex"] == "0" and one["aria-label"] for one in page.of("div") if one.get("role") == "region")
    assert not page.of("style")
    assert [list(one) for one in page.of("script")] == [["src", "defer"]]
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name == "style" or name.startswith("on")], tag
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for one in page.of("link") + page.of("script"):
        assert (one.get("href") or one["src"]).startswith(("/", "data:,"))


@pytest.mark.long
def test_every_page_is_linked_whole_and_within_the_policy(runs):
    client = opened(runs)
    pages = every_page(client)
    below = [path.removeprefix(client.base) for path in pages]
    assert sorted(below) == sorted([
        "/", "/?state=completed", "/?state=failed", "/compare", "/sites", "/logs", "/logs/demo", "/logs/runs",
        "/runs/fedavg", "/runs/fedavg/report", "/runs/fedrand", "/runs/fedrand/report", "/runs/demo%3Afedqsn",
        "/runs/demo%3Afedqsn/report",
    ])  # fmt: skip
    for text in pages.values():
        is_whole(text)


def test_the_list_of_runs_has_when_each_began_and_how_long_it_lasted(runs):
    client = opened(runs)
    text = client.get(f"{client.base}/").text
    assert text.count('<td data-label="lasted">2 h 2 min</td>') == 3
    assert text.count('<td data-label="started (UTC)"><time datetime="2026-01-02T03:04:05+00:00">') == 3


@pytest.mark.long
def test_a_run_says_what_attacks_found_and_a_broken_audit_is_shown_as_text(runs):
    client = opened(runs)
    assert "Not attacked, so what an attacker could learn is unknown" in client.get(f"{client.base}/runs/fedrand").text
    audited(runs / "fedrand", found("site-1", 0.8, "above"))
    page_text = " ".join(client.get(f"{client.base}/runs/fedrand").text.split())
    assert "<h3>What attacks found</h3> <p>Membership shows" in page_text
    assert "compares the direction of a site&#x27;s update with the example&#x27;s own gradient" in page_text
    assert "<dt>strongest attack</dt><dd>AUROC 0.80</dd>" in page_text
    (runs / "fedrand" / "audit.json").write_text('{"findings": "<b>"}')
    page = client.get(f"{client.base}/runs/fedrand")
    assert page.status_code == 200
    assert "not a valid output of fedveil audit" in page.text
    assert "<b>" not in page.text


def test_a_run_shows_its_figures_its_sites_and_what_each_disclosed(runs):
    client = opened(runs)
    text = client.get(f"{client.base}/runs/fedrand").text
    # By hand, as in test_report.py: A is 2 x 8 x 192 floats, B 2 x 576 x 8, with 613 bytes around them.
    up = 5 * (2 * 4 * 8 * 192 + 613) + 6 * (2 * 4 * 576 * 8 + 613) + REFUSED_BYTES
    assert f"<dd>{up:,}</dd>" in text
    assert '<progress class="failed" value="3" max="5"' in text
    assert text.count("3 of 5") == 1
    assert text.count("<svg") == 2
    assert 'aria-label="Test loss by round. ' in text
    bleu = re.search(r'<tr><td data-label="what">BLEU</td>.*?</tr>', text)[0]  # two points: no chart
    assert re.findall(r">([\d.]+)<", bleu) == ["0", "0.4", "3", "21.25"]
    row = '<td data-label="site">north</td><td data-label="sent by the site">{}</td>'
    assert row.format("A (2 tensors) twice, B (2 tensors) once, refused uploads once") in text
    assert "n_k is the number of examples" in text
    assert "ValueError: &lt;no rows&gt;" in text
    assert "found &lt;0&gt;" in text
    last = text[text.index("<h3>Round 4, attempt 1: 0 of 4 sites accepted</h3>") : text.index('<h2 id="quality">')]
    for words in ("refused by the server", "refused by the site&#x27;s policy", "silent", "failed"):
        assert f'<span class="tag failed">{words}</span>' in last
    assert "expected a norm of at most 1e+06, found 3.2e+07" in last
    assert "no reply within 900 s" in last
    assert "epsilon is infinite" in text
    assert disclosure_section.UNSIGNED_NOTE.replace("'", "&#x27;") in text


@pytest.mark.long
def test_a_run_that_is_not_scored_shows_what_its_sites_told(runs):
    client = opened(runs)
    assert "Training loss at the sites" not in client.get(f"{client.base}/runs/fedavg").text
    file = unscored(runs / "fedavg") / "metrics.jsonl"
    first, *rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[2]["reports"]["site-0"] |= {"loss_held_out": 2.5, "rows_held_out": 40.0}
    file.write_text("".join(json.dumps(row) + "\n" for row in (first, *rows)))
    text = client.get(f"{client.base}/runs/fedavg").text
    assert 'aria-label="Training loss at the sites. ' in text
    assert "This is not a held-out loss." in text
    assert "in round 3: 2.5000 (40 examples of 1 sites)" in text
    is_whole(text)
    scored = [first | {"scores": {"server": {"loss": 4.0}}}, *rows]  # before round 0, and not yet again
    file.write_text("".join(json.dumps(row) + "\n" for row in scored))
    assert "The server did not score models" not in client.get(f"{client.base}/runs/fedavg").text


def goes_on(runs, name, **about) -> None:
    """A run of `runs` that goes on, and where its round is."""
    run = write_run(runs, name, state="running")
    now = time.time()
    progress = {"round": 3, "attempt": 0, "phase": "round", "since": now - 41.2, "deadline_seconds": 600.0, "quorum": 2}
    progress |= {"asked": 4, "accepted": 1, "failed": 1, "waiting": [EVIL, "west"], "reasons": {}, "until": now + 254.2}
    (run / "progress.json").write_text(json.dumps(progress | about))


UNDER_WAY = (
    r"2 of 4 have answered, waiting for &lt;script[^<]*, west "
    r'\(<span data-step="1">(?:4[1-9]|[5-9]\d)</span> s of 600\)'
)
AWAITED = (
    r'waiting for sites: 1 of 2 take part \(<span data-step="-1">2[0-5]\d</span> s left\); not waited for: '
    r"&lt;script.*?, refused by its policy; fix the policy"
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("about", "words"),
    [({}, UNDER_WAY), ({"phase": "waiting", "there": 1, "refused": {EVIL: "its policy"}}, AWAITED),
     ({"accepted": 3}, "all 4 have answered; the server aggregates and evaluates"),
     ({"since": -1e300}, r"2 of 4 [^<]*, west \(10{5}")],
)  # fmt: skip
def test_where_a_round_is_stands_below_the_state_and_in_the_list(runs, about, words):
    goes_on(runs, "goes-on", **about)
    client = opened(runs)
    run, home = client.get(f"{client.base}/runs/goes-on").text, client.get(f"{client.base}/").text
    assert re.search(f'<p class="now">Round in progress: {words}', run)
    assert re.search(f'<p class="big">Round 4 of 5: {words}', home)
    assert "<script>alert" not in run + home
    assert client.get(f"{client.base}/runs/fedrand").text.count('class="now"') == 0


@pytest.mark.parametrize("about", [{"phase": "done"}, {"asked": "x"}, {"waiting": 3}])
def test_where_nothing_says_where_a_round_is_the_page_says_nothing(runs, about):
    goes_on(runs, "goes-on", **about)
    client = opened(runs)
    assert "Round in progress" not in client.get(f"{client.base}/runs/goes-on").text


def test_sites_over_all_runs(runs):
    client = opened(runs)
    text = client.get(f"{client.base}/sites").text
    north = re.search(r'<tr><td data-label="site">north</td>.*?</tr>', text)[0]
    when = audit_log.read_log(runs / audit_log.NAME)[20]["time"]  # of round 3
    assert f"<span>{when[:10]}</span> {when[11:19]}" in north
    assert re.findall(r">(\d+)<", north)[:5] == ["1", "4", "3", "0", "1"]
    south = re.search(r'<tr><td data-label="site">south</td>.*?</tr>', text)[0]
    assert re.findall(r">(\d+)<", south)[:5] == ["1", "4", "2", "0", "2"]
    west = re.search(r'<tr><td data-label="site">west</td>.*?</tr>', text)[0]
    assert re.findall(r">(\d+)<", west)[:5] == ["1", "4", "3", "3", "1"]
    assert '<span class="failed">2</span>' in south
    assert "fedrand, round 4: PolicyError: train.batch-size: expected at most 8, found 16" in south
    assert "newest 3 runs" in text


def test_the_audit_log_has_its_verdict(runs):
    client = opened(runs)
    path, file = f"{client.base}/logs/runs", runs / audit_log.NAME
    text = client.get(path).text
    assert 'class="good">28 lines, all unchanged.' in text
    assert f"<code>{audit_log.log_head(file)}</code></p>" in text  # nothing after it, for it is there to be copied
    assert f'href="{client.base}/logs" aria-current="true"' in text
    assert "12,901 bytes." in text
    file.write_text(file.read_text().replace("expected a norm of", "expected a weather of"))
    deadline = 100
    while 'class="alert"' not in (text := client.get(path).text) and deadline:
        deadline -= 1
    assert "line 25: expected a whole line with its own hash" in text
    assert "expected a weather of" in text
    assert 'class="alert"' in client.get(f"{client.base}/").text


@pytest.mark.long
def test_what_others_wrote_is_text_on_every_page(hostile):
    client = opened(hostile)
    pages = every_page(client)
    assert len(pages) == 8
    for path, text in pages.items():
        is_whole(text)
        assert "<script>alert" not in text, path
        assert not set("\x1b\x07\u202e") & set(text), path
    run = next(text for path, text in pages.items() if path.endswith("script%3E"))
    assert run.count("&lt;script&gt;alert(271828)&lt;/script&gt;\\x1b]0;owned\\x07\\u202e") > 10


@pytest.mark.parametrize(
    "path",
    [
        "runs/..", "runs/%2e%2e", "runs/..%2f..%2fsecret", "runs/demo/fedqsn", "runs/fedrand/..", "runs/", "runs/none",
        "runs/%00", "runs/fedrand/config.json", "logs/..", "logs/none", "static/../gate.py", "static/%2e%2e%2fgate.py",
        "runs/linked", "runs/fedrand%2f", "x" * 5000,
    ],
)  # fmt: skip
def test_a_name_from_a_url_is_looked_up_and_never_made_a_path(runs, tmp_path, path):
    write_run(tmp_path / "outside", "secret")
    (runs / "linked").symlink_to(tmp_path / "outside" / "secret")
    client = opened(runs)
    answer = client.get(f"{client.base}/{path}")
    # httpx itself takes out "..", so a path may end outside of the dashboard's own place.
    assert answer.status_code in (401, 404)
    assert "secret" not in answer.text
    assert "def " not in answer.text


def test_a_file_beyond_the_bound_is_not_read(runs, monkeypatch):
    monkeypatch.setattr(safe_files, "MOST_BYTES", 20_000)
    (runs / "fedrand" / "metrics.jsonl").write_text("x" * 20_001)
    client = opened(runs)
    text = client.get(f"{client.base}/").text
    assert (
        "<b>fedrand</b> cannot be read: metrics.jsonl: expected at most 20,000 bytes for display here, found 20,001"
        in text
    )
    assert 'runs/fedavg">fedavg</a>' in text
    assert client.get(f"{client.base}/runs/fedrand").status_code == 500


@pytest.mark.parametrize(
    "line",
    [
        "nonsense", "[1]", '{"round": 3}', '{"round": "x", "cohort": 3}',
        '{"round": 0, "cohort": {"a": 1}, "accepted": 7}',
        '{"round": 0, "scores": [1], "weights": "a"}', "[" * 100_000, '{"round": 1e999, "failed": []}',
    ],
)  # fmt: skip
def test_a_damaged_run_is_named_and_the_others_are_shown(runs, line):
    with (runs / "fedrand" / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    client = opened(runs)
    for path in ("", "sites"):
        answer = client.get(f"{client.base}/{path}")
        assert answer.status_code == 200
        assert "fedavg" in answer.text or path == "sites"
    assert client.get(f"{client.base}/runs/fedrand").status_code in (200, 500)


def test_a_new_run_and_a_new_round_are_another_state(runs, monkeypatch):
    monkeypatch.setattr("fedveil.console.web.server_views._POLL", 0.0)
    client = opened(runs)

    def state() -> str:
        return Page(client.get(f"{client.base}/sites").text).of("main")[0]["data-state"]

    client.get(f"{client.base}/")  # what takes long is known from here on
    first = state()
    assert state() == first
    with (runs / "fedrand" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "resumed": true}\n')
    second = state()
    assert second != first
    write_run(runs, "fedpara")
    assert state() not in (first, second)


def test_a_run_that_was_told_to_end_is_stopped_and_no_failure(runs):
    status = runs / "fedrand" / "status.json"
    run_status = json.loads(status.read_text()) | {
        "state": "failed",
        "reason": f"{process_exit.TOLD_TO_END}; run it again",
    }
    status.write_text(json.dumps(run_status))
    client = opened(runs)
    page = client.get(f"{client.base}/").text
    assert '<span class="tag stopped">stopped</span>' in page
    assert "stopped <b>1</b>" in page
    assert "failed or died" not in page


def test_no_run_is_no_error(tmp_path):
    client = opened(tmp_path / "none")
    assert "No runs yet" in client.get(f"{client.base}/").text


@pytest.mark.parametrize(
    "started,ended,words",
    [
        ("2026-01-02T03:04:05+00:00", "2026-01-02T03:04:45+00:00", "40 s"),
        ("2026-01-02T03:04:05+00:00", "2026-01-02T05:06:07+00:00", "2 h 2 min"),
        ("2026-01-02T03:04:05+00:00", "2026-01-05T04:04:05+00:00", "3 d 1 h"),
        ("2026-01-02T03:04:05+01:00", "2026-01-02T02:05:07+00:00", "1 min 2 s"),
        ("2026-01-02T03:04:05", "2026-01-02T02:05:07+00:00", ""),  # no zone beside one
        ("<b>", "2026-01-02T02:05:07+00:00", ""),
        (None, None, ""),
    ],
)
def test_a_duration_is_read_or_left_out(started, ended, words):
    assert format_duration(started, ended) == words
