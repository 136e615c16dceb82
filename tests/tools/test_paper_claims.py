"""The page about claims of papers: which sentences are such claims, their states, and what would decide them."""

from __future__ import annotations

import pytest

from tools.pages import paper_claims, results

CLAIM = "Accuracy of a less that of b: +1.0 [-1.0, +3.0] points; the paper has it higher: not decided."
RESULT = {
    "preset": "dp_fpl/x",
    "rows": [{"name": "a", "metrics": {"right": {"mean": 1.0, "low": 0.0, "high": 2.0, "n": 5, "seeds": [1.0] * 5}}}],
    "verdicts": [
        CLAIM,
        CLAIM.replace("+1.0 [", "+2.0 [").replace("not decided", "holds here"),
        CLAIM.replace("+1.0 [", "-2.0 [").replace("not decided", "does not hold here"),
        CLAIM.replace("a less", "c less"),
        "Accuracy of a less that of c: +1.0 [-1.1, +3.0] points; the claim has it higher: not decided.",
        "test loss of server (lower first): the paper's order a > b is not decided: no pair of 1 is told apart.",
        "Intervals are of 95 % each, over rows and seeds; words are corrected for 2 comparisons (Holm).",
    ],
}  # fmt: skip


def test_claims_of_the_paper_are_listed_once_and_ours_are_not():
    found = paper_claims.list_claims({"dp_fpl_x": RESULT, "lora_x": RESULT})
    assert [claim.state for claim in found] == [paper_claims.OPEN, paper_claims.HOLDS, paper_claims.REFUTED]
    assert {claim.paper for claim in found} == {"DP-FPL"}


@pytest.mark.parametrize(
    ("name", "sentence", "state"),
    [
        ("fedqsn_x", "w = 1 gap less control, loss: +1.0 [+0.9, +1.1]: a gap.", "holds"),
        ("fedqsn_x", "w = 1 tuned gap less control, loss: +1.0 [-0.9, +1.1]: no gap can be told.", "open"),
        ("fedqsn_x", "w = 1 gap less control, loss: -1.0 [-1.1, -0.9]: less than where nothing is hidden.", "refuted"),
        ("fedqsn_x", "FedLPP gap less control, loss: +1.0 [+0.9, +1.1]: a gap.", None),
        ("fedrand_x", "cider of a (higher first): the paper's order a > b holds in all 1 pairs.", "holds"),
        ("fedrand_x", "cider of a (higher first): the paper's order a > b does not hold: 0 of 1.", "refuted"),
        ("fedrand_x", "cider of a (higher first): the paper's order a > b holds in part: 1 of 3.", "open"),
        ("random_binary_april", "modified, R = 0.2, APRIL: PSNR 6.6 dB, expected below 9: holds here.", "holds"),
        ("random_binary_april", "standard, R = 0.2, direct: PSNR 6.6 dB, expected below 9: holds here.", None),
    ],
)  # fmt: skip
def test_a_state_is_that_of_the_sentence(name, sentence, state):
    assert paper_claims.is_paper_claim(name, sentence) == (state is not None)
    if state:
        assert paper_claims.find_state(sentence) == state


def test_a_sentence_without_a_verdict_is_no_claim():
    with pytest.raises(ValueError, match="expected a verdict"):
        paper_claims.find_state("the paper has it higher: perhaps.")


def test_seeds_that_would_decide_a_claim_follow_from_its_interval():
    """Half of 2.0 at five seeds is a deviation of 1.611; at alpha 0.02 the bound of 1.0 is first reached at 18."""
    assert paper_claims.estimate_seeds(CLAIM, RESULT) == 18
    far = CLAIM.replace("[-1.0, +3.0]", "[-9.0, +11.0]")
    assert paper_claims.estimate_seeds(far, RESULT) is None
    within = CLAIM.replace("it higher", "it equal (within 2)").replace("+1.0 [-1.0, +3.0]", "+0.0 [-2.0, +2.0]")
    assert paper_claims.estimate_seeds(within, RESULT) == 7


def test_the_page_has_the_committed_sentences_and_counts():
    read = results.read_results()
    page = paper_claims.render_page(read)
    claims = paper_claims.list_claims(read)
    states = [claim.state for claim in claims]
    assert {claim.paper for claim in claims} == set(paper_claims.PAPERS.values())
    assert f"test {len(claims)} claims that are the papers' own: {states.count('holds')} hold" in page
    for claim in claims:
        assert claim.sentence in read[claim.result]["verdicts"]
        assert results.escape_markdown(claim.sentence) in page
    for paper, theirs, _ in paper_claims.MISSING:
        assert f"| {paper} | {theirs} |" in page
    # A claim that is tested in a sense other than the paper's is not called refuted.
    other = next(claim for claim in claims if claim.sentence.startswith(tuple(paper_claims.OTHER_SENSE)))
    assert other.sentence.endswith("does not hold here.")
    assert other.state == "open"
    assert "| open | the paper's noise: its 0.4 is nominal" in page
