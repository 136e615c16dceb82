"""`fedveil generate`: answers prompts or describes images with a run's model.

It uses the server's final model, from RUN/final. A prompt has the form of an input in the run's examples; anything
beyond task.max-tokens is cut off. Decoding is greedy or uses evaluate.num-beams, as in the run's own evaluation.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedveil.console.runs.run_reader import config_of
from fedveil.errors import ConfigError
from fedveil.sanitize import sanitize

_IMAGE_BYTES = 1 << 26
_CHARACTERS = 20_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder: <run.dir>/<run.name>")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="prompt to answer; repeatable")
    parser.add_argument(
        "--image", action="append", default=[], type=Path, metavar="FILE", help="input image; repeatable"
    )
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="default: the run's setting")
    parser.add_argument(
        "--base", default="", metavar="MODEL", help="path of the base model on this machine (default: task.model)"
    )
    parser.add_argument("--device", default="auto", help='"auto", "cpu" or "cuda" (default: auto)')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one line per prompt or image; if there are several, each line begins with the prompt or image name."""
    config_of(args.folder)  # before importing torch, so that a missing run is reported at once
    from fedveil.console.runs import final_model
    from fedveil.contract.task import CanGenerate

    images = [(str(file), _read(file)) for file in args.image]
    changed = {} if args.max_new_tokens is None else {"max_new_tokens": args.max_new_tokens}
    model = final_model.load_final_model(args.folder, args.base, **changed)
    task, weights = model.task(args.device)
    if not isinstance(task, CanGenerate):
        raise ConfigError(
            f'RUN: expected a run of a task that generates text, found "{sanitize(model.config.task.name, 80)}"; use '
            "fedveil evaluate"
        )
    texts = task.write(weights, args.prompt, images)
    asked = [name for name, _ in images] or args.prompt
    for what, text in zip(asked, texts, strict=True):
        print(f"{sanitize(what)}: {sanitize(text, _CHARACTERS)}" if len(asked) > 1 else sanitize(text, _CHARACTERS))
    return 0


def _read(file: Path) -> bytes:
    with file.open("rb") as data:
        content = data.read(_IMAGE_BYTES + 1)
    if len(content) > _IMAGE_BYTES:
        raise ConfigError(
            f"--image: expected a file of at most {_IMAGE_BYTES} bytes, found a larger one: {file}; shrink it"
        )
    return content
