"""Facts about a secure run's sites that the server must keep across a restart: expelled sites and key owners.

    <run folder>/secure-sites.json    {"checksum", "expelled": {site: reason}, "signers": {signing key: site},
                                       "prekeys": {site: its last prekey}}

It is written before a plan shows sites' keys to other sites, and after every attempt. So after a restart, no site can
claim a key that it saw in a plan, and a site whose shares do not reconstruct its secret is not asked again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedveil.errors import StateError
from fedveil.federation.secagg.server import SecAggCoordinator
from fedveil.records.atomic_files import read_checksummed, write_atomic, write_checksummed

NAME = "secure-sites.json"


@dataclass
class KnownSitesStore:
    """The file in a run folder that stores a coordinator's knowledge of its sites.

    Attributes:
        folder: the run folder.
    """

    folder: Path
    _saved: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def save(self, coordinator: SecAggCoordinator) -> None:
        """Write the changes since the last call. Raises StateError, for example on a full disk."""
        known = coordinator.known_sites()
        if known == self._saved:
            return
        try:
            write_atomic(self.folder / NAME, write_checksummed(known))
        except OSError as error:
            raise StateError(f"{self.folder / NAME}: cannot be written: {error}; free some disk space") from error
        self._saved = known

    def load(self, coordinator: SecAggCoordinator) -> None:
        """Restore the saved state, if there is one. Raises StateError if the file is damaged."""
        file = self.folder / NAME
        if not file.exists():
            return
        try:
            content = read_checksummed(file.read_bytes())
            known = {part: {str(key): str(value) for key, value in content[part].items()} for part in content}
            coordinator.restore_sites(known["expelled"], known["signers"], known["prekeys"])
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise StateError(
                f"{file}: cannot read the run's expelled sites and key owners ({error}); restore the file, or move it "
                "away so that expelled sites may take part again"
            ) from None
