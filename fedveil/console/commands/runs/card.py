"""`fedveil card`: writes, signs and checks a run's privacy card.

A run writes a card next to its model, in final/: privacy.json, PRIVACY.md, and a README.md for the Hugging
Face Hub. "make" rewrites it with later results, such as an audit. "sign" adds a signature over the card and
every other file in final/ to final/privacy.dsse.json; sites may sign the same files. "verify" finds any change.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedveil.cards import card, markdown
from fedveil.cards.card import DeclaredFacts, PrivacyCard
from fedveil.cards.signing import dsse, in_toto, keys, verification
from fedveil.console.runs.run_reader import load_run
from fedveil.console.terminal import say
from fedveil.errors import ConfigError, StateError
from fedveil.records import audit_log
from fedveil.records.atomic_files import write_atomic
from fedveil.sanitize import sanitize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    make = actions.add_parser("make", help="rewrite the card with audit results and the facts you declare")
    make.add_argument("folder", type=Path, metavar="RUN", help="a run folder: <run.dir>/<run.name>")
    make.add_argument("--curator", help="person or organization responsible for the run")
    make.add_argument("--use", help="what the model is for")
    make.add_argument("--why-epsilon", help="why this epsilon, delta and unit")
    make.add_argument("--license", help="the model's license, as named on the Hugging Face Hub, such as apache-2.0")
    make.add_argument(
        "--data-set", action="append", default=[], metavar="SITE=ID",
        help="a site's data set, identified by the ID that the site uses",
    )  # fmt: skip
    make.set_defaults(run=_make)
    sign = actions.add_parser("sign", help="sign the card and every file next to the model")
    sign.add_argument("--key", type=Path, required=True, help='Ed25519 private key: ssh-keygen -t ed25519 -N "" -f key')
    sign.add_argument("--site", default="", help="the signing site; the card must match its audit log (see --log)")
    sign.add_argument(
        "--log", type=Path, metavar="FILE", help="with --site: audit-log.jsonl in the site's state folder"
    )
    sign.set_defaults(run=_sign)
    verify = actions.add_parser("verify", help="detect any change to the signed files")
    verify.add_argument(
        "--key", action="append", required=True, metavar="[NAME=]FILE",
        help="public key that must have signed, with a name for its owner; repeatable",
    )  # fmt: skip
    verify.set_defaults(run=_verify)
    for action in (sign, verify):
        action.add_argument("folder", type=Path, metavar="RUN", help="a run folder, or a model folder with its card")


def _make(args: argparse.Namespace) -> int:
    from fedveil.console.runs import card_update  # imports torch, which signing and checking do not need

    run = load_run(args.folder)
    final = args.folder / "final"
    if "method" not in run.config or not final.is_dir():
        raise StateError(f"run folder {args.folder}: expected config.json and final/ of a finished run, found none")
    if (final / in_toto.NAME).exists():
        raise StateError(
            f"{final / in_toto.NAME}: expected no signatures, found signatures of the current card; remove "
            "the file, and ask the signers to sign again"
        )
    privacy_card = card_update.rewrite_card(run, _stated(args, final))
    print(final / card.PAGE)
    say(privacy_card.guarantee.says)
    return 0


def _stated(args: argparse.Namespace, final: Path) -> DeclaredFacts:
    """Return the declared facts: those given now, otherwise those of the existing card."""
    before = card.read_card(final).stated if (final / card.NAME).is_file() else DeclaredFacts()
    given = {name: getattr(args, name) for name in ("curator", "use", "why_epsilon", "license")}
    data_sets = before.data_sets | dict(_named(text, "--data-set") for text in args.data_set)
    now = before.model_dump() | {k: v for k, v in given.items() if v is not None} | {"data_sets": data_sets}
    try:
        return DeclaredFacts.model_validate(now)
    except ValueError as error:
        raise ConfigError(f"card: expected short texts, and a license such as apache-2.0, found {error}") from None


def _sign(args: argparse.Namespace) -> int:
    key, folder = keys.read_private_key(args.key), verification.model_folder(args.folder)
    about = card.read_card(folder)
    if (folder / card.PAGE).read_bytes() != markdown.card_page(about).encode():
        raise StateError(
            f"{folder / card.PAGE}: expected the page that this version generates from {card.NAME}, found a different "
            "one, so a signature would cover text that the data doesn't support; run fedveil card make RUN to "
            "rewrite both"
        )
    if args.site:
        _require_own(about, args.site, args.log)
    payload, file = in_toto.make_statement(folder), folder / in_toto.NAME
    others = verification.read_envelope(file) if file.exists() else None
    if others is not None and others.content != payload:
        differ = "; ".join(in_toto.find_differences(in_toto.parse_statement(others.content, str(file)), folder))
        raise StateError(
            f"{file}: expected signatures of the files here, found signatures of other files ({differ}); remove or "
            "re-download it"
        )
    done = dsse.sign_payload(in_toto.PAYLOAD_TYPE, payload, key, others)
    write_atomic(file, done.to_bytes())
    say(f"{file}: signed by {keys.key_fingerprint(key.public_key())}; {len(done.signatures)} signatures in total")
    return 0


def _require_own(about: PrivacyCard, site: str, log: Path | None) -> None:
    """Raise StateError unless the card's anchor for the site comes from that site's own log."""
    if log is None:
        raise ConfigError("--site: expected --log FILE too (the site's own audit log), found none; add it")
    anchor = about.audit_log.sites.get(site, "")
    if not anchor:
        raise StateError(
            f"card: expected an anchor of {sanitize(site, 80)}'s audit log, found none: the server has no upload of "
            "this site; do not sign for it"
        )
    audit_log.verify_log(log, [audit_log.LogHead.parse(anchor)])


def _verify(args: argparse.Namespace) -> int:
    folder = verification.model_folder(args.folder)
    given = [_named(text, "--key") if "=" in text else (Path(text).name, text) for text in args.key]
    known = {
        keys.key_fingerprint(key): (name, key)
        for name, key in ((n, keys.read_public_key(Path(file))) for n, file in given)
    }
    result = verification.verify_model(folder, {print_: key for print_, (_, key) in known.items()})
    if result.wrong:
        raise StateError(
            f"{folder}: expected the signed files unchanged, found {'; '.join(result.wrong)}; do not trust it"
        )
    say(f"{folder}: {result.files} files, all unchanged since they were signed, and no other files")
    for each in result.signed:
        say(f"signed by {sanitize(known[each][0], 80)} ({each})")
    for each in result.unknown:
        say(f"signature by {each}, a key that was not given: NOT checked, so it proves nothing")
    say(f"the card says: {sanitize(card.read_card(folder).guarantee.says, 2000)}")
    return 0


def _named(text: str, what: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise ConfigError(f"{what}: expected NAME=VALUE, found {sanitize(text, 100)!r}; put a name before the =")
    return name, value
