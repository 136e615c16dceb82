"""The privacy card: its text for runs with and without a guarantee, and statements that it must not contain."""

from __future__ import annotations

import hashlib
import json
import math

import dp_accounting
import pytest
import yaml
from dp_accounting.pld import PLDAccountant
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from fedveil.cards import card as cards
from fedveil.cards import collect, digests, hub_readme, markdown
from fedveil.cards.card import DeclaredFacts
from fedveil.contract.privacy import UNTIMED
from fedveil.errors import StateError
from fedveil.federation.secagg.adversary_model import POLICIES_DECIDE
from fedveil.models import bundled
from fedveil.records import audit_log
from tests.fedveil.cards.made import DP, SITES, attempts, card, messages

HOSTILE = "</td><img src=x onerror=y> | `[a](http://b)` **b** \x1b[2J\n# head www.evil.org ![x](y) \u202e"


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "final"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_a_run_without_dp_says_plainly_that_there_is_no_guarantee(tmp_path):
    privacy_card = card(tmp_path)
    assert not privacy_card.guarantee.formal
    assert privacy_card.guarantee.epsilon == "infinite"
    assert "There is NO formal guarantee: the run makes no claim of differential privacy" in privacy_card.guarantee.says
    assert f"**{privacy_card.guarantee.says}**" in markdown.card_page(privacy_card)
    assert privacy_card.guarantee.says in hub_readme.hub_page(privacy_card, set())
    assert "differential-privacy" not in ModelCard(hub_readme.hub_page(privacy_card, set())).data.tags
    assert any("withholding does not bound" in line for line in privacy_card.not_protected)


@pytest.mark.parametrize(
    "changes",
    [
        {"run.deterministic": True, "dp.clip-norm": 1.0, "dp.noise-multiplier": 2.0},
        {"dp.clip-norm": 1.0},  # no noise
        {
            "dp.clip-norm": 1.0,
            "dp.noise-multiplier": 2.0,
            "attempts": [{"round": 0, "cohort": ["north"], "accepted": []}],
        },
    ],
    ids=["seeded", "no noise", "nobody reported, nothing bounds it"],
)
def test_a_claim_that_bounds_nothing_is_no_guarantee(tmp_path, changes):
    privacy_card = card(tmp_path, **{"train.batch-size": 8, **changes})
    assert not privacy_card.guarantee.formal
    assert "NO formal guarantee" in privacy_card.guarantee.says
    assert not isinstance(privacy_card.guarantee.epsilon, float)


def test_attacks_that_were_not_run_are_not_measured(tmp_path):
    privacy_card = card(tmp_path)
    assert privacy_card.audited == cards.AuditSection()
    assert markdown.NOT_MEASURED in markdown.card_page(privacy_card)
    assert markdown.NOT_MEASURED in hub_readme.hub_page(privacy_card, set())
    assert "AUROC" not in markdown.card_page(privacy_card)


def naive(rows: int, batch: int, steps: int) -> float:
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE)
    step = dp_accounting.PoissonSampledDpEvent(batch / rows, dp_accounting.GaussianDpEvent(2.0))
    accountant.compose(dp_accounting.SelfComposedDpEvent(step, steps))
    return float(accountant.get_epsilon(1e-5))


@pytest.mark.long
def test_epsilon_is_the_accountants_for_the_site_with_the_fewest_rows(tmp_path):
    attempt_records = attempts()
    for row in attempt_records:
        row["reports"] = {"north": {"num_examples": 100, "steps": 5}, "south": {"num_examples": 50, "steps": 5}}
    guarantee = card(tmp_path, attempts=attempt_records, **DP).guarantee
    assert guarantee.formal
    assert [site.epsilon for site in guarantee.sites] == [
        pytest.approx(naive(100, 8, 10), rel=1e-4), pytest.approx(naive(50, 8, 10), rel=1e-4),
    ]  # fmt: skip
    assert guarantee.epsilon == guarantee.sites[1].epsilon
    assert (guarantee.relation, guarantee.delta, guarantee.allowed, guarantee.nominal) == (
        "replace-one",
        1e-5,
        8.0,
        None,
    )
    assert "privacy loss distributions" in guarantee.accountant
    assert guarantee.sites[0].mu is None  # not at a run's end
    assert "one example of one site's data set" in guarantee.unit
    assert f"epsilon {guarantee.epsilon:.4g} at delta 1e-05 (replace-one)" in guarantee.says


def test_a_site_that_reported_nothing_counts_with_what_its_ledger_allows(tmp_path):
    attempt_records = attempts()
    for row in attempt_records:
        del row["reports"]["south"]
    guarantee = card(tmp_path, attempts=attempt_records, **DP).guarantee
    assert guarantee.epsilon == 8.0
    assert "does not know" in guarantee.sites[1].unknown
    assert guarantee.sites[1].epsilon == "not known"
    assert guarantee.says.endswith(
        "against everyone but the site itself, provided that the server does not time the site."
    )
    assert UNTIMED in guarantee.assumptions


def test_one_site_of_which_nothing_is_known_and_no_ledger_bounds_it_takes_the_guarantee_away(tmp_path):
    attempt_records = attempts()
    for row in attempt_records:
        del row["reports"]["south"]
    guarantee = card(tmp_path, attempts=attempt_records, **DP | {"dp.epsilon": 0.0}).guarantee
    assert isinstance(guarantee.sites[0].epsilon, float)
    assert (guarantee.formal, guarantee.epsilon) == (False, "not known")


@pytest.mark.long
def test_a_nominal_epsilon_stands_beside_the_honest_one_and_the_server_is_named(tmp_path):
    fields = 'mode = "paper"\nepsilon = 4.0\nrounds = 2'
    guarantee = card(tmp_path, **{"method.name": "dp_fpl", "method.params": fields, "train.batch-size": 8}).guarantee
    assert guarantee.nominal == 4.0
    assert isinstance(guarantee.epsilon, float)
    assert guarantee.epsilon > 4.0
    assert "against the server epsilon is infinite" in guarantee.says
    assert guarantee.model.startswith("central")


@pytest.mark.long
def test_a_whole_card_has_mu(tmp_path):
    (north, south) = card(tmp_path, whole=True, **DP).guarantee.sites
    assert north.mu == south.mu
    assert 0.1 < north.mu < 1
    assert north.mu_down_to == pytest.approx(1e-7)


def test_parties_and_messages_are_those_of_the_record(tmp_path):
    privacy_card = card(tmp_path, **{"run.capture-messages": True})
    server, site, other, holder = privacy_card.parties
    sentence = "2 messages from sites to the server, 200 bytes; including repeated and refused ones, and the keys "
    assert sentence + "and shares of secure aggregation." in server.saw
    assert any("one trained factor of each client" in line for line in server.saw)
    assert any("num_examples, steps" in line for line in server.saw)
    assert any("They also carried: next." in line for line in server.saw)
    assert any("run.capture-messages" in line for line in server.saw)
    assert any("600 bytes" in line for line in site.saw)
    assert not other.trusted
    assert not holder.trusted
    up, down = privacy_card.sent
    assert (up.bytes, up.payload, up.sites) == (200, 48, dict.fromkeys(SITES, 1))
    assert up.fields == [("h.0.lora_A", "dense float32", [2, 3], 24)]
    assert len(down.fields) == 2


def test_keys_shares_and_refused_uploads_count_with_their_site_also_one_in_no_cohort(tmp_path):
    attempt_records = attempts()
    attempt_records[0]["unlisted"] = {"north": [1000, 20, 3, 4], "west": [496, 5, 1, 1]}
    attempt_records[1]["unlisted"] = {"north": [7, 0, 1, 0], "east": [9, 0]}
    privacy_card = card(tmp_path, attempts=attempt_records)
    assert [site.model_dump() for site in privacy_card.traffic] == [
        {"site": "east", "up": 0, "up_bytes": 9, "down": 0, "down_bytes": 0, "unsigned": 0},
        {"site": "north", "up": 1 + 4, "up_bytes": 100 + 1007, "down": 1 + 4, "down_bytes": 300 + 20, "unsigned": 2},
        {"site": "south", "up": 1, "up_bytes": 100, "down": 1, "down_bytes": 300, "unsigned": 2},
        {"site": "west", "up": 1, "up_bytes": 496, "down": 1, "down_bytes": 5, "unsigned": 0},
    ]
    assert any(
        line.startswith("7 messages from sites to the server, 1712 bytes;") for line in privacy_card.parties[0].saw
    )
    assert "| north | 5 | 1107 | 5 | 320 | 2 |" in markdown.card_page(privacy_card)
    assert cards.parse_card(privacy_card.to_bytes(), "card") == privacy_card


UNSEEN = {
    "sites": 3, "cohort": 3, "quorum": 3, "threshold": 3, "neighbours": 0, "colluding": 1, "deaf": {},
}  # fmt: skip


def test_a_secure_run_says_what_nobody_saw_and_what_it_holds_against(tmp_path):
    attempt_records = attempts(("a", "b", "c"))
    for row in attempt_records:
        row |= {"reports": {}, "unseen": dict(UNSEEN)}
    privacy_card = card(tmp_path, attempts=attempt_records, **{"secure.enabled": True})
    server = privacy_card.parties[0]
    (learned,) = [line for line in server.saw if line.startswith("The server learns: ")]
    assert "a server that follows the protocol learns no single site's values" in learned
    assert "and n_k" in next(line for line in server.saw if line.startswith("Without secure aggregation it would be: "))
    assert any(line.startswith("Holds against an honest but curious server") for line in server.trusted)
    assert POLICIES_DECIDE in server.trusted
    assert "Up to 1 of them may work with the server; the claim allows for that." in privacy_card.parties[2].saw
    assert any("lies or deviates from the protocol of secure aggregation" in x for x in privacy_card.not_protected)
    assert not any("Single uploads" in line for line in privacy_card.not_protected)
    assert any("Single uploads" in line for line in card(tmp_path).not_protected)


def test_noise_in_the_sum_holds_while_some_sites_are_honest_and_a_ledger_bounds_what_the_server_cannot_see(tmp_path):
    attempt_records = attempts(("a", "b", "c"))
    for row in attempt_records:
        row |= {"reports": {}, "unseen": dict(UNSEEN)}
    secure = {"secure.enabled": True, "secure.noise": "sum", "train.max-steps": 1}
    guarantee = card(tmp_path, attempts=attempt_records, **DP, **secure).guarantee
    assert guarantee.formal
    assert guarantee.epsilon == 8.0
    assert "provided that 2 sites in every sum keep their share of the noise secret" in guarantee.says
    assert "and the server follows the protocol and the server does not time the site." in guarantee.says
    assert UNTIMED in guarantee.assumptions
    assert guarantee.model.startswith("distributed")
    assert "the server saw only sums" in guarantee.sites[0].unknown


def test_the_card_says_against_whom_and_gives_an_ethics_board_three_sentences(tmp_path):
    """By hand: e^8 = 2,981; two hospitals: 16 at 2e-5; the noise is at the site, so all others have the same figure."""
    privacy_card = card(tmp_path, **DP)
    guarantee = privacy_card.guarantee
    assert [(one.party, one.epsilon) for one in guarantee.against] == [
        (party, guarantee.epsilon) for party in ("the server", "other sites", "all of them together")
    ]
    assert guarantee.sampling.startswith("Poisson batches")
    assert "Zhu, Dong, Wang 2022" in guarantee.accountant
    first, second, third = guarantee.for_the_board
    assert "whether this example or another one was used" in first
    assert "more than 2.98e+03 times as likely (e^8;" in first
    assert "about 1e-05 (one in 100,000)" in first
    assert second.startswith("This counts this run alone,")  # dp.epsilon limits one run, and the policy all of them
    assert "for two hospitals with this figure: at most epsilon 16 at delta 2e-05" in second
    assert "the server does not time the hospital; against all others working together the figure is epsilon 8" in third
    page = markdown.card_page(privacy_card)
    assert "## For an ethics board\n\n1. A person who sees everything" in page
    assert "| against | epsilon, at most |" in page
    assert cards.parse_card(privacy_card.to_bytes(), "card") == privacy_card


def test_under_a_unit_column_every_sentence_is_for_all_examples_of_a_unit(tmp_path):
    privacy_card = card(tmp_path, **DP | {"dp.unit-column": "patient"})
    guarantee = privacy_card.guarantee
    unit = 'one unit of one site\'s data set, all examples with its id in the column "patient"'
    assert guarantee.unit == f"{unit}, in this run alone"
    assert f"at most, for {unit}, in this run alone" in guarantee.says
    assert "each unit is drawn independently" in guarantee.sampling
    first, second, _ = guarantee.for_the_board
    assert "whether this unit or another one was used" in first
    assert f"for single units of this hospital's data only ({unit})" in second
    assert "a patient with several examples" not in second
    assert any(words.startswith("A person with k units in a site's data") for words in privacy_card.not_protected)
    assert not any("the unit is one example" in words for words in privacy_card.not_protected)


def test_without_a_limit_an_ethics_board_is_told_of_this_run_alone(tmp_path):
    guarantee = card(tmp_path, **DP | {"dp.epsilon": 0.0, "dp.adjacency": "zero-out"}).guarantee
    first, second, _ = guarantee.for_the_board
    assert f"(e^{guarantee.epsilon:.4g};" in first
    assert "whether this example was used or added nothing" in first
    assert second.startswith("This counts this run alone")


def test_noise_in_the_sum_is_told_an_ethics_board_with_its_honest_hospitals(tmp_path):
    attempt_records = attempts(steps=1)
    secure = {"secure.enabled": True, "secure.noise": "sum", "train.max-steps": 1}
    seen = card(tmp_path, attempts=attempt_records, **DP, **secure).guarantee
    assert [one.party for one in seen.against] == [
        "the server", "other sites", "the server with 1 other site", "all of them together",
    ]  # fmt: skip
    assert seen.against[0].epsilon < seen.against[3].epsilon == seen.sites[0].against_all
    assert "at least 1 other hospital in every sum tell nobody their noise" in seen.for_the_board[2]
    assert f"the figure is epsilon {seen.sites[0].against_all:.4g} in this run" in seen.for_the_board[2]
    for row in attempt_records:
        row |= {"reports": {}, "unseen": dict(UNSEEN)}
    unseen = card(tmp_path, attempts=attempt_records, **DP, **secure).guarantee
    assert unseen.against[3].epsilon == "not known"
    assert "not known to the server (this hospital's own ledger has it)" in unseen.for_the_board[2]
    assert "at most epsilon 16 at delta 0.03" in unseen.for_the_board[1]  # (1 + e^8) 1e-5


def test_without_a_figure_against_the_server_there_is_nothing_for_an_ethics_board(tmp_path):
    trusted = {"method.name": "dp_fpl", "method.params": 'mode = "paper"\nepsilon = 4.0\nrounds = 2'}
    for changes in ({}, trusted | {"train.batch-size": 8}):
        privacy_card = card(tmp_path, **changes)
        assert privacy_card.guarantee.for_the_board == []
        assert "ethics board" not in markdown.card_page(privacy_card)


def test_the_card_says_what_its_own_signatures_are_worth(tmp_path):
    page = markdown.card_page(card(tmp_path))
    assert "The server wrote this card and can write anything." in page
    assert "A site that also signs vouches only for what it saw itself" in page


def test_uploads_that_a_site_did_not_sign_are_counted_and_named_as_not_protected(tmp_path):
    first, second = attempts()
    origin = "The origin of {}: the site did not sign it, so only the server's SuperLink vouches for the sender."
    signed = card(tmp_path, attempts=[first | {"unsigned": []}, second | {"unsigned": []}])
    assert not any(line.startswith("The origin") for line in signed.not_protected)
    assert {site.unsigned for site in signed.traffic} == {0}
    mixed = card(tmp_path, attempts=[first | {"unsigned": ["north"]}, second | {"unsigned": []}])
    assert origin.format(f"1 of {2 * len(SITES)} uploads") in mixed.not_protected
    assert {site.site: site.unsigned for site in mixed.traffic if site.unsigned} == {"north": 1}
    assert "| unsigned uploads |" in markdown.card_page(mixed)
    none = card(tmp_path)  # of lines that do not say so
    assert origin.format("every upload") in none.not_protected
    assert {site.unsigned for site in none.traffic} == {2}


def test_anchors_and_app_are_those_of_this_run_in_the_log(tmp_path):
    log, run = tmp_path / audit_log.NAME, {"run": "pilot-0a1b2c3d"}
    audit_log.append_entry(log, "started", run | {"app": "aa" * 32})
    audit_log.append_entry(log, "started", run | {"app": "bb" * 32})
    for count, name in ((1, "pilot-0a1b2c3d"), (2, "pilot-0a1b2c3d"), (3, "another-0a1b2c3d")):
        audit_log.append_entry(log, "accepted", {"run": name, "site": "north", "site_log": f"{count}:{'c' * 64}"})
    privacy_card = card(tmp_path)
    assert privacy_card.digests.app == "bb" * 32
    assert privacy_card.audit_log.server == str(audit_log.log_head(log))
    assert privacy_card.audit_log.sites == {"north": f"2:{'c' * 64}"}
    for odd in ("5f", "", "B" * 64):
        audit_log.append_entry(log, "started", run | {"app": odd})
        audit_log.append_entry(log, "accepted", run | {"site": "south", "site_log": odd})
        assert card(tmp_path).digests.app == ""
    assert set(card(tmp_path).audit_log.sites) == {"north"}
    log.write_bytes(log.read_bytes().replace(b"north", b"south"))
    assert "cannot be read" in card(tmp_path).audit_log.note
    assert str(tmp_path) not in card(tmp_path).audit_log.note


def test_digests_are_of_the_files(tmp_path):
    privacy_card = card(tmp_path)
    folder = bundled.bundled_folder("text-generation")
    assert privacy_card.digests.base.files == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir() if file.is_file()
    }
    assert digests.digest_config({"b": 1, "a": 2.5}, {"name": "x"}) == (
        hashlib.sha256(b'{"config":{"a":2.5,"b":1},"method":{"name":"x"}}').hexdigest()
    )
    base = tmp_path / "secret-project" / "llama"
    base.mkdir(parents=True)
    (base / "model.safetensors").write_bytes(b"w")
    local = card(tmp_path, **{"task.model": str(base)})
    assert local.digests.base.files == {"model.safetensors": hashlib.sha256(b"w").hexdigest()}
    assert local.run.base == "llama"
    assert "secret-project" not in local.to_bytes().decode()


def test_the_hub_reads_the_front_matter(tmp_path, model):
    stated = DeclaredFacts(license="apache-2.0", use="To try.")
    collect.write_card(model, card(tmp_path, stated=stated, **DP | {"task.model": "gpt2-owner/gpt2"}))
    model_card = ModelCard.load(model / "README.md")
    about = model_card.data.to_dict()
    assert about["library_name"] == "peft"
    assert about["license"] == "apache-2.0"
    assert about["base_model"] == "gpt2-owner/gpt2"
    assert about["pipeline_tag"] == "text-generation"
    assert about["tags"] == ["fedveil", "federated-learning", "method:fedrand", "differential-privacy"]
    assert yaml.safe_load((model / "README.md").read_text().split("---")[1]) == about
    assert "To try." in model_card.text
    assert {file.name for file in model.iterdir()} == {"adapter_config.json", "README.md", "PRIVACY.md", "privacy.json"}
    assert {file.stat().st_mode & 0o77 for file in model.iterdir() if file.name != "adapter_config.json"} == {0}


def test_nothing_that_others_wrote_is_markup_on_the_pages(tmp_path):
    stated = DeclaredFacts(use=HOSTILE, curator="1. - # x", data_sets={HOSTILE: HOSTILE})
    sites = (HOSTILE, "south")
    hostile_card = card(
        tmp_path, stated=stated, messages=messages(sites), attempts=attempts(sites), scores={HOSTILE: 1.0}, **DP
    )
    clean = card(tmp_path, stated=DeclaredFacts(use="x", curator="x", data_sets={"x": "x"}), messages=messages(), **DP)
    for page, plain in (
        (markdown.card_page(hostile_card), markdown.card_page(clean)),
        (hub_readme.hub_page(hostile_card, set()).split("---")[2], hub_readme.hub_page(clean, set()).split("---")[2]),
    ):
        tokens, expected = (MarkdownIt("commonmark").enable("table").parse(text) for text in (page, plain))
        kinds = [[t.type for t in [token, *(token.children or [])]] for token in tokens]
        assert kinds == [[t.type for t in [token, *(token.children or [])]] for token in expected]
        assert "\x1b" not in page
        assert "\u202e" not in page
        assert "<img" not in page
        assert "www.evil" not in page


def test_long_and_odd_values_make_a_card_all_the_same(tmp_path):
    sites = ("s" * 10_000 + "\x1b" * 1000, "south")
    privacy_card = card(
        tmp_path, messages=messages(sites), attempts=attempts(sites), scores={"loss": math.nan, "bleu": 2.0}, **DP
    )
    assert cards.parse_card(privacy_card.to_bytes(), "card") == privacy_card
    assert privacy_card.run.scores == {"bleu": 2.0}


@pytest.mark.parametrize(
    "change",
    [
        lambda about: about | {"more": 1},
        lambda about: about | {"fedveil_card": 2},
        lambda about: about | {"not_protected": ["x" * 4001]},
        lambda about: about | {"guarantee": about["guarantee"] | {"epsilon": -1.0}},
        lambda about: about | {"guarantee": about["guarantee"] | {"epsilon": "none"}},
        lambda about: about | {"digests": about["digests"] | {"app": "xyz"}},
        lambda about: about | {"run": about["run"] | {"rounds": True}},
    ],
)
def test_what_is_no_card_is_refused(tmp_path, change):
    about = json.loads(card(tmp_path).to_bytes())
    with pytest.raises(StateError, match="not a privacy card of version 1"):
        cards.parse_card(json.dumps(change(about)).encode(), "card")


def test_bytes_of_any_kind_are_refused_in_words(tmp_path):
    for data in (b"", b"null", b"[" * 100_000, b"\xff\xfe", b"NaN"):
        with pytest.raises(StateError, match="not a privacy card"):
            cards.parse_card(data, "card")
    with pytest.raises(StateError, match="at most"):
        cards.parse_card(b" " * (cards.MOST_BYTES + 1), "card")
    (tmp_path / "privacy.json").symlink_to("/etc/hostname")
    with pytest.raises(StateError, match="there is no privacy card"):
        cards.read_card(tmp_path)
