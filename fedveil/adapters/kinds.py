"""The kinds of adapters that method.fields may name.

| adapter | trained tensors, by name |
|---|---|
| `Lora` | `<module>.lora_A` (r x d_in), `<module>.lora_B` (d_out x r) for every chosen linear layer |
| `HadamardLora` | the same two, and `<module>.private_A`, `<module>.private_B` of the same shapes |
| `ResidualLora` | those of `Lora`, and `<module>.residual` (d_out x d_in), which no training moves |
| `AllWeights` | every parameter of the base, under its own name; tied parameters once |
| `Prompt` | `prompt` (length x width), context vectors of a frozen CLIP; a second part by its form |
| `Prefix` | `prefix` (layers x 2 x heads x length x width), keys and values before every layer; with `cells` the shared
  layers too |
"""

from fedveil.adapters.all_weights import AllWeights
from fedveil.adapters.hadamard import HadamardLora
from fedveil.adapters.lora import Lora
from fedveil.adapters.prefix import Prefix
from fedveil.adapters.prompt import Prompt

AnyAdapter = Lora | HadamardLora | AllWeights | Prompt | Prefix  # of a method that takes any of them
