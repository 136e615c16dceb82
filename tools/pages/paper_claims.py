"""The page about the papers: the parts that FedVeil did not reproduce, and the outcome of each claim that was measured.

Every figure and verdict is quoted from a committed result. For an open claim the page also says how many seeds would
decide it if the difference and its spread stayed the same.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedveil.attacks.statistics import student_t
from tools.pages.results import escape_markdown

HOLDS, REFUTED, OPEN = "holds", "refuted", "open"
PAPERS = {"fedrand": "FedRand", "random_binary": "Random binary weights", "dp_fpl": "DP-FPL", "fedqsn": "FedQSN"}
# Parts of the papers that no committed result covers, with what FedVeil measured instead; "-": nothing.
MISSING = (
    ("FedRand", "TinyLLaVA with OpenELM-450M", "a LLaVA of 1.5 M parameters; GPT-2 of 1.4 M on texts"),
    (
        "FedRand",
        "ScienceQA; captions of COCO and NoCaps",
        "Caltech-101 and CIFAR-10, with questions and short captions",
    ),
    ("FedRand", "Figures 2 and 3, and the entropy of single tokens (Appendix B)", "-"),
    ("Random binary weights", "ViT-S/16 at 224 pixels", "ViTs of 160,000 and 10,786 parameters at 32 and 8 pixels"),
    ("Random binary weights", "weights pre-trained on ImageNet", "a part of CIFAR-10 that no client has"),
    ("DP-FPL", "CLIP with ViT-B/16 and with ResNet-50", "a CLIP of 1.1 M parameters"),
    ("DP-FPL", "Pets, Flowers, Food101 and CIFAR-100", "30 of the 101 classes of Caltech-101; CIFAR-10"),
    ("DP-FPL", "Table 4: CIFAR-100 with 25 or 50 clients", "`dp_fpl/table4`: Caltech-101 with 10 clients"),
    ("FedQSN", "GPT-2 Medium", "GPT-2 of 1.4 M parameters"),
    ("FedQSN", "Table 4", "-"),
    (
        "FedQSN",
        "Eq. 4, with activation masks and an untied head",
        "2^w + 1 levels at normal quantiles, with column masks",
    ),
    ("all", "sites on machines of their own", "processes, containers and network namespaces of one machine"),
)
# The requirements of the full forms.
NEEDED = {
    "FedRand": "the full forms of `fedrand/table1` to `table4`: the paper's base, ScienceQA, COCO, NoCaps and a GPU",
    "Random binary weights": "`random_binary/vit_small`: ViT-S/16, CIFAR-10 and a GPU",
    "DP-FPL": "the full forms of `dp_fpl/table2` to `table4` and `ablation`: CLIP with ViT-B/16, Caltech-101 and a GPU",
    "FedQSN": "the full forms of `fedqsn/table1` to `table8`: GPT-2 Medium, four data sets and a GPU",
}
_ALPHA = 0.04  # for all verdicts of a table together, as in fedveil_bench/common/verdicts.py
MOST_SEEDS = 100
_CLAIMS = (r"; the paper has it ", r": the paper's order ")
# Metrics that results rank like the paper's, although the paper does not report them.
_OURS = re.compile(r".*test loss of |(loss|alignment) of ")
_GAP = re.compile(r"(?!FedLPP|FedSP)(?!.*embeddings|.*all layers).+ gap less control, loss: .*")
_MASKED = re.compile(r"modified, .*APRIL: PSNR .*")
_ENDINGS = (
    (r"does not hold here\.$|less than where nothing is hidden\.$|order .* does not hold: ", REFUTED),
    (r"holds here\.$|: a gap\.$|order .* holds in all \d+ pairs\.$", HOLDS),
    (r"not decided\.$|no gap can be told\.$|is not decided: |holds in part: ", OPEN),
)
# A claim that a result tests in a different sense than the paper: it stays open, whatever the result says.
OTHER_SENSE = {
    "Local accuracy of DP-FPL, epsilon 0.4 less that of DP-FPL, no noise":
        "the paper's noise: its 0.4 is nominal, here it is the actual epsilon, and a site has few examples",
}  # fmt: skip
_DIFFERENCE = re.compile(r": ([+-][\d.]+) \[([+-][\d.]+), ([+-][\d.]+)\]")


@dataclass(frozen=True)
class PaperClaim:
    """A claim of a paper, as a sentence in a result states it.

    Attributes:
        paper: the paper's name.
        result: the name of the result's page.
        preset: the preset that measured it.
        sentence: the result's sentence.
        state: HOLDS, REFUTED or OPEN.
        seeds: about how many seeds would decide it; None if it is decided, or if no reasonable number would.
    """

    paper: str
    result: str
    preset: str
    sentence: str
    state: str
    seeds: int | None


def list_claims(results: Mapping[str, Mapping[str, Any]]) -> list[PaperClaim]:
    """Return the papers' own claims in all results, in the order of PAPERS.

    Raises:
        ValueError: a sentence does not end with a known verdict.
    """
    found, measured = [], set()
    of_papers = [(paper, name) for prefix, paper in PAPERS.items() for name in results if name.startswith(f"{prefix}_")]
    for paper, name in of_papers:
        result = results[name]
        for sentence in (text for text in result["verdicts"] if is_paper_claim(name, text)):
            figures = _DIFFERENCE.search(sentence)
            if figures and (paper, figures.groups()) in measured:
                continue
            measured |= {(paper, figures.groups())} if figures else set()
            is_other = sentence.startswith(tuple(OTHER_SENSE))
            state = OPEN if is_other else find_state(sentence)
            seeds = estimate_seeds(sentence, result) if state == OPEN and not is_other else None
            found.append(PaperClaim(paper, name, result["preset"], sentence, state, seeds))
    return found


def is_paper_claim(name: str, sentence: str) -> bool:
    """Return whether a sentence is about a claim of the result's paper, rather than our own claim or a control."""
    if name == "random_binary_april":
        return bool(_MASKED.fullmatch(sentence))
    is_gap = name.startswith("fedqsn_") and bool(_GAP.fullmatch(sentence))
    return is_gap or (not _OURS.match(sentence) and any(re.search(pattern, sentence) for pattern in _CLAIMS))


def find_state(sentence: str) -> str:
    """Return HOLDS, REFUTED or OPEN for the claim in a sentence."""
    for pattern, state in _ENDINGS:
        if re.search(pattern, sentence):
            return state
    raise ValueError(f"sentence: expected a verdict at its end, found {sentence!r}")


def estimate_seeds(sentence: str, result: Mapping[str, Any]) -> int | None:
    """Return the number of seeds at which the interval, corrected for its table, would exclude the claim's bound.

    None if the number exceeds MOST_SEEDS or is unknown. It is a rough estimate, which assumes that the difference and
    its spread stay the same, and that the whole interval comes from the seeds.
    """
    match = _DIFFERENCE.search(sentence)
    counts = [len(m.get("seeds", ())) for row in result["rows"] for m in row["metrics"].values()]
    if not match or (seeds := max(counts, default=0)) < 2:
        return None
    value, low, high = map(float, match.groups())
    margin = float(stated[1]) if (stated := re.search(r"\(within ([\d.]+)\)", sentence)) else 0.0
    bounds = {"equal": (-margin, margin), "not lower": (-margin,), "not higher": (margin,)}
    claim = said[1] if (said := re.search(r"the paper has it ([a-z ]+?)(?: \(|:)", sentence)) else ""
    distance = min(abs(value - at) for at in bounds.get(claim, (0.0,)))
    families = [int(m[1]) for text in result["verdicts"] if (m := re.search(r"corrected for (\d+) comparisons", text))]
    if not distance or not families:
        return None
    spread = (high - low) / 2 / student_t(seeds - 1) * math.sqrt(seeds)
    alpha = _ALPHA / families[0]
    needed = range(seeds + 1, MOST_SEEDS + 1)
    return next((n for n in needed if student_t(n - 1, alpha) * spread / math.sqrt(n) <= distance), None)


def render_page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page."""
    claims = list_claims(results)
    counts = Counter(claim.state for claim in claims)
    lines = [
        "# What became of the papers' claims", "",
        f"The committed results test {len(claims)} claims that are the papers' own: {counts[HOLDS]} hold, "
        f"{counts[REFUTED]} are refuted, and {counts[OPEN]} are open.",
        "All are tested on small models and data, so that a refuted claim is refuted for these. Each sentence below is",
        "that of a result. A measurement that stands in two results is listed once; metrics and rows that a paper does",
        "not have are left out.", "",
        "## What of the papers is not here", "", "| paper | in the paper | here |", "|---|---|---|",
        *(f"| {paper} | {theirs} | {ours} |" for paper, theirs, ours in MISSING), "",
    ]  # fmt: skip
    for paper in PAPERS.values():
        lines += _render_paper(paper, [claim for claim in claims if claim.paper == paper])
    return "\n".join(lines)


def _render_paper(paper: str, claims: list[PaperClaim]) -> Iterator[str]:
    counts = Counter(claim.state for claim in claims)
    yield from (f"## {paper}", "")
    yield f"{counts[HOLDS]} hold, {counts[REFUTED]} are refuted, {counts[OPEN]} are open. What the full form needs:"
    yield f"{NEEDED[paper]}. No full form has been run, so its GPU hours are not known."
    yield from ("", "| claim, as measured | result | state | what would decide it |", "|---|---|---|---|")
    for claim in claims:
        link = f"[{escape_markdown(claim.preset)}]({claim.result}.md)"
        yield f"| {escape_markdown(claim.sentence)} | {link} | {claim.state} | {_describe_need(claim)} |"
    yield ""


def _describe_need(claim: PaperClaim) -> str:
    if claim.state != OPEN:
        return "-"
    if other := next((need for start, need in OTHER_SENSE.items() if claim.sentence.startswith(start)), None):
        return other
    if claim.seeds is None:
        return "the full form: more seeds of the small one would hardly tell"
    return f"about {claim.seeds} seeds of the same run, if difference and spread stay"
