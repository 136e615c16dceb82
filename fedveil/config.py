"""The run config: `[tool.flwr.app.config]` in pyproject.toml, overridden by `flwr run . -c "..."`.

Flower passes it as a flat mapping ("train.batch-size" = 16), and this module parses it once. It refuses unknown keys;
for a key renamed in 0.2, the error names the new key. These classes define the defaults. pyproject.toml repeats them
because Flower refuses to override a key that has no default; a test keeps the two in sync.
"""

from __future__ import annotations

import csv
import difflib
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedveil.errors import ConfigError
from fedveil.sanitize import sanitize

__all__ = [
    "AggregateConfig",
    "ClientConfig",
    "CohortConfig",
    "DpConfig",
    "EvaluateConfig",
    "MethodConfig",
    "RunConfig",
    "RunSection",
    "SecureConfig",
    "ServerConfig",
    "SinksConfig",
    "TaskConfig",
    "TrainConfig",
    "parse",
]

_MOST_CLASSES = 50_000
_LONGEST_CLASS_NAME = 200
_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_LONGEST_TEMPLATE = 4096
_MOST_GRAY = 1e15  # as gray_values.LARGEST
_MOST_TEMPLATE_COLUMNS = 16
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
RENAMED_KEYS = {  # keys in files that were written before 0.2
    "method.fields": "method.params",
    "task.classes": "task.num-classes",
    "task.max-examples": "task.examples-per-site",
    "train.accumulate": "train.gradient-accumulation-steps",
    "train.schedule": "train.lr-schedule",
    "train.warmup": "train.warmup-ratio",
    "train.max-gradient-norm": "train.max-grad-norm",
    "train.optimiser": "train.optimizer",
    "train.loss-on": "train.loss-mask",
    "train.checkpointing": "train.gradient-checkpointing",
    "train.score-rows": "train.received-loss-examples",
    "dp.clip": "dp.clip-norm",
    "dp.noise": "dp.noise-multiplier",
    "dp.neighbours": "dp.adjacency",
    "evaluate.max-examples": "evaluate.eval-examples",
    "evaluate.beams": "evaluate.num-beams",
    "evaluate.keep": "evaluate.select-model",
    "cohort.repeats": "cohort.max-retries",
    "cohort.max-share": "cohort.max-weight-fraction",
    "cohort.norm-factor": "cohort.max-norm-ratio",
    "aggregate.trim": "aggregate.trim-fraction",
    "aggregate.hostile": "aggregate.num-byzantine",
    "aggregate.best": "aggregate.num-selected",
    "secure.neighbours": "secure.graph-degree",
    "secure.bound": "secure.clip-bound",
    "secure.max-examples": "secure.max-weight",
    "secure.colluding": "secure.max-colluders",
    "run.tap": "run.capture-messages",
}


def config_key(name: str) -> str:
    """Return a field's name as a run config key."""
    return name.replace("_", "-")


def parse_window(text: str) -> tuple[float, float] | None:
    """Return the two gray values in task.image-window; None for "". Raises ValueError for anything else."""
    if not text:
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        low = high = math.nan
    if not -_MOST_GRAY <= low < high <= _MOST_GRAY:  # also NaN
        raise ValueError(f'expected the gray values for black and for white, up to {_MOST_GRAY:g}, such as "-1000,400"')
    return low, high


def parse_class_names(text: str) -> tuple[str, ...]:
    """Return the stripped names in a line of comma-separated values or in a JSON list; () for an empty line.

    Raises:
        ValueError: a name is empty, repeated, too long or unprintable, there are too many, or a quote is not closed.
    """
    if not text.strip():
        return ()
    if not text.isprintable():
        raise ValueError("expected printable names on one line, separated by commas")
    try:
        listed = json.loads(text) if text.lstrip().startswith("[") else None
    except (ValueError, RecursionError):
        listed = None  # a name may also begin with a bracket
    try:
        given = listed if _are_texts(listed) else next(csv.reader([text], skipinitialspace=True, strict=True))
    except csv.Error as error:
        raise ValueError(f"expected names separated by commas ({error})") from None
    names = [str(name).strip() for name in given or []]
    if not names:
        return ()
    if not all(map(str.isprintable, names)):
        raise ValueError("expected printable names")
    if not all(names) or len(set(names)) < len(names):
        raise ValueError("expected names separated by commas, none of them empty or repeated")
    if len(names) > _MOST_CLASSES or max(map(len, names)) > _LONGEST_CLASS_NAME:
        raise ValueError(
            f"expected at most {_MOST_CLASSES:,} names of at most {_LONGEST_CLASS_NAME} characters, found "
            f"{len(names):,}, the longest with {max(map(len, names)):,}"
        )
    return tuple(names)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def parse_source_template(text: str) -> tuple[tuple[str, str], ...]:
    """Return a source template's literal texts, each paired with the column that follows it ("" after the last).

    Raises:
        ValueError: it is too long, has an unmatched brace, or names no column, an empty column or more than 16 columns.
    """
    if len(text) > _LONGEST_TEMPLATE:
        raise ValueError(f"expected at most {_LONGEST_TEMPLATE:,} characters, found {len(text):,}")
    parts, literal, end = list[tuple[str, str]](), "", 0
    for found in _BRACES.finditer(text):
        literal += text[end : found.start()]
        end = found.end()
        if found[0] in ("{{", "}}"):
            literal += found[0][0]
            continue
        if not (column := (found[1] or "").strip()):
            raise ValueError(
                'expected columns in braces, as in "{instruction}\\n\\n{input}", and {{ or }} for a brace, found '
                f'"{found[0]}" at character {found.start() + 1}'
            )
        parts.append((literal, column))
        literal = ""
    if not 0 < (count := len({column for _, column in parts})) <= _MOST_TEMPLATE_COLUMNS:
        raise ValueError(f"expected from 1 to {_MOST_TEMPLATE_COLUMNS} columns in braces, found {count}")
    return (*parts, (literal + text[end:], ""))


class ConfigSection(BaseModel):
    """A section of the run config: unknown keys are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=config_key, populate_by_name=True, allow_inf_nan=False
    )


class SinksConfig(ConfigSection):
    """Additional destinations for each round's metrics during the run. A failing destination does not stop a round."""

    use: str = Field("", max_length=200, description="comma-separated sinks: tensorboard, mlflow, prometheus, wandb")
    mlflow_uri: str = Field(
        "", max_length=500, description="http on loopback, or https; empty = mlflow.db in run.dir. Sites see it"
    )
    prometheus_port: int = Field(
        9464, ge=1024, le=65535, description="port on 127.0.0.1; scrapers need the token in run.dir/prometheus.token"
    )

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the sinks, in the configured order."""
        return tuple(name.strip() for name in self.use.split(",") if name.strip())

    @field_validator("use")
    @classmethod
    def _each_once(cls, text: str) -> str:
        names = [name.strip() for name in text.split(",")]
        if text and (len(set(names)) < len(names) or not all(name.isidentifier() for name in names)):
            raise ValueError("expected unique names separated by commas")
        return text

    @field_validator("mlflow_uri")
    @classmethod
    def _without_secrets(cls, text: str) -> str:
        try:
            parts = urlsplit(text)
            plain = text.isascii() and text.isprintable() and not set(' "\\') & set(text) and parts.port != 0
        except ValueError as error:
            raise ValueError(f"expected an address ({error})") from None
        if text and (not plain or not parts.hostname or parts.query or parts.fragment or "@" in parts.netloc):
            raise ValueError("expected an address without a user, password, query or fragment, because sites see it")
        if text and parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
            raise ValueError(f"expected https, or http on one of {', '.join(_LOOPBACK)}")
        return text


def nearest_key(known: Mapping[str, Sequence[str]], section: str, name: str) -> str:
    """Return the key in `known` (keys by section) that the user probably meant; "" if there is none.

    Keys in the same section come first, if their spelling is close to `name` or their initials are `name`; then a key
    called `name` in another section.
    """
    if section not in known:
        return next(iter(difflib.get_close_matches(section, known, 1)), "")
    short = [key for key in known[section] if "".join(word[0] for word in key.split("-")) == name]
    alike = [*short, *difflib.get_close_matches(name, known[section], 1)]
    others = [f"{other}.{name}" for other, keys in known.items() if name in keys]
    return next(iter([*(f"{section}.{key}" for key in alike), *others]), "")


class MethodConfig(ConfigSection):
    """The federated learning method."""

    name: str = Field("fedrand", description="the method, see `fedveil methods`")
    params: str = Field("", description='method parameters, as TOML: "rho = 0.5"; see `fedveil methods NAME`')


class TaskConfig(ConfigSection):
    """The task: the model, the data and its columns."""

    name: str = Field("text-generation", description="the task: the name of a module in fedveil/tasks/")
    model: str = Field("tiny", description="the base model: tiny (bundled), a local folder, or a Hugging Face id")
    module: str = Field(
        "", pattern=r"^([a-z][a-z0-9_]{0,63})?$", description="own-model: name of the model's file in fedveil/own/"
    )
    buffers: Literal["averaged", "initial"] = Field(
        "averaged",
        description="own-model: average float buffers (BatchNorm) like weights, or keep those that model() returns",
    )
    data: str = Field("", description="folder with the examples, for sites whose node config does not name one")
    data_set: str = Field(
        "",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9_-]{0,63})?$",
        description="name of the data set to use, at sites whose node config names several (data-sets); empty = data",
    )
    evaluation: str = Field("", description="the server's test data; empty = no evaluation on the server")
    server_data: str = Field(
        "", description="examples for server-side training before round 0, for methods that use it (fedsp)"
    )
    source_column: str = Field("mr", description="input column: a text or a question")
    source_template: str = Field(
        "",
        description='text tasks: a source built from several columns, "{title}\\n{abstract}"; empty = source-column',
    )
    messages_column: str = Field(
        "",
        description="text-generation: column with whole conversations in OpenAI or ShareGPT format, instead of "
        "source and target; empty = none",
    )
    target_column: str = Field("ref", description="target column: a text, a class or a caption")
    rejected_column: str = Field("rejected", description="preference: column with the rejected answer")
    image_column: str = Field("image", description="image column: bytes, or paths relative to the file")
    image_window: str = Field(
        "",
        max_length=100,
        description='images: gray values for black and white, as in "-1000,400", for DICOM and gray images with more '
        "than 8 bits; values beyond them are black or white; empty = the window or range that each file declares",
    )
    choices_column: str = Field("", description="vision-language: column with a question's choices; empty = none")
    hint_column: str = Field("", description="vision-language: column with the text before a question; empty = none")
    label_column: str = Field("mr", description="column whose values partition the examples among sites")
    label_pattern: str = Field(
        "", description="regular expression whose only group captures the label; empty = the whole value"
    )
    partition: Literal["iid", "dirichlet", "pathological", "natural"] = Field(
        "iid", description="how sites that share a folder split its examples; unused by sites with their own folder"
    )
    alpha: float = Field(0.5, gt=0, description="partition = dirichlet: smaller values make sites differ more")
    num_classes: int = Field(
        10,
        ge=2,
        description="image-classification: number of classes, for a model without pretrained weights or class-names",
    )
    from_scratch: bool = Field(False, description="image-classification: allow a model folder without weights")
    class_names: str = Field(
        "",
        max_length=1_000_000,
        description="classification: names of all classes, in numerical order, separated by commas, or as a list "
        '["a, b", "c"] for names that contain commas; required if labels are names; empty = labels are integers, or '
        "the model's class names. token-classification: names of the entities, or O and all tags B-X and I-X",
    )
    multi_label: bool = Field(
        False, description="text and image classification: an example has any number of classes, including none"
    )
    label_separator: str = Field(
        "|",
        min_length=1,
        max_length=8,
        description="text-classification: separator between the classes of a text that has several",
    )
    classes_per_site: int = Field(
        2, ge=0, description="pathological: labels per site; 0 = each label goes to exactly one site"
    )
    tag_scheme: Literal["iob2", "iob1", "iobes", "bilou"] = Field(
        "iob2", description="token-classification: the tagging scheme of the data; tags are converted to iob2"
    )
    examples_per_site: int = Field(0, ge=0, description="maximum number of training examples per site; 0 = all")
    max_tokens: int = Field(
        0,
        ge=0,
        description="maximum length of an example in tokens, at least 8; longer ones are truncated and counted; "
        "0 = twice the 99th percentile of the example lengths, within the base's context",
    )
    chat_template: bool = Field(
        False,
        description="text-generation: format each example as a chat message and its answer with the base's chat "
        "template",
    )
    empty_texts: Literal["refuse", "drop"] = Field(
        "refuse",
        description="text-generation: refuse rows whose source or target is null, NaN or empty, or drop and count them",
    )

    @property
    def class_list(self) -> tuple[str, ...]:
        """Return the names in `class_names`, in numerical order."""
        return parse_class_names(self.class_names)

    @property
    def gray_window(self) -> tuple[float, float] | None:
        """Return the gray values for black and white in `image_window`; None if it is empty."""
        return parse_window(self.image_window)

    @field_validator("image_window")
    @classmethod
    def _is_a_window(cls, text: str) -> str:
        parse_window(text)
        return text

    @field_validator("max_tokens")
    @classmethod
    def _long_enough(cls, tokens: int) -> int:
        if 0 < tokens < 8:
            raise ValueError("expected 0, or at least 8")
        return tokens

    @field_validator("source_template")
    @classmethod
    def _is_a_template(cls, text: str) -> str:
        if text:
            parse_source_template(text)
        return text

    @field_validator("class_names", mode="before")
    @classmethod
    def _from_list(cls, value: object) -> object:
        """Return a list, which a TOML file may contain, as JSON text, because Flower's run config has no lists."""
        return json.dumps(value, ensure_ascii=False) if _are_texts(value) else value

    @field_validator("class_names")
    @classmethod
    def _can_be_parsed(cls, text: str) -> str:
        parse_class_names(text)
        return text


class TrainConfig(ConfigSection):
    """Local training. The optimizer starts with empty state in every client round."""

    epochs: int = Field(1, ge=0, description="passes over a site's examples in each client round")
    batch_size: int = Field(16, ge=1, description="examples per training step")
    gradient_accumulation_steps: int = Field(
        1, ge=1, description="batches per optimizer step; together they count as one large batch"
    )
    max_steps: int = Field(
        0, ge=0, description="maximum number of optimizer steps in a client round; 0 = determined by epochs"
    )
    learning_rate: float = Field(3e-4, gt=0, description="learning rate; the peak value with a schedule or warm-up")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="learning-rate schedule over the whole run; see training/lr_schedule.py"
    )
    warmup_ratio: float = Field(
        0.0, ge=0, lt=1, description="fraction of the run over which the learning rate rises from 0"
    )
    weight_decay: float = Field(1e-6, ge=0, description="weight decay for AdamW")
    max_grad_norm: float = Field(0.0, ge=0, description="gradient-norm clipping per step; 0 = off")
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="bf16: train with autocast; a frozen base is stored in bf16"
    )
    quantized_base: Literal["none", "4bit", "8bit"] = Field(
        "none", description="LoRA: quantize the frozen base with bitsandbytes"
    )
    optimizer: Literal["adamw", "adamw-8bit", "paged-adamw-8bit"] = Field(
        "adamw", description="adamw-8bit: a quarter of AdamW's memory (bitsandbytes), slow on CPUs; paged: GPUs only"
    )
    loss_mask: Literal["targets", "all"] = Field(
        "targets",
        description="text-generation: tokens in the training loss; all = source too. Evaluation always uses targets",
    )
    preference_beta: float = Field(
        0.1, gt=0.0, le=100.0, description="preference: DPO beta; larger values keep the model closer to its base"
    )
    packing: bool = Field(
        False, description="text-generation: pack short examples into sequences of up to task.max-tokens"
    )
    bucketing: bool = Field(False, description="batch examples of similar length, which need less padding")
    pad_to_multiple_of: int = Field(
        0,
        ge=0,
        le=1024,
        description="text-generation: pad each batch to a multiple of this length; 0 = 8 on a GPU, else 1",
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations: less memory, more time")
    received_loss_examples: int = Field(
        64, ge=0, description="number of examples, at least 64, on which a site scores the received weights; 0 = none"
    )
    compile: bool = Field(False, description="use torch.compile: the first step is slow; intended for GPUs")

    @field_validator("received_loss_examples")
    @classmethod
    def _not_of_a_few(cls, rows: int) -> int:
        if 0 < rows < 64:
            raise ValueError("expected 0, or at least 64: the mean loss of fewer examples reveals more about each one")
        return rows


def refuse_old_adjacency(value: object) -> object:
    """Return `value`. Raises ValueError for the name that `zero-out` had before 0.2; the error gives the new name."""
    if value == "add-or-remove-one":
        raise ValueError(
            'expected "replace-one" or "zero-out", found "add-or-remove-one", which is now called "zero-out": the '
            "number of examples is public"
        )
    return value


class DpConfig(ConfigSection):
    """Local training with noisy steps (DP-SGD) instead of `train`'s AdamW.

    With all defaults, this section has no effect.

    `unit`, `unit-column`, `unit-rows` and `no-unit` also apply to methods that add their own noise.
    """

    clip_norm: float = Field(0.0, ge=0, description="C: per-example gradient-norm bound; 0 = no noisy steps")
    noise_multiplier: float = Field(
        0.0, ge=0, description="z: each step's sum gets noise of standard deviation z C; see `fedveil privacy plan`"
    )
    learning_rate: float = Field(0.1, gt=0, description="learning rate of the noisy steps, which are plain SGD")
    epsilon: float = Field(0.0, ge=0, description="maximum epsilon charged to a record; 0 = only count the charges")
    delta: float = Field(1e-5, gt=0, lt=1, description="probability that the epsilon bound fails; below 1 / examples")
    adjacency: Literal["replace-one", "zero-out"] = Field(
        "replace-one", description="neighboring data sets: one record is replaced, or contributes nothing to any sum"
    )

    unit: Literal["", "row"] = Field(
        "", description='"row": a guarantee for one row, also at sites with units of several rows, which else refuse it'
    )
    unit_column: str = Field(
        "", description="column with the id of the unit that the guarantee protects, such as a patient; empty = one row"
    )
    unit_rows: int = Field(
        16, ge=1, description="maximum rows of a unit in a step, drawn at random; this does not change epsilon"
    )
    no_unit: Literal["refuse", "one"] = Field(
        "refuse", description="rows without a unit id: refuse them, or treat them all as one unit"
    )

    @field_validator("adjacency", mode="before")
    @classmethod
    def _refuse_old_name(cls, value: object) -> object:
        return refuse_old_adjacency(value)

    @property
    def is_noisy(self) -> bool:
        """Return whether the section asks for noisy steps. The unit keys do not count: they also apply to methods that
        add their own noise."""
        keys = {"unit", "unit_column", "unit_rows", "no_unit"}
        return self.model_dump(exclude=keys) != DpConfig().model_dump(exclude=keys)


class EvaluateConfig(ConfigSection):
    """Scoring on the server's own test data."""

    every: int = Field(1, ge=0, description="rounds between evaluations; 0 = only the last round")
    generate: Literal["never", "last", "always"] = Field(
        "last", description="when to also generate and score texts, which is slow"
    )
    eval_examples: int = Field(
        200,
        ge=1,
        description="maximum number of test examples (for texts: sources) to score, drawn from the whole file",
    )
    max_new_tokens: int = Field(48, ge=1, description="maximum length of a generated text in evaluation")
    num_beams: int = Field(1, ge=1, description="number of beams for generation in evaluation; 1 = greedy")
    select_model: Literal["last", "best"] = Field(
        "last", description="which round's model becomes the result in final/"
    )
    metric: str = Field(
        "loss", description="metric on task.evaluation that selects the best model; each task has its own metrics"
    )
    patience: int = Field(
        0, ge=0, description="stop the run after this many evaluations in a row without improvement; 0 = never"
    )
    min_delta: float = Field(
        0.0, ge=0, description="minimum change in the metric that patience counts as an improvement"
    )
    validation_share: float = Field(
        0.0,
        ge=0,
        le=0.5,
        description="fraction of the examples held out to choose the model if there is no validation split: of "
        "task.evaluation's test examples or, without task.evaluation, of each site's training examples",
    )
    held_out: float = Field(
        0.0,
        ge=0,
        le=0.5,
        description="fraction of its examples that a site holds out to score received weights, if its policy allows it",
    )


class CohortConfig(ConfigSection):
    """The sites that take part in a round. ceil(fraction x sites) sites are drawn without replacement."""

    fraction: float = Field(1.0, gt=0, le=1, description="fraction of the connected sites sampled in each round")
    min_sites: int = Field(2, ge=1, description="quorum: a round with fewer accepted uploads changes nothing")
    sites: int = Field(0, ge=0, description="sites to wait for before round 0; 0 = min-sites")
    wait_seconds: float = Field(120.0, gt=0, description="how long the server waits for enough sites to connect")
    deadline_seconds: float = Field(
        900.0,
        gt=0,
        le=2_592_000,
        description="end a round after this time with the sites that have replied; at most 30 days",
    )
    max_retries: int = Field(2, ge=0, description="how many times to retry a round below the quorum")
    max_weight_fraction: float = Field(
        0.5, ge=0.5, le=1, description="maximum fraction of a round's total weight that one site gets"
    )
    max_norm_ratio: float = Field(
        0.0, ge=0, description="refuse uploads above this multiple of the round's median norm; 0 = off"
    )
    buffer_size: int = Field(
        0, ge=0, le=10_000, description="uploads per server step without waiting for other sites; 0 = rounds (FedBuff)"
    )
    max_staleness: int = Field(
        10, ge=0, le=1000, description="buffer-size: discard uploads trained on a state more server steps old than this"
    )


class AggregateConfig(ConfigSection):
    """The aggregation of a round's uploads.

    `mean` is weighted by the number of examples. The other rules weight all sites equally and hold all uploads of a
    round in memory: `median` and `trimmed` work entry by entry, `multi-krum` drops whole uploads.
    """

    rule: Literal["mean", "median", "trimmed", "multi-krum"] = Field(
        "mean", description="aggregation rule for a round's uploads; all but mean defend against hostile sites"
    )
    trim_fraction: float = Field(0.2, ge=0, lt=0.5, description="trimmed: fraction of the values trimmed at each end")
    num_byzantine: int = Field(
        1, ge=1, le=10_000, description="multi-krum: f, assumed number of Byzantine sites in a round"
    )
    num_selected: int = Field(
        0, ge=0, le=10_000, description="multi-krum: m, number of uploads averaged; 0 = all but f + 2"
    )


class ServerConfig(ConfigSection):
    """The server optimizer, which treats a round's aggregated update as a pseudo-gradient (Reddi et al. 2021)."""

    optimizer: Literal["none", "fedavgm", "fedadam", "fedyogi", "fedadagrad"] = Field(
        "none", description="server optimizer applied to the method's aggregated update; none = the update as it is"
    )
    learning_rate: float = Field(
        0.0, ge=0, le=1e3, description="eta of the server optimizer; 0 = 1 for fedavgm, 0.01 for the others"
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment; the momentum of fedavgm")
    beta2: float = Field(0.99, ge=0, lt=1, description="fedadam, fedyogi: decay of the second moment")
    tau: float = Field(
        1e-3, gt=0, le=1e3, description="adaptive optimizers: added to the square root of the second moment"
    )


class SecureConfig(ConfigSection):
    """Secure aggregation: the server gets the sum of a round's uploads, but no single upload."""

    enabled: bool = Field(False, description="sites mask their uploads, so that the server gets only their sum")
    threshold: int = Field(
        0,
        ge=0,
        le=10_000,
        description="number of sites that must agree to a sum before it is revealed; 0 = more than two thirds",
    )
    min_sites: int = Field(3, ge=2, le=10_000, description="minimum number of sites in a sum")
    ring_bits: Literal[32, 64] = Field(32, description="bits per integer; each weight is sent as one integer")
    graph_degree: int = Field(
        0,
        ge=0,
        le=10_000,
        description="number of sites that each site shares masks with (even); 0 = all, for up to 100 sites",
    )
    clip_bound: float = Field(
        64.0, gt=0, le=1e9, description="bound that sites clip values to; a smaller bound gives more precision"
    )
    whole_cohort: bool = Field(
        False, description="reveal only whole-cohort sums, in a single exchange; one missing upload fails the round"
    )
    roster: str = Field("", description="file on the server with all sites' signing keys (fedveil members roster)")
    max_weight: int = Field(1, ge=1, le=1_000_000, description="maximum weight of one site; 1 = equal weights")
    noise: Literal["site", "sum"] = Field(
        "site", description="where the noise reaches full scale: at each site, or in the sum over min-sites sites"
    )
    max_colluders: int = Field(
        1,
        ge=0,
        le=10_000,
        description="number of sites that may collude with the server; single uploads stay hidden from them, and "
        "epsilon counts only the noise of the other sites",
    )

    @property
    def honest(self) -> int:
        """Return h: the number of sites in the smallest sum whose noise the adversary does not know."""
        return self.min_sites - self.max_colluders

    @field_validator("graph_degree")
    @classmethod
    def _on_both_sides(cls, k: int) -> int:
        if k % 2:
            raise ValueError("expected an even number")
        return k


class ClientConfig(ConfigSection):
    """The process that a site trains in."""

    worker: bool = Field(
        True, description="train in a process that outlives the round; false = a new process for each round"
    )


class RunSection(ConfigSection):
    """The run itself."""

    rounds: int = Field(5, ge=1, description="total number of rounds, including those before a resume")
    seed: int = Field(0, ge=0, description="seed for all random draws that need not be secret")
    deterministic: bool = Field(False, description="derive every draw from the seed: for tests, never for real data")
    dir: str = Field(
        "runs",
        description="parent of the run folders: absolute, or relative to the working directory of the server's "
        "SuperExec (without containers, the federation's folder)",
    )
    # The server appends nine characters; the result is a folder name at every site.
    name: str = Field(
        "",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,54})?$",
        description="name of the run folder; empty = generated",
    )
    capture_messages: bool = Field(
        False, description="store all messages for `fedveil audit`; protect the files like the messages themselves"
    )
    resume: bool = Field(False, description="resume from the checkpoint of the run with that name")
    signature: str = Field("", description="output of `fedveil app sign`, for sites whose policy requires a signer")


class RunConfig(ConfigSection):
    """The whole run config."""

    method: MethodConfig = MethodConfig()
    task: TaskConfig = TaskConfig()
    train: TrainConfig = TrainConfig()
    dp: DpConfig = DpConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    cohort: CohortConfig = CohortConfig()
    aggregate: AggregateConfig = AggregateConfig()
    server: ServerConfig = ServerConfig()
    secure: SecureConfig = SecureConfig()
    client: ClientConfig = ClientConfig()
    sinks: SinksConfig = SinksConfig()
    run: RunSection = RunSection()

    @property
    def held_out_key(self) -> str:
        """Return the key that makes sites hold out training examples; "" if none does."""
        if self.evaluate.held_out:
            return "evaluate.held-out"
        return "evaluate.validation-share" if self.evaluate.validation_share and not self.task.evaluation else ""

    @property
    def held_out_fraction(self) -> float:
        """Return the fraction of its training examples that each site holds out, if its policy allows it."""
        key = self.held_out_key
        return self.evaluate.held_out or (self.evaluate.validation_share if key else 0.0)

    def flat(self) -> dict[str, bool | int | float | str]:
        """Return the config as Flower passes it: {"train.batch-size": 16, ...}."""
        return {
            f"{section}.{key}": value
            for section, values in self.model_dump(by_alias=True).items()
            for key, value in values.items()
        }


def renamed(key: str) -> str:
    """Return the new name of a key, or of a method parameter, that was renamed in 0.2; "" for other keys."""
    for old, new in RENAMED_KEYS.items():
        if key == old or key.startswith(f"{old}."):
            return new + key.removeprefix(old)
    return ""


def parse(flat: Mapping[str, Any]) -> RunConfig:
    """Parse the run config from Flower's flat mapping. Raises ConfigError, naming every invalid key."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        section, _, name = key.partition(".")
        if not name:
            raise ConfigError(
                f'{sanitize(key, 100)}: unknown key; expected "section.name" with a section of '
                f"{list(RunConfig.model_fields)}"
            )
        nested.setdefault(section, {})[name] = value
    try:
        return RunConfig.model_validate(nested)
    except ValidationError as error:
        raise ConfigError("; ".join(_line(e) for e in error.errors())) from None


def _line(error: Any) -> str:
    key = sanitize(".".join(str(part) for part in error["loc"]), 100)
    if error["type"] == "extra_forbidden":
        if new := renamed(key):
            return f"{key}: this key is now called {new}; rename it"
        section, _, name = key.partition(".")
        known = {
            one: [config_key(n) for n in field.annotation.model_fields] if field.annotation else []
            for one, field in RunConfig.model_fields.items()
        }
        here = f"one of {known[section]} in [{section}]" if section in known else f"a section of {list(known)}"
        meant = nearest_key(known, section, name)
        return f"{key}: unknown key; {f'did you mean {meant}? ' if meant else ''}expected {here}"
    said = error["msg"].removeprefix("Value error, ")  # the prefix that pydantic adds to this file's errors
    found = "" if ", found " in said else f", found {sanitize(repr(error['input']), 200)}"
    return f"{key}: {said[0].lower()}{said[1:]}{found}"


def parse_toml(text: str, what: str) -> dict[str, Any]:
    """Parse the TOML text of one config value. Raises ConfigError, naming `what`."""
    try:
        return tomllib.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # also raised for numbers with thousands of digits and for deeply nested brackets
        raise ConfigError(f'{what}: expected TOML such as "rho = 0.5", found {text[:300]!r} ({error})') from None
