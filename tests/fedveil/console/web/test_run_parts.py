"""The parts of a run's page: tiles, the next command, the card and the model, whatever is in the folder."""

from __future__ import annotations

import html
import json
import re
import shlex

import pytest

from fedveil.attacks.audit.attack_words import describe_attack
from fedveil.cards import collect
from fedveil.console.runs import privacy_statements
from fedveil.console.runs.run_reader import load_run
from fedveil.console.web import run_parts, safe_files
from fedveil.console.web.components import command_line
from fedveil.console.web.safe_files import RunLocation
from tests.fedveil.cards import made
from tests.fedveil.console.conftest import masked, write_run
from tests.fedveil.console.web.conftest import ESCAPES, EVIL, opened
from tests.fedveil.console.web.report.made import audited, controlled, found
from tests.fedveil.console.web.test_pages import Page, is_whole


def at(folder) -> RunLocation:
    return RunLocation(folder.name, folder, 0.0)


def steps(folder, federation: str = "") -> list[str]:
    run = load_run(folder)
    next_ = run_parts.next_steps(run, at(folder), federation, (folder / "audit.json").exists())
    return [html.unescape(re.sub(r"<[^>]+>", "", command)).removesuffix(" Copy") for _, command in next_]


def with_config(folder, **settings):
    content = json.loads((folder / "config.json").read_text())
    content["config"] |= settings
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def with_card(folder, parent) -> None:
    (folder / "final").mkdir()
    collect.write_card(folder / "final", made.card(parent))


def tiles(text: str) -> dict[str, str]:
    return {name: re.sub(r"<[^>]+>", " ", value).strip()
            for name, value in re.findall(r"<dt>([^<]*)</dt><dd>(.*?)</dd>", text)}  # fmt: skip


def test_the_page_has_four_parts_in_order_and_a_link_to_each(runs):
    client = opened(runs)
    text = client.get(f"{client.base}/runs/fedrand").text
    is_whole(text)
    parts = ["progress", "quality", "given-away", "config"]
    headings = re.findall(r'<h2 id="([^"]*)">', text)
    assert headings == parts
    links = [one["href"] for one in Page(text).of("a") if one["href"].startswith("#")]
    assert links == ["#main", *(f"#{part}" for part in parts)]


def test_what_was_given_away_begins_with_tiles(runs):
    client = opened(runs)
    text = client.get(f"{client.base}/runs/fedrand").text
    part = text[text.index('id="given-away"') : text.index("What each side learned")]
    figures = tiles(part)
    assert list(figures) == [
        "bytes from the sites",
        "protection of uploads",
        "epsilon",
        "strongest attack",
        "privacy card",
    ]
    assert (figures["protection of uploads"], figures["strongest attack"]) == ("none", "not attacked")
    assert (figures["epsilon"], figures["privacy card"]) == ("infinite", "none")


def test_a_masked_run_says_what_the_server_saw(runs):
    masked(runs / "fedavg")
    client = opened(runs)
    text = client.get(f"{client.base}/runs/fedavg").text
    assert '<dd>sum of at least 3 sites</dd><dd class="note">in a sum, the server saw no single upload</dd>' in text


def test_the_next_command_fits_the_run_s_state(tmp_path):
    running = write_run(tmp_path, "fedavg", state="running")
    assert steps(running)[0] == f"fedveil watch {running}"
    failed = write_run(tmp_path, "fedrand", state="failed")
    assert steps(failed)[0].startswith("fedveil report")  # there is nothing to resume it from
    (failed / "resume.toml").write_text("")
    assert steps(failed, "/srv/pilot")[0] == f"fedveil submit --federation /srv/pilot --config {failed}/resume.toml"
    done = with_config(write_run(tmp_path, "fedpara"), **{"run.capture-messages": True})
    assert steps(done)[0] == f"fedveil audit {done}"
    with_card(done, tmp_path)
    audited(done, found("site-1", 0.8, "above"))
    assert steps(done)[:2] == [f"fedveil card make {done}", f"fedveil card sign --key KEY {done}"]


@pytest.mark.parametrize("name", ["a b", "$(reboot)", "`reboot`", "';reboot;'", "-rf", "<b>", "a&b"])
def test_a_command_is_one_word_for_the_shell_whatever_the_folder_is_called(name):
    text = html.unescape(re.search(r"<code>(.*?)</code>", command_line("fedveil", "watch", f"/runs/{name}"))[1])
    assert shlex.split(text) == ["fedveil", "watch", f"/runs/{name}"]


@pytest.mark.parametrize("name", ["x" * 3000, ESCAPES, "a\nreboot"])
def test_a_command_that_cannot_be_shown_as_it_is_is_not_offered(name):
    assert command_line("fedveil", "watch", name) == ""


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("running", "a run writes it when it ends"),
        ("completed", "the run wrote no model"),
        ("failed", "wrote no model"),
    ],
)
def test_without_a_card_the_tile_says_why(tmp_path, state, words):
    run = write_run(tmp_path, "fedavg", state=state)
    assert words in run_parts.card_tile(at(run), "", state)[2]


def test_the_card_is_a_page_and_its_signatures_are_counted_and_not_believed(runs, tmp_path):
    with_card(runs / "fedavg", tmp_path)
    client = opened(runs)
    text = client.get(f"{client.base}/runs/fedavg").text
    assert f'<a href="{client.base}/runs/fedavg/card">Read the card</a>' in text
    assert '<td data-label="file">privacy.json</td>' in text
    card = client.get(f"{client.base}/runs/fedavg/card").text
    is_whole(card)
    assert "There is NO formal guarantee" in card
    assert "Not signed." in card
    (runs / "fedavg" / "final" / "privacy.dsse.json").write_text(f"{{{EVIL}")
    card = client.get(f"{client.base}/runs/fedavg/card").text
    assert "Its signatures cannot be read" in card
    assert "<script>alert" not in card


def test_a_card_with_hostile_texts_is_text(runs, tmp_path):
    with_card(runs / "fedavg", tmp_path)
    file = runs / "fedavg" / "final" / "privacy.json"
    content = json.loads(file.read_text())
    content["guarantee"]["says"] = content["parties"][0]["who"] = EVIL + ESCAPES
    content["not_protected"] = [EVIL] * 3
    content["stated"]["data_sets"] = {EVIL: EVIL}
    file.write_text(json.dumps(content))
    client = opened(runs)
    text = client.get(f"{client.base}/runs/fedavg/card").text
    is_whole(text)
    assert text.count("&lt;script&gt;alert(271828)") >= 7
    assert not set("\x1b\x07\u202e") & set(text)


def test_a_card_or_a_model_behind_a_link_is_not_read(runs, tmp_path):
    outside = write_run(tmp_path / "outside", "secret")
    with_card(outside, tmp_path)
    (runs / "fedavg" / "final").symlink_to(outside / "final")
    assert safe_files.model_files(at(runs / "fedavg")) == {}
    client = opened(runs)
    assert client.get(f"{client.base}/runs/fedavg/card").status_code == 404
    assert "Read the card" not in client.get(f"{client.base}/runs/fedavg").text
    assert client.get(f"{client.base}/runs/fedrand/card").status_code == 404  # it has none


def test_a_config_of_any_size_and_content_is_bounded_text(runs):
    many = {f"key-{i}{EVIL}": EVIL * 200 for i in range(600)}
    with_config(runs / "fedavg", **many)
    client = opened(runs)
    text = client.get(f"{client.base}/runs/fedavg").text
    is_whole(text)
    assert "<script>alert" not in text
    assert "more are only in config.json." in text
    assert len(text) < 1_000_000


def test_every_attack_is_one_row_with_its_strongest_finding_and_what_it_means():
    base = controlled(found("north", 0.6, "contains"), found("south", 0.9, "above"))
    alone = [*controlled(found("north", 0.5, "contains", "loss"), attack="loss", won="contains")]
    tie = controlled(found("north", 0.57, "contains", "fedmia", half=0.05), attack="fedmia")
    low = controlled(found("north", 0.50, "contains", "calibrated"), attack="calibrated")
    rows = run_parts.attack_rows([*base, *alone, *tie, *low])
    texts = {str(row[0]): (str(row[2]), str(row[3]), re.sub(r"<[^>]+>", "", str(row[4]))) for row in rows}
    assert texts["alignment"] == ("0.90 [0.85, 0.95]", "south", "membership shows")
    assert texts["loss"][2].startswith("proves nothing here: it does not win where members are memorized")
    assert texts["fedmia"][2] == "above 0.5, not decided after correction"
    assert texts["calibrated"][2] == "not told apart from guessing, which proves no safety"


@pytest.mark.parametrize(
    ("name", "words"),
    [("loss", "low"), ("alignment, wrong site", "direction of a site's update"), ("caption 10%", "MaxRenyi"),
     ("projection of B", "span of the sent factor B"), ("somebody's own", ""), ("<b> 10%", "MaxRenyi")],
)  # fmt: skip
def test_an_attack_is_described_by_its_score_s_name(name, words):
    assert words in describe_attack(name)
    assert bool(describe_attack(name)) == bool(words)


@pytest.mark.long
def test_the_figure_of_privacy_is_that_against_the_server_and_says_when_there_is_none(tmp_path):
    assert privacy_statements.privacy_figure(load_run(write_run(tmp_path, "fedrand"))).value == "infinite"
    run = write_run(tmp_path, "fedavg")
    about = json.loads((run / "config.json").read_text())
    about["method"]["fields"] = {}
    about["config"] |= {"dp.noise-multiplier": 2.0, "dp.epsilon": 8.0, "dp.clip-norm": 1.0, "task.max-tokens": 64}
    (run / "config.json").write_text(json.dumps(about))
    figure = privacy_statements.privacy_figure(load_run(run))
    assert 0 < float(figure.value) < 100
    assert "against the server, for an example at site-0, the highest-cost site" in figure.note
    (run / "config.json").write_text(json.dumps(about | {"config": about["config"] | {"run.deterministic": True}}))
    assert privacy_statements.privacy_figure(load_run(run)).value == "infinite"
    (run / "config.json").write_text(json.dumps(about | {"config": about["config"] | {"unknown.key": 1}}))
    assert privacy_statements.privacy_figure(load_run(run)).value == "not known"
