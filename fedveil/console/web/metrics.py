"""The metrics that a dashboard exports to Prometheus at /metrics, and their text.

Every exported name is listed here, with its labels. A test compares docs/deploy/monitoring.md with this list. No metric
describes a row or a person, and no label's value comes from a run's bundled code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedveil.errors import ConfigError, FedVeilError
from fedveil.sanitize import sanitize

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = [
    "MAX_SERIES",
    "METRICS",
    "GaugeSample",
    "MetricDefinition",
    "join_groups",
    "render_metrics",
    "require_exporter",
]

MAX_SERIES = 1000  # samples of one metric; the others are counted in fedveil_series_left_out
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LONGEST_LABEL = 100  # characters


@dataclass(frozen=True)
class MetricDefinition:
    """The meaning of a metric, and the names of its labels. All are gauges."""

    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class GaugeSample:
    """One value of the metric `name`; `labels`: the values, in the order of the definition's names."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


_SITE = ("federation", "site")
_SERVER: dict[str, MetricDefinition] = {
    "fedveil_registry_readable": MetricDefinition("1 if the list of members can be read", ("federation",)),
    "fedveil_superlink_up": MetricDefinition("1 if Flower's SuperLink answers at the control port", ("federation",)),
    "fedveil_sites_registered": MetricDefinition("sites with a registered key", ("federation",)),
    "fedveil_sites_online": MetricDefinition("sites that Flower sees online; missing if unknown", ("federation",)),
    "fedveil_site_online": MetricDefinition("1 if Flower sees the registered site online; missing if unknown", _SITE),
    "fedveil_site_key_days_left": MetricDefinition("days until a registered site's key expires", _SITE),
    "fedveil_site_refused_calls": MetricDefinition("calls by the site that the fleet port refused in 24 h", _SITE),
    "fedveil_site_is_rogue": MetricDefinition(
        "1 if, at any time in the last 24 h, 20 calls were refused within one minute", _SITE
    ),
    "fedveil_flower_runs": MetricDefinition(
        "unfinished runs by Flower's status; pending is the queue", ("federation", "status")
    ),
    "fedveil_runs": MetricDefinition("run folders by state, of the newest 50", ("federation", "state")),
    "fedveil_runs_unreadable": MetricDefinition("run folders that cannot be read, of the newest 50"),
    "fedveil_run_rounds_done": MetricDefinition("rounds done by a run that is running", ("federation", "run")),
}
_SITES: dict[str, MetricDefinition] = {
    "fedveil_site_heard": MetricDefinition("1 if the server answered a heartbeat in the last 75 s", _SITE),
    "fedveil_site_last_heartbeat_timestamp_seconds": MetricDefinition("time of the last answered heartbeat", _SITE),
    "fedveil_site_events": MetricDefinition(
        "lines of the last 24 h in `audit-log.jsonl`; only its last 10,000 lines and 1 MiB are read", ("event",)
    ),
    "fedveil_site_workers": MetricDefinition("running workers; missing if one gives an invalid answer"),
    "fedveil_ledger_readable": MetricDefinition("1 if the privacy ledger can be read, and the policy fits it"),
    "fedveil_ledger_epsilon_limit": MetricDefinition("the policy's max-epsilon over all runs; +Inf without a limit"),
    "fedveil_ledger_epsilon_reserved": MetricDefinition("epsilon reserved by all runs, by adversary", ("party",)),
    "fedveil_ledger_share_reserved": MetricDefinition("fraction of the limit that is reserved; 1 = all", ("party",)),
}
_BOTH: dict[str, MetricDefinition] = {
    "fedveil_certificate_days_left": MetricDefinition(
        "days until a certificate expires; -Inf if it cannot be read", ("federation", "certificate")
    ),
    "fedveil_disk_free_bytes": MetricDefinition("bytes free on a folder's disk", ("federation", "folder")),
    "fedveil_audit_log_last_line_timestamp_seconds": MetricDefinition("time of an audit log's last line", ("log",)),
    "fedveil_groups_failed": MetricDefinition("groups of samples missing or cut short because of an error"),
    "fedveil_series_left_out": MetricDefinition("samples left out, because a metric has at most 1,000"),
}
METRICS: Mapping[str, MetricDefinition] = {**_SERVER, **_SITES, **_BOTH}


def join_groups(groups: Iterable[Iterable[GaugeSample]]) -> Iterator[GaugeSample]:
    """Yield the samples of all groups, and how many groups ended with an error: an error does not cost the others."""
    failed = 0
    for group in groups:
        try:
            yield from group
        except (FedVeilError, OSError):
            failed += 1
    yield GaugeSample("fedveil_groups_failed", failed)


def require_exporter() -> None:
    """Raise ConfigError if the package that writes the text is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--metrics-token: expected the package prometheus_client, found none; pip install -r lock/prometheus.txt"
        ) from None


def render_metrics(samples: Iterable[GaugeSample]) -> bytes:
    """Return Prometheus's text. Raises KeyError or ValueError for a sample that METRICS does not describe."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(tuple(samples)))
    text: bytes = generate_latest(registry)
    return text


@dataclass(frozen=True)
class _Collected:
    samples: tuple[GaugeSample, ...]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for prometheus_client, which escapes the labels."""
        from prometheus_client.core import GaugeMetricFamily

        families: dict[str, GaugeMetricFamily] = {}
        left_out = 0
        for sample in self.samples:
            about = METRICS[sample.name]
            if len(about.labels) != len(sample.labels):
                raise ValueError(
                    f"{sample.name}: expected the labels {about.labels}, found {len(sample.labels)} values"
                )
            family = families.setdefault(sample.name, GaugeMetricFamily(sample.name, about.help, labels=about.labels))
            if len(family.samples) >= MAX_SERIES:
                left_out += 1
                continue
            family.add_metric([sanitize(text, _LONGEST_LABEL) for text in sample.labels], sample.value)
        name = "fedveil_series_left_out"
        yield from families.values()
        yield GaugeMetricFamily(name, METRICS[name].help, value=left_out)
