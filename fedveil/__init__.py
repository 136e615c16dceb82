"""FedVeil: federated fine-tuning in which every exchange withholds something on purpose.

There is one import name. The folders `strategies`, `server_app`, `client_app`, `attacks`, `guard`, `benchmarks` and
`console` are imported as `fedveil.strategies` and so on. A wheel has them inside this package. In a checkout, and in
the bundle that Flower installs, they lie beside it, so their parent folder is added to this package's path.
"""

from pathlib import Path as _Path

__version__ = "0.2.0"

_beside = _Path(__file__).parent.parent
if (_beside / "pyproject.toml").is_file() and (_beside / "strategies").is_dir():
    __path__.append(str(_beside))
