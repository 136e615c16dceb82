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

from fedveil.adapters.all_weights import AllWeights
from fedveil.adapters.hadamard import HadamardLora
from fedveil.adapters.lora import Lora
from fedveil.adapters.prefix import Prefix
from fedveil.adapters.prompt import Prompt
from fedveil.contract.spec import Spec, TensorSpec

Adapter = Lora | HadamardLora | AllWeights | Prompt | Prefix


def trains_base(adapter: Adapter) -> bool:
    """Whether tensors of the base itself are trained, not only what is attached to it."""
    return isinstance(adapter, AllWeights) or (isinstance(adapter, Prefix) and adapter.cells > 0)


def example_spec(adapter: Adapter) -> Spec:
    """What `adapter` trains in a small model: for wire tables and for tests over every method."""
    places = adapter.example_places() if isinstance(adapter, AllWeights) else {}
    return {name: TensorSpec(shape, place=places.get(name)) for name, shape in adapter.example_shapes().items()}
