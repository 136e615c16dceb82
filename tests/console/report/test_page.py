"""The parts that the static report and the dashboard share."""

from __future__ import annotations

import pytest
from jinja2 import UndefinedError

from fedveil.console.report import page
from fedveil.console.report.figures import Curve, svg

FRAME = "console/report/templates"


def test_a_figure_has_no_style_and_words_for_who_cannot_see_it():
    points = [(0, 4.25), (1, 3.5)]
    figure = svg("Loss $by$ $\\frac{", "x", "y", [Curve("<b>$a$ $\\frac{\x1b", points, 0), Curve("other", points, 1)])
    assert "style" not in figure
    assert 'stroke="#1fa187"' in figure
    assert 'stroke-dasharray="' in figure  # of the second, so that a line under it shows
    assert "&lt;b&gt;$a$ $\\frac{\\x1b from 4.25 at 0 to 3.5 at 1; other from" in figure
    assert "<b>" not in figure
    assert "\x1b" not in figure


def test_a_table_names_its_columns_and_with_a_caption_is_reached_by_the_keyboard():
    rows = [["<i>", 1234]]
    table = page.table(["site", "bytes"], rows, caption="What <b> left")
    assert '<th scope="col" class="n">bytes</th>' in table
    assert "<caption>What &lt;b&gt; left</caption>" in table
    assert 'tabindex="0" role="region" aria-label="What &lt;b&gt; left"' in table
    assert '<td data-label="site">&lt;i&gt;</td>' in table
    assert "tabindex" not in page.table(["site", "bytes"], rows)
    share = page.table(["a", "b"], [[page.Figure("3&nbsp;%"), None]])
    assert '<td class="n" data-label="a">3&nbsp;%</td><td class="n" data-label="b">&ndash;</td>' in share


def test_a_template_shows_text_and_nothing_else():
    template = page.environment(FRAME).from_string("{{ a }}|{{ b }}|{{ c }}|{{ d }}")
    said = template.render(a='<script>"\x1b\u202e', b=12345, c=None, d=page.Html("<b>ours</b>"))
    assert said == "&lt;script&gt;&#34;\\x1b\\u202e|12,345|&ndash;|<b>ours</b>".replace("&#34;", "&quot;")
    assert len(page.environment(FRAME).from_string("{{ a }}").render(a="x" * 100_000)) < 6000


def test_a_template_that_names_what_is_not_there_fails():
    with pytest.raises(UndefinedError, match="missing"):
        page.environment(FRAME).from_string("{{ missing }}").render()
