"""The Compare page: configs first, one axis only for runs scored alike, and no protected run called a baseline."""

from __future__ import annotations

import itertools
import json
import re
from urllib.parse import urlencode

import pytest

from fedveil.console.runs.run_reader import load_run
from fedveil.console.web.compare_page import ComparedRun, chosen_keys, compare_about, group_by_scoring
from fedveil.console.web.pages import parse_query
from fedveil.console.web.runs_page import tick_box
from fedveil.console.web.safe_files import RunLocation
from tests.fedveil.console.conftest import write_run
from tests.fedveil.console.web.conftest import EVIL, opened
from tests.fedveil.console.web.report.made import audited, found
from tests.fedveil.console.web.test_pages import Page, is_whole

NOISE = {"dp.noise-multiplier": 0.9, "dp.epsilon": 8.0, "dp.delta": 1e-5}


def with_config(folder, **settings):
    content = json.loads((folder / "config.json").read_text())
    content["config"] |= settings
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def compared(folder, key: str = "") -> ComparedRun:
    place = RunLocation(key or folder.name, folder, 0.0)
    return ComparedRun.from_run(place, load_run(folder))


def page(client, *keys: str) -> str:
    return client.get(f"{client.base}/compare", params={"run": list(keys)}).text


def test_what_differs_comes_first_then_the_table_then_the_curves(runs):
    with_config(runs / "fedavg", **{"train.batch-size": 32})
    text = page(opened(runs), "fedavg", "fedrand")
    is_whole(text)
    parts = ("differ", "<code>train.batch-size</code>", "trade", "Undefended baseline", "curves", "<svg", "choose")
    at = [text.index(part if " " in part or "<" in part else f'id="{part}"') for part in parts]
    assert at == sorted(at)
    assert "<code>task.model</code>" not in text  # which is the same
    assert re.search(r'aria-label="Test loss by round. [^"]*fedavg from [^"]*fedrand from', text)  # on one axis
    headings = [int(tag[1]) for tag, _ in Page(text).tags if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(headings))


def test_runs_scored_on_other_rows_share_no_axis_and_the_page_says_so(runs):
    with_config(runs / "fedavg", **{"evaluate.eval-examples": 30})
    with_config(runs / "fedrand", **{"evaluate.eval-examples": 8})
    text = page(opened(runs), "fedavg", "fedrand")
    assert "evaluate.eval-examples (fedavg: 30, fedrand: 8)" in text
    assert text.index("Scored differently") < text.index('id="differ"')
    assert not re.search(r'aria-label="Test loss[^"]*fedavg from [^"]*fedrand from', text)
    assert text.count('role="img" aria-label="Test loss by round') == 2
    assert re.search(r'aria-label="Uploaded so far. [^"]*fedavg from [^"]*fedrand from', text)  # bytes are bytes


def test_two_runs_of_one_name_are_told_apart(tmp_path):
    first = with_config(write_run(tmp_path / "a", "fedavg", rounds=1), **{"evaluate.eval-examples": 30})
    second = with_config(write_run(tmp_path / "b", "fedavg", rounds=1), **{"evaluate.eval-examples": 8})
    both = [compared(first, "a:fedavg"), compared(second, "b:fedavg")]
    assert [len(group) for group in group_by_scoring(both)] == [1, 1]
    assert "(a:fedavg: 30, b:fedavg: 8)" in compare_about(both, "")["unlike"]


def test_no_protected_run_is_the_baseline(tmp_path):
    noisy = with_config(write_run(tmp_path / "a", "fedavg", rounds=1), **NOISE)
    sums = with_config(write_run(tmp_path / "b", "fedavg", rounds=1), **{"secure.enabled": True, "secure.min-sites": 3})
    other = write_run(tmp_path / "c", "fedrand", rounds=1)
    protected = [compared(noisy, "noisy"), compared(sums, "sums"), compared(other, "other")]
    about = compare_about(protected, "")
    assert (
        about["baseline"] == "None of these runs is FedAvg without protection, so none is an undefended baseline here."
    )
    ratios = r'<td[^>]*data-label="upload / baseline">([^<]*)</td>'
    assert re.findall(ratios, about["table_of"]) == ["&ndash;"] * 3
    plain = write_run(tmp_path / "d", "fedavg", rounds=1)
    about = compare_about([*protected, compared(plain, "plain")], "")
    assert about["baseline"] == "Undefended baseline: plain (FedAvg without protection)."
    assert re.findall(ratios, about["table_of"])[-1] == "1.00"


def test_the_strongest_attack_stands_beside_loss_and_bytes(runs):
    audited(runs / "fedavg", found("site-1", 0.9, "above"), found("north", 0.6, "contains"))
    text = page(opened(runs), "fedavg", "fedrand")
    assert "AUROC 0.90" in text
    assert "alignment on site-1: shows membership (0.5 is guessing)" in text
    assert "not attacked" in text


def test_a_broken_audit_is_named_and_the_page_stays(runs):
    (runs / "fedavg" / "audit.json").write_text(f'{{"findings": "{EVIL}"}}')
    text = page(opened(runs), "fedavg", "fedrand")
    assert "not a valid output of fedveil audit" in text
    assert "<script>alert" not in text
    assert "unreadable" in text


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["fedavg"], "A comparison needs at least two runs."),
        (["fedavg", "../secret"], "No run is named &quot;../secret&quot;."),
        (["fedavg", "fedavg"], "A comparison needs at least two runs."),
        ([f"run-{i}" for i in range(9)], "Only the first 6 of 9 runs are compared."),
        ([], "Choose runs"),
    ],
)  # fmt: skip
def test_a_choice_that_cannot_be_compared_is_explained(runs, keys, words):
    text = page(opened(runs), *keys)
    is_whole(text)
    assert words in text
    assert 'id="trade"' not in text


def test_a_ticked_box_names_any_key():
    keys = ["pilot:fed rand", "a&run=b", "100%25", "ü/../x", "\x1b"]
    values = [re.search(r'value="([^"]*)"', tick_box(key))[1] for key in keys]
    query = urlencode({"run": values}, doseq=True)  # as a browser sends a form
    assert chosen_keys(parse_query(query)) == keys


def test_curves_of_two_points_are_numbers_and_no_charts(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name, "fedavg", rounds=1)
    text = page(opened(tmp_path), "a:fedavg", "b:fedavg")
    assert "<svg" not in text
    assert 'aria-label="Last scores"' in text
