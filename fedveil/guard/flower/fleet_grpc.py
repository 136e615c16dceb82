"""Two more checks on Flower 1.39's fleet port: a SuperNode uses only its own key, and only until it expires.

Flower's interceptor checks that a request is signed by the key in its metadata. It accepts any key for an
activation request, and the servicer then trusts the public key in the request. Anyone who could reach the
port and knew a site's public key, which is not secret, could therefore activate that site. That kept its
SuperNode offline for up to 1800 s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import NodeAuthServerInterceptor

from fedveil.guard.flower import RefusalBehavior

Refusal = Callable[[bytes, bool], tuple[RefusalBehavior, str] | None]

_CODES = {
    RefusalBehavior.SAYS_WHY: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalBehavior.ENDS: grpc.StatusCode.UNAUTHENTICATED,
    RefusalBehavior.ASKS_AGAIN: grpc.StatusCode.UNAVAILABLE,
}

_wrap: Callable[..., Any] = NodeAuthServerInterceptor._wrap_method_handler


def install_checks(refusal: Refusal) -> None:
    """Make Flower's interceptor refuse a request that names a public key other than its signing key.

    It also refuses requests for which `refusal` returns a refusal, given the signing key (PEM) and whether the request
    activates a SuperNode.
    """

    def checked(self: NodeAuthServerInterceptor, handler: Any, signed_by: bytes) -> Any:
        """Replace Flower's method of the same name; `signed_by` is the key in the request's metadata."""
        wrapped = _wrap(self, handler, signed_by)

        def called(request: Any, context: grpc.ServicerContext) -> Any:
            if getattr(request, "public_key", signed_by) != signed_by:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "Invalid public key")
            if (refused := refusal(signed_by, isinstance(request, ActivateNodeRequest))) is not None:
                context.abort(_CODES[refused[0]], refused[1])
            return wrapped.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(
            called,
            request_deserializer=wrapped.request_deserializer,
            response_serializer=wrapped.response_serializer,
        )

    NodeAuthServerInterceptor._wrap_method_handler = checked  # type: ignore[method-assign,assignment]
