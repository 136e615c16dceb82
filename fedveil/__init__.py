"""FedVeil: federated fine-tuning across sites, and attacks that measure what their updates still reveal.

All code is imported under one name. `strategies`, `server_app`, `client_app` and `attacks` are folders at the top of
the repository, linked inside this package, so they are imported as `fedveil.strategies` and so on. A wheel has them
inside the package. Flower's bundle, like an archive unpacked without links, has the folders next to the package
instead.
"""

from pathlib import Path as _Path

__version__ = "0.2.0"

_here = _Path(__file__).parent
if not (_here / "strategies").is_dir():  # a Flower bundle, or an archive that was unpacked without links
    __path__.append(str(_here.parent))
