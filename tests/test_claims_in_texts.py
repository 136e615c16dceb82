"""What pages must say of secure aggregation and noise, and what no page or text may claim again."""

from __future__ import annotations

import re
import subprocess

import pytest

from fedveil.config import parse
from fedveil.privacy.dp_sgd import DpSgdConfig
from fedveil.privacy.guarantee_words import board_sentences
from tests.conftest import ROOT

OVER = (
    "about k times the epsilon",
    "about k times epsilon",
    "and nothing of a single one",
    "larger batches are what helps",
    "it is the undefended baseline",
    "holds against a server that deviates",
    "that the server sees no single site",
    "masked, in sums alone",
    "nobody may see which part is missing",
)
MUST = {
    "README.md": (
        "only if every site's policy names the roster",
        "can read the server's key",
        "some entries of the sum may come from a single site",
        "does not time the site",
    ),
    "docs/methods.md": ("deviates from the protocol or lies", "may come from a single site", "does not time the site"),
    "SECURITY.md": ("deviates from the protocol", "it can read the key", "times a site"),
    "docs/threat-model.md": (
        "honest but curious",
        "a server that lies, without a roster",
        "admits only known code",
        "from round to round and from run to run nothing stops this",
        "may then come from a single site",
        "may poison its upload within the bounds",
        "several registrations of one person are several sites",
        "a superlink that can read the instruction key",
        "larger batches do not stop it",
        "alone does not stop a server that has several rounds",
        "steps alone are no defense",
        "an epsilon with poisson sampling assumes that the server does not time sites",
    ),
    "docs/pitfalls.md": (
        "a larger batch is no defense",
        "a bound on the change only delays the attack",
        "group privacy is k times epsilon at (e^(k epsilon) - 1) / (e^epsilon - 1) times delta",
        "at epsilon 8 per site, the person's epsilon is 19.1, not 16",
        "charging shuffled epochs, or batches of fixed size, as if they were Poisson samples",
    ),
    "docs/deploy/site-policy.md": (
        "(e^(k epsilon) - 1) / (e^epsilon - 1) times as large",
        "the sum of the sites' epsilons is no bound",
        "`max-epsilon = 3` over all runs together, and 8 at most",
        "min(1e-6, 1 / (10 x examples))",
    ),
    "docs/deploy/secure-aggregation.md": (
        "lies, without a roster",
        "may come from a single site",
        "it does not promise",
    ),
    "docs/runs.md": ("a server that followed the protocol could not see", "does not time the site"),
    "docs/cards.md": (
        "does not time the site",
        "Balle, Wang",
        "Zhu, Dong, Wang",
        "Canonne, Kamath, Steinke",
        "Kairouz, Liu, Steinke",
        "Chua et al.",
        "Lebeda",
        "Rogers",
    ),
    "docs/tutorials/to-a-guarantee.md": ("deviates or lies", "may come from a single site", "does not time the site"),
}

# What no epsilon supports. Only this page may name these words: it lists them as what not to say.
NOT_TO_BE_SAID = (
    r"\banonym",
    r"(cannot|can't|can not|impossible to) be re-?identif",
    r"\bre-?identification is impossible",
    r"gdpr[- ]compl",
    r"compl\w+ with the gdpr",
    r"\d ?(%|percent) (of )?protect",
    r"(fully|perfectly|completely|100 ?%) private\b",
)
MAY_LIST_THEM = {"docs/tutorials/to-a-guarantee.md"}

# There is no public repository yet: an address under this name could be anybody's. The signed type of a card is a name.
NO_ADDRESS = "github.com/fedveil"
SIGNED = {"fedveil/cards/signing/in_toto.py", "tests/test_claims_in_texts.py"}


def flat(text: str) -> str:
    return " ".join(text.split()).lower()


@pytest.mark.parametrize("page", MUST)
def test_a_page_says_where_the_claim_ends(page):
    text = flat((ROOT / page).read_text())
    assert [words for words in MUST[page] if words.lower() not in text] == []


def tracked(*patterns: str) -> list[str]:
    """Names of the files under version control. Skips the test outside of a repository."""
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git here")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.mark.long
def test_no_text_claims_what_is_not_so():
    names = tracked("*.py", "*.md", "*.html", ":!tests/", ":!benchmarks/results/")
    claims = [(name, words) for name in names for words in OVER if words in flat((ROOT / name).read_text())]
    assert claims == []


def forbidden_words(text: str) -> list[str]:
    return [match[0] for pattern in NOT_TO_BE_SAID for match in re.finditer(pattern, flat(text))]


def test_no_text_says_of_an_epsilon_what_none_supports():
    names = set(tracked("*.py", "*.md", "*.html", "*.toml", "*.ipynb", "*.js", "*.yaml", ":!tests/")) - MAY_LIST_THEM
    claims = {name: words for name in sorted(names) if (words := forbidden_words((ROOT / name).read_text()))}
    assert claims == {}


@pytest.mark.parametrize(
    "claim",
    ["the model is anonymous", "anonymised data", "Patients cannot be\n  re-identified.", "a GDPR-compliant run",
     "it complies with the GDPR", "99 % protected", "95 % of protection", "fully private training"],
)  # fmt: skip
def test_words_that_no_epsilon_supports_are_found(claim):
    assert forbidden_words(claim)


def test_the_page_that_lists_what_not_to_say_lists_it():
    listed = forbidden_words("".join((ROOT / page).read_text() for page in MAY_LIST_THEM))
    assert {"anonym", "cannot be re-identif", "gdpr-compl", "5 % protect"} <= set(listed)


def test_the_tutorial_has_the_three_sentences_of_a_card():
    page = flat((ROOT / "docs" / "tutorials" / "to-a-guarantee.md").read_text())
    sentences = board_sentences(DpSgdConfig(1.0, 1.0, 0.1, 3.0, 1e-6), parse({}), 3.0, None)
    assert [words for words in sentences if flat(words) not in page] == []
    assert len(sentences) == 3


def test_no_file_sends_a_reader_to_an_address_that_is_not_ours():
    texts = {name: (ROOT / name).read_bytes() for name in tracked()}
    assert {name for name, data in texts.items() if NO_ADDRESS.encode() in data} <= SIGNED


def claims_and_tests() -> list[tuple[str, str]]:
    """The rows of each table of the threat model whose last column says what tests a claim."""
    rows: list[tuple[str, str]] = []
    for block in (ROOT / "docs" / "threat-model.md").read_text().split("\n\n"):
        head, *lines = block.splitlines()
        if head == "| claim | tested by |":
            cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]
            rows += [(claim, tests) for claim, tests in cells]
    return rows


def test_each_claim_of_the_threat_model_names_tests_that_exist():
    """A short name is of the folder of the last whole path in its cell."""
    rows, before = claims_and_tests(), ""
    assert len(rows) >= 70
    for claim, cell in rows:
        folder, named = ROOT, re.findall(r"`([\w/.-]+)`", cell)
        assert named or (cell == "the same tests" and before), claim
        for name in named:
            whole = name.startswith("tests/")
            path = ROOT / name if whole else folder / name
            assert path.is_dir() if name.endswith("/") else path.is_file(), f"{claim}: {name}"
            if whole:
                folder = path if path.is_dir() else path.parent
            assert path.is_relative_to(ROOT / "tests"), f"{claim}: {name}"
            assert path.name.startswith("test_") or list(path.rglob("test_*.py")), f"{claim}: {name}"
        before = cell
