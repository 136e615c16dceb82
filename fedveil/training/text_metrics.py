"""Scores of generated text against several references per source.

`score_texts` returns bleu, rouge_l, nist, meteor and cider; `score_captions` returns bleu_1 to bleu_4, rouge_l, cider
and cider_r. Each score uses the scale of its usual tool:

| score | scale | computed by |
|---|---|---|
| bleu | 0 to 100 | sacrebleu, corpus BLEU-4, its own tokenizer ("13a"), case-sensitive |
| rouge_l | 0 to 1 | rouge-score, F-measure of the longest common subsequence, best reference, mean over sources |
| nist | 0 to about 10 | nltk, corpus NIST up to 5-grams |
| meteor | 0 to 1 | nltk, only exact and Porter stem matches: WordNet's synonyms need a download, so values are lower |
| cider | 0 to 10 | CIDEr-D as in coco-caption: 10 x the mean; typically 1 to 3 on E2E |
| cider_r | 0 to 10 | CIDEr-R: penalties for repeated words and for relative, not absolute, length |

nist, meteor, cider and cider_r use the words from `tokenize_words`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import geometric_mean

from fedveil.errors import TaskError

__all__ = [
    "MAX_N",
    "cider_d",
    "cider_r",
    "exact_match",
    "score_captions",
    "score_texts",
    "select_telling",
    "tokenize_words",
]

Gram = tuple[str, ...]

MAX_N = 4
SCORES = ("bleu", "rouge_l", "nist", "meteor", "cider")
CAPTIONS = (*(f"bleu_{n}" for n in range(1, MAX_N + 1)), "rouge_l", "cider", "cider_r")
SHORT_WORDS = 3  # maximum length of an answer that is either right or wrong as a whole
SIGMA = 6.0
OF_REPETITION, OF_LENGTH = 0.8, 0.2  # the exponents of CIDEr-R's two penalties

_WORD = re.compile(r"[^\W_]+(?:[-.,:/][^\W_]+)*|'[^\W\d_]+|[^\w\s]|_")


def tokenize_words(text: str) -> list[str]:
    """Split text into lowercase words and punctuation marks, in the style of the Penn Treebank.

    Hyphens, periods, commas and slashes inside a word or number are kept ("family-friendly", "3.5"); a clitic is a
    separate word ("it 's"); any other mark is a separate token."""
    return _WORD.findall(text.lower())


def score_texts(candidates: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return all scores of `candidates`, one per source, against `references`, at least one per source.

    Raises:
        ValueError: there are no candidates, the lengths differ, or a source has no reference.
    """
    _check(candidates, references)
    candidate_words = [tokenize_words(c) for c in candidates]
    reference_words = [[tokenize_words(r) for r in refs] for refs in references]
    return {
        "bleu": _bleu(candidates, references),
        "rouge_l": _rouge_l(candidates, references),
        "nist": _nist(candidate_words, reference_words),
        "meteor": _meteor(candidate_words, reference_words),
        "cider": sum(each := cider_d(candidate_words, reference_words)) / len(each),
    }


def score_captions(candidates: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the scores of image captions: bleu_1 to bleu_4, rouge_l, cider, cider_r. Raises like `score_texts`."""
    _check(candidates, references)
    of_words = [tokenize_words(c) for c in candidates], [[tokenize_words(r) for r in refs] for refs in references]
    bleu = {f"bleu_{n}": _bleu(candidates, references, n) for n in range(1, MAX_N + 1)}
    cider, robust = cider_d(*of_words), cider_r(*of_words)
    return bleu | {
        "rouge_l": _rouge_l(candidates, references),
        "cider": sum(cider) / len(cider),
        "cider_r": sum(robust) / len(robust),
    }


def exact_match(candidates: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return the fraction of candidates that equal a reference, ignoring case, outer whitespace and a final period."""
    _check(candidates, references)
    return sum(_plain(c) in map(_plain, refs) for c, refs in zip(candidates, references, strict=True)) / len(candidates)


def select_telling(
    scores: Mapping[str, float], references: Sequence[Sequence[str]], wanted: str = "loss"
) -> dict[str, float]:
    """Return the scores that can tell good answers from bad ones, given the length of the references.

    BLEU-n is 0 without n words in a row, so it is 0 for the right answer "yes" as well as for a wrong one; the n-grams
    of CIDEr, NIST and METEOR are equally uninformative. Long answers rarely equal a reference exactly.

    | for most sources, the longest reference has | omitted scores |
    |---|---|
    | at most SHORT_WORDS words | bleu, nist, meteor, cider, cider_r, and bleu_n for n above that number of words |
    | more words | exact_match |

    Raises:
        TaskError: `wanted`, which is evaluate.metric, is one of the omitted scores.
    """
    words = int(statistics.median_low([max(len(tokenize_words(ref)) for ref in refs) for refs in references]))
    if words > SHORT_WORDS:
        blind = {"exact_match"}
    else:
        blind = {"bleu", "nist", "meteor", "cider", "cider_r", *(f"bleu_{n}" for n in range(words + 1, MAX_N + 1))}
    if wanted in blind:
        better = "exact_match" if words <= SHORT_WORDS else "rouge_l"
        raise TaskError(
            f'evaluate.metric: "{wanted}" does not tell good answers from bad ones, because most of the '
            f"{len(references)} scored sources have answers of at most {words} words; set it to {better} or loss"
        )
    return {name: value for name, value in scores.items() if name not in blind}


def _plain(text: str) -> str:
    return text.strip().removesuffix(".").strip().casefold()


def _check(candidates: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    if not candidates or len(candidates) != len(references) or not all(references):
        raise ValueError(
            f"each candidate needs a nonempty list of references, found {len(candidates)} candidates and "
            f"{len(references)} lists"
        )


def cider_d(candidates: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]) -> list[float]:
    """Return CIDEr-D of each candidate (Vedantam, Zitnick, Parikh 2015, Eq. 2 to 4 and section 5), times 10.

    Document frequencies come from these references, with one document per source. Values range from 0 to 10; with a
    single source all scores are 0, because every idf is then log 1.
    """
    return _consensus(candidates, references, _gaussian)


def cider_r(candidates: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]) -> list[float]:
    """Return CIDEr-R of each candidate (Santos, Colombini, Avila 2021, as in the authors' own scorer), times 10.

    It is CIDEr-D with rep^0.8 len^0.2 in place of the Gaussian, for a reference of l words and a candidate of k words;
    the clipped cosine is the same:

        len = exp(-((k - l) / l)^2)
        rep = geometric mean of 1 / (1 + |times in the candidate - times in the reference|) over the candidate's words

    In rep, a word consists of letters and digits, each distinct word counts once, and a word that the reference lacks
    may occur once without penalty. The authors' scorer uses k - 1 and l - 1 as lengths, so it divides by 0 for a
    one-word reference.
    """
    return _consensus(candidates, references, _robust)


def _consensus(
    candidates: Sequence[Sequence[str]],
    references: Sequence[Sequence[Sequence[str]]],
    penalty: Callable[[Sequence[str], Sequence[str]], float],
) -> list[float]:
    """Return 10 x the mean over references of the clipped cosine, times the penalty of candidate and reference."""
    reference_counts = [[_gram_counts(r) for r in refs] for refs in references]
    documents = Counter(gram for refs in reference_counts for gram in set().union(*refs))
    log_sources = math.log(len(references))
    scores = []
    for candidate, refs, counts in zip(candidates, references, reference_counts, strict=True):
        own = _tf_idf(_gram_counts(candidate), documents, log_sources)
        per_reference = [
            penalty(candidate, ref) * _clipped_cosine(own, _tf_idf(count, documents, log_sources))
            for ref, count in zip(refs, counts, strict=True)
        ]
        scores.append(10 * sum(per_reference) / len(per_reference))
    return scores


def _gaussian(candidate: Sequence[str], reference: Sequence[str]) -> float:
    return math.exp(-((len(candidate) - len(reference)) ** 2) / (2 * SIGMA**2))


def _robust(candidate: Sequence[str], reference: Sequence[str]) -> float:
    if not reference:
        return 0.0
    of_length = math.exp(-(((len(candidate) - len(reference)) / len(reference)) ** 2))
    candidate_counts, wanted = (Counter(re.findall(r"\w+", " ".join(tokens))) for tokens in (candidate, reference))
    of_repetition = [1 / (1 + abs(count - wanted.get(word, 1))) for word, count in candidate_counts.items()]
    return float(geometric_mean(of_repetition or [1.0]) ** OF_REPETITION * of_length**OF_LENGTH)


def _gram_counts(tokens: Sequence[str]) -> Counter[Gram]:
    return Counter(tuple(tokens[i : i + n]) for n in range(1, MAX_N + 1) for i in range(len(tokens) - n + 1))


def _tf_idf(counts: Counter[Gram], documents: Counter[Gram], log_sources: float) -> list[dict[Gram, float]]:
    """Return one vector for each n. An n-gram absent from all references counts as if one reference had it."""
    vectors: list[dict[Gram, float]] = [{} for _ in range(MAX_N)]
    for gram, count in counts.items():
        vectors[len(gram) - 1][gram] = count * (log_sources - math.log(max(1, documents[gram])))
    return vectors


def _clipped_cosine(own: list[dict[Gram, float]], other: list[dict[Gram, float]]) -> float:
    """Return the mean cosine over n. The candidate's entries are clipped at the reference's: repeats gain nothing."""
    total = 0.0
    for mine, theirs in zip(own, other, strict=True):
        lengths = _norm(mine.values()) * _norm(theirs.values())
        if lengths:
            total += sum(min(mine[gram], theirs[gram]) * theirs[gram] for gram in mine.keys() & theirs.keys()) / lengths
    return total / MAX_N


def _norm(values: Iterable[float]) -> float:
    return math.sqrt(sum(v * v for v in values))


def _bleu(candidates: Sequence[str], references: Sequence[Sequence[str]], order: int = MAX_N) -> float:
    from sacrebleu.metrics import BLEU

    most = max(map(len, references))
    columns = [[refs[i] if i < len(refs) else None for refs in references] for i in range(most)]
    return float(BLEU(force=True, max_ngram_order=order).corpus_score(list(candidates), columns).score)


def _rouge_l(candidates: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    best = [
        scorer.score_multi(list(refs), c)["rougeL"].fmeasure for c, refs in zip(candidates, references, strict=True)
    ]
    return float(sum(best) / len(best))


def _nist(candidates: list[list[str]], references: list[list[list[str]]]) -> float:
    from nltk.translate.nist_score import corpus_nist

    longest = min(5, max(map(len, candidates)))
    return float(corpus_nist(references, candidates, n=longest)) if longest else 0.0


class _NoSynonyms:
    """A stand-in for nltk's WordNet in which no word has synonyms."""

    def synsets(self, word: str) -> list[str]:
        return []


def _meteor(candidates: list[list[str]], references: list[list[list[str]]]) -> float:
    from nltk.translate.meteor_score import meteor_score

    none = _NoSynonyms()
    values = [meteor_score(refs, c, wordnet=none) for c, refs in zip(candidates, references, strict=True)]
    return float(sum(values) / len(values))
