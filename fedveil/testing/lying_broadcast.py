"""A server that sends the true broadcast to one site and zeros to all others, so that it can predict the others'
uploads.

Pasquini, Francati, Ateniese: Eluding Secure Aggregation in Federated Learning via Model Inconsistency. 2022.

Starting from zeros, every site trains to the same upload whatever its examples are, as long as they have the classes
that the server expects. The server subtracts these uploads from the sum, which leaves the upload of the one site. It
gives each site the digest of the message that this site receives, because a site refuses any other digest. But then
sites with different messages mask for different plans, and their masks do not cancel.

Not covered by the compatibility promise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedveil.config import RunConfig
from fedveil.contract.layout import Payload
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.errors import PolicyError, QuorumError, WireError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import TrainerFor
from fedveil.federation.secagg.in_process import InProcessSecureSums, secagg_config_of
from fedveil.federation.secagg.mask_streams import Integers
from fedveil.federation.secagg.masked_upload import MaskedUploadCodec
from fedveil.federation.secagg.messages import UploadAttachment
from fedveil.federation.secagg.plan import AttemptPlan, broadcast_digest
from fedveil.federation.secagg.plan_checks import RoundTerms, SiteRequirements
from fedveil.federation.secagg.unmasking import UnmaskingAttempt
from fedveil.rng import derive_secret
from fedveil.testing.lying_server import with_fields
from fedveil.wire import header
from fedveil.wire.capture import MessageCapture
from fedveil.wire.envelope import EnvelopeStamp, pack_message_parts

__all__ = ["capture_isolated_uploads"]


def capture_isolated_uploads(
    exchange: MessageExchange,
    config: RunConfig,
    server: FederatedState,
    trainer_for: TrainerFor,
    guess_for: TrainerFor,
    sites: Sequence[str],
    folder: Path,
) -> MessageCapture:
    """Attack each site in a separate first round. Return a capture with the server's estimate of each upload.

    Each captured upload is the sum of all sites' masked vectors, minus the masks that the server could remove and minus
    the other sites' predicted uploads. Read it as a masked upload.

    Args:
        config: only the sections secure and run are read; the method must send every site the same message.
        server: the state from which the target trains.
        trainer_for: returns a site's trainer.
        guess_for: returns a trainer on the server's own examples, with as many of each class as the site has.
    """
    capture = MessageCapture(folder)
    for target in sites:
        federation = _LyingRound(exchange, config, server, target, sites)
        vector, attached = federation.remove_masks(trainer_for)
        for site in sites:
            if site != target:
                vector = vector - federation.known_vector(guess_for, site)
        capture.write(federation.message_to(target), 0, 0, target, "down")
        capture.write(federation.pack(vector, attached), 0, 0, target, "up", accepted=True)
    return capture


class _LyingRound:
    """The first round of a run, with one target."""

    def __init__(
        self, exchange: MessageExchange, config: RunConfig, server: FederatedState, target: str, sites: Sequence[str]
    ) -> None:
        zeros = {name: torch.zeros_like(tensor) for name, tensor in server.tensors.items()}
        self.exchange, self.config, self.sites = exchange, config, list(sites)
        self._states = {site: server if site == target else FederatedState(zeros, server.scalars) for site in sites}
        self._sums = InProcessSecureSums(
            "run", secagg_config_of(config.secure), self.sites, SiteRequirements(colluding=config.secure.max_colluders)
        )
        plan = self._sums.begin(0, 0, self.sites).plan
        self.plans = {site: with_fields(plan, broadcast=self._digest(site)) for site in sites}
        self._codec = MaskedUploadCodec.from_exchange(exchange, 0, plan.bits)

    def _context(self, site: str) -> RoundContext:
        run = self.config.run
        secret = derive_secret(f"client:{site}", run.seed, run.deterministic)
        return RoundContext(0, site, True, secret, run.deterministic, in_secure_sum=True)

    def _digest(self, site: str) -> str:
        parts = self.exchange.packed(self._states[site], self._context(site)).parts
        return broadcast_digest(header.digest_of_parts(parts))

    def message_to(self, site: str) -> bytes:
        return b"".join(self.exchange.packed(self._states[site], self._context(site)).parts)

    def remove_masks(self, trainer_for: TrainerFor) -> tuple[Integers, UploadAttachment]:
        """Return the sum of the masked vectors: unmasked if the sites open it, otherwise still masked.

        The second value is the attachment of any one of the sites.
        """
        uploads: dict[str, UploadAttachment] = {}
        total: Any = 0
        for site, plan in self.plans.items():
            ctx = self._context(site)
            participate = self._codec.of_site(self._sums.sites[site], plan, self._terms(plan))
            _, parts = participate(self.message_to(site), None, trainer_for(site, ctx), ctx, ctx.new_turn())
            _, vector, uploads[site] = self._codec.receive(b"".join(parts))
            total = vector + total
        for plan in {plan.digest: plan for plan in self.plans.values()}.values():
            with contextlib.suppress(QuorumError):
                return self._open(plan, uploads, total.copy()), uploads[self.sites[0]]
        return total, uploads[self.sites[0]]

    def _terms(self, plan: AttemptPlan) -> RoundTerms:
        return replace(self._sums.terms(plan), is_alike=True)

    def _open(self, plan: AttemptPlan, uploads: Mapping[str, UploadAttachment], total: Integers) -> Integers:
        """Ask every site to open the sum of all sites under a plan. Raises QuorumError if too few shares arrive."""
        attempt = UnmaskingAttempt.from_pending(plan, "", uploads, total)
        attempt.in_sum = tuple(self.sites)  # the lying server does not check the uploads that it has
        for site, asked in attempt.open_requests().items():
            with contextlib.suppress(PolicyError, WireError):
                attempt.take_opening(site, self._sums.sites[site].open(asked))
        return attempt.total()

    def known_vector(self, guess_for: TrainerFor, site: str) -> Integers:
        """Return the upload of a site that trains from zeros."""
        ctx = self._context(site)
        received = [self.exchange.opened(self.message_to(site), ctx)]
        trainer = guess_for(site, ctx)
        _, payload, _ = self.exchange.trained(None, received, trainer, ctx)
        ring = self._codec.ring(self.plans[site])
        vector, _ = self._codec.slots.vector(self.exchange, payload, trainer.num_examples, 0, ring)
        return vector

    def pack(self, vector: Integers, attached: UploadAttachment) -> bytes:
        """Pack the vector and the attachment into a message."""
        signed = torch.from_numpy(np.ascontiguousarray(vector).view(f"<i{self._codec.bits // 8}"))
        stamp = EnvelopeStamp.from_exchange(self.exchange.method, self.exchange.name, 0, "up")
        sent = Payload({"sum": signed, "attached": attached.to_bytes()})
        return b"".join(pack_message_parts(self._codec.layout, stamp, sent).parts)
