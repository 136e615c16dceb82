"""A site's own settings, from the SuperNode's `--node-config`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedveil.errors import ConfigError

ColumnName = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^{}\r\n]*\S[^{}\r\n]*$")]
_COLUMNS = "columns."


class SiteConfig(BaseModel):
    """The settings of one site.

    Attributes:
        site: its name; "" = the registered name.
        data: the site's data folder; "" = the run's `task.data`.
        data_set: the data's name; "" = the id file in its folder (data_sets.py). The privacy ledger does not use it.
        columns: this site's names for the run's columns, see site_columns.py.
        unit_column: the column with unit ids, such as patient ids, that is searched for the ids of withdrawn units
            (withdrawn_units.py); "" = the column that was named at the withdrawal.
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

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=lambda n: n.replace("_", "-"), populate_by_name=True
    )

    site: str = ""
    data: str = ""
    data_set: str = Field("", pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,63})?$")
    columns: Mapping[ColumnName, ColumnName] = Field(default_factory=dict, max_length=32)
    unit_column: str = ""
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


def parse_site(node_config: Mapping[str, Any]) -> SiteConfig:
    """Return the site's settings from its node config. Raises ConfigError, naming the invalid key.

    Flower flattens tables in the node config: `columns = {source = "x"}` arrives as `columns.source`.
    """
    flat = {key: value for key, value in node_config.items() if not key.startswith(_COLUMNS)}
    if columns := {key.removeprefix(_COLUMNS): node_config[key] for key in node_config.keys() - flat.keys()}:
        flat["columns"] = columns
    try:
        site = SiteConfig.model_validate(flat)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        known = [f.alias or name for name, f in SiteConfig.model_fields.items()]
        raise ConfigError(
            f"node config: {key}: {first['msg']}, found {first['input']!r}; known keys: {known}"
        ) from None
    if site.shard_base and site.processes < 2:
        raise ConfigError(
            f"node config: shard-base divides the base among processes, so it needs at least 2, but processes is "
            f"{site.processes}; set processes, or leave shard-base out"
        )
    return site
