"""`fedveil card`: writes, signs and checks a run's privacy card.

A run leaves a card beside its model, in final/: privacy.json, PRIVACY.md, and README.md, which the Hugging Face Hub
reads. "make" writes it again with what was learned since, such as an audit. "sign" puts a signature into
final/privacy.dsse.json: of every file of final/, and of the card; sites may sign the same. "verify" finds any change.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedveil.cards import card, words
from fedveil.cards.card import Card, Stated
from fedveil.console.cards import envelope, keys, statement, verified
from fedveil.console.runs.folder import load
from fedveil.errors import ConfigError, StateError
from fedveil.foreign import shown
from fedveil.records import audit_log
from fedveil.records.files import write_atomic


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    make = actions.add_parser("make", help="write the card again, with what an audit found and with what you state")
    make.add_argument("folder", type=Path, metavar="RUN", help="a run folder: <run.dir>/<run.name>")
    make.add_argument("--curator", help="who answers for the run")
    make.add_argument("--use", help="what the model is for")
    make.add_argument("--why-epsilon", help="why this epsilon, delta and unit")
    make.add_argument("--license", help="of the model, as the Hugging Face Hub names it: apache-2.0")
    make.add_argument(
        "--data-set", action="append", default=[], metavar="SITE=ID",
        help="a site's data set, by the site's own id of it",
    )  # fmt: skip
    make.set_defaults(run=_make)
    sign = actions.add_parser("sign", help="add a signature on every file beside the model, and on the card")
    sign.add_argument("--key", type=Path, required=True, help='Ed25519 private key: ssh-keygen -t ed25519 -N "" -f key')
    sign.add_argument("--site", default="", help="a site that signs: the card must fit its own audit log, see --log")
    sign.add_argument(
        "--log", type=Path, metavar="FILE", help="with --site: audit-log.jsonl of the site's state folder"
    )
    sign.set_defaults(run=_sign)
    verify = actions.add_parser("verify", help="find any byte that is not as it was signed")
    verify.add_argument(
        "--key", action="append", required=True, metavar="[NAME=]FILE",
        help="public key that must have signed, and how to call its owner; repeatable",
    )  # fmt: skip
    verify.set_defaults(run=_verify)
    for action in (sign, verify):
        action.add_argument("folder", type=Path, metavar="RUN", help="a run folder, or a model's folder with its card")


def _make(args: argparse.Namespace) -> int:
    from fedveil.console.cards import made  # torch, which signing and checking do without

    run = load(args.folder)
    final = args.folder / "final"
    if "method" not in run.config or not final.is_dir():
        raise StateError(f"run folder {args.folder}: expected config.json and final/ of a run that ended, found none")
    if (final / statement.NAME).exists():
        raise StateError(
            f"{final / statement.NAME}: expected none, for its signatures are of the card as it is, found one; remove "
            "it, and ask the signers again"
        )
    found = made.write(run, _stated(args, final))
    print(final / card.PAGE)
    print(found.guarantee.says)
    return 0


def _stated(args: argparse.Namespace, final: Path) -> Stated:
    """What is stated now; what is not stays as it stands in the card that is there."""
    before = card.read(final).stated if (final / card.NAME).is_file() else Stated()
    given = {name: getattr(args, name) for name in ("curator", "use", "why_epsilon", "license")}
    data_sets = before.data_sets | dict(_named(text, "--data-set") for text in args.data_set)
    now = before.model_dump() | {k: v for k, v in given.items() if v is not None} | {"data_sets": data_sets}
    try:
        return Stated.model_validate(now)
    except ValueError as error:
        raise ConfigError(f"card: expected short texts, and a license such as apache-2.0, found {error}") from None


def _sign(args: argparse.Namespace) -> int:
    key, folder = keys.private(args.key), verified.model(args.folder)
    about = card.read(folder)
    if (folder / card.PAGE).read_bytes() != words.page(about).encode():
        raise StateError(
            f"{folder / card.PAGE}: expected the page that this version makes of {card.NAME}, found another, so "
            "who signs would sign what no data says; fedveil card make RUN writes both, each version its own pages"
        )
    if args.site:
        _require_own(about, args.site, args.log)
    payload, file = statement.make(folder), folder / statement.NAME
    others = verified.read(file) if file.exists() else None
    if others is not None and others.content != payload:
        differ = "; ".join(statement.differences(statement.parse(others.content, str(file)), folder))
        raise StateError(
            f"{file}: expected signatures of what lies here, found others ({differ}); remove it, or get it anew"
        )
    done = envelope.signed(statement.PAYLOAD_TYPE, payload, key, others)
    write_atomic(file, done.to_bytes())
    print(f"{file}: signed by {keys.fingerprint(key.public_key())}; it has {len(done.signatures)} in all")
    return 0


def _require_own(about: Card, site: str, log: Path | None) -> None:
    """Raises StateError unless the anchor that the card has of a site is one of that site's own log."""
    if log is None:
        raise ConfigError("--site: expected with --log FILE, the site's own audit log, found none; name it")
    anchor = about.audit_log.sites.get(site, "")
    if not anchor:
        raise StateError(
            f"card: expected an end of {shown(site, 80)}'s audit log in it, found none: the server has no upload of "
            "this site; do not sign for it"
        )
    audit_log.verify(log, [audit_log.Head.parse(anchor)])


def _verify(args: argparse.Namespace) -> int:
    folder = verified.model(args.folder)
    given = [_named(text, "--key") if "=" in text else (Path(text).name, text) for text in args.key]
    known = {keys.fingerprint(key): (name, key) for name, key in ((n, keys.public(Path(file))) for n, file in given)}
    found = verified.verify(folder, {print_: key for print_, (_, key) in known.items()})
    if found.wrong:
        raise StateError(
            f"{folder}: expected everything as it was signed, found {'; '.join(found.wrong)}; do not trust it"
        )
    print(f"{folder}: {found.files} files, each as it was signed, and no other one")
    for each in found.signed:
        print(f"signed by {shown(known[each][0], 80)} ({each})")
    for each in found.unknown:
        print(f"a signature by {each}, a key that was not given: NOT checked, and it counts for nothing")
    print(f"the card says: {shown(card.read(folder).guarantee.says, 2000)}")
    return 0


def _named(text: str, what: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise ConfigError(f"{what}: expected NAME=VALUE, found {shown(text, 100)!r}; put a name before the =")
    return name, value
