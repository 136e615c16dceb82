"""The environment variables that tell a ServerApp process where its keys and its bundle are."""

from __future__ import annotations

KEY_VARIABLE = "FEDVEIL_INSTRUCTION_KEY"  # the file with the instruction key
SIGNERS_VARIABLE = "FEDVEIL_SIGNERS"  # signers.json
BUNDLES_VARIABLE = "FEDVEIL_BUNDLES"  # the list of permitted bundles
APP_DIGEST_VARIABLE = "FEDVEIL_APP_DIGEST"  # SHA-256 of the bundle, set by the program that installed the bundle
