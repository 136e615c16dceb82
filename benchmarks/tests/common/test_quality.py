"""NIST and BLEU from sums over sources compared with those of the whole corpus; scores of a model's texts."""

from __future__ import annotations

import numpy as np
import pytest
from nltk.translate.nist_score import corpus_nist

from benchmarks.tests.text_folder import FOODS
from fedveil.config import parse
from fedveil.training.text_metrics import score_captions, tokenize_words
from fedveil_bench.common import quality, resampling, texts

WRITTEN = [
    "The Eagle is a cheap French restaurant by the river.",
    "the the the the the the",
    "Loch Fyne serves Japanese food and it is not family-friendly at all.",
    "A pub.",
]
TARGETS = [
    ["The Eagle is a French restaurant near the river.", "By the river there is a cheap place, The Eagle."],
    ["The Mill serves Thai food.", "In the centre, the Mill is the place for the Thai food that the people like."],
    ["Loch Fyne serves Japanese food. It is not family-friendly.", "No families at Loch Fyne."],
    ["A pub in the city centre that serves Italian food is The Mill.", "The Mill is a pub."],
]


def theirs(rows) -> float:
    return corpus_nist(
        [[tokenize_words(t) for t in TARGETS[i]] for i in rows], [tokenize_words(WRITTEN[i]) for i in rows], n=5
    )


def test_nist_of_all_sources_is_nltk_s():
    found = quality.nist_statistics(WRITTEN, TARGETS)
    assert found.shape == (4, 12)
    assert quality.compute_nist(found.sum(0)) == pytest.approx(theirs(range(4)))
    assert quality.compute_nist(found.sum(0)) > 1


def test_nist_of_a_short_corpus_has_nltk_s_length_penalty():
    """Half as long as the references: the penalty is below 0.2."""
    cut = [" ".join(text.split()[:5]) for text in WRITTEN]
    found = quality.compute_nist(quality.nist_statistics(cut, TARGETS).sum(0))
    assert found == pytest.approx(
        corpus_nist([[tokenize_words(t) for t in refs] for refs in TARGETS], [*map(tokenize_words, cut)], n=5)
    )


def test_nist_of_a_text_without_words_is_zero():
    assert quality.compute_nist(quality.nist_statistics([""], [["a pub"]]).sum(0)) == 0.0


def test_a_source_that_counts_twice_in_a_resample_does_so_in_nist_too():
    """What each source adds depends on no other but by the information of its n-grams, which no resample changes."""
    whole = quality.nist_statistics(WRITTEN, TARGETS)
    twice = quality.nist_statistics(WRITTEN * 2, TARGETS * 2)
    assert quality.compute_nist(2 * whole.sum(0)) == pytest.approx(quality.compute_nist(twice.sum(0)))
    alone = quality.nist_statistics(WRITTEN[:1], TARGETS[:1])
    assert quality.compute_nist(whole[0]) > quality.compute_nist(alone[0])  # a word is rarer among all references


def test_nist_stands_among_the_scores_with_an_interval(monkeypatch):
    monkeypatch.setattr(texts, "losses_of", lambda *_: [1.0] * len(FOODS))

    class Writer:
        def generate(self, weights, sources):
            return [f"{source} serves food by the river of the old town" for source in sources]

    rows = [{"mr": f, "ref": f"{f} serves tasty food by the river in the old town."} for f in FOODS]
    found = texts.compute_scores(Writer(), {}, rows)
    assert tuple(found) == texts.METRICS
    interval = resampling.compute_interval(found["nist"])
    assert 0 < interval["low"] < interval["mean"] < interval["high"] < 10
    assert np.isfinite(found["nist"].replicates).all()


class Captioner:
    """Writes the same texts whatever the model; what it is scored on stands in the column `target`."""

    config = parse({"method.name": "fedavg", "task.name": "vision-language", "task.target-column": "target"})

    def generate(self, weights, sources):
        return WRITTEN


CAPTIONED = [{"target": refs} for refs in TARGETS]


def test_captions_are_scored_as_the_whole_corpus_in_the_papers_scale():
    of_corpus = score_captions(WRITTEN, TARGETS)
    names = ["bleu_1", "bleu_2", "bleu_3", "bleu_4"]
    found = quality.compute_scores(Captioner(), {}, CAPTIONED, names)
    assert {name: figure.value for name, figure in found.items()} == pytest.approx({n: of_corpus[n] for n in names})
    assert len({round(figure.value, 3) for figure in found.values()}) == 4
    means = quality.compute_scores(Captioner(), {}, CAPTIONED, ["rouge_l", "cider", "cider_r"])
    assert {m: figure.value for m, figure in means.items()} == pytest.approx({m: 100 * of_corpus[m] for m in means})
    assert means["cider"].value != pytest.approx(means["cider_r"].value, rel=0.01)
    assert np.ptp(found["bleu_1"].replicates) > 0


@pytest.mark.parametrize("metric", ["bleu_0", "bleu_5", "bleu", "nist"])
def test_a_score_that_captions_do_not_have_is_refused(metric):
    with pytest.raises(ValueError, match=f"expected .*bleu_1 to bleu_4, found {metric}$"):
        quality.compute_scores(Captioner(), {}, CAPTIONED, [metric])


def test_loss_alone_asks_for_no_text(monkeypatch):
    """So that it can be taken after every few rounds."""
    monkeypatch.setattr(quality, "_losses", lambda *_: [1.0, 2.0, 3.0, 4.0])
    task = Captioner()
    monkeypatch.setattr(task, "generate", lambda *_: pytest.fail("generated"), raising=False)
    assert quality.compute_scores(task, {}, CAPTIONED, ["test loss"])["test loss"].value == 2.5
