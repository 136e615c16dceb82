"""CIDEr-D and CIDEr-R compared with values by hand and a slow reference; the other scores at their extremes."""

from __future__ import annotations

import math
import random
import re
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.errors import TaskError
from fedveil.training.text_metrics import (
    CAPTIONS,
    SCORES,
    cider_d,
    cider_r,
    exact_match,
    score_captions,
    score_texts,
    select_telling,
    tokenize_words,
)

WORDS = ["the", "mill", "pub", "cheap", "riverside", "."]
SENTENCE = st.lists(st.sampled_from(WORDS), max_size=7)


def test_words_split_like_the_treebank():
    assert tokenize_words("It's family-friendly, costs £20-25!") == [
        "it", "'s", "family-friendly", ",", "costs", "£", "20-25", "!",
    ]  # fmt: skip
    assert tokenize_words("Café Rouge: 3.5 stars.") == ["café", "rouge", ":", "3.5", "stars", "."]
    assert tokenize_words("") == []


def test_cider_d_by_hand():
    """Two sources, idf = log 2 for grams of one source and 0 for "a", which both have.

    Candidate "a b" against "a c b" (one reference): unigram vectors (a 0, b log2) and (a 0, c log2, b log2), cosine
    1/sqrt 2; no bigram in common; no longer grams. Length penalty exp(-1/72). So 10 * exp(-1/72) / sqrt 2 / 4.
    Candidate "a d d" against "a d": unigrams clipped at one d: (log2 * log2) / (2 log2 * log2) = 1/2; bigrams
    (a d, d d) against (a d): 1/sqrt 2. Penalty the same.
    """
    got = cider_d([["a", "b"], ["a", "d", "d"]], [[["a", "c", "b"]], [["a", "d"]]])
    penalty = math.exp(-1 / 72)
    assert got == pytest.approx([10 * penalty / math.sqrt(2) / 4, 10 * penalty * (0.5 + 1 / math.sqrt(2)) / 4])


def test_cider_r_by_hand():
    """The cosines of `test_cider_d_by_hand`. No word of "a b" is repeated; it is one word of three too short.

    "a d d" has d once too often, a as it should: rep = sqrt(1 x 1/2). It is one word of two too long.
    """
    got = cider_r([["a", "b"], ["a", "d", "d"]], [[["a", "c", "b"]], [["a", "d"]]])
    first = 10 * math.exp(-1 / 9) ** 0.2 / math.sqrt(2) / 4
    second = 10 * math.exp(-1 / 4) ** 0.2 * math.sqrt(1 / 2) ** 0.8 * (0.5 + 1 / math.sqrt(2)) / 4
    assert got == pytest.approx([first, second])


def alone(candidate: str, reference: str) -> float:
    """CIDEr-R beside a second source that has no word of either."""
    return cider_r([tokenize_words(candidate), ["x"]], [[tokenize_words(reference)], [["x"]]])[0]


def test_repeating_costs_in_cider_r():
    """Unigrams only. A word that the reference lacks may stand there once; so may one half of a compound."""
    lacking = [alone(f"pub {again}", "pub") for again in ("cheap", "cheap cheap", "cheap cheap cheap")]
    cosines = [1 / math.sqrt(1 + n**2) for n in (1, 2, 3)]
    lengths = [math.exp(-(n**2)) ** 0.2 for n in (1, 2, 3)]
    repeated = [math.sqrt(1 / n) ** 0.8 for n in (1, 2, 3)]
    assert lacking == pytest.approx([2.5 * c * k * r for c, k, r in zip(cosines, lengths, repeated, strict=True)])
    assert alone("family-friendly family", "family-friendly") == pytest.approx(lacking[0] * math.sqrt(1 / 2) ** 0.8)
    assert alone("pub .", "pub") == pytest.approx(alone("pub cheap", "pub"))
    assert alone("pub . .", "pub") > alone("pub cheap cheap", "pub")  # marks are no words


def test_length_in_cider_r_is_relative_to_the_reference():
    """Half as long: the same share of the cosine is left, however long the reference; CIDEr-D leaves ever less."""
    score_ratios = []
    for size in (4, 8, 16):
        reference = [f"w{i}" for i in range(2 * size)]
        texts = [reference[:size], ["x"]], [[reference], [["x"]]]
        cosine = statistics.fmean(math.sqrt((size - n) / (2 * size - n)) for n in range(4))
        score_ratios.append((cider_r(*texts)[0] / cosine, cider_d(*texts)[0] / cosine))
    assert [of_r for of_r, _ in score_ratios] == pytest.approx([10 * math.exp(-1 / 4) ** 0.2] * 3)
    assert score_ratios[0][1] > score_ratios[1][1] > score_ratios[2][1]


def gaussian(candidate: list[str], reference: list[str]) -> float:
    return math.exp(-((len(candidate) - len(reference)) ** 2) / 72)


def robust(candidate: list[str], reference: list[str]) -> float:
    """An empty reference has no entry in any vector: what its penalty is does not matter."""
    mine, theirs = (re.findall(r"\w+", " ".join(tokens)) for tokens in (candidate, reference))
    factors = [1 / (1 + abs(mine.count(w) - (theirs.count(w) or 1))) for w in set(mine)]
    length = math.exp(-((len(candidate) - len(reference)) ** 2) / max(1, len(reference)) ** 2)
    return (statistics.geometric_mean(factors) if factors else 1.0) ** 0.8 * length**0.2


def twin(candidates: list[list[str]], references: list[list[list[str]]], penalty) -> list[float]:
    """The paper's equations one gram at a time, every gram of the corpus in every vector."""

    def occurrences(tokens: list[str], gram: tuple[str, ...]) -> int:
        return sum(tuple(tokens[i : i + len(gram)]) == gram for i in range(len(tokens) - len(gram) + 1))

    everything = candidates + [r for refs in references for r in refs]
    scores = []
    for candidate, refs in zip(candidates, references, strict=True):
        total = 0.0
        for n in range(1, 5):
            grams = {tuple(t[i : i + n]) for t in everything for i in range(len(t) - n + 1)}
            idf = {
                g: math.log(len(references) / max(1, sum(any(occurrences(r, g) for r in rs) for rs in references)))
                for g in grams
            }
            for ref in refs:
                own = {g: occurrences(candidate, g) * idf[g] for g in grams}
                its = {g: occurrences(ref, g) * idf[g] for g in grams}
                norm = math.sqrt(sum(v * v for v in own.values()) * sum(v * v for v in its.values()))
                if norm > 0:
                    dot = sum(min(own[g], its[g]) * its[g] for g in grams)
                    total += penalty(candidate, ref) * dot / norm / len(refs) / 4
        scores.append(10 * total)
    return scores


@pytest.mark.parametrize(("cider", "penalty"), [(cider_d, gaussian), (cider_r, robust)])
def test_cider_equals_its_twin(cider, penalty):
    rng = random.Random(271828)

    def sentence() -> list[str]:
        return [rng.choice(WORDS) for _ in range(rng.randint(0, 8))]

    for _ in range(10):
        candidates = [sentence() for _ in range(4)]
        references = [[sentence() for _ in range(rng.randint(1, 3))] for _ in range(4)]
        assert cider(candidates, references) == pytest.approx(twin(candidates, references, penalty))


@given(st.lists(st.tuples(SENTENCE, st.lists(SENTENCE, min_size=1, max_size=3)), min_size=1, max_size=4))
def test_cider_lies_between_0_and_10(pairs):
    for cider in (cider_d, cider_r):
        scores = cider([c for c, _ in pairs], [refs for _, refs in pairs])
        assert all(0 <= s <= 10 + 1e-9 for s in scores)


@given(st.lists(SENTENCE.flatmap(lambda s: st.tuples(st.just(s), st.permutations(s))), min_size=2, max_size=4))
def test_a_text_of_the_reference_s_words_has_no_penalty_in_either(pairs):
    texts = [c for c, _ in pairs], [[ref] for _, ref in pairs]
    assert cider_r(*texts) == pytest.approx(cider_d(*texts))


def test_a_copy_of_the_only_reference_scores_full_marks():
    sentences = ["The Mill is a cheap pub by the river .", "Bibimbap House serves English food near Clare Hall ."]
    scores = score_texts(sentences, [[s] for s in sentences])
    assert scores["bleu"] == pytest.approx(100)
    assert scores["rouge_l"] == pytest.approx(1)
    assert scores["cider"] == pytest.approx(10)
    assert scores["meteor"] > 0.99
    assert score_captions(sentences, [[s] for s in sentences])["cider_r"] == pytest.approx(10)
    swapped = score_texts(sentences[::-1], [[s] for s in sentences])
    assert all(swapped[name] < scores[name] / 2 for name in scores)


def test_more_references_count_each_on_its_own():
    """The best reference decides rouge_l; a source may have more of them than another."""
    candidates = ["a cheap pub", "the riverside"]
    one = score_texts(candidates, [["nothing alike here"], ["the riverside"]])
    two = score_texts(candidates, [["nothing alike here", "a cheap pub"], ["the riverside"]])
    assert one["rouge_l"] == pytest.approx(0.5)
    assert two["rouge_l"] == pytest.approx(1.0)


def test_meteor_matches_stems_without_wordnet():
    assert score_texts(["he walks"], [["he walked"]])["meteor"] > score_texts(["he runs"], [["he walked"]])["meteor"]


def test_empty_candidates_score_nothing():
    assert set(score_texts(["", ""], [["a pub"], ["the mill"]]).values()) == {0.0}


def test_a_source_without_reference_is_refused():
    with pytest.raises(ValueError, match="found 2 candidates and 2 lists"):
        score_texts(["a", "b"], [["a"], []])


def test_exact_match_by_hand():
    references = [["A dog."], ["a cat", "a small cat"], ["B"], ["two boats"]]
    assert exact_match(["a dog", "A small cat.", " b ", "two boat"], references) == 0.75
    with pytest.raises(ValueError, match="each candidate needs"):
        exact_match([], [])


def test_captions_by_hand():
    """One candidate of four words, three of them in the reference, two pairs, one triple, no four in a row."""
    scores = score_captions(["a red boat sinks"], [["a red boat floats"]])
    assert set(scores) == {"bleu_1", "bleu_2", "bleu_3", "bleu_4", "rouge_l", "cider", "cider_r"}
    assert scores["bleu_1"] == pytest.approx(75.0)
    assert scores["bleu_2"] == pytest.approx(100 * (3 / 4 * 2 / 3) ** (1 / 2))
    assert scores["bleu_3"] == pytest.approx(100 * (3 / 4 * 2 / 3 * 1 / 2) ** (1 / 3))
    assert scores["rouge_l"] == pytest.approx(0.75)


@pytest.mark.parametrize(
    "references, left_out",
    [
        (
            [["yes"], ["no"], ["a b c d e"]],
            {"bleu", "nist", "meteor", "cider", "bleu_2", "bleu_3", "bleu_4", "cider_r"},
        ),
        (
            [["left lung", "lung"], ["heart"], ["no finding"]],
            {"bleu", "nist", "meteor", "cider", "bleu_3", "bleu_4", "cider_r"},
        ),
        ([["a cheap pub by the river"], ["yes"], ["the mill is a pub"]], {"exact_match"}),
    ],
)
def test_a_score_that_says_nothing_about_such_answers_is_not_shown(references, left_out):
    every = dict.fromkeys((*SCORES, *CAPTIONS, "exact_match", "loss"), 1.0)
    assert every.keys() - select_telling(every, references).keys() == left_out
    for name in left_out:
        with pytest.raises(TaskError, match=f'evaluate.metric: "{name}" does not tell good answers'):
            select_telling(every, references, name)
    assert select_telling(every, references, "rouge_l")["rouge_l"] == 1.0


def test_bleu_of_a_one_word_answer_is_why():
    """It is 0 for the right answer and for the wrong one, while their exact match differs."""
    right, wrong = (score_texts([answer], [["yes"]])["bleu"] for answer in ("yes", "no"))
    assert right == wrong == 0.0
    assert exact_match(["yes"], [["yes"]]) == 1.0
    assert exact_match(["no"], [["yes"]]) == 0.0
