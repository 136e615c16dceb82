"""Scores for a model's answers and captions, with bootstrap replicates over the images."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
from sacrebleu.metrics import BLEU

from fedveil.attacks.membership.model_scores import target_loss
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import Example
from fedveil.tasks.vision_language import LETTERS, VisionLanguage
from fedveil.training import text_metrics
from fedveil.training.text_metrics import MAX_N
from fedveil_bench.common import resampling
from fedveil_bench.common.resampling import Numbers, ResampledMetric

_TEST = 5  # names the random draws
_NIST_N = 5


def compute_scores(
    task: VisionLanguage, weights: Weights, examples: Sequence[Mapping[str, Any]], metrics: Sequence[str]
) -> dict[str, ResampledMetric]:
    """Return the `metrics` of the model on `examples`, by name.

    "test loss" is in nats per token. "accuracy", "cider", "cider_r", "bleu_1" to "bleu_4" and "rouge_l" score the
    generated text, on the papers' scale (100 x). If only the loss is requested, no text is generated.

    Raises:
        ValueError: a metric is unknown.
    """
    written = task.generate(weights, Example.from_columns(examples)) if {*metrics} - {"test loss"} else []
    targets = [_targets(task, example) for example in examples]
    found: dict[str, ResampledMetric] = {}
    for metric in metrics:
        match metric:
            case "test loss":
                found[metric] = resampling.resample_mean(_losses(task, weights, examples), _TEST)
            case "accuracy":
                each = [100 * text_metrics.exact_match([c], [t]) for c, t in zip(written, targets, strict=True)]
                found[metric] = resampling.resample_mean(each, _TEST)
            case "cider" | "cider_r":
                score = text_metrics.cider_d if metric == "cider" else text_metrics.cider_r
                words = [text_metrics.tokenize_words(c) for c in written]
                per_row = score(words, [[text_metrics.tokenize_words(t) for t in refs] for refs in targets])
                found[metric] = resampling.resample_mean([100 * c for c in per_row], _TEST)
            case "rouge_l":
                found[metric] = resampling.resample_mean(
                    [
                        100 * text_metrics.score_captions([c], [t])["rouge_l"]
                        for c, t in zip(written, targets, strict=True)
                    ],
                    _TEST,
                )
            case "bleu_1" | "bleu_2" | "bleu_3" | "bleu_4":
                of_order = partial(compute_bleu, order=int(metric[-1]))
                found[metric] = resampling.resample_statistic(bleu_statistics(written, targets), of_order, _TEST)
            case _:
                raise ValueError(
                    "metrics: expected test loss, accuracy, cider, cider_r, rouge_l or bleu_1 to bleu_4, found "
                    f"{metric}"
                )
    return found


def _losses(task: VisionLanguage, weights: Weights, examples: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the mean loss of each example over its targets."""
    rows = [task.encode(Example.from_columns([example])) for example in examples]
    found = (target_loss(p) for p in task.predict(weights, [row for of_example in rows for row in of_example]))
    return [fmean(next(found) for _ in of_example) for of_example in rows]


def _targets(task: VisionLanguage, example: Mapping[str, Any]) -> list[str]:
    target = example[task.config.task.target_column]
    if task.config.task.choices_column:
        return [LETTERS[target]]
    return list(target) if isinstance(target, list) else [target]


def bleu_statistics(written: Sequence[str], targets: Sequence[Sequence[str]]) -> Numbers:
    """Return (rows, 10): matching and total n-grams for n = 1 to 4, length, and length of the closest reference."""
    scorer = BLEU(effective_order=True, force=True)
    found = [scorer.sentence_score(c, list(refs)) for c, refs in zip(written, targets, strict=True)]
    return np.array([[*f.counts, *f.totals, f.sys_len, f.ref_len] for f in found], dtype=float)


def compute_bleu(total: Numbers, order: int = MAX_N) -> float:
    """Return the corpus BLEU (0 to 100) for n-grams up to `order` (1 to 4), from the summed `bleu_statistics` (10,)."""
    return float(
        BLEU.compute_bleu(
            correct=[int(n) for n in total[:order]],
            total=[int(n) for n in total[MAX_N : MAX_N + order]],
            sys_len=int(total[8]),
            ref_len=int(total[9]),
            smooth_method="exp",
            max_ngram_order=order,
        ).score
    )


def nist_statistics(written: Sequence[str], targets: Sequence[Sequence[str]]) -> Numbers:
    """Return (rows, 12): each row's contribution to corpus NIST (Doddington 2002), counted as in nltk.

    For each n from 1 to 5: the information in the n-grams that the row shares with the reference that maximizes it,
    and the row's number of n-grams. Then the row's length and that reference's length, both summed over n. The
    information of an n-gram is computed over all `targets`, so it is the same in every resample of the rows.
    """
    from nltk.util import ngrams

    texts = [text_metrics.tokenize_words(text) for text in written]
    references = [[text_metrics.tokenize_words(target) for target in refs] for refs in targets]
    orders = range(1, _NIST_N + 1)
    counts = Counter(gram for refs in references for ref in refs for n in orders for gram in ngrams(ref, n))
    tokens = sum(len(ref) for refs in references for ref in refs)
    information = {gram: math.log2((counts[gram[:-1]] if gram[1:] else tokens) / k) for gram, k in counts.items()}
    found = []
    for text, refs in zip(texts, references, strict=True):
        own = [Counter(ngrams(text, n)) for n in orders]
        best = [
            max(
                (sum(information[g] * k for g, k in (mine & Counter(ngrams(ref, n))).items()), len(ref)) for ref in refs
            )
            for n, mine in zip(orders, own, strict=True)
        ]
        lengths = _NIST_N * len(text), sum(length for _, length in best)
        found.append([*(shared for shared, _ in best), *(mine.total() for mine in own), *lengths])
    return np.array(found, dtype=float)


def compute_nist(total: Numbers) -> float:
    """Return the corpus NIST (0 to about 10) from the summed `nist_statistics` (12,)."""
    from nltk.translate.nist_score import nist_length_penalty

    shared, number, (length, of_references) = total[:_NIST_N], total[_NIST_N : 2 * _NIST_N], total[2 * _NIST_N :]
    precision = sum(s / n for s, n in zip(shared, number, strict=True) if n)
    return float(precision * nist_length_penalty(of_references, length))
