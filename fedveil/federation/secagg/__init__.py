"""Secure aggregation: the server gets the sum of a round's uploads but no individual upload, even if it lies.

    mask_streams.py        masks that hide a vector and are removed from the sum
    crypto.py              signatures, agreed keys, shares that only one holder can read
    shamir.py              Shamir secret sharing
    schema.py              the form of all messages except the vectors, bounded before they are trusted
    roster.py              the signing keys of all sites
    plan.py                everything that has to be the same at all sites in an attempt
    derivations.py         keys, masks and digests under a plan
    messages.py            the server's requests and the sites' answers
    graph_connectivity.py  which sites the masks connect
    plan_checks.py         the rules by which a site checks plans, lists and requests
    state.py               a site's stored state
    site.py                a site's half: its answers and refusals
    server.py              the server's half before a round
    unmasking.py           the server's half of an attempt: the sum
    adversary_model.py     the adversaries that a run withstands

None of these needs torch: a site's thin client process does everything but the masking. The sum is over a
method's terms as masked integers:

    fixed_point.py         conversion of values to integers modulo 2^w and back
    flatten.py             a method's terms as one vector of integers; the sums of such vectors
    distributed_noise.py   the sites' noise shares in a sum
    masked_upload.py       an upload as a message, and a client round
    in_process.py          server and sites in one process

A plan names everything that has to be the same at all sites, and its digest salts every key: a site that was
shown a different plan adds masks that do not cancel. When a site masks, it shares the secrets of its masks with the
cohort, under keys that are only for that plan. Before any shares are revealed, q sites in the sum sign one list
of its sites; each site signs only one list per plan, and agrees to only one plan per round.

The base is Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, 2017, with
its consistency round. Keys for the next round are sent with the upload. The neighbor graph follows Bell et
al., Secure Single-Server Aggregation with (Poly)Logarithmic Overhead, 2020, but every signer of a list
checks that no c sites cut the graph. Inconsistent broadcasts: Pasquini et al., Eluding Secure Aggregation in
Federated Learning via Model Inconsistency, 2022.

Formal guarantees, for a cohort of m sites and an adversary that controls the server and c of the sites, if all
policies name one roster, require secure aggregation and admit only known code, 2 q > m + c, t > c (t = q
with all pairs), and max(q, least) - c >= 2:
1. For each plan, the adversary learns at most one sum, over at least max(q, least) - c honest sites. No combination of
   one round's sums reveals anything about fewer than q - c honest sites.
2. A server that follows the protocol, with c' sites, learns one sum per round, if c' < t and
   c' <= max(q, least) - 2; with neighbors, also c' <= c, because every site checks the graph for c.
3. Sites that were shown a different cohort, config, bundle or broadcast (if the method sends all sites the
   same broadcast) are not in the same sum: their sum is noise.

The protocol does not guarantee:

- a correct sum, because a site may send anything, or that a round ends if fewer than q sites answer;
- secrecy of anything shown by the sum, the model or the difference between two rounds' sums;
- secrecy of broadcasts, for methods that keep private state at the site;
- secrecy of entries that only some sites send.

A site that lost its state, or was rolled back to an older copy, counts as one of the c colluding sites in
the rounds that it forgot. If a table plans the entries that each site sends, an entry has at least `least` - c honest
sites.
"""
