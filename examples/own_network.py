"""Your own network: a memory distilled with it, and a plain PyTorch training loop on what the memory recalls.

python examples/own_network.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader

import recollect


def tiny(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Any nn.Module without running statistics will do."""
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (height // 2) * (width // 2), classes),
    )


images = recollect.load("digits")
config = recollect.preset(
    "fast", bases=7, downsample=1, init="samples", inner_steps=20, inner_lr=0.05, window=None, outer_lr=0.05, outer_steps=40
)
memory = recollect.distill(images, config, network=tiny)

torch.manual_seed(0)
network = tiny(memory.image_shape, len(memory.class_names))
optimiser = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
for _ in range(200):
    for pictures, labels in DataLoader(memory.dataset(), batch_size=64, shuffle=True):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(pictures), labels).backward()
        optimiser.step()

seen = memory.preprocess()(images.test.images)  # as the network sees them
right = network(seen).argmax(1) == images.test.labels
print(f"{100 * right.float().mean():.1f} % of the test images, after training on {len(memory.dataset())} recalled ones")
