"""The parts that the static report and the dashboard share."""

from __future__ import annotations

import pytest
from jinja2 import UndefinedError

from fedveil.console.web.report import html
from fedveil.console.web.report.line_chart import ChartCurve, curves_svg

FRAME = "console/web/report/templates"


def test_a_figure_has_no_style_and_words_for_who_cannot_see_it():
    points = [(0, 4.25), (1, 3.5)]
    figure = curves_svg(
        "Loss $by$ $\\frac{", "x", "y", [ChartCurve("<b>$a$ $\\frac{\x1b", points, 0), ChartCurve("other", points, 1)]
    )
    assert "style" not in figure
    assert 'stroke="#1fa187"' in figure
    assert 'stroke-dasharray="' in figure  # of the second, so that a line under it shows
    assert "&lt;b&gt;$a$ $\\frac{\\x1b from 4.25 at 0 to 3.5 at 1; other from" in figure
    assert "<b>" not in figure
    assert "\x1b" not in figure


def test_a_table_names_its_columns_and_with_a_caption_is_reached_by_the_keyboard():
    rows = [["<i>", 1234]]
    table = html.html_table(["site", "bytes"], rows, caption="What <b> left")
    assert '<th scope="col" class="n">bytes</th>' in table
    assert "<caption>What &lt;b&gt; left</caption>" in table
    assert 'tabindex="0" role="region" aria-label="What &lt;b&gt; left"' in table
    assert '<td data-label="site">&lt;i&gt;</td>' in table
    assert "tabindex" not in html.html_table(["site", "bytes"], rows)
    share = html.html_table(["a", "b"], [[html.FormattedNumber("3&nbsp;%"), None]])
    assert '<td class="n" data-label="a">3&nbsp;%</td><td class="n" data-label="b">&ndash;</td>' in share


def test_a_template_shows_text_and_nothing_else():
    template = html.template_environment(FRAME).from_string("{{ a }}|{{ b }}|{{ c }}|{{ d }}")
    rendered_text = template.render(a='<script>"\x1b\u202e', b=12345, c=None, d=html.Html("<b>ours</b>"))
    assert rendered_text == "&lt;script&gt;&#34;\\x1b\\u202e|12,345|&ndash;|<b>ours</b>".replace("&#34;", "&quot;")
    assert len(html.template_environment(FRAME).from_string("{{ a }}").render(a="x" * 100_000)) < 6000


def test_a_template_that_names_what_is_not_there_fails():
    with pytest.raises(UndefinedError, match="missing"):
        html.template_environment(FRAME).from_string("{{ missing }}").render()
