"""Find the sinks that a run config names and check that their dependencies are installed here.

`fedveil submit` runs this check too, so the module does not import Flower.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType

from fedveil.config import RunConfig
from fedveil.errors import ConfigError
from fedveil.plugins import PluginPackage

PLUGINS = PluginPackage(
    "fedveil.server_app.metrics.sinks", "fedveil.sinks", "sinks.use", needs=("EXTRA", "NEEDS", "create")
)


def require_installed(config: RunConfig, where: str) -> dict[str, ModuleType]:
    """Return the modules of the run config's sinks; no sink is created. `where` names the machine in the message.

    Raises:
        ConfigError: a sink is unknown, or its extra is not installed here.
    """
    modules = {name: PLUGINS.load_module(name) for name in config.sinks.names}
    for name, module in modules.items():
        if importlib.util.find_spec(module.NEEDS) is None:
            raise ConfigError(f"sinks.use: {_missing(module, name, where)}")
    return modules


def _missing(module: ModuleType, name: str, where: str) -> str:
    """Return the rest of the message: the missing package, and the command that installs it."""
    extra, needs = module.EXTRA, module.NEEDS
    if not extra:  # the package is not in any lock file
        return f"{name} needs the package {needs} {where}, which is not installed; next step: pip install {needs}"
    return (
        f'{name} needs the extra "{extra}" {where}, which is not installed ({needs} is missing); next step: '
        f"pip install --require-hashes --no-deps -r lock/{extra}.txt, or without a checkout "
        f'pip install "fedveil[{extra}]"'
    )
