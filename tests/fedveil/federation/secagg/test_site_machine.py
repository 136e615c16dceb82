"""A site's states and its file: every transition, and what is left of it after a kill, a restart, a loss or a theft."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from fedveil.errors import FedVeilError, PolicyError, StateError, WireError
from fedveil.federation.secagg import crypto, derivations
from fedveil.federation.secagg.messages import AgreeRequest, KeysRequest, OpenRequest
from fedveil.federation.secagg.plan import AttemptPlan, agreed_text, list_digest
from fedveil.federation.secagg.state import SiteSecAggState
from fedveil.testing.lying_server import RUN, LyingServer, site_names, terms_of
from tests.conftest import ROOT
from tests.fedveil.federation.secagg.file_store import FileStore

SITE = "s00"
SITES = site_names(4)
LISTS = (("s00", "s01", "s02"), ("s00", "s01", "s03"), tuple(SITES))
ATTEMPTS = ((0, 0), (0, 1), (1, 0))


def agree_request(plan: AttemptPlan, in_sum) -> AgreeRequest:
    return AgreeRequest(plan=plan, table="", in_sum=in_sum)


def open_request(server: LyingServer, plan: AttemptPlan, in_sum) -> OpenRequest:
    """Return a request with a certificate of all its sites, whatever they would sign."""
    text = agreed_text(plan, list_digest(plan.digest, in_sum))
    agreed = {site: crypto.sign_bytes(server.sites[site].signing_key, text).hex() for site in in_sum}
    return OpenRequest(plan=plan, table="", in_sum=in_sum, agreed=agreed, rows=server.rows(SITE, plan, in_sum))


# Every transition


@dataclass(frozen=True)
class Machine:
    """The states of section "none -> masked -> signed -> opened", without keys."""

    live: tuple[int, int] | None = None
    phase: str = ""
    in_sum: tuple[str, ...] = ()
    masked: tuple[int, int] | None = None
    signed: int | None = None

    def after(self, event: tuple) -> Machine | None:
        """Return the state after a request, None if it is refused."""
        kind, attempt, in_sum = event
        if kind == "restart":
            return replace(self, live=None, phase="", in_sum=())
        if kind == "mask":
            if (self.masked is not None and attempt <= self.masked) or (
                self.signed is not None and attempt[0] <= self.signed
            ):
                return None
            return replace(self, live=attempt, phase="masked", in_sum=(), masked=attempt)
        if self.live != attempt or (self.phase != "masked" and self.in_sum != in_sum):
            return None
        phase = "opened" if kind == "open" or self.phase == "opened" else "signed"
        return replace(self, phase=phase, in_sum=in_sum, signed=attempt[0])


EVENTS = [
    *(("mask", attempt, ()) for attempt in ATTEMPTS),
    *((kind, attempt, in_sum) for kind in ("agree", "open") for attempt in ATTEMPTS for in_sum in LISTS[:2]),
    ("restart", None, ()),
]


@dataclass
class Walk:
    """One way to a state of the machine with a real site."""

    server: LyingServer
    state: SiteSecAggState
    plans: dict[tuple[int, int], AttemptPlan]
    boot: str

    def go(self, event: tuple) -> Walk | None:
        """Send a request to the site; None if it is refused. What it answers, it answers a second time."""
        kind, attempt, in_sum = event
        server, site = self.server, self.server.sites[SITE]
        site.store.save(self.state)
        server.boots[SITE] = self.boot
        plans = dict(self.plans)
        try:
            if kind == "restart":
                server.boots[SITE] += "+"
                site.ready(KeysRequest(run=RUN))
            elif kind == "mask":
                prekey = site.ready(KeysRequest(run=RUN))
                plans[attempt] = server.plan(*attempt)
                site.mask(plans[attempt], terms_of(plans[attempt], server.roster), np.zeros(4, np.uint32))
                assert site.ready(KeysRequest(run=RUN)).prekey != prekey.prekey
            else:
                plan = plans.get(attempt) or server.plan(*attempt)
                ask = site.agree if kind == "agree" else site.open
                request = agree_request(plan, in_sum) if kind == "agree" else open_request(server, plan, in_sum)
                assert ask(request) == ask(request)
        except PolicyError:
            assert site.store.load() is self.state
            return None
        return Walk(server, site.store.load(), plans, server.boots[SITE])


def seen_in(state: SiteSecAggState, plans) -> Machine:
    """Return the machine's state that a file has."""
    live = state.live
    attempt = next((attempt for attempt, plan in plans.items() if live is not None and plan.digest == live.plan), None)
    digests = {list_digest(live.plan, in_sum): in_sum for in_sum in LISTS} if live else {}
    return Machine(
        attempt, live.phase if live else "", digests.get(live.list, ()) if live else (), state.fence.masked,
        state.fence.signed,
    )  # fmt: skip


def test_every_transition_from_every_state():
    server = LyingServer(SITES)
    server.plan()  # prekeys
    first = Walk(server, server.sites[SITE].store.load(), {}, "boot-0")
    reached, queue, tried = {Machine(): first}, [Machine()], 0
    while queue:
        state = queue.pop()
        walk = reached[state]
        for event in EVENTS:
            expected, after = state.after(event), walk.go(event)
            tried += 1
            assert (after is None) == (expected is None), (state, event)
            if after is None or expected is None:
                continue
            assert seen_in(after.state, after.plans) == expected, (state, event)
            live = after.state.live
            if live is not None:
                assert (live.phase == "opened") == (live.answer is not None) == (live.rows == {})
                assert (live.phase == "masked") == (live.list == "")
            if expected not in reached:
                reached[expected] = after
                queue.append(expected)
    print(f"{len(reached)} states, {tried} transitions")
    assert len(reached) == 24
    assert {state.phase for state in reached} == {"", "masked", "signed", "opened"}


# The file


def served(folder: Path, after_save=lambda state: None) -> LyingServer:
    """Return a server of four sites, of which the first has its state in a folder."""
    folder.mkdir(exist_ok=True)
    return LyingServer(SITES, stores={SITE: FileStore(folder, after_save)})


class Killed(BaseException):
    """The machine dies right after the write."""


def die(state: SiteSecAggState) -> None:
    raise Killed


def restarted(server: LyingServer, after_save=lambda state: None) -> LyingServer:
    """Give the site a process of its own again, with the same file."""
    site = server.sites[SITE]
    server.sites[SITE] = replace(site, store=replace(site.store, after_save=after_save))
    return server


KILL = """
import os, signal, sys
from pathlib import Path
import numpy as np
from fedveil.federation.secagg.messages import AgreeRequest, OpenRequest
from fedveil.federation.secagg.plan import AttemptPlan
from fedveil.testing.lying_server import LyingServer, site_names, terms_of
from tests.fedveil.federation.secagg.file_store import FileStore
folder, kind = Path(sys.argv[1]), sys.argv[2]
store = FileStore(folder, lambda state: os.kill(os.getpid(), signal.SIGKILL))
server = LyingServer(site_names(4), stores={"s00": store})
site, data = server.sites["s00"], (folder / "request").read_bytes()
if kind == "mask":
    plan = AttemptPlan.from_bytes(data)
    site.mask(plan, terms_of(plan, server.roster), np.zeros(4, np.uint32))
else:
    getattr(site, kind)((AgreeRequest if kind == "agree" else OpenRequest).from_bytes(data))
print("answered")
"""


def ask_and_die(server: LyingServer, folder: Path, kind: str, request, with_process: bool) -> None:
    """Ask the site, and kill it between the write and the answer."""
    if with_process:
        (folder / "request").write_bytes(request.to_bytes())
        ran = subprocess.run(
            [sys.executable, "-c", KILL, str(folder), kind], cwd=ROOT, capture_output=True, text=True, timeout=120,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert (ran.returncode, ran.stdout) == (-signal.SIGKILL, ""), ran.stderr
        return
    site = restarted(server, die).sites[SITE]
    arguments = (request,)
    if kind == "mask":
        arguments = (request, terms_of(request, server.roster), np.zeros(4, np.uint32))
    with pytest.raises(Killed):
        getattr(site, kind)(*arguments)
    restarted(server)


KILLS = [pytest.param(False, id="exception"), pytest.param(True, id="SIGKILL", marks=pytest.mark.long)]


@pytest.mark.parametrize("with_process", KILLS)
def test_killed_after_the_write_of_masking_it_never_masks_for_the_plan_again(tmp_path, with_process):
    server = served(tmp_path)
    plan = server.plan()
    ask_and_die(server, tmp_path, "mask", plan, with_process)
    state = server.sites[SITE].store.load()
    assert (state.live.phase, state.live.plan, state.fence.masked) == ("masked", plan.digest, (0, 0))
    assert server.mask(SITE, plan) is None
    assert server.mask(SITE, server.plan()) is None  # the same attempt with its new prekey
    assert server.mask(SITE, server.plan(attempt=1)) is not None


@pytest.mark.parametrize("with_process", KILLS)
@pytest.mark.parametrize("kinds", list(itertools.product(("agree", "open"), repeat=2)), ids="-".join)
def test_killed_after_the_write_of_a_list_it_takes_no_other(tmp_path, kinds, with_process):
    server = served(tmp_path)
    plan = server.plan()
    for site in SITES:
        assert server.mask(site, plan)
    requests = {
        (kind, in_sum): agree_request(plan, in_sum) if kind == "agree" else open_request(server, plan, in_sum)
        for kind in ("agree", "open")
        for in_sum in LISTS
    }
    first, second = kinds
    ask_and_die(server, tmp_path, first, requests[first, LISTS[0]], with_process)
    site = server.sites[SITE]
    for other in LISTS[1:]:
        with pytest.raises(PolicyError, match="another list"):
            getattr(site, second)(requests[second, other])
    answer = getattr(site, second)(requests[second, LISTS[0]])
    assert answer.list == list_digest(plan.digest, LISTS[0])
    if first == second == "open":
        assert answer == site.store.load().live.answer
    assert server.mask(SITE, server.plan(attempt=1)) is None
    assert server.mask(SITE, server.plan(round_=1)) is not None


@pytest.mark.parametrize("kind", ["agree", "open"])
def test_what_was_not_written_was_not_answered(tmp_path, kind):
    """Without the write there is no answer; then the other list may be the one."""
    server = served(tmp_path)
    plan = server.plan()
    assert server.mask(SITE, plan)

    class FullDisk(FileStore):
        def save(self, kept):
            raise StateError("secure.json: cannot be written: a full disk")

    site = server.sites[SITE]
    request = agree_request(plan, LISTS[0]) if kind == "agree" else open_request(server, plan, LISTS[0])
    with pytest.raises(StateError, match="full disk"):
        getattr(replace(site, store=FullDisk(tmp_path)), kind)(request)
    assert site.store.load().live.phase == "masked"
    assert site.agree(agree_request(plan, LISTS[1])).signature


def test_another_boot_drops_the_plan_before_anything_else(tmp_path):
    server = served(tmp_path)
    plan = server.plan()
    assert server.mask(SITE, plan)
    copy = server.sites[SITE].store.file.read_bytes()
    server.boots[SITE] = "boot-1"
    assert server.agree(SITE, plan, LISTS[0]) is None
    state = server.sites[SITE].store.load()
    assert (state.live, state.fence.masked) == (None, (0, 0))
    assert server.open(SITE, plan, SITES) is None
    server.sites[SITE].store.file.write_bytes(copy)  # a backup of the time before the restart
    assert server.agree(SITE, plan, LISTS[0]) is None
    assert server.sites[SITE].store.load().live is None
    server.boots[SITE] = "boot-0"
    assert server.agree(SITE, plan, LISTS[0]) is None


def test_file_moved_away_begins_anew_without_the_plan(tmp_path):
    server = served(tmp_path)
    plan = server.plan()
    assert server.mask(SITE, plan)
    assert server.agree(SITE, plan, LISTS[0])
    store = server.sites[SITE].store
    store.file.rename(tmp_path / "moved")
    assert server.agree(SITE, plan, LISTS[0]) is None
    assert server.open(SITE, plan, LISTS[0]) is None
    assert server.mask(SITE, plan) is None
    ready = server.sites[SITE].ready(KeysRequest(run=RUN))
    assert (ready.after, ready.signed, ready.prekey.number) == (None, None, 0)
    assert ready.prekey != plan.by_name[SITE]
    assert server.mask(SITE, server.plan()) is not None


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"next": 1}', None])
def test_damaged_or_unknown_file_is_refused(tmp_path, damage):
    server = served(tmp_path)
    plan = server.plan()
    store = server.sites[SITE].store
    data = store.file.read_bytes()
    store.file.write_bytes(data[:-1] + b',"version":2}' if damage is None else damage)
    if damage == b"{}":  # a file of defaults is a new site's
        assert server.mask(SITE, plan) is None
        return
    with pytest.raises(WireError):
        server.sites[SITE].begin(plan, terms_of(plan, server.roster))


@dataclass(frozen=True)
class SlowStore(FileStore):
    """A store that waits after reading for another reader; under a lock none comes."""

    barrier: threading.Barrier = None
    has_lock: bool = True

    def alone(self):
        return super().alone() if self.has_lock else contextlib.nullcontext()

    def load(self):
        state = super().load()
        with contextlib.suppress(threading.BrokenBarrierError):
            self.barrier.wait(0.2)
        return state


@pytest.mark.parametrize("has_lock", [True, False])
@pytest.mark.parametrize("kinds", [("agree", "agree"), ("agree", "open"), ("open", "open"), ("mask", "mask")])
def test_two_processes_at_once_give_one_answer(tmp_path, kinds, has_lock):
    server = served(tmp_path)
    plans = [server.plan(), server.plan(attempt=1)]  # with one prekey
    if kinds[0] != "mask":
        assert server.mask(SITE, plans[0])
    site = replace(server.sites[SITE], store=SlowStore(tmp_path, barrier=threading.Barrier(2), has_lock=has_lock))
    answers, refusals = [], []

    def ask(kind: str, at: int) -> None:
        try:
            if kind == "mask":
                answers.append(site.mask(plans[at], terms_of(plans[at], server.roster), np.zeros(4, np.uint32)))
            elif kind == "agree":
                answers.append(site.agree(agree_request(plans[0], LISTS[at])))
            else:
                answers.append(site.open(open_request(server, plans[0], LISTS[at])))
        except FedVeilError as error:
            refusals.append(error)

    threads = [threading.Thread(target=ask, args=(kind, at)) for at, kind in enumerate(kinds)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (len(answers), len(refusals)) == ((1, 1) if has_lock else (2, 0))


# A stolen file


def private_halves_in(data: bytes) -> list[bytes]:
    """Return all that a file has that could be a private half."""
    return [bytes.fromhex(text) for text in re.findall(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", data.decode())]


def learn_from_file(server: LyingServer, site: str, data: bytes) -> None:
    """Open with everything that is in a site's file all rows of the traffic."""
    state, halves = SiteSecAggState.from_bytes(data), private_halves_in(data)
    for upload in server.uploads:
        plan, dealer, p = upload.plan, upload.site, upload.plan.digest
        partners = ["", *plan.partners(dealer)]
        for holder in plan.holders(dealer):
            ends = {bytes.fromhex(plan.by_name[end].key) for end in (dealer, holder)}
            shared = [crypto.exchange_keys(half, end) for half in halves for end in ends]
            keys = [derivations.row_key(secret, p, dealer, holder) for secret in shared]
            if state.live is not None and dealer in state.live.rows:
                keys.append(bytes.fromhex(state.live.rows[dealer]))
            for key in keys:
                with contextlib.suppress(WireError):
                    row = upload.attached.rows[holder]
                    shares = derivations.decrypt_row(key, row, len(partners), p, dealer, holder)
                    server.shares |= {
                        (upload.number, other, holder): share for other, share in zip(partners, shares, strict=True)
                    }


def masked_by_all(tmp_path, count: int = 5) -> tuple[LyingServer, AttemptPlan, dict[str, bytes], dict[str, bytes]]:
    """Return a server with all uploads, and all sites' files before and after masking."""
    sites = site_names(count)
    for site in sites:
        (tmp_path / site).mkdir()
    server = LyingServer(sites, stores={site: FileStore(tmp_path / site) for site in sites})
    plan = server.plan()
    before = {site: server.sites[site].store.file.read_bytes() for site in sites}
    for site in sites:
        assert server.mask(site, plan)
    return server, plan, before, {site: server.sites[site].store.file.read_bytes() for site in sites}


def test_no_private_half_of_the_plan_is_in_a_file_from_masking_on(tmp_path):
    server, plan, before, after = masked_by_all(tmp_path)
    for site in plan.cohort:
        spent = SiteSecAggState.from_bytes(before[site]).next.private
        assert crypto.public_key_of(bytes.fromhex(spent)).hex() == plan.by_name[site].key
        assert spent.encode() in before[site]
        assert spent.encode() not in after[site]
        publics = {crypto.public_key_of(half).hex() for half in private_halves_in(after[site])}
        assert plan.by_name[site].key not in publics
        left = [path.name for path in (tmp_path / site).iterdir()]
        assert sorted(left) == ["secure.json", "secure.lock"]
    assert server.agree(SITE, plan, SITES)
    assert server.open(SITE, plan, plan.cohort) is None


def test_files_of_fewer_than_t_sites_and_all_traffic_open_nothing(tmp_path):
    server, plan, _, after = masked_by_all(tmp_path)
    for count, site in enumerate(plan.cohort, 1):
        learn_from_file(server, site, after[site])
        assert (server.sums().attack() > 0) == (count >= plan.threshold), count


def test_the_file_before_masking_and_the_traffic_do_open_it(tmp_path):
    """The unspent prekey is what is left: so the attack on the file works, if there is something to find."""
    server, plan, before, _ = masked_by_all(tmp_path)
    learn_from_file(server, SITE, before[SITE])
    shares = [server.secret(upload, "") is not None for upload in server.uploads]
    assert shares == [site == SITE for site in plan.cohort]


def test_files_after_opening_open_nothing(tmp_path):
    server, plan, _, _ = masked_by_all(tmp_path)
    for site in plan.cohort:
        assert server.open(site, plan, plan.cohort)
    server.shares.clear()
    for site in plan.cohort:
        learn_from_file(server, site, server.sites[site].store.file.read_bytes())
    assert server.shares == {}
    assert server.sums().attack() == 0
