"""Why sites are missing, for people: sites with the same reason stand before it together."""

from __future__ import annotations

from collections.abc import Mapping

MOST = 5  # sites before a reason, and reasons; the records have all


def by_reason(failed: Mapping[str, str], most: int = MOST) -> list[str]:
    """["east, north: why", "west: another", "and 2 more"] from the reason of each site, in their order."""
    sites: dict[str, list[str]] = {}
    for site, reason in failed.items():
        sites.setdefault(reason, []).append(site)
    lines = [f"{', '.join(_cut(names, most))}: {reason}" for reason, names in sites.items()]
    rest = sum(len(names) for names in list(sites.values())[most:])
    return [*lines[:most], *([f"and {rest} more"] if rest else [])]


def _cut(names: list[str], most: int) -> list[str]:
    return [*names[:most], f"and {len(names) - most} more"] if len(names) > most else names
