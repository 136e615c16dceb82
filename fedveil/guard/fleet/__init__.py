"""The fleet port: checks on each registered site's calls, so that a reply counts only for the site that sent it.

    a call -> flower/fleet_calls.py or flower/fleet_http.py    before it is parsed
           -> port.py                                          the hook into Flower; call_rates.py, delivered.py
           -> announcement.py, announced_tree.py, object_form.py    stateless checks
           -> staging.py, spool.py -> hand_over.py -> Flower   complete replies

docs/threat-model.md describes what a hostile member can still do.
"""
