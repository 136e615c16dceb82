"""What a run gave away: every attack that fits it, on the run's own tap, each beside its controls.

| model under attack | whose adversary holds it |
|---|---|
| server | everyone who gets the final model |
| <site> | the server: the site's last factors or weights, paired by `factor_pairing.latest` |
| <site>, merged | the server: the site's last upload, the rest from the broadcast it answered |
| round 0 | nobody trained it: an attack must lose here |
| other rows | half of the members taught it, and it is asked about the others: an attack must lose here |
| another site's upload | for the alignment alone: the site's rows did not move it, so the attack must not win |
| overfitted FedAvg | a few members known by heart, undefended: an attack must win here |
| <site>, the sum | of a secure run: the sum of all sites, taken for the site's own upload (attacks/unseen.py) |

An attack whose controls fail proves nothing about the run, in either direction, and the result says so. Where rows are
told apart in round 0, or by a model that was taught other rows, the non-members are not of the members' distribution.

An attack gets the view of the tap, what every adversary knows (base model, initial weights, method) and rows without
labels; which of them are members only the statistics know. Against a site's model scores are compared within a label,
since a model that likes the labels of its site is no sign of membership.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedveil import rng, strategies, tasks
from fedveil.attacks import controls, spelled
from fedveil.attacks.base import Attack, Knowledge, UploadAttack, View, installed, misfit
from fedveil.attacks.canaries import pairs
from fedveil.attacks.collector import KINDS, ON_UPLOADS, Collector, Kind
from fedveil.attacks.controls import Control
from fedveil.attacks.findings import Audit, Finding, Rebuilt, corrected
from fedveil.attacks.hidden_model import factor_pairing
from fedveil.attacks.membership.scores import PublicBase, loss_of
from fedveil.attacks.paired import Sides
from fedveil.attacks.reconstruction import pictures
from fedveil.attacks.samples import LEAST, Sample, Source, samples
from fedveil.attacks.steps import Budget, Step, taken, words
from fedveil.attacks.unseen import of_run
from fedveil.attacks.verdict import notes
from fedveil.config import RunConfig
from fedveil.contract.spec import Weights
from fedveil.privacy.claims import claim_of
from fedveil.wire.tap import Tap

_BY_HEART = 64  # members of the overfitted control
_UNREAD: Mapping[str, Sequence[str]] = {
    "weights": (),
    "gradients": (
        "Sites send gradients: there is no model of theirs to attack; the alignment is with what they sent.",
    ),
    "changes": ("The sites' uploads are NOT attacked: they are changes of a proxy, which no attack here reads.",),
}
_NEVER = (
    "Left out of every audit: LiRA and shadow models (they train dozens of models), imprinting (a server that "
    "deviates), what a site's rows have in common (the auditor would have to name it), which sites were in a round "
    "(the auditor would need rows of sites that were not), what clients win back of a proxy; fedveil bench has most of "
    "them."
)
_NO_PICTURES = "Left out: pictures read off gradients: the sites of this run send none, or their rows are no pictures."


def audit_run(
    folder: Path,
    config: RunConfig,
    asked: Sequence[str],
    source: Source,
    device: str = "auto",
    say: Callable[[str], None] = lambda text: None,
    budget: Budget | None = None,
    planted: tuple[str, Path] | None = None,
) -> tuple[Audit, bytes | None]:
    """Attacks a finished run on what its tap recorded. Writes nothing.

    Args:
        folder: the run's; its tap and its final model are read.
        config: the run's.
        asked: every site that the run asked to take part.
        source: the auditor's rows.
        device: where models are asked, "auto", "cpu" or "cuda".
        say: told what is done now.
        budget: of the attacks; the controls are always trained, and take of it.
        planted: a site, and the folder of the canaries in its rows.

    Returns:
        What was found, and a sheet of rebuilt pictures as PNG, None where the run sends no gradients of pictures.

    Raises:
        StateError: there is no tap, or no final model.
        ConfigError: no rows are named, or too few are there.
    """
    budget = budget or Budget()
    method = strategies.create(config.method.name, config.method.fields)
    task = tasks.load(config, method.adapter, device)
    view, sums, said, server = of_run(folder, config, method, task)
    members, non_members = samples(source, config, task, asked, view.sites)
    knowledge = Knowledge(
        task=task,
        initial=task.initial(rng.initial(config.run.seed, "weights")),
        server=server,
    )
    shown = None
    if planted:
        site, canary_folder = planted
        say(f"{site}: canaries")
        claim = claim_of(method, config)
        delta = claim.budget.delta if claim else pairs.DELTA
        bound = pairs.bound_of(canary_folder, site, view, knowledge, delta)
        shown = bound.epsilon
        said = [pairs.words(bound, site, claim.budget if claim else None), *said]
    with tempfile.TemporaryDirectory() as scratch:
        pair = controls_of(knowledge, config, members, source, Path(scratch), device, say)
        found = audit(view, knowledge, members, non_members, *pair, source.seed, say, sums, budget=budget)
    over = budget.left <= 0
    sheet = None if over else pictures.reconstructed(view, task, config, members)
    more = ["Left out: pictures read off gradients: the time did not suffice."] if over else [_NO_PICTURES]
    read = spelled.notes(view, knowledge, config, members, non_members, lambda: budget.left <= 0)
    told = [*said, *found.notes, *(sheet.notes if sheet else more), *read, _NEVER]
    return replace(found, notes=told, epsilon_shown=shown), sheet.png if sheet else None


def controls_of(
    knowledge: Knowledge,
    config: RunConfig,
    members: Mapping[str, Sample],
    source: Source,
    scratch: Path,
    device: str,
    say: Callable[[str], None],
    by_heart: int = _BY_HEART,
) -> tuple[Control, Control | None]:
    """The control that knows members by heart, and the one that half of the members taught as well as the run did."""
    assert knowledge.server is not None
    everyone = [row for sample in members.values() for row in sample.rows]
    drawn = random.Random(source.seed).sample(everyone, len(everyone))
    known, half = drawn[:by_heart], drawn[: min(len(drawn) // 2, source.most)]
    own, adapter = controls.settings(config), strategies.create("fedavg").adapter
    say(f"Training the overfitted control on {len(known)} members")
    tap = Tap(scratch / "by-heart")
    overfitted = controls.overfitted(tasks.load(own, adapter, device), known, own, tap, say=say)
    if len(drawn) - len(half) < LEAST:
        return overfitted, None
    base = PublicBase(knowledge.task, knowledge.initial)
    left = [loss_of(prediction) for prediction in knowledge.task.predict(knowledge.server, half)]
    share = sum(left) / float(base.losses(half).sum())
    say(f"Teaching the control of other rows {len(half)} members, to {100 * share:.0f} % of their loss")
    gentle = controls.gently(own)
    task = tasks.load(gentle, adapter, device)
    return overfitted, controls.taught(task, half, gentle, Tap(scratch / "other-rows"), share, say=say)


def audit(
    view: View,
    knowledge: Knowledge,
    members: Mapping[str, Sample],
    non_members: Sample,
    control: Control,
    taught: Control | None,
    seed: int,
    say: Callable[[str], None] = lambda text: None,
    sums: View | None = None,
    attacks: Sequence[Attack] | None = None,
    known: Sequence[Finding] = (),
    budget: Budget | None = None,
    scored: dict[tuple[str, str], Sides] | None = None,
) -> Audit:
    """Runs every attack on the server's model, each rebuilt client, what each site sent, and the controls.

    Args:
        view: the server's.
        knowledge: of the same run; `server` is its final model.
        members: rows that each site trained on, of the sites that took part.
        non_members: rows that no site trained on, of the same distribution.
        control: the overfitted control.
        taught: the control of other rows, where there are enough.
        seed: of the bootstrap.
        sums: of a secure run, where its broadcasts show them.
        attacks: by default every installed one.
        known: findings about the controls, where they are known already.
        budget: steps that do not fit into it are left out and named.
        scored: gets the scores of members and non-members, by model and attack.

    Raises:
        ValueError: `knowledge` has no final model.
    """
    if knowledge.server is None:
        raise ValueError("knowledge.server: expected the server's final model, found None; give it to Knowledge")
    server = knowledge.server
    attacks = installed() if attacks is None else attacks
    reasons = [(attack, misfit(attack, view, knowledge)) for attack in attacks]
    fitting = [attack for attack, reason in reasons if not reason]
    found = Collector(fitting, PublicBase(knowledge.task, knowledge.initial), non_members, seed, say, scored)
    everyone = [row for sample in members.values() for row in sample.rows]
    steps = [] if known else found.control_steps(knowledge, everyone, control, taught)
    steps += found.model_steps("server", knowledge.task, lambda: [("server", server)], everyone)
    of_run = _OfRun(view, sums, knowledge, server, members, non_members, found)
    steps += [step for site in members for step in of_run.steps(site)]
    found.done = [*known]
    left = taken(steps, budget or Budget())
    done, targets = corrected(found.done), [("model", "server"), *(t for site in members for t in of_run.targets(site))]
    said = [*notes(done, control, taught), *_unread(view.exchange.method.sends, attacks)]
    said += [f"Left out: {attack.name}: {reason}." for attack, reason in reasons if reason]
    return Audit(done, of_run.rebuilt, [*said, *words(left)], found.undecided(done, targets))


@dataclass(frozen=True)
class _OfRun:
    """What there is to try on each site.

    Attributes:
        server: the weights of the server's final model.
        rebuilt: filled as the sites' models are rebuilt, one at a time: a model may be large.
    """

    view: View
    sums: View | None
    knowledge: Knowledge
    server: Weights
    members: Mapping[str, Sample]
    non_members: Sample
    found: Collector
    rebuilt: list[Rebuilt] = field(default_factory=list)

    @property
    def _sends_weights(self) -> bool:
        return self.view.exchange.method.sends == "weights"

    def targets(self, site: str) -> list[tuple[Kind, str]]:
        """What an adversary has of a site: what it sent, the sum that it is in, and models where it sent weights."""
        names = [site, *([_summed(site)] if self.sums else [])]
        return [(kind, name) for kind in (KINDS if self._sends_weights else KINDS[:1]) for name in names]

    def steps(self, site: str) -> list[Step]:
        """Every attack on what a site sent, on the same of another site, and on its rebuilt models."""
        sample, sites = self.members[site], list(self.members)
        mine, theirs = (of.alike(sample.labels, ON_UPLOADS) for of in (sample, self.non_members))
        steps = self.found.upload_steps(site, self.view, site, self.knowledge, mine, theirs)
        if len(sites) > 1:
            other = sites[sites.index(site) - 1]
            steps += self.found.upload_steps(site, self.view, other, self.knowledge, mine, theirs, is_beside=True)
        if self.sums:
            steps += self.found.upload_steps(_summed(site), self.sums, site, self.knowledge, mine, theirs)
        if self._sends_weights:
            rows, labels = sample.rows, sample.labels
            steps += self.found.model_steps(site, self.knowledge.task, lambda: self._rebuilt(site), rows, labels)
        return steps

    def _rebuilt(self, site: str) -> Iterator[tuple[str, Weights]]:
        latest = factor_pairing.latest(self.view, site, self.server)
        self.rebuilt.append(Rebuilt(site, latest.coverage, latest.staleness))
        yield site, latest.weights
        if latest.staleness or latest.coverage < 1:
            yield f"{site}, merged", factor_pairing.merged(self.view, site, self.server).weights
        if self.sums:
            yield _summed(site), factor_pairing.latest(self.sums, site, self.server).weights


def _summed(site: str) -> str:
    return f"{site}, the sum"


def _unread(kind: str, attacks: Sequence[Attack]) -> Sequence[str]:
    """What is not attacked in a run that sends such uploads, in sentences."""
    read = any(isinstance(attack, UploadAttack) and kind in attack.reads for attack in attacks)
    return () if kind == "changes" and read else _UNREAD[kind]
