"""Compute the epsilon that a run may cost, for privacy_cost.py.

This is a separate process because it needs torch, which the client process must not import.

python -m fedveil.client_app.policy.epsilon_main < {"method": ..., "fields": JSON text, "config": flat, "delta": ...}
"""

from __future__ import annotations

import json
import sys

from fedveil import strategies
from fedveil.config import parse
from fedveil.privacy.server_side_bound import promised_epsilon


def main() -> None:
    """Read the request from standard input and print {"epsilon": ...}."""
    asked = json.load(sys.stdin)
    method = strategies.create_from_json(asked["method"], asked["fields"])
    print(json.dumps({"epsilon": promised_epsilon(method, parse(asked["config"]), asked["delta"])}))  # noqa: T201  # its only output


if __name__ == "__main__":
    main()
