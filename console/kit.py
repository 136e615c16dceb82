"""A site's start-up kit: everything that a site needs and nothing secret. Its keys are made at the site.

compose.yaml       SuperNode and SuperExec in containers of their own, and the command that makes the keys
compose.gpu.yaml   the same with a GPU: docker compose -f compose.yaml -f compose.gpu.yaml up
ca.crt             whom to trust as the server
site.toml          federation, site, server: public
node-config.toml   what the site says of itself to its own apps
site-policy.toml   what it permits: nothing, until somebody at the site has filled it in
README.md          one page
SHA256SUMS         of all of the above: sha256sum -c SHA256SUMS
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

from console.federation import FederationFile
from console.machine import toml

_COMPOSE = """\
# Site {site} of {federation}. Opens one connection, to {superlink}; publishes no port.
name: fedveil-{project}
x-common: &common
  image: {image}
  restart: unless-stopped
  read_only: true
  user: "10001:10001"
  cap_drop: [ALL]
  security_opt: ["no-new-privileges:true"]
  tmpfs: ["/tmp:mode=1777"]
  environment: &environment
    FLWR_HOME: /state/flower
    FLWR_TELEMETRY_ENABLED: "0"
    FLWR_DISABLE_UPDATE_CHECK: "1"
    HF_HUB_OFFLINE: "1"
    MALLOC_MMAP_THRESHOLD_: "1048576"
services:
  init:                       # docker compose run --rm init: makes this site's key and its request
    <<: *common
    profiles: [init]
    restart: "no"
    network_mode: none
    entrypoint: [fedveil, site, init, --kit, /kit, --out, /keys]
    volumes: ["./:/kit:ro", "./keys:/keys"]
  doctor:                     # docker compose run --rm doctor: this image's own code alone, so it may see everything
    <<: *common
    profiles: [doctor]
    restart: "no"
    environment:
      <<: *environment
      PATH: {path}
    entrypoint: [fedveil, doctor, --kit, /kit, --keys, /keys]
    volumes:
      - ./:/kit:ro
      - ./keys:/keys:ro
      - state:/state
      - ${{FEDVEIL_DATA:-./data}}:/data:ro
    networks: [outside]
  supernode:
    <<: *common
    command:
      - flower-supernode
      - --grpc-rere
      - --root-certificates=/kit/ca.crt
      - --superlink={superlink}
      - --auth-supernode-private-key=/keys/node.key
      - --isolation=process
      - --superexec-auth-secret-file=/keys/superexec-secret
      - --host=0.0.0.0
      - --port=9094
      - --health-server-address=127.0.0.1:9097
      - --node-config=/kit/node-config.toml
    volumes: ["./:/kit:ro", "./keys:/keys:ro", "node-state:/state"]
    networks: [inside, outside]
    healthcheck:
      test: [CMD, fedveil, doctor, --health, "127.0.0.1:9097"]
      interval: 10s
      timeout: 10s
      retries: 12
  clientapp:                  # runs the permitted app; sees the data; has no way out
    <<: *common
    environment:
      <<: *environment
      PATH: {path}
    command:
      - flower-superexec
      - --runtime-api-address=supernode:9094
      - --insecure             # inside the network between these two; the secret says who they are
      - --superexec-auth-secret-file=/keys/superexec-secret
    volumes:                  # not the kit's folder: the site's key lies in it
      - ./site-policy.toml:/kit/site-policy.toml:ro
      - ./keys/superexec-secret:/keys/superexec-secret:ro
      - state:/state
      - ${{FEDVEIL_DATA:-./data}}:/data:ro
      - ${{FEDVEIL_MODELS:-./models}}:/models:ro
    networks: [inside]
    depends_on:
      supernode: {{condition: service_healthy}}
networks:
  inside: {{internal: true}}
  outside: {{}}
volumes:
  state: {{}}
  node-state: {{}}
"""

# The image has the entry point there (fedveil site guard --bin /opt/fedveil/guard), before Flower's own command.
_PATH = "/opt/fedveil/guard:/usr/local/bin:/usr/bin:/bin"

_GPU = """\
services:
  clientapp:
    deploy:
      resources:
        reservations:
          devices: [{driver: nvidia, count: 1, capabilities: [gpu]}]
"""

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
# signers = ["ssh-ed25519 AAAA..."]     # leave out, or list who may vouch for an app
# max-epsilon = 8.0                     # refuses every method without a differential-privacy guarantee
# delta = 1e-5
# hours = ["20:00-06:00"]
"""

_README = """\
# {federation}: start-up kit of site {site}

Nothing in this kit is secret. Your key is made here, by you, and does not leave this machine.

1. Check the kit, then make your key and your request:

       sha256sum -c SHA256SUMS && mkdir -p -m 700 keys && docker compose run --rm init

   Send `keys/request.json` to the operator, and read the fingerprint that was printed to them over the telephone.

2. Fill in `site-policy.toml`: as delivered it permits nothing. `FEDVEIL_DATA` names the folder of your rows (`train.jsonl` or
   `train.parquet`), `FEDVEIL_MODELS` the base models; both are mounted read-only, into the container without a way out.

3. When the operator has registered your key:

       docker compose up -d --wait

Your firewall must allow one outgoing TCP connection, to {superlink}. Nothing comes in: publish no port.

| to ... | run |
|---|---|
| see whether all is well | `docker compose run --rm doctor` |
| see what was sent, and what was refused | `docker compose exec clientapp fedveil log show /state/audit-log.jsonl` |
| check that log | `docker compose exec clientapp fedveil log verify /state/audit-log.jsonl` |
| make a new key before the old one's last day | `docker compose run --rm init --renew`, then as under 1 |
| leave | `docker compose down`, and tell the operator, who revokes your key |

The folder `keys` must belong to user 10001 (`chown -R 10001:10001 keys`) where your engine does not map users. The server's
certificate comes from the operator's own authority: SHA-256 of ca.crt is

    {ca}

Ask for it on a second way before you trust it.
"""


def files(federation: FederationFile, site: str, ca: bytes) -> dict[str, bytes]:
    """The kit's files by name."""
    project = "".join(c if c.isalnum() else "-" for c in site.lower())
    words = {
        "site": site, "federation": federation.name, "superlink": federation.superlink, "image": federation.image,
        "project": project, "path": _PATH, "ca": hashlib.sha256(ca).hexdigest(),
    }  # fmt: skip
    public = {"federation": federation.name, "site": site, "superlink": federation.superlink}
    node = {"site": site, "data": "/data", "state-dir": "/state", "policy": "/kit/site-policy.toml"}
    found = {
        "compose.yaml": _COMPOSE.format(**words),
        "compose.gpu.yaml": _GPU,
        "site.toml": toml(public),
        "node-config.toml": toml(node),
        "site-policy.toml": _POLICY,
        "README.md": _README.format(**words),
    }
    kit = {"ca.crt": ca, **{name: text.encode() for name, text in found.items()}}
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(kit.items()))
    return {**kit, "SHA256SUMS": sums.encode()}


def write(file: Path, federation: FederationFile, site: str, ca: bytes) -> None:
    """The kit as SITE.tar.gz, one folder in it."""
    with tarfile.open(file, "w:gz") as archive:
        for name, data in files(federation, site, ca).items():
            entry = tarfile.TarInfo(f"{federation.name}-{site}/{name}")
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
