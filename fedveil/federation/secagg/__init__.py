"""Secure aggregation: a server that follows the protocol gets only the sum of a round's uploads.

    mask_streams.py        masks that hide a vector and are removed from the sum
    crypto.py              signatures, agreed keys, shares that only one holder can read
    shamir.py              secrets in shares
    graph_connectivity.py  which sites of a sum the masks connect
    schema.py              the form of all messages except the vectors, bounded before it is trusted
    membership.py          who holds whose shares
    messages.py            the server's requests and the sites' answers
    pairwise_keys.py       keys and masks that two ends agree on
    state.py               a site's stored state
    site.py                a site's half: what it answers, and what it refuses
    server.py              the server's half before a round
    unmasking.py           the server's half of an attempt: the sum
    adversary_model.py     which adversary a run holds against

None of these needs torch: a site's thin process does everything but the masking. The sum is over a
method's terms as masked integers:

    fixed_point.py         values as integers modulo 2^w, and back
    flatten.py             a method's terms as one vector of integers; the sums of such vectors
    distributed_noise.py   the shares of noise that are in a sum
    masked_upload.py       an upload as a message, and a client's round
    in_process.py          server and sites in one process

The protocol follows Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine
Learning, 2017. Its key exchange is moved into the round before, so that a round has two exchanges.
Neighbors follow Bell et al., Secure Single-Server Aggregation with (Poly)Logarithmic Overhead, 2020.

Formal guarantees, for N holders of a site's secrets, where any t holders can reconstruct one, and an
adversary that controls the server and c holders:
1. If c < t, a server that follows the protocol learns only the sum of the uploads of sites other than
   the adversary's own. With neighbors it learns the sum of each component of sites that masks connect;
   each component has at least as many sites as a sum must have. Where a method does not have every site
   send every entry, some entries of that sum may come from one site.
2. Nothing is claimed against a server that deviates from the protocol or lies. Two checks make some of
   its attacks harder: if 2 t > N + c, no t holders reveal both halves of one site's secrets; with a
   roster, the server cannot replace the sites' keys by its own.
It does not hide what the sum and the model themselves reveal. It does not stop a site from sending a
wrong vector, which spoils the sum.
"""
