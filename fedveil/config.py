"""The run config: `[tool.flwr.app.config]` of pyproject.toml, overridden by `flwr run . -c "..."`.

Flower hands it over flat ("train.batch-size" = 16), and this module parses it once. Unknown keys are refused, and keys
that had another name before 0.2 with the new name. The defaults stand in these classes. pyproject.toml repeats them
because Flower refuses an override of a key without a default; a test keeps the two equal.
"""

from __future__ import annotations

import difflib
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
    "SinksConfig",
    "TaskConfig",
    "TrainConfig",
    "parse",
]

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
RENAMED_KEYS = {  # as files of before 0.2 have them
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
    """A field's name as a key of the run config."""
    return name.replace("_", "-")


class ConfigSection(BaseModel):
    """A section of the run config: unknown keys are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=config_key, populate_by_name=True, allow_inf_nan=False
    )


class SinksConfig(ConfigSection):
    """Where else the server writes a round's figures while the run goes on. None of them can stop a round."""

    use: str = Field(
        "", max_length=200, description="tensorboard, mlflow, prometheus: those of them that are named, with commas"
    )
    mlflow_uri: str = Field(
        "", max_length=500, description="http on loopback, or https; empty = mlflow.db in run.dir. Sites see this key"
    )
    prometheus_port: int = Field(
        9464, ge=1024, le=65535, description="on 127.0.0.1; a scrape needs the token in run.dir/prometheus.token"
    )

    @property
    def names(self) -> tuple[str, ...]:
        """The sinks, in the order in which they are named."""
        return tuple(name.strip() for name in self.use.split(",") if name.strip())

    @field_validator("use")
    @classmethod
    def _each_once(cls, text: str) -> str:
        names = [name.strip() for name in text.split(",")]
        if text and (len(set(names)) < len(names) or not all(name.isidentifier() for name in names)):
            raise ValueError("expected names with commas between them, each once")
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
            raise ValueError("expected an address without user, password, query and fragment, for sites see it")
        if text and parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
            raise ValueError(f"expected https, or http on one of {', '.join(_LOOPBACK)}")
        return text


def nearest_key(known: Mapping[str, Sequence[str]], section: str, name: str) -> str:
    """The key of `known`, by section, that was probably meant; "" for none.

    One of the section that is spelled alike or has `name` for its initials; else one of another section that is `name`.
    """
    if section not in known:
        return next(iter(difflib.get_close_matches(section, known, 1)), "")
    short = [key for key in known[section] if "".join(word[0] for word in key.split("-")) == name]
    alike = [*short, *difflib.get_close_matches(name, known[section], 1)]
    others = [f"{other}.{name}" for other, keys in known.items() if name in keys]
    return next(iter([*(f"{section}.{key}" for key in alike), *others]), "")


class MethodConfig(ConfigSection):
    """Who shares what with whom: the method."""

    name: str = Field("fedrand", description="the method: a file of strategies/, see `fedveil methods`")
    params: str = Field("", description='its fields, as TOML text: "rho = 0.5"; see `fedveil methods NAME`')


class TaskConfig(ConfigSection):
    """What is learned, and on which data."""

    name: str = Field("text-generation", description="what is learned: the name of a file of fedveil/tasks/")
    model: str = Field("tiny", description="the base: tiny (bundled), a local folder, or a Hugging Face id")
    data: str = Field("", description="folder of the rows, at sites whose node config names none of their own")
    evaluation: str = Field("", description="the server's own test data; empty = the server scores nothing")
    server_data: str = Field(
        "", description="rows that the server trains on before round 0, for methods that do (fedsp)"
    )
    source_column: str = Field("mr", description="column of the rows that holds what is given: a text, a question")
    target_column: str = Field("ref", description="column of what is to be said: a text, a class, a caption")
    image_column: str = Field("image", description="column of the pictures: bytes, or paths beside the file")
    choices_column: str = Field("", description="vision-language: choices of a question; empty = captions")
    hint_column: str = Field("", description="vision-language: what stands before a question; empty = nothing")
    label_column: str = Field("mr", description="column by whose values rows are dealt out to sites")
    label_pattern: str = Field(
        "", description="regular expression with one group, which is the label; empty = the whole column"
    )
    partition: Literal["iid", "dirichlet", "pathological", "natural"] = Field(
        "iid", description="how sites that share a folder share its rows; no part in sites with folders of their own"
    )
    alpha: float = Field(0.5, gt=0, description="of partition = dirichlet: the smaller, the more sites differ")
    num_classes: int = Field(
        10, ge=2, description="image-classification: classes of a model that starts without weights"
    )
    from_scratch: bool = Field(False, description="image-classification: a model folder may be without weights")
    class_names: str = Field("", description="clip-prompt: all names, split by commas; empty = those of the data")
    classes_per_site: int = Field(2, ge=0, description="pathological: labels a site; 0 = each label has one site")
    examples_per_site: int = Field(0, ge=0, description="a site trains on at most so many of its rows; 0 = on all")
    max_tokens: int = Field(96, ge=8, description="longest sequence, source and target together; what is longer is cut")
    chat_template: bool = Field(
        False,
        description="text-generation: a row is a message and its answer, in the words of the base's chat template",
    )


class TrainConfig(ConfigSection):
    """Local training. The optimiser starts anew at every participation."""

    epochs: int = Field(1, ge=0, description="passes over a site's rows each time it takes part")
    batch_size: int = Field(16, ge=1, description="rows that one step of a site is computed on")
    gradient_accumulation_steps: int = Field(
        1, ge=1, description="batches in an optimiser step, which count as one large batch"
    )
    max_steps: int = Field(0, ge=0, description="most optimiser steps in a participation; 0 = the epochs decide")
    learning_rate: float = Field(3e-4, gt=0, description="the highest one, where there is a schedule or a warm-up")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="of the learning rate over the whole run; see training/lr_schedule.py"
    )
    warmup_ratio: float = Field(0.0, ge=0, lt=1, description="part of the run in which the learning rate rises from 0")
    weight_decay: float = Field(1e-6, ge=0, description="how strongly AdamW pulls weights to zero")
    max_grad_norm: float = Field(0.0, ge=0, description="a step's gradient is scaled down to it; 0 = off")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="bf16: autocast, and a frozen base kept in it")
    quantized_base: Literal["none", "4bit", "8bit"] = Field(
        "none", description="a frozen base in bitsandbytes' formats, under LoRA"
    )
    optimizer: Literal["adamw", "adamw-8bit", "paged-adamw-8bit"] = Field(
        "adamw", description="adamw-8bit: a quarter of AdamW's memory (bitsandbytes), slow on a CPU; paged: GPUs only"
    )
    loss_mask: Literal["targets", "all"] = Field(
        "targets", description="text-generation: tokens that steps learn; all = the source's too. Scores: targets"
    )
    packing: bool = Field(False, description="text-generation: short rows share a sequence of up to task.max-tokens")
    bucketing: bool = Field(False, description="batches of rows of similar length, which need less padding")
    pad_to_multiple_of: int = Field(
        0, ge=0, le=1024, description="text-generation: a batch's length is rounded up to it; 0 = 8 on a GPU, else 1"
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations: less memory, more time")
    received_loss_examples: int = Field(
        64, ge=0, description="rows, at least 64, on which a site scores the received weights; 0 = none"
    )
    compile: bool = Field(False, description="torch.compile of the model: a long first step, meant for a GPU")

    @field_validator("received_loss_examples")
    @classmethod
    def _not_of_a_few(cls, rows: int) -> int:
        if 0 < rows < 64:
            raise ValueError("expected 0, or at least 64: the mean loss of fewer rows tells more of each")
        return rows


class DpConfig(ConfigSection):
    """Local training by noisy steps (DP-SGD) instead of `train`'s AdamW. With all defaults, training is plain."""

    clip_norm: float = Field(0.0, ge=0, description="C: bound on the norm of one row's gradient; 0 = no noisy steps")
    noise_multiplier: float = Field(
        0.0, ge=0, description="z: noise of z C on a step's sum; see `fedveil privacy plan`"
    )
    learning_rate: float = Field(0.1, gt=0, description="step size of the noisy steps, which are plain SGD")
    epsilon: float = Field(0.0, ge=0, description="most that a record may be charged; 0 = charges are only counted")
    delta: float = Field(1e-5, gt=0, lt=1, description="chance that epsilon bounds nothing; below 1 / rows")
    adjacency: Literal["replace-one", "add-or-remove-one"] = Field(
        "replace-one", description="the data sets that epsilon cannot tell apart: one row is another one, or is missing"
    )


class EvaluateConfig(ConfigSection):
    """Scoring on the server's own test data."""

    every: int = Field(1, ge=0, description="rounds from one evaluation to the next; 0 = the last round only")
    generate: Literal["never", "last", "always"] = Field(
        "last", description="when texts are generated and scored as well; it is slow"
    )
    eval_examples: int = Field(200, ge=1, description="the most test rows to score; of texts, distinct sources")
    max_new_tokens: int = Field(48, ge=1, description="longest text that the model writes when it is scored")
    num_beams: int = Field(1, ge=1, description="how many beams a scored text is searched with; 1 = greedy")
    select_model: Literal["last", "best"] = Field(
        "last", description="which round's model the run ends with, and final/ holds"
    )
    metric: str = Field("loss", description="score on task.evaluation that says which is best; each task names its own")
    patience: int = Field(
        0, ge=0, description="evaluations in a row without improvement after which the run stops; 0 = never"
    )
    min_delta: float = Field(0.0, ge=0, description="the least change of the metric that patience takes for one")
    held_out: float = Field(
        0.0,
        ge=0,
        le=0.5,
        description="part of a site's rows on which it scores received weights, if its policy permits",
    )


class CohortConfig(ConfigSection):
    """Who takes part in a round. ceil(fraction x sites) sites are drawn without replacement."""

    fraction: float = Field(1.0, gt=0, le=1, description="share of the connected sites that is drawn in each round")
    min_sites: int = Field(2, ge=1, description="quorum: a round with fewer accepted uploads changes nothing")
    sites: int = Field(0, ge=0, description="sites to wait for before round 0; 0 = min-sites")
    wait_seconds: float = Field(120.0, gt=0, description="how long the server waits for enough sites to connect")
    deadline_seconds: float = Field(
        900.0, gt=0, le=2_592_000, description="a round ends then, with the sites that have answered; 30 days at most"
    )
    max_retries: int = Field(2, ge=0, description="how often a round below the quorum is repeated")
    max_weight_fraction: float = Field(
        0.5, ge=0.5, le=1, description="most of a round's examples that one site counts for"
    )
    max_norm_ratio: float = Field(
        0.0, ge=0, description="uploads above this many times the round's median norm are refused; 0 = off"
    )


class AggregateConfig(ConfigSection):
    """What is made of a round's uploads.

    `mean` is weighted with the examples. The others count every site alike and hold all uploads of a round in memory:
    `median` and `trimmed` work entry by entry, `multi-krum` leaves whole uploads out.
    """

    rule: Literal["mean", "median", "trimmed", "multi-krum"] = Field(
        "mean", description="of a round's uploads; all but mean are against hostile sites"
    )
    trim_fraction: float = Field(0.2, ge=0, lt=0.5, description="trimmed: share of the values left out at each end")
    num_byzantine: int = Field(1, ge=1, le=10_000, description="multi-krum: f, sites of a round that may send anything")
    num_selected: int = Field(0, ge=0, le=10_000, description="multi-krum: m, uploads averaged; 0 = all but f + 2")


class SecureConfig(ConfigSection):
    """Secure aggregation: a server that keeps to the protocol gets the sum of a round's uploads."""

    enabled: bool = Field(False, description="a server that keeps to the protocol gets only sums of uploads")
    threshold: int = Field(0, ge=0, le=10_000, description="holders that open a secret; 0 = more than two thirds")
    min_sites: int = Field(3, ge=2, le=10_000, description="a sum is opened only with at least so many sites in it")
    ring_bits: Literal[32, 64] = Field(32, description="of each integer that is sent in place of a weight")
    graph_degree: int = Field(
        0, ge=0, le=10_000, description="sites, an even number, with which one shares masks; 0 = all, above 32 sites 32"
    )
    clip_bound: float = Field(
        64.0, gt=0, le=1e9, description="values are clipped to it at the site; smaller is more exact"
    )
    roster: str = Field("", description="file at the server: all sites' signing keys (fedveil members roster)")
    max_weight: int = Field(
        1, ge=1, le=1_000_000, description="most that one site counts for; 1 = all count alike, whatever they have"
    )
    noise: Literal["site", "sum"] = Field(
        "site", description="where the noise of an epsilon is whole: at each site, or in the sum of min-sites of them"
    )
    max_colluders: int = Field(
        1, ge=0, le=10_000, description="sum: sites that may tell the server their noise; an epsilon counts the others"
    )

    @property
    def honest(self) -> int:
        """h: sites of the smallest sum whose noise nobody knows."""
        return self.min_sites - self.max_colluders

    @property
    def feared(self) -> int:
        """Holders beside a server that lies who must open no secret, for an epsilon counts on it."""
        return self.max_colluders if self.noise == "sum" else 0

    @field_validator("graph_degree")
    @classmethod
    def _on_both_sides(cls, k: int) -> int:
        if k % 2:
            raise ValueError("expected an even number")
        return k


class ClientConfig(ConfigSection):
    """In which process a site trains."""

    worker: bool = Field(True, description="training in a process that outlives the round; false = in each round's own")


class RunSection(ConfigSection):
    """The run itself."""

    rounds: int = Field(5, ge=1, description="of the whole run, those before a resume among them")
    seed: int = Field(0, ge=0, description="from which every draw follows that need not be secret")
    deterministic: bool = Field(False, description="every draw follows from the seed: for tests, never for real data")
    dir: str = Field("runs", description="folder of run folders: absolute, or below where the SuperLink runs")
    # With the nine characters that the server adds it is the name of a folder at every site.
    name: str = Field(
        "",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,54})?$",
        description="the run folder's name; empty = one is made up",
    )
    capture_messages: bool = Field(
        False, description="keep all messages as they crossed the wire, for `fedveil audit`; as secret as they"
    )
    resume: bool = Field(False, description="go on from the checkpoint of the run of that name")
    signature: str = Field("", description="of `fedveil app sign`, for sites whose policy asks for a signer")


class RunConfig(ConfigSection):
    """The whole run config."""

    method: MethodConfig = MethodConfig()
    task: TaskConfig = TaskConfig()
    train: TrainConfig = TrainConfig()
    dp: DpConfig = DpConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    cohort: CohortConfig = CohortConfig()
    aggregate: AggregateConfig = AggregateConfig()
    secure: SecureConfig = SecureConfig()
    client: ClientConfig = ClientConfig()
    sinks: SinksConfig = SinksConfig()
    run: RunSection = RunSection()

    def flat(self) -> dict[str, bool | int | float | str]:
        """The config as Flower carries it: {"train.batch-size": 16, ...}."""
        return {
            f"{section}.{key}": value
            for section, values in self.model_dump(by_alias=True).items()
            for key, value in values.items()
        }


def renamed(key: str) -> str:
    """The name that a key had another one for before 0.2, or a field of the method below it; "" for other keys."""
    for old, new in RENAMED_KEYS.items():
        if key == old or key.startswith(f"{old}."):
            return new + key.removeprefix(old)
    return ""


def parse(flat: Mapping[str, Any]) -> RunConfig:
    """The run config from Flower's flat mapping. Raises ConfigError, which names every bad key."""
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
            return f"{key}: expected the name that this key has now, {new}, found its old one; rename it"
        section, _, name = key.partition(".")
        known = {
            one: [config_key(n) for n in field.annotation.model_fields] if field.annotation else []
            for one, field in RunConfig.model_fields.items()
        }
        here = f"one of {known[section]} in [{section}]" if section in known else f"a section of {list(known)}"
        meant = nearest_key(known, section, name)
        return f"{key}: unknown key; expected {here}{f'; did you mean {meant}?' if meant else ''}"
    return f"{key}: {error['msg'][0].lower()}{error['msg'][1:]}, found {sanitize(repr(error['input']), 200)}"


def parse_toml(text: str, what: str) -> dict[str, Any]:
    """TOML text of one config value. Raises ConfigError naming `what`."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and brackets in brackets
        raise ConfigError(f'{what}: expected TOML such as "rho = 0.5", found {text[:300]!r} ({error})') from None
