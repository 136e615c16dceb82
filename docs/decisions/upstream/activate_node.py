"""ActivateNode accepts a request for a registered SuperNode that another key has signed."""

import types

import grpc
from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import NodeAuthServerInterceptor
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message

(_, site), (stranger, _) = generate_key_pairs(), generate_key_pairs()
stamp = now().isoformat()
metadata = (
    (PUBLIC_KEY_HEADER, public_key_to_bytes(stranger.public_key())),
    (TIMESTAMP_HEADER, stamp),
    (SIGNATURE_HEADER, sign_message(stranger, stamp.encode())),
)
reached = []
handler = grpc.unary_unary_rpc_method_handler(lambda request, context: reached.append(request))
details = types.SimpleNamespace(method="/flwr.proto.Fleet/ActivateNode", invocation_metadata=metadata)
checked = NodeAuthServerInterceptor(None).intercept_service(lambda details: handler, details)
checked.unary_unary(ActivateNodeRequest(public_key=public_key_to_bytes(site)), types.SimpleNamespace(abort=None))
print("the servicer got a request that names the site's key, signed by a stranger:", len(reached) == 1)
assert reached[0].public_key == public_key_to_bytes(site) != public_key_to_bytes(stranger.public_key())
