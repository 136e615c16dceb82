"""The kinds of adapters that method.params can select.

| adapter | trained tensors, by name |
|---|---|
| `LoraAdapter` | `<module>.lora_A` (r x d_in), `<module>.lora_B` (d_out x r) for every chosen linear layer |
| `HadamardLoraAdapter` | these two, and `<module>.private_A`, `<module>.private_B` of the same shapes |
| `ResidualLoraAdapter` | these two, and `<module>.residual` (d_out x d_in), which training does not change |
| `AllWeightsAdapter` | every parameter of the base, under its own name; tied parameters appear once |
| `PromptAdapter` | `prompt` (length x width), context vectors of a frozen CLIP model; other tensors vary by form |
| `PrefixAdapter` | `prefix` (layers x 2 x heads x length x width), keys and values before every layer; with `cells`,
  also the shared layers |
"""

from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.adapters.hadamard import HadamardLoraAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.adapters.prefix import PrefixAdapter
from fedveil.adapters.prompt import PromptAdapter

AnyAdapter = (
    LoraAdapter | HadamardLoraAdapter | AllWeightsAdapter | PromptAdapter | PrefixAdapter
)  # for a method that accepts any of them
