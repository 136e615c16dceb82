"""Simulate when the uploads from N SuperNodes arrive at one server, event by event.

A round has these steps, in this order, for each of N sites with messages of b bytes:

1. The ServerApp creates the messages one after another: `send` seconds each. All are pushed after the last one.
2. A SuperNode asks for work every `poll_seconds`, with a uniformly random phase.
3. The SuperLink delivers the message: `relay` seconds of its single Python thread, after its earlier work.
4. The message passes through the server's shared downlink: b / `megabytes_a_second`, first come, first served.
5. The site starts a client process and trains: uniform between `train_seconds`' two values.
6. The upload passes through the uplink, and the SuperLink accepts it: `relay` seconds again.
7. The ServerApp asks for every outstanding message, one after another, `look` seconds each, and folds those that have
arrived: `fold` seconds each. After a pass in which none had arrived, it waits `_POLL_SECONDS`.

Measured in the same run: `send` and `fold` (CPU seconds of core/scale's strategy rows: gate, checksum,
fold and the run's records, without waiting for the disk), `relay` (CPU seconds of a SuperLink that carries messages of
b bytes). Assumed, in the preset: the link, the polling, the training, and `look`. Not modeled: lost messages, sites
that disconnect, a SuperLink that swaps.
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
    """Costs of a simulated round, in seconds except for link values.

    Attributes:
        send, fold: ServerApp seconds per message.
        relay: SuperLink seconds per message and direction.
        look: ServerApp seconds to check for a message that has not arrived.
        poll_seconds: interval between two polls of an idle SuperNode.
        train_seconds: training times of the fastest and the slowest site, including the start of the client process.
        megabytes: size of a message, each way.
        megabytes_a_second: speed of the server's link, each way.
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
        seconds: time until the last upload is folded.
        training: training time of the slowest site, a lower bound for the round.
        last_arrival: time until the last upload has reached the SuperLink.
        most_waiting: maximum number of uploads at the SuperLink that had not been folded yet.
        most_polling: maximum number of SuperNodes waiting for their message at the same time.
        busy: share of time that the ServerApp, the SuperLink and the busier direction of the link were busy.
    """

    seconds: float
    training: float
    last_arrival: float
    most_waiting: int
    most_polling: int
    busy: dict[str, float]


class _Station:
    """A queue that serves one job at a time, first come, first served."""

    def __init__(self) -> None:
        self.free_at = self.busy = 0.0

    def ends(self, now: float, seconds: float) -> float:
        """Return when a job that arrives at `now` and takes `seconds` will be done."""
        self.free_at = max(now, self.free_at) + seconds
        self.busy += seconds
        return self.free_at


def simulate_round(sites: int, costs: ArrivalCosts, seed: int = 0) -> SimulatedRound:
    """Simulate one round of N sites."""
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
    """Simulate the ServerApp's passes over outstanding messages. Return end time, longest queue, and busy seconds."""
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
