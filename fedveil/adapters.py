"""What a task attaches to the frozen base and trains. Data only: the tensors live in the task.

| adapter | trained tensors, by name |
|---|---|
| `Lora` | `<module>.lora_A` (r x d_in), `<module>.lora_B` (d_out x r) for every chosen linear layer |
| `HadamardLora` | the same two, and `<module>.private_A`, `<module>.private_B` of the same shapes |
| `AllWeights` | every parameter of the base, under its own name; tied parameters once |
| `Prompt` | `prompt` (length x width), context vectors of a frozen CLIP; a second part by its form |
| `Prefix` | `prefix` (layers x 2 x heads x length x width), keys and values before every layer; with `cells` the shared layers too |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

from fedveil.columns import Place
from fedveil.errors import ConfigError


@dataclass(frozen=True)
class _Pairs:
    """What every adapter of low-rank pairs has. Abstract: no `kind`."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    rank: int = 8
    alpha: float | None = None
    targets: str = "all-linear"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"adapter.rank: expected an integer of at least 1, found {self.rank}")
        if self.alpha is not None and not self.alpha > 0:
            raise ConfigError(f"adapter.alpha: expected a number above 0, found {self.alpha}")

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def _example_shapes(self, pairs: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
        """Three layers of unequal widths, so that a method which shares the top two keeps one to itself."""
        widths = {"h.0.attn": (5, 7), "h.1.mlp": (7, 3), "h.2.mlp": (3, 4)}
        return {
            f"{module}.{pair}_{side}": (self.rank, d_in) if side == "A" else (d_out, self.rank)
            for module, (d_in, d_out) in widths.items()
            for pair in pairs
            for side in "AB"
        }


@final
@dataclass(frozen=True)
class Lora(_Pairs):
    """Low-rank pairs: W = W_0 + scale * B A, with scale = alpha / rank (Hu et al. 2021).

    Attributes:
        rank: r, the inner width of each pair.
        alpha: the numerator of the scale; None means `rank`, so that W = W_0 + B A.
        targets: "all-linear" (every linear layer of the blocks, the output head left out), or a
            regular expression over module names.
    """

    kind: Literal["lora"] = "lora"

    def example_shapes(self) -> dict[str, tuple[int, ...]]:
        """Layers of a small model: for wire tables and for tests over every method."""
        return self._example_shapes(("lora",))


@final
@dataclass(frozen=True)
class HadamardLora(_Pairs):
    """Two low-rank pairs a layer, multiplied entry by entry (Hyeon-Woo et al. 2022): W = W_0 + scale * (B A) o M.

    | form | M | initial values |
    |---|---|---|
    | "plus-one" | B_p A_p + 1 | B and B_p zero |
    | "product" | B_p A_p | B zero, B_p from N(0, 1/r); with B_p zero too no gradient would ever differ from zero |

    A and A_p are random in both. The change of W has rank up to r^2, so a forward pass forms it whole.

    Attributes:
        rank: r, the inner width of each pair.
        alpha: the numerator of the scale; None means `rank`, which gives scale 1.
        targets: as for `Lora`.
        form: what the private pair is made into.
    """

    kind: Literal["hadamard-lora"] = "hadamard-lora"
    form: Literal["plus-one", "product"] = "plus-one"

    @property
    def private_b_std(self) -> float:
        """Standard deviation of B_p's initial entries."""
        return 0.0 if self.form == "plus-one" else self.rank**-0.5

    def example_shapes(self) -> dict[str, tuple[int, ...]]:
        """Layers of a small model: for wire tables and for tests over every method."""
        return self._example_shapes(("lora", "private"))


@dataclass(frozen=True)
class AllWeights:
    """Every parameter of the base model is trained and exchanged."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    kind: Literal["all"] = "all"

    def example_shapes(self) -> dict[str, tuple[int, ...]]:
        """Four tensors of a small model: for wire tables and for tests over every method."""
        return {"wte.weight": (11, 4), "position_embeddings": (6, 4), "h.0.mlp.weight": (4, 4), "h.0.mlp.bias": (4,)}

    def example_places(self) -> dict[str, Place]:
        """The places of those that have one."""
        mlp = Place("linear", "h.0.mlp", 1, closes=True), Place("linear", "h.0.mlp", 0, closes=True)
        return {"wte.weight": Place("embedding", "wte", 1), "h.0.mlp.weight": mlp[0], "h.0.mlp.bias": mlp[1]}


@final
@dataclass(frozen=True)
class Prompt:
    """Context vectors before the class names of a frozen CLIP, in the space of its token embeddings (Zhou et al. 2022).

    b = length, d = the width of the token embeddings, k = rank. All tensors start from N(0, std^2).

    | form | further tensors | the text of a class has the context |
    |---|---|---|
    | "one" | | prompt |
    | "sum" | `prompt.local` (b x d) | prompt + prompt.local |
    | "factored" | `prompt.u` (b x k), `prompt.v` (k x d) | prompt + prompt.u prompt.v |
    | "transport" | `prompt.local` (b x d) | both, two texts; an image's patches are transported to them |

    Attributes:
        length: b, context vectors.
        form: see above.
        rank: k, of the form "factored".
        std: of the initial entries.
        mass: of the form "transport": gamma, the part of an image's patches that is transported.
        contrast: of the form "factored": mu, weight of the contrastive term in the loss; 0 = none.
        temperature: of the contrastive term.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    length: int = 16
    form: Literal["one", "sum", "factored", "transport"] = "one"
    rank: int = 4
    std: float = 0.02
    mass: float = 0.8
    contrast: float = 0.0
    temperature: float = 0.5
    kind: Literal["prompt"] = "prompt"

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(f"adapter.length: expected an integer of at least 1, found {self.length}")
        if self.form == "factored" and not 1 <= self.rank <= self.length:
            raise ConfigError(
                f"adapter.rank: expected 1 to {self.length}, the prompt's length, found {self.rank}; lower it, or raise "
                "adapter.length"
            )
        if not 0.0 < self.mass <= 1.0:
            raise ConfigError(f"adapter.mass: expected a part above 0 and at most 1, found {self.mass}")
        for name, value, least in (
            ("std", self.std, "at least 0"),
            ("contrast", self.contrast, "at least 0"),
            ("temperature", self.temperature, "above 0"),
        ):
            if not (0.0 <= value < math.inf) or (least == "above 0" and value == 0.0):
                raise ConfigError(f"adapter.{name}: expected a finite number {least}, found {value}")
        if self.contrast > 0 and self.form != "factored":
            raise ConfigError(f'adapter.contrast: expected 0 with form = "{self.form}", found {self.contrast}')

    def shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """The tensors' shapes for token embeddings of that width."""
        whole = (self.length, width)
        match self.form:
            case "one":
                return {"prompt": whole}
            case "factored":
                return {"prompt": whole, "prompt.u": (self.length, self.rank), "prompt.v": (self.rank, width)}
            case _:
                return {"prompt": whole, "prompt.local": whole}

    def example_shapes(self) -> dict[str, tuple[int, ...]]:
        """Prompts of a small model: for wire tables and for tests over every method."""
        return self.shapes(width=12)


@final
@dataclass(frozen=True)
class Prefix:
    """Keys and values before every layer of a causal language model (Li, Liang 2021), of the model or of a proxy of it.

    Attributes:
        length: tokens' worth of keys and values.
        cells: 0: the model's own layers, frozen; above: so many of its first layers, repeated to the model's depth. Then all
            that the proxy consists of is trained and exchanged beside the prefix: cells, embeddings, norms, head.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    length: int = 40
    cells: int = 0
    kind: Literal["prefix"] = "prefix"

    def __post_init__(self) -> None:
        for name, least in (("length", 1), ("cells", 0)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"adapter.{name}: expected an integer of at least {least}, found {getattr(self, name)}"
                )

    def example_shapes(self) -> dict[str, tuple[int, ...]]:
        """A small model of two layers: for wire tables and for tests over every method."""
        proxy = {"wte.weight": (11, 6), "h.0.mlp.weight": (6, 6)} if self.cells else {}
        return {"prefix": (2, 2, 1, self.length, 6), **proxy}


Adapter = Lora | HadamardLora | AllWeights | Prompt | Prefix


def trains_base(adapter: Adapter) -> bool:
    """Whether tensors of the base itself are trained, not only what is attached to it."""
    return isinstance(adapter, AllWeights) or (isinstance(adapter, Prefix) and adapter.cells > 0)
