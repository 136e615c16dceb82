"""The privacy card: what it says of runs with and without a guarantee, and what it must not say."""

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
from fedveil.cards import digests, hub, words, written
from fedveil.cards.card import Stated
from fedveil.errors import StateError
from fedveil.models import tiny
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
    found = card(tmp_path)
    assert not found.guarantee.formal
    assert found.guarantee.epsilon == "infinite"
    assert "There is NO formal guarantee: the run makes no claim of differential privacy" in found.guarantee.says
    assert f"**{found.guarantee.says}**" in words.page(found)
    assert found.guarantee.says in hub.page(found, set())
    assert "differential-privacy" not in ModelCard(hub.page(found, set())).data.tags
    assert any("withholding is no bound" in line for line in found.not_protected)


@pytest.mark.parametrize(
    "changes",
    [
        {"run.deterministic": True, "dp.clip": 1.0, "dp.noise": 2.0},
        {"dp.clip": 1.0},  # no noise
        {"dp.clip": 1.0, "dp.noise": 2.0, "attempts": [{"round": 0, "cohort": ["north"], "accepted": []}]},
    ],
    ids=["seeded", "no noise", "nobody reported, nothing bounds it"],
)
def test_a_claim_that_bounds_nothing_is_no_guarantee(tmp_path, changes):
    found = card(tmp_path, **{"train.batch-size": 8, **changes})
    assert not found.guarantee.formal
    assert "NO formal guarantee" in found.guarantee.says
    assert not isinstance(found.guarantee.epsilon, float)


def test_attacks_that_were_not_run_are_not_measured(tmp_path):
    found = card(tmp_path)
    assert found.audited == cards.Audited()
    assert words.NOT_MEASURED in words.page(found)
    assert words.NOT_MEASURED in hub.page(found, set())
    assert "AUROC" not in words.page(found)


def naive(rows: int, batch: int, steps: int) -> float:
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE)
    step = dp_accounting.PoissonSampledDpEvent(batch / rows, dp_accounting.GaussianDpEvent(2.0))
    accountant.compose(dp_accounting.SelfComposedDpEvent(step, steps))
    return float(accountant.get_epsilon(1e-5))


@pytest.mark.long
def test_epsilon_is_the_accountants_for_the_site_with_the_fewest_rows(tmp_path):
    told = attempts()
    for row in told:
        row["reports"] = {"north": {"num_examples": 100, "steps": 5}, "south": {"num_examples": 50, "steps": 5}}
    found = card(tmp_path, attempts=told, **DP).guarantee
    assert found.formal
    assert [site.epsilon for site in found.sites] == [
        pytest.approx(naive(100, 8, 10), rel=1e-6), pytest.approx(naive(50, 8, 10), rel=1e-6),
    ]  # fmt: skip
    assert found.epsilon == found.sites[1].epsilon
    assert (found.relation, found.delta, found.allowed, found.nominal) == ("replace-one", 1e-5, 8.0, None)
    assert "privacy loss distributions" in found.accountant
    assert found.sites[0].mu is None  # not at a run's end
    assert "one row of one site's data set" in found.unit
    assert f"epsilon {found.epsilon:.4g} at delta 1e-05 (replace-one)" in found.says


def test_a_site_that_reported_nothing_counts_with_what_its_ledger_allows(tmp_path):
    told = attempts()
    for row in told:
        del row["reports"]["south"]
    found = card(tmp_path, attempts=told, **DP).guarantee
    assert found.epsilon == 8.0
    assert "not known" in found.sites[1].unknown
    assert found.sites[1].epsilon == "not known"


def test_one_site_of_which_nothing_is_known_and_no_ledger_bounds_it_takes_the_guarantee_away(tmp_path):
    told = attempts()
    for row in told:
        del row["reports"]["south"]
    found = card(tmp_path, attempts=told, **DP | {"dp.epsilon": 0.0}).guarantee
    assert isinstance(found.sites[0].epsilon, float)
    assert (found.formal, found.epsilon) == (False, "not known")


@pytest.mark.long
def test_a_nominal_epsilon_stands_beside_the_honest_one_and_the_server_is_named(tmp_path):
    fields = 'mode = "paper"\nepsilon = 4.0\nrounds = 2'
    found = card(tmp_path, **{"method.name": "dp_fpl", "method.fields": fields, "train.batch-size": 8}).guarantee
    assert found.nominal == 4.0
    assert isinstance(found.epsilon, float)
    assert found.epsilon > 4.0
    assert "against the server epsilon is infinite" in found.says
    assert found.model.startswith("central")


@pytest.mark.long
def test_a_whole_card_has_mu(tmp_path):
    (north, south) = card(tmp_path, whole=True, **DP).guarantee.sites
    assert north.mu == south.mu
    assert 0.1 < north.mu < 1
    assert north.mu_down_to == pytest.approx(1e-7)


def test_parties_and_messages_are_those_of_the_record(tmp_path):
    found = card(tmp_path, **{"run.tap": True})
    server, site, other, holder = found.parties
    told = "2 messages from sites to the server, 200 bytes; repeated and refused ones, and the keys and shares of "
    assert told + "secure aggregation, counted." in server.saw
    assert any("one trained factor of each client" in line for line in server.saw)
    assert any("num_examples, steps" in line for line in server.saw)
    assert any("They also carried: next." in line for line in server.saw)
    assert any("run.tap" in line for line in server.saw)
    assert any("600 bytes" in line for line in site.saw)
    assert not other.trusted
    assert not holder.trusted
    up, down = found.sent
    assert (up.bytes, up.payload, up.sites) == (200, 48, dict.fromkeys(SITES, 1))
    assert up.fields == [("h.0.lora_A", "dense float32", [2, 3], 24)]
    assert len(down.fields) == 2


def test_keys_shares_and_refused_uploads_count_with_their_site_also_one_in_no_cohort(tmp_path):
    told = attempts()
    told[0]["unlisted"] = {"north": [1000, 20, 3, 4], "west": [496, 5, 1, 1]}
    told[1]["unlisted"] = {"north": [7, 0, 1, 0], "east": [9, 0]}
    found = card(tmp_path, attempts=told)
    assert [site.model_dump() for site in found.traffic] == [
        {"site": "east", "up": 0, "up_bytes": 9, "down": 0, "down_bytes": 0},
        {"site": "north", "up": 1 + 4, "up_bytes": 100 + 1007, "down": 1 + 4, "down_bytes": 300 + 20},
        {"site": "south", "up": 1, "up_bytes": 100, "down": 1, "down_bytes": 300},
        {"site": "west", "up": 1, "up_bytes": 496, "down": 1, "down_bytes": 5},
    ]
    assert any(line.startswith("7 messages from sites to the server, 1712 bytes;") for line in found.parties[0].saw)
    assert "| north | 5 | 1107 | 5 | 320 |" in words.page(found)
    assert cards.parse(found.to_bytes(), "card") == found


def test_a_secure_run_says_what_nobody_saw_and_what_it_holds_against(tmp_path):
    told = attempts(("a", "b", "c"))
    for row in told:
        row |= {"reports": {}, "unseen": {"sites": 3, "holders": 3, "threshold": 3, "deaf": {}}}
    found = card(tmp_path, attempts=told, **{"secure.enabled": True})
    server = found.parties[0]
    (learned,) = [line for line in server.saw if line.startswith("The server learns: ")]
    assert "of no single site its values" in learned
    assert "and n_k" in next(line for line in server.saw if line.startswith("Without secure aggregation it would be: "))
    assert any(line.startswith("Holds against an honest but curious server") for line in server.trusted)
    assert not any("Single uploads" in line for line in found.not_protected)
    assert any("Single uploads" in line for line in card(tmp_path).not_protected)


def test_noise_in_the_sum_holds_while_some_sites_are_honest_and_a_ledger_bounds_what_the_server_cannot_see(tmp_path):
    told = attempts(("a", "b", "c"))
    for row in told:
        row |= {"reports": {}, "unseen": {"sites": 3, "holders": 3, "threshold": 3, "deaf": {}}}
    secure = {"secure.enabled": True, "secure.noise": "sum", "train.max-steps": 1}
    found = card(tmp_path, attempts=told, **DP, **secure).guarantee
    assert found.formal
    assert found.epsilon == 8.0
    assert "while 2 sites of every sum tell nobody their share of the noise" in found.says
    assert found.model.startswith("distributed")
    assert "added up unseen" in found.sites[0].unknown


def test_the_card_says_what_its_own_signatures_are_worth(tmp_path):
    page = words.page(card(tmp_path))
    assert "The server wrote this card, and can write what it wants." in page
    assert "A site that signs too vouches for what that site itself saw" in page


def test_anchors_and_app_are_those_of_this_run_in_the_log(tmp_path):
    log, run = tmp_path / audit_log.NAME, {"run": "pilot-0a1b2c3d"}
    audit_log.append(log, "started", run | {"app": "aa" * 32})
    audit_log.append(log, "started", run | {"app": "bb" * 32})
    for count, name in ((1, "pilot-0a1b2c3d"), (2, "pilot-0a1b2c3d"), (3, "another-0a1b2c3d")):
        audit_log.append(log, "accepted", {"run": name, "site": "north", "site_log": f"{count}:{'c' * 64}"})
    found = card(tmp_path)
    assert found.digests.app == "bb" * 32
    assert found.audit_log.server == str(audit_log.head(log))
    assert found.audit_log.sites == {"north": f"2:{'c' * 64}"}
    for odd in ("5f", "", "B" * 64):
        audit_log.append(log, "started", run | {"app": odd})
        audit_log.append(log, "accepted", run | {"site": "south", "site_log": odd})
        assert card(tmp_path).digests.app == ""
    assert set(card(tmp_path).audit_log.sites) == {"north"}
    log.write_bytes(log.read_bytes().replace(b"north", b"south"))
    assert "cannot be read" in card(tmp_path).audit_log.note
    assert str(tmp_path) not in card(tmp_path).audit_log.note


def test_digests_are_of_the_files(tmp_path):
    found = card(tmp_path)
    folder = tiny.folder("text-generation")
    assert found.digests.base.files == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir() if file.is_file()
    }
    assert digests.of_config({"b": 1, "a": 2.5}, {"name": "x"}) == (
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
    stated = Stated(license="apache-2.0", use="To try.")
    written.write(model, card(tmp_path, stated=stated, **DP | {"task.model": "gpt2-owner/gpt2"}))
    found = ModelCard.load(model / "README.md")
    about = found.data.to_dict()
    assert about["library_name"] == "peft"
    assert about["license"] == "apache-2.0"
    assert about["base_model"] == "gpt2-owner/gpt2"
    assert about["pipeline_tag"] == "text-generation"
    assert about["tags"] == ["fedveil", "federated-learning", "method:fedrand", "differential-privacy"]
    assert yaml.safe_load((model / "README.md").read_text().split("---")[1]) == about
    assert "To try." in found.text
    assert {file.name for file in model.iterdir()} == {"adapter_config.json", "README.md", "PRIVACY.md", "privacy.json"}
    assert {file.stat().st_mode & 0o77 for file in model.iterdir() if file.name != "adapter_config.json"} == {0}


def test_nothing_that_others_wrote_is_markup_on_the_pages(tmp_path):
    stated = Stated(use=HOSTILE, curator="1. - # x", data_sets={HOSTILE: HOSTILE})
    sites = (HOSTILE, "south")
    found = card(
        tmp_path, stated=stated, messages=messages(sites), attempts=attempts(sites), scores={HOSTILE: 1.0}, **DP
    )
    clean = card(tmp_path, stated=Stated(use="x", curator="x", data_sets={"x": "x"}), messages=messages(), **DP)
    for page, plain in (
        (words.page(found), words.page(clean)),
        (hub.page(found, set()).split("---")[2], hub.page(clean, set()).split("---")[2]),
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
    found = card(
        tmp_path, messages=messages(sites), attempts=attempts(sites), scores={"loss": math.nan, "bleu": 2.0}, **DP
    )
    assert cards.parse(found.to_bytes(), "card") == found
    assert found.run.scores == {"bleu": 2.0}


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
    with pytest.raises(StateError, match="expected a privacy card of version 1"):
        cards.parse(json.dumps(change(about)).encode(), "card")


def test_bytes_of_any_kind_are_refused_in_words(tmp_path):
    for data in (b"", b"null", b"[" * 100_000, b"\xff\xfe", b"NaN"):
        with pytest.raises(StateError, match="expected a privacy card"):
            cards.parse(data, "card")
    with pytest.raises(StateError, match="at most"):
        cards.parse(b" " * (cards.MOST_BYTES + 1), "card")
    (tmp_path / "privacy.json").symlink_to("/etc/hostname")
    with pytest.raises(StateError, match="found none"):
        cards.read(tmp_path)
