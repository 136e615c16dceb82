"""Two more checks on the fleet port of Flower 1.39: each SuperNode by its own key alone, and each key until its day.

Flower's interceptor checks that a request is signed by the key in its metadata. It lets a request for activation pass
with any key, and the servicer then believes the public key in the request. So whoever reached the port and knew the
public key of a site, which is no secret, could activate that site, and kept its SuperNode off for up to 1800 s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import NodeAuthServerInterceptor

from fedveil.guard.flower import Answer

Refusal = Callable[[bytes, bool], tuple[Answer, str] | None]

_CODES = {
    Answer.SAYS_WHY: grpc.StatusCode.FAILED_PRECONDITION,
    Answer.ENDS: grpc.StatusCode.UNAUTHENTICATED,
    Answer.ASKS_AGAIN: grpc.StatusCode.UNAVAILABLE,
}

_wrap: Callable[..., Any] = NodeAuthServerInterceptor._wrap_method_handler


def install(refusal: Refusal) -> None:
    """From now on Flower's interceptor refuses a request that names another public key than the one that signed it.

    It also refuses what `refusal` does, by the key that signed (PEM) and whether the request activates a SuperNode.
    """

    def checked(self: NodeAuthServerInterceptor, handler: Any, signed_by: bytes) -> Any:
        """As Flower's method of that name; `signed_by` is the key of the request's metadata."""
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
