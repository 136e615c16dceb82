"""A site's own settings, from the SuperNode's `--node-config`.

A site with several data sets names each one, and a run chooses one (`task.data-set`):

    state-dir = "state"
    [data-sets.icu]
    data = "icu"
    unit-column = "patient"
    [data-sets.radiology]
    data = "/mnt/radiology"
    columns = {source = "Befund"}

| a run's `task.data-set` | at a site with `data` alone | with `data-sets` alone | with both |
|---|---|---|---|
| not set | `data` | ConfigError | `data` |
| the name of a data set here | - | that data set | that data set |
| any other name | ConfigError | ConfigError | ConfigError |

A data set without a `unit-column` has the site's. `columns` and `data-set` at the top belong to `data`, and are refused
without it. All data sets are charged to the one ledger in the state folder, and a run keeps to the data set of its
first round (replay_guard.py). An error does not list the names: the server reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedveil.errors import ConfigError

ColumnName = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^{}\r\n]*\S[^{}\r\n]*$")]
_COLUMNS, _DATA_SETS = "columns.", "data-sets."
DataSetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]  # without dots, at which Flower joins
_OwnName = Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,63})?$")]
_KEYS = ConfigDict(extra="forbid", frozen=True, alias_generator=lambda n: n.replace("_", "-"), populate_by_name=True)


class NamedDataset(BaseModel):
    """One of several data sets of a site. The attributes are those of `SiteConfig`."""

    model_config = _KEYS

    data: str = Field(min_length=1)
    data_set: _OwnName = ""
    columns: Mapping[ColumnName, ColumnName] = Field(default_factory=dict, max_length=32)
    unit_column: str = ""


class SiteConfig(BaseModel):
    """The settings of one site.

    Attributes:
        site: its name; "" = the registered name.
        data: the site's data folder; "" = the run's `task.data`.
        data_set: the data's name; "" = the id file in its folder (data_sets.py). The privacy ledger does not use it.
        columns: this site's names for the run's columns, see site_columns.py.
        unit_column: the column with unit ids, such as patient ids, that is searched for the ids of withdrawn units
            (withdrawn_units.py); "" = the column that was named at the withdrawal.
        data_sets: the data sets that a run may choose by name, see above.
        state_dir: folder for private state and the worker's socket.
        key_file: the key that encrypts the site's stored files (fedveil.encrypted_files); "" = no encryption.
        signing_key: the file that identifies this site in secure aggregation (created by fedveil site init);
            "" = the site creates one, which is not in any roster.
        instruction_keys: the kit's file with the server's instruction keys; "" = instructions are not verified.
        policy: the file with the site's policy; "" = no restrictions.
        device: "auto", "cpu", "cuda", "cuda:1".
        processes: number of processes that train together, each on its own CUDA device.
        shard_base: each process stores only a part of the frozen base, for a base that does not fit on one device;
            otherwise each stores all of it.
        worker_idle_seconds: a worker ends after this time without a client round.
        worker_memory_mb: limit on the resident memory of the worker and its processes; 0 = none. With a limit, the
            site runs a worker only for the current run.
        partition_id, num_partitions: the site's part of a data folder that all sites share, in demonstrations and
            simulation.
        simulated: one of several demonstration sites on one machine; its data folder is not bound to its ledger.
    """

    model_config = _KEYS

    site: str = ""
    data: str = ""
    data_set: _OwnName = ""
    columns: Mapping[ColumnName, ColumnName] = Field(default_factory=dict, max_length=32)
    unit_column: str = ""
    data_sets: Mapping[DataSetName, NamedDataset] = Field(default_factory=dict, max_length=32)
    state_dir: Path = Path("~/.local/state/fedveil")
    key_file: str = ""
    signing_key: str = ""
    instruction_keys: str = ""
    policy: str = ""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    processes: int = Field(1, ge=1, le=64)
    shard_base: bool = False
    worker_idle_seconds: float = Field(900.0, ge=0)
    worker_memory_mb: int = Field(0, ge=0)
    partition_id: int = Field(0, ge=0)
    num_partitions: int = Field(1, ge=1)
    simulated: bool = False

    @property
    def shares_data(self) -> bool:
        """Return whether other sites may use the same data folder, so that no single ledger can cover it."""
        return self.simulated or self.num_partitions > 1

    def has_data(self, name: str) -> bool:
        """Return whether a run may name this data set; "" = `data`, or the run's own `task.data`."""
        return name in self.data_sets if name else bool(self.data or not self.data_sets)

    def choose_data(self, name: str) -> SiteConfig:
        """Return the settings with the data set of this name; "" = `data`. Raises ConfigError if there is none."""
        if not name:
            if not self.has_data(name):
                raise ConfigError(
                    "task.data-set: this site has several data sets, and the run names none; agree on a name with the "
                    "site, and set it"
                )
            return self
        if not self.has_data(name):
            raise ConfigError("task.data-set: this site has no data set of this name; agree on one with the site")
        own = dict(self.data_sets[name])
        return self.model_copy(update=own | {"unit_column": own["unit_column"] or self.unit_column})

    @property
    def other_data(self) -> list[Path]:
        """Return the data of the site's other named data sets."""
        return [Path(each.data) for each in self.data_sets.values() if each.data != self.data]

    def list_data(self) -> dict[str, SiteConfig]:
        """Return the settings for each data set by its name, and for `data`, if it is set, by the name ""."""
        own = {"": self} if self.has_data("") else {}
        return own | {name: self.choose_data(name) for name in self.data_sets}


def parse_site(node_config: Mapping[str, Any]) -> SiteConfig:
    """Return the site's settings from its node config. Raises ConfigError, naming the invalid key.

    Flower flattens tables in the node config: `columns = {source = "x"}` arrives as `columns.source`.
    """
    flat = _with_columns({key: value for key, value in node_config.items() if not key.startswith(_DATA_SETS)})
    data_sets: dict[str, dict[str, Any]] = {}
    for key in sorted(node_config.keys() - flat.keys()):
        if key.startswith(_DATA_SETS):
            name, _, own = key.removeprefix(_DATA_SETS).partition(".")
            data_sets.setdefault(name, {})[own] = node_config[key]
    if data_sets:
        flat["data-sets"] = {name: _with_columns(own) for name, own in data_sets.items()}
    try:
        site = SiteConfig.model_validate(flat)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        known = [f.alias or name for name, f in SiteConfig.model_fields.items()]
        raise ConfigError(
            f"node config: {key}: {first['msg']}, found {first['input']!r}; known keys: {known}"
        ) from None
    if site.data_sets and not site.data and (site.columns or site.data_set):
        raise ConfigError(
            "node config: columns and data-set belong to data, which is not set; put them under [data-sets.NAME], or "
            "leave them out"
        )
    named = {(own.data_set, own.data) for own in site.list_data().values() if own.data_set}
    ids = [name for name, _ in named]
    if repeated := sorted({name for name in ids if ids.count(name) > 1}):
        raise ConfigError(f'node config: data-set: two data sets have the name "{repeated[0]}"; give each its own')
    if site.shard_base and site.processes < 2:
        raise ConfigError(
            f"node config: shard-base divides the base among processes, so it needs at least 2, but processes is "
            f"{site.processes}; set processes, or leave shard-base out"
        )
    return site


def _with_columns(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys with each "columns.X" in a table `columns`."""
    own = {key: value for key, value in flat.items() if not key.startswith(_COLUMNS)}
    columns = {key.removeprefix(_COLUMNS): flat[key] for key in flat.keys() - own.keys()}
    return {**own, "columns": columns} if columns else own
