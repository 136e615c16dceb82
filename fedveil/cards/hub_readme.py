"""README.md: the card in the Hugging Face Hub's format, with front matter."""

from __future__ import annotations

from fedveil.cards.card import NAME, PAGE, PrivacyCard
from fedveil.cards.markdown import NOT_MEASURED, markdown_table, plain_text
from fedveil.models import bundled, published_name

_TASKS = {
    "text-generation": "text-generation",
    "preference": "text-generation",
    "text-classification": "text-classification",
    "token-classification": "token-classification",
    "image-classification": "image-classification",
    "vision-language": "image-text-to-text",
    "clip-prompt": "zero-shot-image-classification",
}
_LOADERS = {
    "adapter_config.json": ("peft", "PEFT: `PeftModel.from_pretrained(base, folder)`"),
    "config.json": ("transformers", "transformers: `from_pretrained(folder)`"),
    "adapter.json": ("fedveil", "fedveil: `fedveil.adapters.load.load_adapter(folder, model)`"),
}


def hub_page(card: PrivacyCard, files: set[str]) -> str:
    """Return the complete README.md. `files`: names of the folder's other files, which show which library loads it."""
    from huggingface_hub import ModelCard, ModelCardData

    run = card.run
    is_bundled = run.base == published_name.bundled_name(run.task)
    library, how = next((loader for name, loader in _LOADERS.items() if name in files), ("fedveil", "fedveil"))
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
        f"# {plain_text(run.name)}",
        f"Trained by federated learning with FedVeil: method {plain_text(run.method)}, "
        f"base {plain_text(run.base) or '?'}, "
        f"{run.rounds} rounds. Loaded with {how}.",
        *([_bundled(run.task)] if is_bundled and library != "transformers" else []),
        "## Use",
        plain_text(card.stated.use) or "Not stated.",
        "## Privacy",
        f"**{plain_text(card.guarantee.says)}**",
        "The run was attacked, with controls." if card.audited.measured else NOT_MEASURED,
        f"[{PAGE}]({PAGE}) states what each party saw and was trusted with, what the guarantee relies on, and what "
        f"is not protected; {NAME} has the same content as data. `fedveil card verify` checks signatures on this "
        "folder.",
        "## Scores",
        markdown_table(["metric", "last value, on the server's test data"], scores)
        if scores
        else "The server computed no scores.",
    ]  # fmt: skip
    return str(ModelCard("\n\n".join(parts) + "\n"))


def _bundled(task: str) -> str:
    """Return a sentence that says where to get a bundled base, which is not on the Hub."""
    name = plain_text(published_name.bundled_name(task))
    if bundled.bundled_folder(task) is None:
        return (
            f"The base {name} is not on the Hub: FedVeil initializes it from the run's seed. `fedveil merge RUN "
            "FOLDER` writes the base and its changes as one model."
        )
    return (
        f"The base {name} is not on the Hub: it is part of FedVeil, in the folder "
        f'`fedveil.paths.find_folder("assets/{name.removeprefix("fedveil/")}")`, which `from_pretrained` loads.'
    )
