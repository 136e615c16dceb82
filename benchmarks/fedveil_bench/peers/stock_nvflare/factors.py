"""The server's model: only the LoRA factors, under PEFT's names."""

import torch
from safetensors.torch import load_file


class Factors(torch.nn.Module):
    """A module whose state dict is the content of `file`; the server needs no base model to average factors."""

    def __init__(self, file: str) -> None:
        super().__init__()
        for name, tensor in load_file(file).items():
            *path, last = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, torch.nn.Parameter(tensor))
