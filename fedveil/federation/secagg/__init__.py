"""Secure aggregation: the server gets the sum of a round's uploads, and no single one, even if it lies.

    mask_streams.py        masks that hide a vector and are removed from the sum
    crypto.py              signatures, agreed keys, shares that only one holder can read
    shamir.py              secrets in shares
    schema.py              the form of all messages except the vectors, bounded before it is trusted
    roster.py              the signing keys of all sites
    plan.py                what has to be the same at all sites of an attempt
    derivations.py         keys, masks and digests under a plan
    messages.py            the server's requests and the sites' answers
    graph_connectivity.py  which sites the masks connect
    plan_checks.py         the rules by which a site judges plans, lists and requests
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

A plan names everything that has to be the same at all sites, and its digest salts every key: a site that was
shown another plan adds masks that do not cancel. Each site shares the secrets of its masks with the cohort
while it masks, under keys that are only for that plan. Before shares open, q sites of the sum sign one list of who is
in it; each site signs one list of a plan, and agrees to one plan of a round.

The base is Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, 2017, with
its consistency round. Keys for the next round travel with an upload. The graph of neighbors is that of Bell
et al., Secure Single-Server Aggregation with (Poly)Logarithmic Overhead, 2020, but every signer of a list
checks that no c sites cut it. Inconsistent broadcasts: Pasquini et al., Eluding Secure Aggregation in
Federated Learning via Model Inconsistency, 2022.

Formal guarantees, for a cohort of m sites and an adversary that controls the server and c of them, where all
policies name one roster, require secure aggregation and admit only known code, 2 q > m + c, t > c (t = q
with all pairs), max(q, least) - c >= 2:
1. For each plan the adversary learns at most one sum, over at least max(q, least) - c honest sites. No combination of
   one round's sums reveals anything about fewer than q - c honest sites.
2. A server that follows the protocol, with c' sites, learns one sum of each round, if c' < t and
   c' <= max(q, least) - 2; with neighbors c' <= c, for which every site checks the graph.
3. Sites that were shown another cohort, config, bundle or broadcast (where the method sends all sites the
   same) are not in the same sum: theirs is noise.

The protocol does not guarantee:

- a correct sum, because a site may send anything, or that a round ends if fewer than q sites answer;
- secrecy of what the sum, the model or the difference of two rounds' sums shows;
- secrecy of broadcasts, for methods that keep private state at the site;
- secrecy of entries that only some sites send.

A site that lost its state, or whose state was set back to an older copy, counts as one of the c colluding sites in
the rounds that it forgot. If a table plans which site sends which entries, an entry has at least `least` - c honest
sites.
"""
