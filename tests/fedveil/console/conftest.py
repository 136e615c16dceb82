"""A run folder as server_app/run_folder.py writes it, with sizes that no formula would hit by chance."""

import json
import signal
from pathlib import Path

import pytest

from fedveil.records import disclosure_ledger

LAYERS = ("h.0.attn", "h.0.mlp")
SITES = ("site-0", "site-1", "site-2", "site-3")


def write_run(
    parent: Path,
    method: str = "fedrand",
    rounds: int = 3,
    state: str = "completed",
    site_names: tuple[str, ...] = SITES,
) -> Path:
    """A run whose uploads alternate between the factors, in which one site fails once and another does not sign.

    One that has failed ends with an attempt of which nothing was accepted.
    """
    folder = parent / method
    folder.mkdir(parents=True)
    config = {"method.name": method, "method.params": "", "task.name": "text-generation", "task.model": "tiny"}
    config |= {"run.rounds": 5, "run.name": method, "train.learning-rate": 3e-4, "train.batch-size": 16}
    about = {"name": method, "version": 1, "fields": {"rho": 0.5, "wire_dtype": "float32"}}
    environment = {"fedveil": "0.2.0", "flwr": "1.39.0", "torch": "2.13.0", "python": "3.11.2"}
    content = {"config": config, "method": about, **environment, "started": "2026-01-02T03:04:05+00:00"}
    (folder / "config.json").write_text(json.dumps(content))
    reason = "" if state == "completed" else f"round {rounds + 1}: expected at least 2 accepted uploads, found <0>"
    over = rounds - (state != "failed")
    status = {"state": state, "round": over, "rounds": rounds if state == "completed" else 5, "reason": reason}
    status |= {"ended": "2026-01-02T05:06:07+00:00"} if state != "running" else {}
    (folder / "status.json").write_text(json.dumps(status))
    start = 4.2 if method == "fedrand" else 4.21
    lines = [{"round": -1, "scores": {"server": {"loss": start, "bleu": 0.4, "cider": 0.01}}}]
    messages = []
    for round_ in range(rounds):
        failed = {site_names[1]: "ValueError: <no rows>"} if round_ == 1 else {}
        accepted = [site for site in site_names if site not in failed]
        for index, site in enumerate(site_names):
            messages.append(_message(round_, site, "down", "both", ("A", "B")))
            if site in accepted:
                variant = "AB"[(round_ + index) % 2] if method == "fedrand" else ""
                messages.append(_message(round_, site, "up", variant, tuple(variant or "AB")))
        sent = [message for message in messages if message["round"] == round_]
        loss = start - 0.5 * (round_ + 1) ** 0.7
        scores = {"loss": loss} | ({"bleu": 21.25, "cider": 0.875} if round_ == rounds - 1 else {})
        lines.append(
            {
                "round": round_,
                "attempt": 0,
                "cohort": list(site_names),
                "accepted": accepted,
                "unsigned": [site_names[2]],
                "failed": failed,
                "upload_bytes": sum(m["bytes"] for m in sent if m["direction"] == "up"),
                "download_bytes": sum(m["bytes"] for m in sent if m["direction"] == "down"),
                "reports": {site: _report(loss) for site in accepted},
                "seconds": 11.5,
                "aggregate_seconds": 0.1,
                "weights": f"{round_:02x}" * 32,
                "scores": {"server": scores},
            }
        )
    if state == "failed":
        asked = [_message(rounds, site, "down", "both", ("A", "B")) for site in site_names]
        messages += asked
        lines.append(_nothing_accepted(rounds, site_names, sum(int(str(message["bytes"])) for message in asked)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ledger = disclosure_ledger.DisclosureLedger(folder / disclosure_ledger.NAME)
    for message in messages:
        ledger.append({key: message[key] for key in ("round", "attempt", "site")}, str(message["direction"]), message)
    return folder


def _message(round_: int, site: str, direction: str, variant: str, factors: tuple[str, ...]) -> dict[str, object]:
    shapes = {"A": [8, 192], "B": [576, 8]}
    fields = [
        [f"{layer}.lora_{side}", "dense float32", shapes[side], 4 * shapes[side][0] * shapes[side][1]]
        for layer in LAYERS
        for side in factors
    ]
    payload = sum(int(str(f[3])) for f in fields)
    return {
        "round": round_,
        "attempt": 0,
        "site": site,
        "direction": direction,
        "variant": variant,
        "bytes": payload + 613,
        "payload_bytes": payload,
        "fields": fields,
        "scalars": {},
    }


REFUSED_BYTES = 12_901


def _nothing_accepted(round_: int, sites: tuple[str, ...], down: int) -> dict[str, object]:
    """An attempt with a failure of every kind."""
    reasons = (
        "refused: h.0.attn.lora_A: expected a norm of at most 1e+06, found 3.2e+07",
        "PolicyError: train.batch-size: expected at most 8, found 16",
        "no reply within 900 s",
        "its reply was lost, or arrived too late (code 4)",
    )
    return {
        "round": round_,
        "attempt": 0,
        "cohort": list(sites),
        "accepted": [],
        "unsigned": [],
        "failed": dict(zip(sites, reasons, strict=False)),
        "upload_bytes": REFUSED_BYTES,
        "download_bytes": down,
        "unlisted": {sites[0]: [REFUSED_BYTES, 0, 1, 0]},
        "reports": {},
        "seconds": 900.0,
        "weights": "",
        "scores": {},
    }


def _report(loss: float) -> dict[str, float]:
    return {
        "num_examples": 1057,
        "loss_received": loss + 0.1,
        "loss_trained": loss - 0.1,
        "steps": 66,
        "train_seconds": 3.5,
    }


@pytest.fixture
def signal_handlers():
    """Those of the test run, put back after a test that calls a command."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def run_folders(tmp_path_factory):
    """A finished FedAvg run and a finished FedRand run."""
    parent = tmp_path_factory.mktemp("runs")
    return write_run(parent, "fedavg"), write_run(parent, "fedrand")


@pytest.fixture
def make_run(tmp_path):
    """Writes a run folder below tmp_path."""
    return lambda **options: write_run(tmp_path, **options)


def unscored(folder: Path) -> Path:
    """The run as one whose server has no test data."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{key: value for key, value in row.items() if key != "scores"} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def masked(folder: Path) -> Path:
    """The run as one of secure aggregation: no reports, one vector an upload, one attempt without a sum."""
    config = json.loads((folder / "config.json").read_text())
    config["config"] |= {"secure.enabled": True, "secure.min-sites": 3, "secure.roster": "/roster/roster.json"}
    (folder / "config.json").write_text(json.dumps(config))
    first, *rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["unseen"] = {
            "sites": len(row["accepted"]), "cohort": 4, "quorum": 3, "threshold": 3, "neighbours": 0, "colluding": 1,
            "deaf": {},
        }  # fmt: skip
        row["reports"] = {}
        row["upload_bytes"] += 4111  # of questions
    rows[1]["unseen"]["deaf"] = {"site-3": "no answer within <120> s"}
    void = rows[1] | {
        "accepted": ["site-0"],
        "unsigned": [],
        "weights": "",
        "scores": {},
        "unseen": {"reason": "expected 3, found <1>"},
    }
    rows[2]["failed"] = {"site-9": "PolicyError: it gave no keys, so it was in no cohort"}
    lines = [first, rows[0], void, *[row | {"attempt": 1} for row in rows[1:2]], *rows[2:]]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
