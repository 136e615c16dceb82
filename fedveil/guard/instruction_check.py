"""Verify an instruction's signature, and sign the reply to it (fedveil/federation/message_signatures).

| the site's kit | an instruction | result |
|---|---|---|
| pins no keys, and the policy does not require signatures | signed or not | admitted; the reply is not signed |
| pins no keys, and the policy requires signatures | any | refused |
| pins keys | without a signature | refused, unless the policy says `require-signed-instructions = false` |
| pins keys | with a signature by a different key, or over different content | refused |
| pins keys | too old, or from the future, by more than 5 minutes | refused |
| pins keys, but the site has no signing key | any | refused: its reply would not count |
| pins keys, but the server lists a different signing key for the site | any | refused, for the same reason |
| pins keys, but the node config does not name the site | any | refused: only the instruction would say which site it
  is for |

The signature is checked over values that this site knows or has measured: its own name, the node and run that its
SuperNode serves, the bundle's bytes, the run config that the app will see, the records, and the message bytes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Message, RecordDict

from fedveil import encrypted_files
from fedveil.errors import PolicyError, WireError
from fedveil.federation.message_signatures import claims, digests
from fedveil.federation.message_signatures.claims import InstructionClaims
from fedveil.federation.message_signatures.key_files import InstructionKeys
from fedveil.federation.secagg import crypto
from fedveil.sanitize import sanitize
from fedveil.wire import chunking

_WRONG = (
    "instruction: it has no valid signature by this federation's instruction key over this message, bundle and run "
    "config"
)


@dataclass(frozen=True)
class VerifiedInstruction:
    """An instruction signed with a key that this site pins.

    Attributes:
        evidence: its claims, key and signature for the audit log: the server cannot deny having sent it.
        signing_key: file with the key that signs the reply.
    """

    claims: InstructionClaims
    evidence: Mapping[str, str | int]
    signing_key: Path

    def sign_reply(self, content: str, log: str) -> dict[str, str | int]:
        """Return a reply's signature record. Raises ConfigError if the signing key cannot be read.

        Args:
            content: digest of the upload.
            log: head of the audit log after the line about this reply.
        """
        return claims.sign(claims.answer_claims(self.claims, content, log), _signing_key(self.signing_key))


def verify_instruction(
    message: Message, context: Any, flower_run: int, app: str, site: Any, is_required: bool
) -> VerifiedInstruction | None:
    """Return the verified instruction; None if the site pins no keys, or accepts unsigned instructions and got one.

    Args:
        message, context: as Flower passes them to this process.
        app: SHA-256 of the bundle.
        site: the validated node config.
        is_required: whether the policy requires signed instructions.

    Raises:
        PolicyError, ConfigError, WireError: the instruction is refused.
    """
    if not site.instruction_keys:
        if is_required:
            raise PolicyError(
                "instruction: require-signed-instructions is true, but this site pins no keys; set instruction-keys in "
                "its node config"
            )
        return None
    pinned = InstructionKeys.from_file(Path(site.instruction_keys).expanduser())
    records = message.content
    if claims.RECORD not in records.config_records:
        if is_required:
            raise PolicyError("instruction: the server's signature is missing")
        return None
    if not site.site:
        raise PolicyError("site: this site pins instruction keys, but its node config has no name; set site there")
    if not site.signing_key:
        raise PolicyError("signing-key: this site pins instruction keys, but names no key to sign its replies with")
    signing_key = Path(site.signing_key).expanduser()
    private = _signing_key(signing_key)
    signature = claims.read_signature(dict(records.config_records[claims.RECORD]), is_instruction=True)
    # These two checks come before the message is hashed, which takes seconds for a large one.
    public = [key for key in pinned.keys if claims.key_id(key) == signature["key"]]
    if not public:
        raise PolicyError(_WRONG)
    _require_current(signature["issued"], signature["until"])
    asked = _claims_of(message, records, context, pinned.federation, str(flower_run), app, site.site, signature)
    if not claims.is_signed(asked, public[0], signature):
        raise PolicyError(_WRONG)
    _require_listed_key(private, signing_key, records.config_records["order"].get("signing-key"))
    evidence = {**asked.as_evidence(), "key": signature["key"], "signature": signature["signature"]}
    return VerifiedInstruction(asked, evidence, signing_key)


def _claims_of(
    message: Message, records: RecordDict, context: Any, federation: str, flower_run: str, app: str, name: str,
    signature: Mapping[str, Any],
) -> InstructionClaims:  # fmt: skip
    order, upload = records.config_records["order"], records.array_records["fedveil"]
    kind = claims.KINDS.get(message.metadata.message_type)
    if kind is None:
        raise WireError("instruction: it is neither a training nor a secure-aggregation message")
    round_, attempt = order.get("round"), order.get("attempt")
    if not isinstance(round_, int) or not isinstance(attempt, int):  # the claims reject booleans
        raise WireError("instruction: round and attempt must be whole numbers")
    settings = dict(records.config_records["config"]) if "config" in records.config_records else {}
    return InstructionClaims(
        federation=federation, flower_run=flower_run, node=str(context.node_id), run=str(order.get("run")),
        round=round_, attempt=attempt, site=name, kind=kind, app=app,
        config=digests.digest_record(dict(context.run_config)), order=digests.digest_record(dict(order)),
        settings=digests.digest_record(settings),
        content=digests.digest_content(upload[key].data for key in chunking.order_slices(list(upload))),
        issued=signature["issued"], until=signature["until"], nonce=signature["nonce"],
    )  # fmt: skip


def _require_current(issued: int, until: int) -> None:
    now = int(time.time())
    if issued > now + claims.CLOCK_SECONDS:
        raise PolicyError(
            f"instruction: it is dated {issued - now} s ahead of this machine's clock; compare the server's and "
            "the site's clocks"
        )
    if until + claims.CLOCK_SECONDS < now:
        raise PolicyError(
            f"instruction: it expired {now - until} s ago by this machine's clock; compare the server's and the "
            "site's clocks"
        )


def _require_listed_key(private: bytes, file: Path, listed: object) -> None:
    """Raise PolicyError if the server would verify replies with a different key, and so drop a trained upload."""
    own = claims.key_id(crypto.verifying_key(private).hex())
    if listed != own:
        raise PolicyError(
            f"signing-key: the server lists {sanitize(listed, 20)} for this site, but {file.name} has {own}; restore "
            "the registered key, or make new ones with fedveil site init --renew "
            "--renew-signing, which the operator then registers"
        )


def _signing_key(file: Path) -> bytes:
    return encrypted_files.read_key_file(file, "signing-key", "create one with fedveil site init", "fedveil site init")
