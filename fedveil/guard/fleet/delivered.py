"""Track the instructions delivered to each site, so that a site can pull only its own objects.

In Flower, the objects of all sites and runs share one namespace, and any site can pull any of them.

Formal guarantees:
- `may_pull` is true only for objects in the tree of an instruction that was delivered to this site in this run;
- an object is counted at most `MAX_PULLS_OF_AN_OBJECT` times for each time its instruction was handed out, and an
  instruction's deliveries at most `MAX_COUNTED_DELIVERIES` times.

This is only a cache: after a server restart, and once a site has more than four instructions, port.py reads the
database again.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from fedveil.guard import fleet_limits as limits


@dataclass
class _Delivery:
    run_id: int
    object_ids: frozenset[str]
    times: int = 1
    pulls: Counter[str] = field(default_factory=Counter)
    is_confirmed: bool = False


class DeliveredInstructions:
    """The most recent instructions delivered to each site."""

    def __init__(self) -> None:
        self._of_site: dict[int, OrderedDict[str, _Delivery]] = {}
        self._lock = threading.Lock()

    def record_delivery(self, node_id: int, run_id: int, root: str, object_ids: Iterable[str]) -> None:
        """Record that an instruction was delivered to a site."""
        with self._lock:
            own = self._of_site.setdefault(node_id, OrderedDict())
            delivery = own.setdefault(root, _Delivery(run_id, frozenset(object_ids), times=0))
            delivery.times = min(delivery.times + 1, limits.MAX_COUNTED_DELIVERIES)
            own.move_to_end(root)
            while len(own) > limits.REMEMBERED_INSTRUCTIONS:
                own.popitem(last=False)

    def has_run(self, node_id: int, run_id: int) -> bool:
        """Return whether an instruction in this run was delivered to the site."""
        with self._lock:
            return any(delivery.run_id == run_id for delivery in self._of_site.get(node_id, {}).values())

    def may_pull(self, node_id: int, run_id: int, object_id: str) -> bool:
        """Return whether an object belongs to an instruction delivered to this site in this run."""
        with self._lock:
            return bool(self._deliveries_of(node_id, run_id, object_id))

    def is_pulled_too_often(self, node_id: int, run_id: int, object_id: str) -> bool:
        """Return whether a site has used up its pulls of an object."""
        with self._lock:
            return all(
                delivery.pulls[object_id] >= limits.MAX_PULLS_OF_AN_OBJECT * delivery.times
                for delivery in self._deliveries_of(node_id, run_id, object_id)
            )

    def count_pull(self, node_id: int, run_id: int, object_id: str) -> None:
        """Count one pull of an object by a site."""
        with self._lock:
            for delivery in self._deliveries_of(node_id, run_id, object_id):
                delivery.pulls[object_id] += 1

    def is_confirmed(self, node_id: int, root: str) -> bool:
        """Return whether a site has confirmed an instruction."""
        with self._lock:
            delivery = self._of_site.get(node_id, OrderedDict()).get(root)
            return delivery is not None and delivery.is_confirmed

    def confirm(self, node_id: int, root: str) -> None:
        """Record that a site has confirmed an instruction."""
        with self._lock:
            if (delivery := self._of_site.get(node_id, OrderedDict()).get(root)) is not None:
                delivery.is_confirmed = True

    def _deliveries_of(self, node_id: int, run_id: int, object_id: str) -> list[_Delivery]:
        own = self._of_site.get(node_id, OrderedDict())
        return [delivery for delivery in own.values() if delivery.run_id == run_id and object_id in delivery.object_ids]
