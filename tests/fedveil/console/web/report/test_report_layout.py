"""The report's order: key figures, contents, sections; what is about one of several runs is folded."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser

import pytest

from fedveil.console.runs.run_reader import load_run
from fedveil.console.runs.summary import run_label
from fedveil.console.web.report import html, key_figures, run_page
from tests.fedveil.console.conftest import masked, unscored, write_run
from tests.fedveil.console.web.report.made import audited, found


class Outline(HTMLParser):
    """The headings with their levels, the anchors, the links to anchors, and the text outside folded parts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.headings: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.shown, self.open = "", list[str]()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        about = dict(attrs)
        self.open.append(tag)
        self.ids += [about["id"]] if "id" in about else []
        self.links += [about["href"]] if tag == "a" else []
        if re.fullmatch(r"h\d", tag):
            self.headings.append((tag, ""))
        if tag in ("meta", "br", "img"):
            self.open.pop()

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if self.open and re.fullmatch(r"h\d", self.open[-1]):
            self.headings[-1] = (self.headings[-1][0], data)
        if not {"style", "svg", "title"} & set(self.open) and ("details" not in self.open or "summary" in self.open):
            self.shown += data


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs: plain and audited, of a secure sum, and another method."""
    folder = tmp_path_factory.mktemp("three")
    plain = audited(write_run(folder, "fedavg"), found("site-1", 0.973, "above"), found("site-2", 0.6, "contains"))
    return [load_run(run) for run in (plain, masked(write_run(folder / "b", "fedrand")), write_run(folder, "fedpara"))]


@pytest.mark.parametrize("count", [1, 3])
def test_the_contents_link_to_every_section_inside_main(runs, count):
    page = run_page.run_page_html(runs[:count])
    outline = Outline(page)
    sections = [title for level, title in outline.headings if level == "h2"]
    assert page.count("<main>") == page.count("</main>") == 1
    assert outline.headings[0][0] == "h1"
    assert [link.removeprefix("#") for link in outline.links] == [
        name for name in outline.ids if name.startswith("report-")
    ]
    assert len(outline.links) == len(sections) == len(set(outline.links))
    assert page.index("<main>") < page.index('class="keys"') < page.index('class="contents"') < page.index("<h2")
    assert {"Summary", "What attacks found", "Disclosure ledger", "Sites"} <= set(sections)
    assert ("Secure aggregation" in sections) == (count == 3)


def test_no_heading_repeats_a_run_s_name(runs):
    for of_page in (runs, runs[:1]):
        headings = Outline(run_page.run_page_html(of_page)).headings[1:]
        assert not [title for _, title in headings if any(run.name in title for run in of_page)]
        assert len({title for _, title in headings}) == len(headings)


def test_of_several_runs_each_run_s_part_is_folded_and_of_one_it_is_shown(runs):
    single, several = (Outline(run_page.run_page_html(of_page)).shown for of_page in (runs[:1], runs))
    for words in ("The server learns: each client's trained weights", "single variant", "ValueError: <no rows>"):
        assert words in single
        assert words not in several
    assert several.count("Not attacked, so what an attacker could learn is unknown") == 2  # never folded
    assert "fedavg: Membership shows in 1 of 2 findings" in several


def test_the_key_figures_of_each_run_stand_first(runs):
    strip = str(key_figures.key_figures(runs))
    figures = re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)", strip)
    assert figures[:4] == [
        ("test loss", "3.131"), ("uploaded", f"{runs[0].upload_bytes / 1e6:.2f} MB"), ("epsilon", "not known"),
        ("strongest attack", "AUROC 0.97"),
    ]  # fmt: skip
    assert [value for name, value in figures if name == "strongest attack"][1:] == ["not attacked"] * 2
    assert figures[6] == ("epsilon", "infinite")
    assert "alignment on site-1" in strip
    assert "the run makes no claim of differential privacy" in strip
    assert "fedrand + secure aggregation" in strip


def test_a_run_that_was_not_scored_has_its_sites_loss_as_key_figure(tmp_path):
    strip = str(key_figures.key_figures([load_run(unscored(write_run(tmp_path, "fedavg")))]))
    assert re.search(r"<dt>loss at the sites</dt><dd>[\d.]+<small", strip)
    rows = [json.loads(line) for line in (tmp_path / "fedavg" / "metrics.jsonl").read_text().splitlines()]
    text = "".join(json.dumps(row | {"reports": {}}) + "\n" for row in rows)
    (tmp_path / "fedavg" / "metrics.jsonl").write_text(text)
    (tmp_path / "fedavg" / "audit.json").write_text("{")
    strip = str(key_figures.key_figures([load_run(tmp_path / "fedavg")]))
    assert "<dt>test loss</dt><dd>not scored</dd>" in strip
    assert "<dt>strongest attack</dt><dd>not known" in strip


def test_metrics_have_the_names_of_papers(runs):
    page = run_page.run_page_html(runs)
    assert '<th scope="col" class="n">BLEU</th>' in page
    assert '<th scope="col" class="n">CIDEr</th>' in page
    assert ">bleu<" not in page
    assert [run_label(name) for name in ("loss", "rouge_l", "f1", "my_own")] == ["test loss", "ROUGE-L", "F1", "my_own"]


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([3.7, 3.1875, 2.9], ["3.700", "3.188", "2.900"]),
        ([21.25, 0.4, None], ["21.2500", "0.4000", None]),
        ([4, 3.5], ["4.000", "3.500"]),
        ([1234.5, 0.25], ["1,234", "0"]),
        ([1e-6, 2.0], [1e-6, 2.0]),
        ([1, 2, 3], [1, 2, 3]),
        ([0.0, 0.0], [0.0, 0.0]),
        ([math.nan, 2.0], ["nan", "2.000"]),
        ([math.inf], [math.inf]),
        ([True, 0.5], [True, "0.5000"]),
        (["x", 0.5], ["x", "0.5000"]),
        ([], []),
    ],
)
def test_numbers_of_a_column_have_equally_many_decimals(values, shown):
    found_values = html.equal_decimals(values)
    assert [value if isinstance(value, float | int | None) else str(value) for value in found_values] == shown


def test_a_table_s_column_keeps_its_alignment_and_its_dashes():
    table = html.html_table(["run", "loss"], [["a", 3.7], ["b", None], ["c", 3.1875]])
    assert re.findall(r'class="n" data-label="loss">([^<]*)<', table) == ["3.700", "&ndash;", "3.188"]
