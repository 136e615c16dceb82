"""Upload a model's folder with its privacy card to a model repository on the Hugging Face Hub.

The caller must pass a token; a token that `hf auth login` stored on this machine is never used. All files in the
folder, and nothing else, are uploaded in one commit. A publicly readable repository requires `is_public`.
"""

from __future__ import annotations

import re
from pathlib import Path

from fedveil.cards import card
from fedveil.cards.signing import in_toto, verification
from fedveil.errors import ConfigError, StateError
from fedveil.sanitize import sanitize

__all__ = ["push_to_hub"]

_README = "README.md"
_TOKEN = re.compile(r"[\x21-\x7e]{1,500}")


def push_to_hub(folder: Path, repo: str, token: str, is_public: bool = False) -> str:
    """Upload the model in `folder`, which is a run folder or a model's folder with a card; return the commit's URL.

    Args:
        folder: a run folder, whose final/ is uploaded, or a folder written by `save` or `fedveil merge`.
        repo: "owner/name"; the repository is created if it does not exist. Its other files are kept.
        token: a Hub token with write permission.
        is_public: whether everyone may read the repository.

    Raises:
        StateError: the folder has no card, contains a link, or differs from what its signatures cover.
        ConfigError: there is no token, the repository's visibility differs, or the Hub refuses the upload or does not
            answer.
    """
    if not _TOKEN.fullmatch(token):
        raise ConfigError("token: uploading needs a Hub token with write permission; set HF_TOKEN or give --token-file")
    model = verification.model_folder(folder)
    names = _checked_files(model)

    import httpx  # slow to import, like huggingface_hub, which depends on it
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    api, run = HfApi(token=token), card.read_card(model).run
    if "/" not in repo:
        raise ConfigError(f'repository: expected "owner/name", found "{sanitize(repo, 100)}"; name the owner too')
    try:
        api.create_repo(repo, private=not is_public, exist_ok=True)
        if bool(api.repo_info(repo).private) == is_public:
            expected, found, todo = ("private", "public", "add")
            if is_public:
                expected, found, todo = ("public", "private", "leave out")
            raise ConfigError(
                f"repository {repo}: it is {found}, not {expected}; {todo} --public if that is intended, or name "
                "another repository"
            )
        commit = api.create_commit(
            repo,
            [CommitOperationAdd(name, model / name) for name in names],
            commit_message=f"Upload the model of {sanitize(run.name, 100)} with its privacy card",
        )
    except OfflineModeIsEnabled:
        raise ConfigError("HF_HUB_OFFLINE: this variable prevents uploads; unset it") from None
    except ValueError as error:  # the Hub does not accept the name or README.md's front matter
        raise ConfigError(f"repository: {sanitize(error, 300)}") from None
    # An upload of weights raises the last two.
    except (HfHubHTTPError, httpx.HTTPError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"repository {repo}: the upload to the Hub failed: {sanitize(error, 300)}; check the token's "
            "permissions and the network, and try again"
        ) from None
    return str(commit.commit_url)


def _checked_files(model: Path) -> list[str]:
    """Return the names of the files to upload. Raises StateError if one is missing or differs from what was signed."""
    names = sorted(name for name in in_toto.digest_files(model) if not in_toto.is_of_the_hub(name))
    for needed in (card.PAGE, _README):
        if needed not in names:
            raise StateError(f"{model}: {needed} is missing; write it with fedveil card make")
    signatures = model / in_toto.NAME
    if not signatures.exists():
        return names
    envelope = verification.read_envelope(signatures)
    differ = in_toto.find_differences(in_toto.parse_statement(envelope.content, str(signatures)), model)
    if differ:
        raise StateError(
            f"{model}: the files differ from those that were signed ({'; '.join(differ)}); do not publish them"
        )
    return [*names, in_toto.NAME]
