"""A site's start-up kit: everything that a site needs and nothing secret. The site creates its own keys.

compose.yaml       SuperNode and SuperExec in separate containers, and the command that makes the keys
compose.gpu.yaml   the same with a GPU: docker compose -f compose.yaml -f compose.gpu.yaml up
ca.crt             certificate of the CA to trust for the server
site.toml          federation, site, server, its ports: public
node-config.toml   what the site tells its own apps about itself; paths are relative to the kit
containers.toml    the same with the paths of compose.yaml's containers
site-policy.toml   what the site permits: nothing, until the site has filled it in
README.md          one page
SHA256SUMS         of all of the above: sha256sum -c SHA256SUMS
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

from fedveil.console.flower.machine import Value, format_toml
from fedveil.console.provisioning import compose_files
from fedveil.console.provisioning.federation_folder import FederationFile
from fedveil.guard import poll_backoff

_POLICY = """\
# What this site permits. Read at the site, before any of the server's code runs; what is not permitted is refused.
# As it stands it permits nothing. `fedveil explain` says what a run would send.
methods = []                     # ["fedrand"]
tasks = []                       # ["text-generation"]
models = []                      # ["/models/llama"]
app-digests = []                 # the SHA-256 of the app that you have looked at: fedveil app digest
max-rounds = 50
max-bytes-a-round = 200_000_000
min-examples = 100
min-batch = 4
# max-broadcast-change = 1.0              # 10 unless said; each turn's change stands in the site's log
# max-broadcast-norm = 50.0
# signers = ["ssh-ed25519 AAAA..."]     # leave out, or list who may vouch for an app
# max-epsilon = 8.0                     # refuses every method without a differential-privacy guarantee
# delta = 1e-5                          # what the site's privacy ledger judges by, beside what a run claims
# adjacency = "replace-one"
# hours = ["20:00-06:00"]
# require-secure = true                 # uploads leave this site masked: for a server that keeps to the protocol
# min-cohort = 5                        # sites of a sum, at least
# min-threshold = 4                     # of the sites, so many must help before anything of this one is opened
# roster = "sha256:5f0c..."             # fedveil members roster; compare it with the other sites, not with the server
# [permits]                             # all other keys of the run config; this table comes last in the file
# "train.batch-size" = {min = 8, max = 64}
"""

_README = """\
# {federation}: start-up kit of site {site}

Nothing in this kit is secret. Your keys are made here, by you, and do not leave this machine.

Before: a container engine with compose, and the image `{image}` (`docker load -i`, where you got it as a file).
Or no containers, and FedVeil installed: then the commands are those after "or", in this folder.

1. Check the kit, then make your keys and your request:

       sha256sum -c SHA256SUMS
       docker compose run --rm -T init >request.json       # or: fedveil site init, which writes keys/request.json

   Send `request.json` to the operator, and read the fingerprint that was printed to them over the telephone.
   It is of two keys: the node key opens your connection, the signing key is what the other sites know you by.

2. Fill in `site-policy.toml`: as delivered it permits nothing. `FEDVEIL_DATA` names the folder of your rows
   (`train.jsonl` or `train.parquet`), `FEDVEIL_MODELS` that of the base models. Both are mounted read-only, into the
   container without a way out, and must be readable by user 10001. Without containers `node-config.toml` names the
   folder of the rows: `data`, in this folder.

   For runs with secure aggregation: when all sites are registered, the operator tells the digest of the roster. Compare
   it with the other sites, by telephone, before it goes into `site-policy.toml`: it keeps the server from
   putting keys of its own in the place of theirs. Secure aggregation still does not hold against a server that
   deviates from the protocol or lies.

3. When the operator has registered your keys:

       docker compose up -d --wait                         # or: fedveil site start --kit .

Your firewall must allow one outgoing TCP connection, to {superlink}. Nothing comes in: publish no port.

| to ... | run |
|---|---|
| see whether all is well | `docker compose run --rm doctor`, or `fedveil doctor --kit .` |
| see what was sent, and what was refused | `docker compose exec clientapp fedveil log show /state/audit-log.jsonl` |
| the same without containers | `fedveil log show state/audit-log.jsonl` |
| check that log | `docker compose exec clientapp fedveil log verify /state/audit-log.jsonl` |
| make a new node key before the old one's last day | `docker compose run --rm -T init --renew >request.json`, then 3 |
| make a new signing key, if others may have the old one | the same with `--renew-signing`; all need the new roster |
| use a GPU | `docker compose -f compose.yaml -f compose.gpu.yaml up -d --wait`, with an image built for it |
| leave | `docker compose down`, and tell the operator, who revokes your key |

The server's certificate comes from the operator's own authority: SHA-256 of ca.crt is

    {ca}

Ask for it on a second way before you trust it.
"""


_IN_THE_KIT: dict[str, Value] = {
    "data": "data", "state-dir": "state", "policy": "site-policy.toml", "signing-key": "keys/signing.key",
}  # fmt: skip
_IN_CONTAINERS: dict[str, Value] = {
    "data": "/data", "state-dir": "/state", "policy": "/kit/site-policy.toml", "signing-key": "/secret/signing.key",
}  # fmt: skip


def kit_files(federation: FederationFile, site: str, ca: bytes) -> dict[str, bytes]:
    """The kit's files by name."""
    public = {"federation": federation.name, "site": site, "superlink": federation.superlink}
    words = {**public, "image": federation.image, "ca": hashlib.sha256(ca).hexdigest()}
    ports = {
        "control-port": federation.control_port,
        "poll-seconds": poll_backoff.patch_site_polling(len(federation.sites)),
    }
    # Data may be mounted read-only, so that its id cannot be kept beside it: it has the site's name.
    names: dict[str, Value] = {"site": site, "data-set": site}
    text_files = {
        "compose.yaml": compose_files.site_compose(federation, site),
        "compose.gpu.yaml": compose_files.gpu_override("clientapp"),
        "site.toml": format_toml({**public, **ports}),
        "node-config.toml": format_toml(names | _IN_THE_KIT),
        "containers.toml": format_toml(names | _IN_CONTAINERS),
        "site-policy.toml": _POLICY,
        "README.md": _README.format(**words),
    }
    kit = {"ca.crt": ca, **{name: text.encode() for name, text in text_files.items()}}
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(kit.items()))
    return {**kit, "SHA256SUMS": sums.encode()}


def write_kit(file: Path, federation: FederationFile, site: str, ca: bytes) -> None:
    """The kit as SITE.tar.gz, one folder in it."""
    with tarfile.open(file, "w:gz") as archive:
        for name, data in kit_files(federation, site, ca).items():
            entry = tarfile.TarInfo(f"{federation.name}-{site}/{name}")
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
