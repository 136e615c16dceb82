"""A stranger who knows a site's public key and reaches the fleet port, against Flower's own interceptor."""

from __future__ import annotations

import types

import grpc
import pytest
from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, RegisterNodeFleetRequest
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import NodeAuthServerInterceptor
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message

from fedveil.guard.flower import RefusalBehavior
from fedveil.guard.flower import fleet_grpc as fleet


class Aborted(Exception):
    pass


def asked(request, key) -> list:
    """What the servicer is asked when `key` signs; raises Aborted where the interceptor ends it."""
    seen = []
    stamp = now().isoformat()
    metadata = (
        (PUBLIC_KEY_HEADER, public_key_to_bytes(key.public_key())),
        (TIMESTAMP_HEADER, stamp),
        (SIGNATURE_HEADER, sign_message(key, stamp.encode())),
    )
    details = types.SimpleNamespace(method="/flwr.proto.Fleet/ActivateNode", invocation_metadata=metadata)
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: seen.append(request))

    def abort(code, words):
        raise Aborted(words)

    wrapped_handler = NodeAuthServerInterceptor(None).intercept_service(lambda details: handler, details)
    wrapped_handler.unary_unary(request, types.SimpleNamespace(abort=abort))
    return seen


@pytest.mark.parametrize("kind", [ActivateNodeRequest, RegisterNodeFleetRequest])
def test_a_site_is_activated_by_its_own_key_alone(kind, monkeypatch):
    (site, public), (stranger, _) = generate_key_pairs(), generate_key_pairs()
    request = kind(public_key=public_key_to_bytes(public))
    assert asked(request, stranger) == [request]  # Flower alone: the stranger speaks for the site
    monkeypatch.setattr(NodeAuthServerInterceptor, "_wrap_method_handler", fleet._wrap)  # put back afterwards
    fleet.install_checks(lambda public, activates: None)
    with pytest.raises(Aborted, match="Invalid public key"):
        asked(request, stranger)
    assert asked(request, site) == [request]


def test_a_key_that_is_refused_reaches_no_servicer(monkeypatch):
    site, public = generate_key_pairs()
    monkeypatch.setattr(NodeAuthServerInterceptor, "_wrap_method_handler", fleet._wrap)  # put back afterwards
    judged = []

    def refusal(key, activates):
        judged.append((key, activates))
        return RefusalBehavior.SAYS_WHY, "its expiry date has passed"

    fleet.install_checks(refusal)
    with pytest.raises(Aborted, match="its expiry date has passed"):
        asked(ActivateNodeRequest(public_key=public_key_to_bytes(public)), site)
    with pytest.raises(Aborted, match="its expiry date has passed"):
        asked(PullMessagesRequest(), site)
    assert judged == [(public_key_to_bytes(public), True), (public_key_to_bytes(public), False)]
