"""When the uploads of N SuperNodes arrive at one server: a round as a simulation of events, one at a time.

A round goes through these, in this order, for each of N sites with messages of b bytes:

1. The ServerApp makes the messages one after another: `send` seconds each. All are pushed when the last is made.
2. A SuperNode asks for work every `poll_seconds`, from a phase that is uniform.
3. The SuperLink hands the message out: `relay` seconds of its one Python thread, after its other work.
4. The message goes down the server's link, which all share: b / `megabytes_a_second`. First come, first served.
5. The site starts a client process and trains: uniform between `train_seconds`' two values.
6. The upload goes up the link, the other direction of it, and is taken in by the SuperLink: `relay` seconds again.
7. The ServerApp asks for every message that is still out, one after another, `look` seconds each, and folds what is
   there: `fold` seconds each. After a pass in which nothing was there it waits `_POLL_SECONDS`.

Measured in the run that gives the result: `send` and `fold` (CPU seconds of core/scale's strategy rows: gate, checksum,
fold and the run's records, without waiting for the disk), `relay` (CPU seconds of a SuperLink that carries messages of
b bytes). Assumed, in the preset: the link, the polling, the training, and `look`. Not in it: lost messages, sites that
go away, a SuperLink that swaps.
"""

from __future__ import annotations

import bisect
import heapq
from dataclasses import dataclass

import torch

from fedveil import rng

_POLL_SECONDS = 0.25  # as in server_app/round_attempt.py


@dataclass(frozen=True)
class ArrivalCosts:
    """Seconds, but for the link's.

    Attributes:
        send, fold: of the ServerApp, a message.
        relay: of the SuperLink, a message each way.
        look: of the ServerApp, for one message that is not there yet.
        poll_seconds: between two questions of an idle SuperNode.
        train_seconds: the fastest site's and the slowest one's, with the start of the client process.
        megabytes: of a message, each way.
        megabytes_a_second: of the server's link, each way.
    """

    send: float
    fold: float
    relay: float
    look: float
    poll_seconds: float
    train_seconds: tuple[float, float]
    megabytes: float
    megabytes_a_second: float


@dataclass(frozen=True)
class SimulatedRound:
    """The measurements of one simulated round.

    Attributes:
        seconds: until the last upload is folded.
        training: of the slowest site, which nothing here can shorten.
        last_arrival: until the last upload is at the SuperLink.
        most_waiting: the most uploads that were at the SuperLink at one time and not yet folded.
        most_polling: the most SuperNodes that waited for their message at one time.
        busy: of the ServerApp, the SuperLink, and the busier direction of the link: the share of the seconds.
    """

    seconds: float
    training: float
    last_arrival: float
    most_waiting: int
    most_polling: int
    busy: dict[str, float]


class _Station:
    """Serves one at a time, first come, first served."""

    def __init__(self) -> None:
        self.free_at = self.busy = 0.0

    def ends(self, now: float, seconds: float) -> float:
        """When something is done that comes now and takes so long."""
        self.free_at = max(now, self.free_at) + seconds
        self.busy += seconds
        return self.free_at


def simulate_round(sites: int, costs: ArrivalCosts, seed: int = 0) -> SimulatedRound:
    """One round of N sites."""
    draws = rng.initial_stream(seed, f"arrivals of {sites}")
    phases, works = _uniform(sites, draws), _uniform(sites, draws)
    superlink, down, up = _Station(), _Station(), _Station()
    carry = costs.megabytes / costs.megabytes_a_second
    pushed, polling, most_polling = sites * costs.send, 0, 0
    fastest, slowest = costs.train_seconds
    events = [(pushed + phases[i] * costs.poll_seconds, "polls", i) for i in range(sites)]
    heapq.heapify(events)
    arrivals = [0.0] * sites
    while events:
        now, what, site = heapq.heappop(events)
        match what:
            case "polls":
                polling += 1
                most_polling = max(most_polling, polling)
                heapq.heappush(events, (superlink.ends(now, costs.relay), "handed out", site))
            case "handed out":
                heapq.heappush(events, (down.ends(now, carry), "received", site))
            case "received":
                polling -= 1
                heapq.heappush(events, (now + fastest + works[site] * (slowest - fastest), "trained", site))
            case "trained":
                heapq.heappush(events, (up.ends(now, carry), "uploaded", site))
            case _:
                arrivals[site] = superlink.ends(now, costs.relay)
    seconds, most_waiting, busy = _folded(arrivals, pushed, costs)
    shares = {"ServerApp": busy + pushed, "SuperLink": superlink.busy, "link": max(up.busy, down.busy)}
    slowest_drawn = fastest + max(works) * (slowest - fastest)
    busy_shares = {name: s / seconds for name, s in shares.items()}
    return SimulatedRound(seconds, slowest_drawn, max(arrivals), most_waiting, most_polling, busy_shares)


def _folded(arrivals: list[float], began: float, costs: ArrivalCosts) -> tuple[float, int, float]:
    """The ServerApp's passes over what is out, by site. Returns the end, the longest queue, and its busy seconds."""
    now, busy, folded, most = began, 0.0, 0, 0
    out, times = list(range(len(arrivals))), sorted(arrivals)
    while out:
        left = []
        for site in out:
            now, busy = now + costs.look, busy + costs.look
            if arrivals[site] > now:
                left.append(site)
                continue
            most = max(most, bisect.bisect_right(times, now) - folded)
            now, busy, folded = now + costs.fold, busy + costs.fold, folded + 1
        if len(left) == len(out):
            now += _POLL_SECONDS
        out = left
    return now, most, busy


def _uniform(count: int, draws: rng.RandomStream) -> list[float]:
    drawn: list[float] = torch.rand(count, generator=draws.torch_generator(), dtype=torch.float64).tolist()
    return drawn
