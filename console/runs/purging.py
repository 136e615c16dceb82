"""What `fedveil site purge` lists, asks and removes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedveil.console.runs.kept import Kept, kept, leftovers, purge
from fedveil.console.runs.prepared import prepared, remove
from fedveil.errors import ConfigError
from fedveil.foreign import shown


def offer(state_dir: Path, names: Sequence[str], older_than: float | None, agreed: Callable[[], bool]) -> int:
    """Lists what a purge would remove, and removes it if it is `agreed`. Returns the exit code. Raises ConfigError."""
    if not names and older_than is None:
        raise ConfigError("--older-than: expected a number of days, or --run NAME, found neither; name what shall go")
    if older_than is not None and not older_than >= 0:
        raise ConfigError(f"--older-than: expected a number of days, at least 0, found {older_than}; correct it")
    there, days = kept(state_dir), older_than or 0.0
    if unknown := set(names) - {run.run for run in there}:
        raise ConfigError(
            f"--run: expected a run below {state_dir}, found {min(unknown)!r}; fedveil site status lists them"
        )
    chosen = [run for run in there if (run.run in names if names else run.bytes > 0)]
    chosen = [run for run in chosen if older_than is None or run.days >= older_than]
    goes = [run for run in chosen if not run.why]
    parts = [] if names else leftovers(state_dir, days)
    parts = [part for part in parts if part.parent not in {run.folder for run in goes}]
    sets = [] if names else [of for of in prepared(state_dir) if of.days >= days]
    for run in chosen:
        print(f"{'stays' if run.why else 'goes':<6}{line(run)}{f': {shown(run.why)}' if run.why else ''}")
    for part in parts:
        print(f"goes  {shown(part)}, {part.stat().st_size:,} bytes, left by an interrupted write")
    for of in sets:
        print(f"goes  prepared rows of {shown(of.data_set)}, {of.bytes:,} bytes, made anew where they are needed")
    if not goes and not parts and not sets:
        print("nothing to remove")
        return 0
    if not agreed():
        print("nothing was removed")
        return 1
    remove(state_dir, sets)
    stayed = purge(state_dir, goes, parts)
    for run in stayed:
        print(f"stays {line(run)}: it has gone on meanwhile")
    size = sum(run.bytes for run in goes if run not in stayed)
    print(f"removed {len(goes) - len(stayed)} runs, {size:,} bytes, and {len(parts)} leftovers; ledger and logs stay")
    return 0


def line(run: Kept) -> str:
    """A run that is kept, on one line."""
    return f"{shown(run.run, 80)}, site {shown(run.site, 80)}: {run.bytes:,} bytes, last turn {run.days:.1f} days ago"
