"""To be imported before Avalanche: lets torchvision's wheel from PyPI, which is built for CUDA's torch, be imported beside a CPU
build. There its operators are missing, and two of them it must find; nobody here calls them."""

import torch

try:
    import torchvision  # noqa: F401
except RuntimeError:
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
