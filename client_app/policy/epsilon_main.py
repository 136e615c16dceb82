"""The epsilon that a run may cost, for privacy_cost.py. It runs as a separate process: it needs torch, the client
process must not.

python -m fedveil.client_app.policy.epsilon_main < {"method": ..., "fields": JSON text, "config": flat, "delta": ...}
"""

from __future__ import annotations

import json
import sys

from fedveil import strategies
from fedveil.config import parse
from fedveil.privacy.server_side_bound import promised_epsilon


def main() -> None:
    """Reads the question from standard input and prints {"epsilon": ...}."""
    asked = json.load(sys.stdin)
    method = strategies.create_from_json(asked["method"], asked["fields"])
    print(json.dumps({"epsilon": promised_epsilon(method, parse(asked["config"]), asked["delta"])}))  # noqa: T201  # its only output


if __name__ == "__main__":
    main()
