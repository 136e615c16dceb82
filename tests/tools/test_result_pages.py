"""The pages that are generated from committed results."""

from __future__ import annotations

from tools.pages import results

RESULT = {
    "preset": "x/y", "title": "A | title", "form": "small", "commit": "0123456789ab",
    "environment": {"gpu": None, "cores": 2},
    "rows": [
        {"name": "a_b", "upload_bytes": 12345, "metrics": {"loss": {"mean": 1.25, "low": 1.0, "high": 1.5, "n": 5}}},
        {"name": "one", "metrics": {"loss": {"mean": 2.0, "low": 2.0, "high": 2.0, "n": 1}}},
    ],
    "paper": {"a_b": {"loss": 1.5}}, "verdicts": ["a <b> holds here."], "differences": [],
}  # fmt: skip


def test_a_page_has_every_row_with_its_interval_and_what_the_paper_printed():
    page = results.render_result(RESULT)
    assert "| loss | 1.25 | 1 to 1.5 | 5 | 1.5 |" in page
    assert "| loss | 2 | - | 1 | - |" in page
    assert "12,345 bytes up." in page
    assert "`fedveil bench x/y --small`, commit 0123456789ab. cores 2." in page


def test_the_command_of_a_page_has_the_seeds_that_the_result_states():
    page = results.render_result(RESULT | {"differences": ["this run: 2 clients; 5 seeds"]})
    assert "`fedveil bench x/y --small --seeds 5`, commit" in page


def test_nothing_of_a_result_is_read_as_markdown():
    page = results.render_result(RESULT)
    assert "A \\| title." in page
    assert "### a\\_b" in page
    assert "- a \\<b\\> holds here." in page
    assert "Differences" not in page


def test_one_measurement_with_two_verdicts_is_named():
    text = "loss of {} less that of b: +0.1 [+0.0, +0.2]; the claim has it {}: {}."
    given = {
        "x_small": RESULT | {"verdicts": [text.format("a", "higher", "holds here")]},
        "x_large": RESULT | {"verdicts": [text.format("a", "higher", "not decided")]},
        "x_other": RESULT | {"verdicts": [text.format("a", "equal (within 0.3)", "not decided")]},
    }
    assert [[name for name, _ in pair] for pair in results.find_double_verdicts(given)] == [["x_small", "x_large"]]
    index = results.render_index(given)
    assert "- +0.1 \\[+0.0, +0.2\\]: [x/y](x_small.md): holds here; [x/y](x_large.md): not decided" in index
    del given["x_large"]
    assert results.find_double_verdicts(given) == []


def test_every_committed_result_has_a_page_and_stands_in_the_index():
    read = results.read_results()
    assert read
    index = results.render_index(read)
    for name, result in read.items():
        assert f"({name}.md)" in index
        assert results.render_result(result).count("\n### ") == len(result["rows"])
