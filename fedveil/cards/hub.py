"""README.md: the card as the Hugging Face Hub reads it, front matter first."""

from __future__ import annotations

from fedveil.cards.card import NAME, PAGE, Card
from fedveil.cards.words import NOT_MEASURED, plain, table
from fedveil.models import named, tiny

_TASKS = {
    "text-generation": "text-generation",
    "image-classification": "image-classification",
    "vision-language": "image-text-to-text",
    "clip-prompt": "zero-shot-image-classification",
}
_LOADERS = {
    "adapter_config.json": ("peft", "PEFT: `PeftModel.from_pretrained(base, folder)`"),
    "config.json": ("transformers", "transformers: `from_pretrained(folder)`"),
    "adapter.json": ("fedveil", "fedveil: `fedveil.adapters.saved.load(folder, model)`"),
}


def page(card: Card, files: set[str]) -> str:
    """The whole file. `files`: the names of those beside it, which say who loads them."""
    from huggingface_hub import ModelCard, ModelCardData

    run = card.run
    is_bundled = run.base == named.bundled(run.task)
    library, how = next((found for name, found in _LOADERS.items() if name in files), ("fedveil", "fedveil"))
    tags = ["fedveil", "federated-learning", f"method:{run.method}"]
    tags += ["differential-privacy"] if card.guarantee.formal else []
    data = ModelCardData(
        library_name=library,
        license=card.stated.license or None,
        base_model=run.base if "/" in run.base and not is_bundled else None,
        pipeline_tag=_TASKS.get(run.task),
        tags=tags,
    )
    scores = [(name, f"{value:.4f}") for name, value in run.scores.items()]
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {plain(run.name)}",
        f"Trained by federated learning with FedVeil: method {plain(run.method)}, base {plain(run.base) or '?'}, "
        f"{run.rounds} rounds. Loaded with {how}.",
        *([_bundled(run.task)] if is_bundled and library != "transformers" else []),
        "## Use",
        plain(card.stated.use) or "Not stated.",
        "## Privacy",
        f"**{plain(card.guarantee.says)}**",
        "Attacks were run on it, beside controls." if card.audited.measured else NOT_MEASURED,
        f"[{PAGE}]({PAGE}) says what each party saw and was trusted with, what the guarantee rests on, and what is not "
        f"protected; {NAME} is the same as data. `fedveil card verify` checks signatures on this folder.",
        "## Scores",
        table(["metric", "last value, on the server's test data"], scores) if scores else "The server scored nothing.",
    ]  # fmt: skip
    return str(ModelCard("\n\n".join(parts) + "\n"))


def _bundled(task: str) -> str:
    """Where the base is that no Hub has."""
    name = plain(named.bundled(task))
    if tiny.folder(task) is None:
        return (
            f"The base {name} is not on the Hub: FedVeil draws it from the seed of the run. `fedveil merge RUN FOLDER` "
            "writes base and changes as one model."
        )
    return (
        f"The base {name} is not on the Hub: it comes with FedVeil, in the folder "
        f'`fedveil.places.folder("assets/tiny-{plain(task)}")`, which `from_pretrained` loads.'
    )
