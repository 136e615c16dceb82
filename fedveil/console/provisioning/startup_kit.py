"""A site's start-up kit: everything a site needs, and nothing secret. The site creates its own keys.

compose.yaml       SuperNode and SuperExec in separate containers, and the command that creates the keys
compose.gpu.yaml   the same with a GPU: docker compose -f compose.yaml -f compose.gpu.yaml up
ca.crt             certificate of the server's CA
instruction-keys.toml  public keys for verifying the server's instructions
site.toml          federation, site, server and ports (all public)
node-config.toml   the site's settings for its own apps; paths are relative to the kit
containers.toml    the same, with the paths in compose.yaml's containers
site-policy.toml   the site's permissions: none until the site fills it in (policy_template.py)
README.md          one page
SHA256SUMS         checksums of all of the above: sha256sum -c SHA256SUMS
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import tomllib
from pathlib import Path

from fedveil.console.flower.machine import Value, format_toml
from fedveil.console.provisioning import compose_files
from fedveil.console.provisioning.federation_folder import FederationFile
from fedveil.console.provisioning.policy_template import EMPTY_POLICY
from fedveil.federation.message_signatures.key_files import INSTRUCTION_KEYS, InstructionKeys
from fedveil.guard import poll_backoff

_README = """\
# {federation}: start-up kit of site {site}

Nothing in this kit is secret. You make your keys here, and they do not leave this machine.

You need a container engine with compose, and the image `{image}` (`docker load -i` if you got it as a file).
Without containers, you need FedVeil installed; use the commands after "or" in this folder.

1. Check the kit, then make your keys and your request:

       sha256sum -c SHA256SUMS
       docker compose run --rm -T init >request.json       # or: fedveil site init, which writes keys/request.json

   Send `request.json` to the operator, and read the printed fingerprint to them by phone. It covers two keys:
   the node key authenticates your connection, and the signing key identifies you to the other sites.

2. Fill in `site-policy.toml`: as delivered, it permits nothing. `FEDVEIL_DATA` names the folder with your examples
   (such as `train.jsonl`, `train.csv` or `train.parquet`), `FEDVEIL_MODELS` the one with base models. Both are mounted
   read-only in the container that has no outside network, and must be readable by user 10001. Without containers,
   `node-config.toml` names the folder with the examples: `data`, in this folder.

   For runs with secure aggregation: when all sites are registered, the operator sends you the roster digest.
   Compare it with the other sites by phone before you put it in `site-policy.toml`: it keeps the server from
   replacing their keys with its own. Secure aggregation still does not hold against a server that deviates from the
   protocol or lies.

3. When the operator has registered your keys:

       docker compose up -d --wait                         # or: fedveil site start --kit .

Your firewall must allow one outgoing TCP connection, to {superlink}. Nothing connects to you, so publish no ports.

| to ... | run |
|---|---|
| check the site | `docker compose run --rm doctor`, or `fedveil doctor --kit .` |
| see what was sent and refused | `docker compose exec clientapp fedveil log show /state/audit-log.jsonl` |
| the same without containers | `fedveil log show state/audit-log.jsonl` |
| check that log | `docker compose exec clientapp fedveil log verify /state/audit-log.jsonl` |
| make a new node key before the old one expires | `docker compose run --rm -T init --renew >request.json`, then 3 |
| make a new signing key, if others may have the old one | the same with `--renew-signing`; all need the new roster |
| accept the server's new instruction keys | `fedveil site trust FILE --kit . --fingerprint SHA256:...` |
| the same with containers | after that, `docker compose restart clientapp` |
| use a GPU | `docker compose -f compose.yaml -f compose.gpu.yaml up -d --wait`, with an image built for it |
| leave the federation | `docker compose down`, and tell the operator, who revokes your key |

The server's certificate is signed by the operator's own CA. The SHA-256 of ca.crt is

    {ca}

The server signs its instructions to you. Its public keys are in instruction-keys.toml.

Confirm both with the operator by phone before you trust them. Compare what `sha256sum ca.crt` prints, and the
fingerprint of the instruction keys that `fedveil site init` or `fedveil doctor --kit .` prints: anyone who changed the
kit in transit could have changed this page too.
"""


_IN_THE_KIT: dict[str, Value] = {
    "data": "data", "state-dir": "state", "policy": "site-policy.toml", "signing-key": "keys/signing.key",
    "instruction-keys": INSTRUCTION_KEYS,
}  # fmt: skip
_MOST_BYTES = 1 << 16
ADDRESS_AT_SITE = (
    "at the site, in its kit's folder: tar xzf NEW.tar.gz --strip-components=1 --wildcards '*/site.toml' "
    "'*/compose.yaml', then restart it; keys, policy and state stay as they are"
)
_IN_CONTAINERS: dict[str, Value] = {
    "data": "/data", "state-dir": "/state", "policy": "/kit/site-policy.toml", "signing-key": "/secret/signing.key",
    "instruction-keys": f"/kit/{INSTRUCTION_KEYS}",
}  # fmt: skip


def kit_files(federation: FederationFile, site: str, ca: bytes, keys: InstructionKeys) -> dict[str, bytes]:
    """Return the kit's files by name. `keys`: the server's instruction keys, which the site pins."""
    public = {"federation": federation.name, "site": site, "superlink": federation.superlink}
    words = {
        **public, "image": federation.image, "ca": hashlib.sha256(ca).hexdigest(),
    }  # fmt: skip
    ports = {
        "control-port": federation.control_port,
        "poll-seconds": poll_backoff.patch_site_polling(len(federation.sites)),
    }
    # Data may be mounted read-only, so no ID can be stored with it; the data set is named after the site.
    names: dict[str, Value] = {"site": site, "data-set": site}
    text_files = {
        "compose.yaml": compose_files.site_compose(federation, site),
        "compose.gpu.yaml": compose_files.gpu_override("clientapp"),
        INSTRUCTION_KEYS: keys.to_toml(),
        "site.toml": format_toml({**public, **ports}),
        "node-config.toml": format_toml(names | _IN_THE_KIT),
        "containers.toml": format_toml(names | _IN_CONTAINERS),
        "site-policy.toml": EMPTY_POLICY,
        "README.md": _README.format(**words),
    }
    kit = {"ca.crt": ca, **{name: text.encode() for name, text in text_files.items()}}
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(kit.items()))
    return {**kit, "SHA256SUMS": sums.encode()}


def address_in_kit(file: Path) -> str:
    """Return the server's HOST:PORT in a kit that `write_kit` wrote; "" if it cannot be read."""
    try:
        with tarfile.open(file, "r:gz") as archive:
            for entry in archive:
                if entry.isfile() and entry.name.endswith("/site.toml") and (data := archive.extractfile(entry)):
                    return str(tomllib.loads(data.read(_MOST_BYTES).decode())["superlink"])
    except (OSError, ValueError, KeyError, RecursionError, tarfile.TarError):
        return ""
    return ""


def write_kit(file: Path, federation: FederationFile, site: str, ca: bytes, keys: InstructionKeys) -> None:
    """Write the kit as SITE.tar.gz, which contains one folder."""
    with tarfile.open(file, "w:gz") as archive:
        for name, data in kit_files(federation, site, ca, keys).items():
            entry = tarfile.TarInfo(f"{federation.name}-{site}/{name}")
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
