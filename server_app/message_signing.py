"""Signs the instructions of one run and verifies the sites' replies (fedveil/federation/message_signatures).

The ServerApp process reads two files named by its environment: the instruction key, which must not be stored where the
SuperLink can read or write, and the list of the sites' signing keys. The list is read again when it changes, so a site
that is revoked in the middle of a run no longer counts.

| the environment | result |
|---|---|
| names neither file | no instruction is signed, and signatures in replies are ignored, as the run's log states |
| names only one of them | ConfigError before any site is asked |
| names a key that others can read, a list that others can write, or a malformed file | ConfigError, likewise |
| names a bundle digest that differs from the SuperLink's | ConfigError: the server signs only for code that it runs |

| a site in the list | its instruction | its reply |
|---|---|---|
| is registered and signs | is signed, and names the site's key in the list | counts only with its signature |
| is registered, with an older kit | is not signed; not sent if signatures are required | counts without a signature |
| is not in the list, is revoked or expired, or has a different node | is not sent | is refused |
| any site, while the list cannot be read | is not sent | is refused |
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from logging import INFO
from pathlib import Path
from typing import Any, final

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.supercore import log

from fedveil import encrypted_files, paths
from fedveil.contract.codec import Buffer
from fedveil.errors import ConfigError, StateError, WireError
from fedveil.federation.message_signatures import claims, digests
from fedveil.federation.message_signatures.claims import InstructionClaims
from fedveil.federation.message_signatures.environment import (
    APP_DIGEST_VARIABLE,
    KEY_VARIABLE,
    SIGNERS_VARIABLE,
)
from fedveil.federation.message_signatures.key_files import SiteSigner, SiteSigners
from fedveil.wire import chunking

_MOST_BYTES = 4 << 20  # maximum size of the list


@final
class SignerFile:
    """signers.json, read again when it changes."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read: tuple[tuple[int, ...], SiteSigners] | None = None

    def get(self) -> SiteSigners:
        """Return the current list. Raises StateError."""
        try:
            with self._file.open("rb") as file:
                about = os.fstat(file.fileno())
                if other := paths.find_other_writer(self._file, about):
                    raise StateError(f"{self._file}: only this user may be able to change the keys, but {other}")
                stamp = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)
                if self._read is not None and self._read[0] == stamp:
                    return self._read[1]
                data = file.read(_MOST_BYTES + 1)
            if len(data) > _MOST_BYTES:
                raise ValueError(f"more than {_MOST_BYTES} bytes")
            signers = SiteSigners.from_json(json.loads(data))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StateError(
                f"{self._file}: cannot read the sites' signing keys ({type(error).__name__}: {error}); "
                "run fedveil members list to write the file again"
            ) from None
        self._read = (stamp, signers)
        return signers


@final
class MessageSigner:
    """Signs and verifies the messages of one run.

    Args:
        private: the instruction key, 32 bytes.
        signers: the sites' keys.
        flower_run: Flower's run ID.
        app: SHA-256 of the bundle.
        run_config: the flat run config, as Flower passes it to both ends.
    """

    def __init__(
        self, private: bytes, signers: SignerFile, flower_run: int, app: str, run_config: Mapping[str, Any]
    ) -> None:
        self._private, self._signers = private, signers
        self._flower_run, self._app = str(flower_run), app
        self._config = digests.digest_record(run_config)
        self._federation = signers.get().federation

    @classmethod
    def from_environment(cls, flower_run: int, app: str, run_config: Mapping[str, Any]) -> MessageSigner | None:
        """Return a run's signer; None if the environment names no files. Raises ConfigError, StateError.

        `app`: the digest that the SuperLink names; it has to match the bundle that runs here.
        """
        key, signers = os.environ.get(KEY_VARIABLE, ""), os.environ.get(SIGNERS_VARIABLE, "")
        if not key and not signers:
            log(INFO, "fedveil: instructions are not signed: %s names no key", KEY_VARIABLE)
            return None
        if not key or not signers:
            missing = SIGNERS_VARIABLE if key else KEY_VARIABLE
            raise ConfigError(f"{missing}: it names no file, although the other variable does; set both")
        if (measured := os.environ.get(APP_DIGEST_VARIABLE, "")) != app:
            raise ConfigError(
                f"app digest: the SuperLink names {app}, but the bundle that runs here is {measured or 'not measured'}"
            )
        private = encrypted_files.read_key_file(
            Path(key), KEY_VARIABLE, "create one with fedveil members renew-instruction-key", "fedveil provision"
        )
        return cls(private, SignerFile(Path(signers)), flower_run, app, run_config)

    def sign(self, site: str, message: Message, contents: dict[int, str]) -> InstructionClaims | None:
        """Add the signature record to a message. Return the signed claims; None for a site with an older kit.

        Args:
            contents: cached digests, keyed by `id(record)`; all the messages stay alive until the last one is signed.

        Raises:
            WireError, StateError: the site must not be asked.
        """
        about, records = message.metadata, message.content
        signers = self._signers.get()
        signer = self._signer_of(signers, site, about.dst_node_id)
        if not signer.signs:
            if signers.required:
                raise WireError("signature: the site's kit is too old and lacks the instruction keys")
            return None
        order, upload = records.config_records["order"], records.array_records["fedveil"]
        order["signing-key"] = claims.key_id(signer.signing)
        if (content := contents.get(id(upload))) is None:
            content = contents[id(upload)] = _content_of(upload)
        issued = int(time.time())
        asked = InstructionClaims(
            federation=self._federation, flower_run=self._flower_run, node=str(about.dst_node_id),
            run=str(order["run"]), round=_whole(order["round"]), attempt=_whole(order["attempt"]), site=site,
            kind=claims.KINDS[about.message_type], app=self._app, config=self._config,
            order=digests.digest_record(dict(order)), settings=digests.digest_record(dict(records["config"])),
            content=content, issued=issued, until=issued + int(about.ttl), nonce=secrets.token_hex(16),
        )  # fmt: skip
        record = claims.sign(asked, self._private)
        times: dict[str, str | int] = {"issued": asked.issued, "until": asked.until, "nonce": asked.nonce}
        records[claims.RECORD] = ConfigRecord({**record, **times})
        return asked

    def verify(
        self, site: str, node_id: int, asked: InstructionClaims | None, data: Buffer, site_log: str,
        record: Mapping[str, Any] | None,
    ) -> dict[str, str | int]:  # fmt: skip
        """Return a reply's claims, key and signature for the audit log; {} for a site that does not sign.

        Args:
            asked: the instruction's claims, as returned by `sign`.
            data, site_log: the upload and the head of the site's log, as received.
            record: the signature record; None if the reply has none.

        Raises:
            WireError: the signature does not match, or is missing where one is required.
        """
        try:
            signer = self._signer_of(self._signers.get(), site, node_id)
        except StateError as error:
            raise WireError(str(error)) from None
        if asked is None:
            return {}
        if record is None:
            raise WireError("signature: the site's signature is missing from the reply")
        signature = claims.read_signature(record, is_instruction=False)
        answer = claims.answer_claims(asked, digests.digest_content([data]), site_log)
        if not claims.is_signed(answer, signer.signing, signature):
            raise WireError("signature: it is not a signature of this reply by the site's signing key")
        return {**answer.as_evidence(), "key": signature["key"], "signature": signature["signature"]}

    def _signer_of(self, signers: SiteSigners, site: str, node_id: int) -> SiteSigner:
        """Return a site's entry. Raises WireError unless it is registered with this node."""
        signer = signers.sites.get(site)
        if signers.federation != self._federation:
            raise WireError("signature: this is not the federation that the run started with")
        if signer is None or signer.state != "registered":
            state = "not registered" if signer is None else signer.state
            raise WireError(f"signature: the site is not registered: it is {state}")
        if signer.until and datetime.fromisoformat(signer.until) <= datetime.now(UTC):
            raise WireError(f"signature: the site's key expired on {signer.until[:10]}")
        if signer.node != str(node_id):
            raise WireError(f"signature: node {node_id} is not the node of the registered key")
        if signer.signs and not signer.signing:
            raise WireError("signature: the site has no registered signing key")
        return signer


def _content_of(record: ArrayRecord) -> str:
    return digests.digest_content(record[name].data for name in chunking.order_slices(list(record)))


def _whole(value: object) -> int:
    if type(value) is not int:
        raise WireError(f"order: expected a whole number, found {type(value).__name__}")
    return value
