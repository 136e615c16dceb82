"""The port of the sites: what one registered site may ask, so that a reply counts only for the site that sent it.

    a call -> flower/fleet_calls.py or flower/fleet_http.py    before it is parsed
           -> port.py                                          the seam in Flower; call_rates.py, delivered.py
           -> announcement.py, announced_tree.py, object_form.py    checks without state
           -> staging.py, spool.py -> hand_over.py -> Flower   replies that are whole

docs/threat-model.md has what a hostile member can still do.
"""
