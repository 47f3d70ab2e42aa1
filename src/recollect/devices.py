"""Which device computes: the one place that asks torch what is there."""

import re

import torch

from recollect.errors import RecollectError


def find_device(name: str) -> str:
    """cpu, cuda or cuda:N; "auto" is cuda where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise RecollectError(f"unknown device '{name}': give cpu, cuda, cuda:1, ... or auto")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise RecollectError(f"device is '{name}', but torch sees no CUDA device here: give --device cpu")
    return name


def device_name(device: str) -> str:
    """For the record: the GPU's own name, or cpu."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
