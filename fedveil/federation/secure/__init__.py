"""Secure aggregation: the server gets the sum of what the sites of a round send, and nothing of a single one.

    masks.py       what hides a vector, and is taken off the sum
    keys.py        signatures, agreed keys, shares that one holder alone can read
    shamir.py      secrets in shares
    parts.py       which sites of a sum masks join
    forms.py       the form of what goes over the wire beside the vectors, bounded before it is believed
    membership.py  who holds whose shares
    statements.py  what a server asks, and what sites answer
    agreed.py      what two ends agree on
    kept.py        what a site keeps
    site.py        a site's half: what it answers, and what it refuses
    server.py      the server's half before a round
    unmasking.py   the server's half of an attempt: the sum
    claim.py       which adversary a run holds against

What the vectors are, and their sums, is fedveil/federation/summed. Nothing here needs torch: a site's thin process does
all of it but the masking.

After Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, 2017, with the key exchange
moved into the round before, so that a round has two exchanges; neighbours after Bell et al., Secure Single-Server
Aggregation with (Poly)Logarithmic Overhead, 2020.

Formal guarantees, for N holders of a site's secrets of which t open one, and an adversary who has the server and c of
the holders, where the signing keys of the others are known to each other (a roster):
1. A server that keeps to the protocol learns of the sites in a sum, the adversary's own apart, their sum alone, if
   c < t. With neighbours: the sum of each part of them that masks join, which has as many sites as a sum must have.
2. So does a server that does not, if 2 t > N + c: no t holders open both halves of one site's secrets; and whatever it
   opens by telling holders of different sums has at least `parts.fewest_honest` honest sites, so that must be two. Not
   with neighbours, where no holder sees the whole sum.
3. Without a roster only the first holds, for the server could put its own keys in the place of the sites'.
It guarantees nothing of what the sum and the model themselves show, and nothing against a site that sends another
vector than it should: that spoils the sum.
"""
