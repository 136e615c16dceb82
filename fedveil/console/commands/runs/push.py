"""`fedveil push`: uploads a run's model with its privacy card to the Hugging Face Hub.

    HF_TOKEN=hf_... fedveil push runs/x owner/name
    fedveil push whole owner/name --token-file token --public

The folder is a run folder, whose final/ is uploaded, or a folder written by `fedveil merge`. All its files go into one
commit: weights, README.md, PRIVACY.md, privacy.json and signatures. The repository is created, private unless --public
is given. A token that `hf auth login` stored is not used: give HF_TOKEN or --token-file.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from fedveil.cards.signing import verification
from fedveil.errors import ConfigError

_TOKEN_BYTES = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder, or a model folder with its card")
    parser.add_argument("repo", metavar="OWNER/NAME", help="the model repository; created if it does not exist")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="a file with a write token (default: HF_TOKEN)")
    parser.add_argument("--public", action="store_true", help="make the repository public (default: private)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Upload the folder; print the commit URL."""
    verification.model_folder(args.folder)  # before the slow imports
    token = _read_token(args.token_file)
    from fedveil.cards.hub_upload import push_to_hub

    print(push_to_hub(args.folder, args.repo, token, args.public))
    return 0


def _read_token(file: Path | None) -> str:
    if file is None:
        return os.environ.get("HF_TOKEN", "").strip()
    try:
        with file.open("rb") as data:
            content = data.read(_TOKEN_BYTES + 1)
        return content.decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--token-file: expected a file with a token, found {type(error).__name__}; name another"
        ) from None
