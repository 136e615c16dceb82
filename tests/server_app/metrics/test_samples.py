"""A round's line as figures: by hand, and nothing that is not finite."""

from __future__ import annotations

import math

from fedveil.server_app.metrics.samples import samples_from_line

ROW = {
    "round": 2, "attempt": 1, "cohort": ["north", "south", "west"], "accepted": ["north"],
    "failed": {"south": "refused: delta: expected finite values, found nan", "west": "no reply within 9 s"},
    "upload_bytes": 700, "download_bytes": 900, "seconds": 3.25, "weights": "",
    "reports": {"north": {"num_examples": 31, "loss_trained": 0.5}},
    "scores": {"server": {"loss": 1.5, "bleu": math.inf}},
}  # fmt: skip
SIZES = {"north": {"upload_bytes": 400, "download_bytes": 300}, "south": {"upload_bytes": 300, "download_bytes": 300}}


def test_every_figure_of_a_line_by_hand():
    metrics = samples_from_line(ROW, SIZES)
    assert {figure.path: figure.value for figure in metrics.figures} == {
        "asked": 3, "accepted": 1, "failed": 2, "upload_bytes": 700, "download_bytes": 900, "seconds": 3.25,
        "score/server/loss": 1.5,
        "site_accepted/north": 1, "site_accepted/south": 0, "site_accepted/west": 0,
        "site_upload_bytes/north": 400, "site_download_bytes/north": 300,
        "site_upload_bytes/south": 300, "site_download_bytes/south": 300,
        "site_num_examples/north": 31, "site_loss_trained/north": 0.5,
    }  # fmt: skip
    assert metrics.step == 3
    assert metrics.failed == ROW["failed"]


def test_the_scores_before_round_0_are_step_0_and_nothing_else():
    metrics = samples_from_line({"round": -1, "scores": {"server": {"loss": 4.0}}}, SIZES)
    assert (metrics.step, metrics.failed) == (0, {})
    assert [(figure.path, figure.value) for figure in metrics.figures] == [("score/server/loss", 4.0)]
