"""One participation of this site: decode, train, keep what is private, encode. No Flower in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from client_app.private import PrivateStore
from client_app.site import Site
from fedveil import tasks
from fedveil.config import RunConfig
from fedveil.errors import ConfigError
from fedveil.exchange import Exchange
from fedveil.method import RoundContext
from fedveil.tasks.base import Share


@dataclass(frozen=True)
class Order:
    """What the server asks of this site, beside the message itself.

    Attributes:
        round: 0-based.
        is_new: the server has accepted no upload of this site yet.
        site: the name under which the server knows this site.
        run: name of the run, for private state.
        method: the method's file name.
        fields: its hyper-parameters as JSON.
    """

    round: int
    is_new: bool
    site: str
    run: str
    method: str
    fields: str


def take_part(data: bytes, order: Order, config: RunConfig, site: Site) -> bytes:
    """This site's whole turn. The private state is on disk before the upload exists."""
    import strategies

    name = site.site or order.site
    method = strategies.create_from_json(order.method, order.fields)
    task = tasks.load(config, method.adapter, site.device)
    folder = site.data or config.task.data
    if not folder:
        raise ConfigError(
            'data: expected a folder in the node config ("data") or the run config (task.data), found none'
        )
    store = PrivateStore.of(site.state_dir, order.run, name)
    secret = store.secret(config.run.seed, name, config.run.deterministic)
    ctx = RoundContext(order.round, name, order.is_new, secret)
    share = Share(site.partition_id, site.num_partitions) if site.num_partitions > 1 else None
    rows = task.prepare(task.examples(Path(folder), "train", share))
    local = task.local(rows, ctx.rng("batches"))
    private, upload = Exchange(method, order.method, task.spec).participate(data, store.load(), local, ctx)
    store.save(private)
    return upload
