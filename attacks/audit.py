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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedveil import rng, strategies, tasks
from fedveil.attacks import controls, statistics
from fedveil.attacks.base import (
    OTHER_ROWS,
    OVERFITTED,
    ROUND_0,
    Attack,
    Knowledge,
    ModelAttack,
    UploadAttack,
    View,
    installed,
)
from fedveil.attacks.controls import Control
from fedveil.attacks.findings import TO_LOSE, Audit, Finding, Numbers, Rebuilt, beside, corrected, finding, notes
from fedveil.attacks.hidden_model import factor_pairing
from fedveil.attacks.membership.scores import PublicBase, centred, loss_of
from fedveil.attacks.paired import Sides
from fedveil.attacks.reconstruction import pictures
from fedveil.attacks.samples import LEAST, Sample, Source, samples
from fedveil.attacks.unseen import of_run
from fedveil.config import RunConfig
from fedveil.contract.spec import Weights
from fedveil.contract.task import Rows, Task
from fedveil.wire.tap import Tap

ON_UPLOADS = 60  # rows of a side that attacks on uploads get: they may take a gradient of each
_BY_HEART = 64  # members of the overfitted control
_UNREAD: Mapping[str, Sequence[str]] = {
    "weights": (),
    "gradients": (
        "Sites send gradients: there is no model of theirs to attack; the alignment is with what they sent.",
    ),
    "changes": ("The sites' uploads are NOT attacked: they are changes of a proxy, which no attack here reads.",),
}


def audit_run(
    folder: Path,
    config: RunConfig,
    asked: Sequence[str],
    source: Source,
    device: str = "auto",
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Audit, bytes | None]:
    """Attacks a finished run on what its tap recorded. Writes nothing.

    Args:
        folder: the run's; its tap and its final model are read.
        config: the run's.
        asked: every site that the run asked to take part.
        source: the auditor's rows.
        device: where models are asked, "auto", "cpu" or "cuda".
        say: told what is done now.

    Returns:
        What was found, and a sheet of rebuilt pictures as PNG, None where the run sends no gradients of pictures.

    Raises:
        StateError: there is no tap, or no final model.
        ConfigError: no rows are named, or too few are there.
    """
    method = strategies.create(config.method.name, config.method.fields)
    task = tasks.load(config, method.adapter, device)
    view, sums, said, server = of_run(folder, config, method, task)
    members, non_members = samples(source, config, task, asked, view.sites)
    knowledge = Knowledge(
        task=task,
        initial=task.initial(rng.initial(config.run.seed, "weights")),
        server=server,
    )
    with tempfile.TemporaryDirectory() as scratch:
        pair = controls_of(knowledge, config, members, source, Path(scratch), device, say)
        found = audit(view, knowledge, members, non_members, *pair, source.seed, say, sums)
    found = replace(found, notes=[*said, *found.notes])
    sheet = pictures.reconstructed(view, task, config, members)
    if sheet is None:
        return found, None
    return replace(found, notes=[*found.notes, *sheet.notes]), sheet.png


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
    overfitted = controls.overfitted(tasks.load(own, adapter, device), known, own, Tap(scratch / "by-heart"))
    if len(drawn) - len(half) < LEAST:
        return overfitted, None
    base = PublicBase(knowledge.task, knowledge.initial)
    left = [loss_of(prediction) for prediction in knowledge.task.predict(knowledge.server, half)]
    share = sum(left) / float(base.losses(half).sum())
    say(f"Teaching the control of other rows {len(half)} members, to {100 * share:.0f} % of their loss")
    gentle = controls.gently(own)
    task = tasks.load(gentle, adapter, device)
    return overfitted, controls.taught(task, half, gentle, Tap(scratch / "other-rows"), share)


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
        scored: gets the scores of members and non-members, by model and attack.

    Raises:
        ValueError: `knowledge` has no final model.
    """
    if knowledge.server is None:
        raise ValueError("knowledge.server: expected the server's final model, found None; give it to Knowledge")
    task, base = knowledge.task, PublicBase(knowledge.task, knowledge.initial)
    everyone = [row for sample in members.values() for row in sample.rows]
    attacks = installed() if attacks is None else attacks
    found = Collector(attacks, base, non_members, seed, say, scored)
    found.done = [*(known or found.of_controls(knowledge, everyone, control, taught))]
    found.of_model("server", task, knowledge.server, everyone)
    rebuilt, sites, kind = [], list(members), view.exchange.method.sends
    for site, sample in members.items():
        mine, theirs = sample.alike(sample.labels, ON_UPLOADS), non_members.alike(sample.labels, ON_UPLOADS)
        found.of_uploads(site, view, site, knowledge, mine, theirs)
        if len(sites) > 1:
            found.of_uploads(site, view, sites[sites.index(site) - 1], knowledge, mine, theirs, is_control=True)
        if sums:
            found.of_uploads(f"{site}, the sum", sums, site, knowledge, mine, theirs)
        if kind != "weights":
            continue
        latest = factor_pairing.latest(view, site, knowledge.server)
        merged = factor_pairing.merged(view, site, knowledge.server)
        rebuilt.append(Rebuilt(site, latest.coverage, latest.staleness))
        found.of_model(site, task, latest.weights, sample.rows, sample.labels)
        if latest.staleness or latest.coverage < 1:
            found.of_model(f"{site}, merged", task, merged.weights, sample.rows, sample.labels)
        if sums:
            summed = factor_pairing.latest(sums, site, knowledge.server)
            found.of_model(f"{site}, the sum", task, summed.weights, sample.rows, sample.labels)
    done = corrected(found.done)
    return Audit(done, rebuilt, [*notes(done, control, taught), *_unread(kind, attacks)])


def _unread(kind: str, attacks: Sequence[Attack]) -> Sequence[str]:
    """What is not attacked in a run that sends such uploads, in sentences."""
    read = any(isinstance(attack, UploadAttack) and kind in attack.reads for attack in attacks)
    return () if kind == "changes" and read else _UNREAD[kind]


class Collector:
    """Runs the attacks and keeps what they found."""

    def __init__(
        self,
        attacks: Sequence[Attack],
        base: PublicBase,
        non_members: Sample,
        seed: int,
        say: Callable[[str], None],
        scored: dict[tuple[str, str], Sides] | None = None,
    ) -> None:
        self.done: list[Finding] = []
        self._scored = {} if scored is None else scored
        self._theirs: dict[tuple[object, ...], Mapping[str, Numbers]] = {}
        self._on_models = [attack for attack in attacks if isinstance(attack, ModelAttack)]
        self._on_uploads = [attack for attack in attacks if isinstance(attack, UploadAttack)]
        self._base, self._non_members, self._seed, self._say = base, non_members, seed, say

    def of_model(self, model: str, task: Task, weights: Weights, members: Rows, labels: Sequence[str] = ()) -> None:
        """Every attack on one model; with the members' labels, within a label. Of controls those that an attack has."""
        others = self._non_members
        attacks = [attack for attack in self._on_models if model not in TO_LOSE or model in attack.must_lose]
        if not attacks:
            return
        self._say(f"{model}: {len(members)} members, {len(others.rows)} non-members")
        mine, theirs = (self._base.scores(attacks, task, weights, rows) for rows in (members, others.rows))
        for name in mine:
            self.add(model, name, mine[name], theirs[name], labels, others.labels)

    def of_controls(
        self, knowledge: Knowledge, everyone: Rows, control: Control, taught: Control | None
    ) -> Sequence[Finding]:
        """Every attack on the controls: what it found, which is not in `done`."""
        self.of_model(ROUND_0, knowledge.task, knowledge.initial, everyone)
        self.of_control(OVERFITTED, control, knowledge.initial, control.members, control.members[::2])
        if taught:
            seen = set(map(id, taught.members))
            others = [row for row in everyone if id(row) not in seen]
            self.of_control(OTHER_ROWS, taught, knowledge.initial, others, others)
        found, self.done = self.done, []
        return found

    def of_control(self, name: str, control: Control, initial: Weights, members: Rows, of_client: Rows) -> None:
        """Every attack on a trained control: `members` on its model, those `of_client` "a" on what that one sent."""
        self.of_model(name, control.task, control.weights, members)
        mine, others = (
            Sample(rows, [""] * len(rows)).first(ON_UPLOADS) for rows in (of_client, self._non_members.rows)
        )
        self.of_uploads(name, control.view, "a", Knowledge(control.task, initial), mine, others)

    def of_uploads(
        self,
        model: str,
        view: View,
        site: str,
        knowledge: Knowledge,
        members: Sample,
        others: Sample,
        is_control: bool = False,
    ) -> None:
        """Every attack that can read them on the uploads of `site`; of another site than the rows' it is a control."""
        for attack in self._on_uploads:
            if view.exchange.method.sends in attack.reads:
                mine = attack.scores(view, site, knowledge, members.rows)
                asked = (id(attack), id(view), site, *map(id, others.rows))  # a site's own upload, and as a wrong one
                if asked not in self._theirs:
                    self._theirs[asked] = attack.scores(view, site, knowledge, others.rows)
                theirs = self._theirs[asked]
                for name in mine:
                    shown = beside(name) if is_control else name
                    self.add(model, shown, mine[name], theirs[name], members.labels, others.labels)

    def add(
        self,
        model: str,
        attack: str,
        members: Numbers,
        non_members: Numbers,
        labels: Sequence[str],
        other_labels: Sequence[str],
    ) -> None:
        """The statistics of one attack's scores; nothing where no label has rows on both sides."""
        z = None
        if labels and len(members) and len(non_members):
            z = statistics.rank_test(members, non_members, labels, other_labels)
            members, non_members = centred(members, non_members, labels, other_labels)
        if len(members) and len(non_members):
            self._scored[model, attack] = members, non_members
            self.done.append(finding(model, attack, members, non_members, self._seed, z))
