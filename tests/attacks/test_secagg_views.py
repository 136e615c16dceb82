"""The capture of a secure run: nothing of masked uploads, the plain upload of an unmasked one, and the sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedveil.attacks import secagg_views
from fedveil.attacks.audit import controls
from fedveil.attacks.base import AdversaryKnowledge
from fedveil.attacks.membership.alignment import alignment_scores
from fedveil.attacks.model_extraction import factor_pairing
from fedveil.attacks.reconstruction.observed_gradients import observe_upload
from fedveil.attacks.secagg_views import MaskedUploadView, SecureSumView
from fedveil.attacks.statistics import area_under_roc
from fedveil.config import parse
from fedveil.errors import WireError
from tests.attacks.toy import Descent, Linear, points

pytestmark = pytest.mark.usefixtures("same_masks")

SITES = "abc"
SECURE = {"secure.enabled": True, "secure.clip-bound": 8.0}


class Twins:
    """The same federation in the clear and under secure aggregation, and what is known of the latter's masks."""

    def __init__(self, federate, name, fields="", rounds=1):
        self.task = Linear()
        self.rows = {site: points(2, ord(site)) for site in SITES}
        self.own, self.pairs = {}, {}

        def trainer_for(site, ctx):
            if self.secure.unseen and self.running is self.secure:
                self.pairs[ctx.round, 0, site] = list(self.secure.unseen.pair_masks(site).values())
            return Descent(self.task, self.rows[site])

        def kept(federation, round_):
            for site, mask in federation.unseen.last.own_masks().items():
                self.own[round_, 0, site] = [mask]

        initial = self.task.initial()
        made = [
            federate(name, self.task.spec, initial, trainer_for, fields, SITES, rounds, config=config)
            for config in ({}, SECURE)
        ]
        (self.clear, self.view), (self.secure, _) = made
        self.running = self.clear
        self.clear.run()
        self.running = self.secure
        self.secure.run(kept)

    def unseen(self, own=False, pairs=0):
        """The view with every site's own mask off, and so many of those that it shares."""
        off = {at: [*(self.own[at] if own else ()), *pair_masks[:pairs]] for at, pair_masks in self.pairs.items()}
        off = off if own or pairs else {}
        return MaskedUploadView.from_capture(self.secure.tap, self.secure.exchange, self.secure.config.secure, off)

    def sums(self):
        final = self.secure.models()["server"]
        return SecureSumView.from_capture(self.secure.tap, self.secure.exchange, final)


def uploads(view):
    return [(u.round, u.site, view.added(u)) for u in view.uploads()]


def cosine(mine, theirs):
    mine, theirs = (torch.cat([w.double().flatten() for w in each.values()]) for each in (mine, theirs))
    return float(mine @ theirs / (mine.norm() * theirs.norm()))


@pytest.mark.parametrize("name", ["fedavg", "fedrand", "fixed_position"])
def test_with_every_mask_off_the_view_shows_what_the_site_sent(name, federate):
    # In a secure run the server draws FedRand's factors, so the twins draw the same one only where all do.
    fields = {"fixed_position": 'hidden = "lora_A"', "fedrand": "rho = 1.0"}.get(name, "")
    twins = Twins(federate, name, fields)
    for (_, site, mine), (_, same, true) in zip(uploads(twins.unseen(True, 2)), uploads(twins.view), strict=True):
        assert (site, mine.keys()) == (same, true.keys())
        assert all(torch.allclose(mine[n], w, atol=1e-6) for n, w in true.items())


def test_one_mask_left_hides_all_of_it(federate):
    twins = Twins(federate, "fedavg")
    for view in (twins.unseen(), twins.unseen(own=True), twins.unseen(own=True, pairs=1), twins.unseen(pairs=2)):
        seen = {site: mine for _, site, mine in uploads(view)}
        assert sorted(seen) == view.sites == list(SITES)
        for _, site, true in uploads(twins.view):
            assert abs(cosine(seen[site], true)) < 0.35  # 84 entries: three deviations of the cosine of noise
            assert min(w.abs().max() for w in seen[site].values()) > 1


@pytest.mark.parametrize("wire", ["explicit", "implicit", "seeded"])
def test_masks_of_random_binary_are_read_off_the_weights(wire, federate):
    fields = f'rate = 0.5\nwire = "{wire}"'
    twins = Twins(federate, "random_binary", fields)
    method, spec = twins.clear.exchange.method, twins.task.spec
    view = twins.unseen(own=True, pairs=2)
    for mine, true in zip(view.uploads(), twins.view.uploads(), strict=True):
        mine, true = (
            observe_upload(view.exchange.method, mine.payload, spec),
            observe_upload(method, true.payload, spec),
        )
        assert all(torch.equal(mine.seen[n], true.seen[n] & (true.values[n].abs() > 1e-8)) for n in spec)
        assert all(torch.allclose(mine.values[n], true.values[n], atol=1e-6) for n in spec)


@pytest.mark.long
def test_attacks_win_on_what_is_not_masked_and_on_nothing_else(federate):
    twins = Twins(federate, "fedavg")
    knowledge, others = AdversaryKnowledge(twins.task, twins.task.initial()), points(40, 9)

    def area(view):
        mine, theirs = (
            np.concatenate([alignment_scores(view, s, knowledge, rows or twins.rows[s]) for s in SITES])
            for rows in ([], others)
        )
        return area_under_roc(mine, theirs)

    assert area(twins.view) > 0.9
    assert area(twins.unseen(own=True, pairs=2)) == pytest.approx(area(twins.view), abs=0.01)
    others_masks = [Twins(federate, "fedavg") for _ in range(5)]  # six rows: one area of noise deviates by 0.12
    assert abs(np.mean([area(them.unseen()) for them in others_masks]) - 0.5) < 0.2
    assert abs(np.mean([area(them.unseen(own=True)) for them in others_masks]) - 0.5) < 0.2
    assert 0.6 < area(twins.sums()) < area(twins.view)
    rebuilt = factor_pairing.latest_factors(twins.unseen(own=True, pairs=2), "a", knowledge.initial)
    assert rebuilt.coverage == 1.0


def test_the_sum_is_the_mean_of_what_the_sites_sent_in_each_round(federate):
    twins = Twins(federate, "fedavg", rounds=3)
    clear = uploads(twins.view)
    for round_, _, mine in uploads(twins.sums()):
        of_round = [true for r, _, true in clear if r == round_]
        assert all(torch.allclose(w, sum(true[n] for true in of_round) / 3, atol=1e-5) for n, w in mine.items())
    assert len(uploads(twins.sums())) == 9


def test_the_sum_of_gradients_is_what_moved_the_model(federate):
    fields = 'hidden = "lora_A"\nlearning_rate = 0.5'
    twins = Twins(federate, "fixed_position", fields, rounds=2)
    clear = uploads(twins.view)
    for round_, _, mine in uploads(twins.sums()):
        assert mine.keys() == {"m.lora_B"}
        mean = sum(true["m.lora_B"] for r, _, true in clear if r == round_) / 3
        assert torch.allclose(mine["m.lora_B"], mean, atol=1e-5)


def test_what_broadcasts_do_not_show_is_not_attacked(federate):
    twins = Twins(federate, "fixed_position", 'hidden = "lora_A"\noptimiser = "adam"')
    assert twins.sums() is None
    notes = " ".join(secagg_views.secagg_notes(twins.unseen(), None))
    assert "sums are NOT attacked here: this audit does not compute them from the broadcasts of fixed_position" in notes


def test_an_attempt_that_was_repeated_has_no_sum(federate):
    twins = Twins(federate, "fedavg")
    tap = twins.secure.tap
    for seen in list(tap.messages()):  # the same round again, as after too few shares
        tap.write(tap.read(seen), 0, 1, seen.site, seen.direction, seen.accepted)
    assert len(uploads(twins.unseen())) == 6
    assert [u.attempt for u in twins.sums().uploads()] == [1, 1, 1]


def test_a_tap_of_another_ring_is_refused_with_its_file(federate):
    twins = Twins(federate, "fedavg")
    other = parse({"secure.enabled": True, "secure.ring-bits": 64}).secure
    view = MaskedUploadView.from_capture(twins.secure.tap, twins.secure.exchange, other)
    with pytest.raises(WireError, match=r"00000.0.a.up: .*were these messages captured with another method or base"):
        list(view.uploads())


def test_an_audit_reads_a_secure_run_as_its_server_could(federate):
    twins = Twins(federate, "fedavg")
    asked = twins.secure.tap, twins.secure.exchange, twins.secure.config, twins.secure.models()["server"]
    view, sums, notes = secagg_views.secagg_views(*asked)
    assert isinstance(view, MaskedUploadView)
    assert isinstance(sums, SecureSumView)
    assert "could NOT see any single upload" in notes[0]
    assert "own mask remains here" in notes[1]
    clear = secagg_views.secagg_views(twins.clear.tap, twins.clear.exchange, twins.clear.config, asked[3])
    assert clear[1:] == (None, ())
    assert [u.site for u in clear[0].uploads()] == list(SITES)


def test_the_overfitted_control_of_a_secure_run_is_in_the_clear():
    config = parse({"secure.enabled": True})
    assert not controls.control_config(config).secure.enabled


def test_the_control_has_one_rate_and_runs_on_any_machine():
    """It has more rounds than the run may have, and an auditor may have no GPU."""
    flat = {"run.rounds": 2, "train.lr-schedule": "cosine", "train.warmup-ratio": 0.5, "train.max-grad-norm": 0.1}
    own = controls.control_config(parse(flat | {"train.optimizer": "paged-adamw-8bit"})).train
    assert (own.lr_schedule, own.warmup_ratio, own.max_grad_norm, own.optimizer) == ("constant", 0.0, 0.0, "adamw-8bit")
    assert controls.control_config(parse({})).train.optimizer == "adamw"
