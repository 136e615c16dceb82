"""What a run gave away: every attack that fits it, on the run's own tap, each beside its controls.

| model under attack | whose adversary holds it |
|---|---|
| server | everyone who gets the final model |
| <site> | the server: the site's last factors or weights, paired by `factor_pairing.latest` |
| <site>, merged | the server: the site's last upload, the rest from the broadcast it answered |
| round 0 | nobody trained it: an attack must lose here, its interval containing 0.5 |
| another site's upload | for the alignment alone: the site's rows did not move it, so the attack must not win |
| overfitted FedAvg | a few members known by heart, undefended: an attack must win here, its interval wholly above 0.5 |
| <site>, the sum | of a secure run: the sum of all sites, taken for the site's own upload (attacks/unseen.py) |

An attack whose controls fail proves nothing about the run, in either direction, and the result says so. Where round 0
is already told apart, the non-members are not of the members' distribution.

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
from fedveil.attacks import controls, unseen
from fedveil.attacks.base import Attack, Knowledge, ModelAttack, UploadAttack, View, installed
from fedveil.attacks.controls import Overfitted
from fedveil.attacks.findings import Audit, Finding, Numbers, Rebuilt, beside, finding, notes
from fedveil.attacks.hidden_model import factor_pairing
from fedveil.attacks.membership.scores import PublicBase, centred
from fedveil.attacks.reconstruction import pictures
from fedveil.attacks.samples import Sample, Source, samples
from fedveil.attacks.unseen import SumView, UnseenView
from fedveil.config import RunConfig
from fedveil.contract.spec import Weights
from fedveil.contract.task import Rows, Task
from fedveil.federation.exchange import Exchange
from fedveil.records.state import load_state
from fedveil.sealed import Seal
from fedveil.wire.tap import Tap

ON_UPLOADS = 60  # rows of a side that attacks on uploads get: they may take a gradient of each
_BY_HEART = 64  # members of the overfitted control
_UNREAD: Mapping[str, Sequence[str]] = {
    "weights": (),
    "gradients": (
        "Sites send gradients: there is no model of theirs to attack; the alignment is with what they sent.",
    ),
    "changes": (
        "The sites' uploads are NOT attacked: they are codes or changes of a proxy, which no attack here reads.",
    ),
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
    tap = Tap(folder / "tap", Seal.of_environment())
    list(tap.messages())  # there, or an error that says how to get one
    server = method.deployed(load_state(folder / "final" / "server.safetensors"))["server"]
    view, sums, said = _views(tap, Exchange(method, config.method.name, task.spec), config, server)
    members, non_members = samples(source, config, task, asked, view.sites)
    known = [row for sample in members.values() for row in sample.rows]
    known = random.Random(source.seed).sample(known, min(_BY_HEART, len(known)))
    own = controls.settings(config)
    control_task = tasks.load(own, strategies.create("fedavg").adapter, device)
    knowledge = Knowledge(
        task=task,
        initial=task.initial(rng.initial(config.run.seed, "weights")),
        server=server,
    )
    say(f"Training the overfitted control on {len(known)} members")
    with tempfile.TemporaryDirectory() as scratch:
        control = controls.overfitted(control_task, known, own, Tap(Path(scratch)))
        found = audit(view, knowledge, members, non_members, control, source.seed, say, sums)
    found = replace(found, notes=[*said, *found.notes])
    sheet = pictures.reconstructed(view, task, config, members)
    if sheet is None:
        return found, None
    return replace(found, notes=[*found.notes, *sheet.notes]), sheet.png


def _views(tap: Tap, exchange: Exchange, config: RunConfig, server: Weights) -> tuple[View, View | None, Sequence[str]]:
    """What the server saw; of a secure run also its sums, and sentences on what it could not see."""
    if not config.secure.enabled:
        return View.server(tap, exchange), None, ()
    view, sums = UnseenView.of(tap, exchange, config.secure), SumView.of(tap, exchange, server)
    return view, sums, unseen.notes(view, sums)


def audit(
    view: View,
    knowledge: Knowledge,
    members: Mapping[str, Sample],
    non_members: Sample,
    control: Overfitted,
    seed: int,
    say: Callable[[str], None] = lambda text: None,
    sums: View | None = None,
) -> Audit:
    """Runs every installed attack on the server's model, each rebuilt client, what each site sent, and the controls.

    Args:
        view: the server's.
        knowledge: of the same run; `server` is its final model.
        members: rows that each site trained on, of the sites that took part.
        non_members: rows that no site trained on, of the same distribution.
        control: the overfitted control.
        seed: of the bootstrap.
        sums: of a secure run, where its broadcasts show them.

    Raises:
        ValueError: `knowledge` has no final model.
    """
    if knowledge.server is None:
        raise ValueError("knowledge.server: expected the server's final model, found None; give it to Knowledge")
    task, base = knowledge.task, PublicBase(knowledge.task, knowledge.initial)
    everyone = [row for sample in members.values() for row in sample.rows]
    attacks = installed()
    found = _Findings(attacks, base, non_members, seed, say)
    found.of_model(ModelAttack.must_lose, task, knowledge.initial, everyone)
    found.of_model(ModelAttack.must_win, control.task, control.weights, control.members)
    known, some = (Sample(rows, [""] * len(rows)) for rows in (control.members[::2], non_members.rows))
    own = Knowledge(control.task, knowledge.initial)
    found.of_uploads(UploadAttack.must_win, control.view, "a", own, known.first(ON_UPLOADS), some.first(ON_UPLOADS))
    found.of_model("server", task, knowledge.server, everyone)
    rebuilt, sites = [], list(members)
    kind = view.exchange.method.sends
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
    return Audit(found.done, rebuilt, [*notes(found.done, control), *_unread(kind, attacks)])


def _unread(kind: str, attacks: Sequence[Attack]) -> Sequence[str]:
    """What is not attacked in a run that sends such uploads, in sentences."""
    read = any(isinstance(attack, UploadAttack) and kind in attack.reads for attack in attacks)
    return () if kind == "changes" and read else _UNREAD[kind]


class _Findings:
    """Runs the attacks and keeps what they found."""

    def __init__(
        self,
        attacks: Sequence[Attack],
        base: PublicBase,
        non_members: Sample,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        self.done: list[Finding] = []
        self._on_models = [attack for attack in attacks if isinstance(attack, ModelAttack)]
        self._on_uploads = [attack for attack in attacks if isinstance(attack, UploadAttack)]
        self._base, self._non_members, self._seed, self._say = base, non_members, seed, say

    def of_model(self, model: str, task: Task, weights: Weights, members: Rows, labels: Sequence[str] = ()) -> None:
        """Every attack on one model; with the members' labels, within a label."""
        others = self._non_members
        self._say(f"{model}: {len(members)} members, {len(others.rows)} non-members")
        mine, theirs = (self._base.scores(self._on_models, task, weights, rows) for rows in (members, others.rows))
        for name in mine:
            self.add(model, name, mine[name], theirs[name], labels, others.labels)

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
                mine, theirs = (attack.scores(view, site, knowledge, side.rows) for side in (members, others))
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
        if labels:
            members, non_members = centred(members, non_members, labels, other_labels)
        if len(members) and len(non_members):
            self.done.append(finding(model, attack, members, non_members, self._seed))
