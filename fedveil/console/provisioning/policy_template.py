"""A site policy as text: the empty one in a start-up kit, and one that permits a given run.

Both have every key of `client_app/policy/site_policy.py`, each with a comment, in the same order.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping

__all__ = ["EMPTY_POLICY", "fill_policy"]

_FIRST_LINES = """\
# This site's policy. The site reads it before any of the server's code runs, and refuses what it does not permit.
"""
_KEYS = """\
methods = []                            # ["fedrand"]
tasks = []                              # ["text-generation"]
models = []                             # ["/models/llama"]
app-digests = []                        # SHA-256 of the app that you reviewed: fedveil app digest
# modules = ["sha256:5f0c..."]          # own-model files (task.module) that you reviewed; by default none may run
max-rounds = 50
max-bytes-a-round = 200_000_000         # broadcast and upload together
min-examples = 100                      # distinct examples behind an upload
min-batch = 4                           # examples in each step behind an upload
require-signed-instructions = true      # signed with the server's key from instruction-keys.toml
max-broadcast-change = 1.0              # in the weights to train from, since the previous ones
max-broadcast-drift = 1.5               # since the run's first ones; the site's log has both values for each round
# max-broadcast-norm = 50.0
# max-retries = 2                       # further tries of a round after the first; this is the default
# max-scores = 20                       # scores of received weights on your held-out examples, per run; default 0
# report-received-loss = true           # report such a score also as loss_received
# report-row-counts = true              # report how many rows were truncated or dropped
# signers = ["ssh-ed25519 AAAA..."]     # omit, or list the keys that may sign an app
# max-epsilon = 3.0                     # over all runs together; use at most 8; refuses methods without a guarantee
# min-noise-multiplier = 1.0            # refuses runs without noisy steps (dp.*), or with less noise
# delta = 1e-6                          # the ledger's: min(1e-6, 1 / (10 x examples)), from its first day
# adjacency = "replace-one"             # with Poisson batches, which dp.* always draws
# after-open = "refuse"                 # no private runs after a run that made epsilon infinite
# hours = ["20:00-06:00"]
# require-secure = true                 # uploads leave this site masked; with a roster, even if the server lies
# min-cohort = 5                        # minimum number of sites in a sum
# min-threshold = 4                     # number of sites that must agree to a sum that includes this site
# min-colluders = 1                     # number of sites that may collude with a lying server
# roster = "sha256:5f0c..."             # fedveil members roster; compare it with the other sites, not with the server
"""
EMPTY_POLICY = f"""\
{_FIRST_LINES}# As delivered, it permits nothing; `fedveil site policy --from run.toml` prints one that permits a run.
{_KEYS}# [permits]                             # all other run config keys; this table comes last in the file
# "train.batch-size" = {{min = 8, max = 64}}
"""
_KEY_LINE = re.compile(r"(?:# )?([a-z-]+) = [^#]*?\s*(#.*)?")
_VALUE_WIDTH, _WIDTH = 40, 120


def fill_policy(
    introduction: str, values: Mapping[str, str], notes: Mapping[str, str], permits: Iterable[tuple[str, str]]
) -> str:
    """Return the template with values filled in.

    Args:
        introduction: what the policy is for; becomes comment lines at the top.
        values: TOML value by key. A key without a value keeps the template's line, which may be a comment.
        notes: comment by key, put on lines above the key's own.
        permits: lines of [permits], each with its comment, which may be "".
    """
    lines = [*_FIRST_LINES.splitlines(), *_comment(introduction)]
    unknown = dict(values)
    for line in _KEYS.splitlines():
        match = _KEY_LINE.fullmatch(line)
        assert match is not None, line
        key, comment = match[1], match[2] or ""
        if comment.startswith("# ["):  # an example of a value
            comment = comment if key not in values else ""
        lines += _comment(notes.get(key, ""))
        lines.append(_with_comment(f"{key} = {unknown.pop(key)}", comment) if key in values else line)
    assert not unknown, unknown
    lines += ["", "# The run config keys that may differ from their defaults, and how.", "[permits]"]
    lines += [_with_comment(line, comment and f"# {comment}") for line, comment in permits]
    return "\n".join(lines) + "\n"


def _with_comment(line: str, comment: str) -> str:
    return f"{line:<{_VALUE_WIDTH - 1}} {comment}".rstrip()


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False)
