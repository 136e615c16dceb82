"""The event files, as TensorBoard itself reads them."""

from __future__ import annotations

import importlib.util
import os
import warnings
from dataclasses import replace

import pytest

from fedveil.config import parse
from fedveil.server_app.metrics.sinks import SinkRunInfo
from tests.server_app.metrics.sinks.runs import HOSTILE, TOLD

pytest.importorskip("tensorboard", reason='needs the extra "tensorboard"')

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugin_util import markdown_to_safe_html
    from tensorboard.util.tensor_util import make_ndarray

from fedveil.server_app.metrics.sinks import tensorboard


def read(folder):
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def test_tensorboard_reads_every_figure_and_a_site_s_words_load_nothing(tmp_path):
    assert importlib.util.find_spec(tensorboard.NEEDS)
    sink = tensorboard.create(SinkRunInfo(tmp_path, "ab", parse({})))
    assert list(tmp_path.iterdir()) == []  # nothing before there is a figure
    sink.write(TOLD)
    read(tmp_path / "tensorboard").Scalars("seconds")  # it is there before the run's end
    sink.close("completed")
    accumulator = read(tmp_path / "tensorboard")
    scalars = {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }
    assert scalars == {figure.path: [(3, figure.value)] for figure in TOLD.figures}
    (text,) = accumulator.Tensors("failed/south/text_summary")
    (words,) = make_ndarray(text.tensor_proto)
    html = markdown_to_safe_html(words.decode())
    assert "<img" not in html
    assert "<script" not in html
    assert "alert(1)" in html


def test_rounds_that_a_resumed_run_does_again_are_there_once(tmp_path):
    about = SinkRunInfo(tmp_path, "ab", parse({}))
    first = tensorboard.create(about)
    for step in (1, 2, 3):
        first.write(replace(TOLD, step=step, failed={}))
    first.close("failed")
    second = tensorboard.create(replace(about, is_resumed=True))
    for step in (3, 4):
        second.write(replace(TOLD, step=step, failed={}))
    second.close("completed")
    assert [event.step for event in read(tmp_path / "tensorboard").Scalars("seconds")] == [1, 2, 3, 4]


def test_a_folder_that_cannot_be_written_ends_the_sink_and_no_run(runs, monkeypatch):
    """A file lies where the folder should be: root, too, cannot write into it."""
    real = tensorboard.create

    def create(about):
        (about.folder / "tensorboard").write_text("")
        return real(about)

    monkeypatch.setattr(tensorboard, "create", create)
    runs.go(sinks__use="tensorboard")
    assert runs.status["state"] == "completed"
    assert "Error" in runs.status["sinks"]["tensorboard"]
    assert os.path.isfile(runs.at / "run" / "tensorboard")


def test_a_whole_run_lies_in_its_folder(runs):
    runs.go(sinks__use="tensorboard")
    assert "sinks" not in runs.status
    accumulator = read(runs.at / "run" / "tensorboard")
    assert [event.step for event in accumulator.Scalars("site_loss_trained/north")] == [1, 2]
    assert HOSTILE not in str(accumulator.Tags())
