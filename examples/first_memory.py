"""A first memory: the digits distilled to the floats of one image per class, beside random real images of the same floats.

python examples/first_memory.py
"""

import recollect
from recollect.evaluation import memory_recipe, random_real

images = recollect.load("digits")
config = recollect.preset(
    "fast",
    network="mlp:width=128",
    bases=7,
    downsample=1,
    init="samples",
    inner_steps=30,
    inner_lr=0.05,
    window=None,
    outer_lr=0.1,
    outer_steps=100,
)
memory = recollect.distill(images, config)
memory.save("digits.safetensors")
print(memory)

ours = recollect.evaluate(memory, images, networks=5)
real = random_real(images, 1, memory.preprocess(), memory_recipe(memory), networks=5)
for row in (ours, real):
    print(f"{row.name:20} {row.mean:.1f} ± {row.deviation:.1f} % of the test set")
