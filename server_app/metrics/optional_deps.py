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
            raise ConfigError(f"sinks.use: expected {_missing(module, name, where)}")
    return modules


def _missing(module: ModuleType, name: str, where: str) -> str:
    """Return the rest of the message: what was expected and found, and the command that installs it."""
    extra, needs = module.EXTRA, module.NEEDS
    if not extra:  # the package is not in any lock file
        return f"the package {needs} {where}, found none for {name}; next step: pip install {needs}"
    return (
        f'the extra "{extra}" {where}, found no {needs} for {name}; next step: pip install --require-hashes --no-deps '
        f'-r lock/{extra}.txt, or without a checkout pip install "fedveil[{extra}]"'
    )
