"""The networks of the paper, as plain nn.Modules, with a seeded fresh start.

A network is a name with options ("convnet", "convnet:width=32,depth=2") or any function (image shape, classes) ->
nn.Module: everything that takes a name takes such a function too. All norms are InstanceNorm with affine weights, which
keeps no running statistics, so a network is nothing but its parameters. Maps are halved only while at least 4 wide, so
that a norm never sees a single pixel.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.func import functional_call

from recollect import limits
from recollect.errors import RecollectError, unknown

Shape = tuple[int, int, int]  # channels, height, width
Constructor = Callable[[Shape, int], nn.Module]
Params = dict[str, Tensor]
Criterion = Callable[[Tensor, Tensor], Tensor]
"""(what a network puts out [N, outputs], labels) -> a scalar, the mean over the examples"""
_default_generator = threading.Lock()  # modules draw from it, and there is one for all threads
MOST_OPTION, MOST_DEPTH = 2**20, 1000  # of a network's name: a damaged file may ask for anything
SMALL = 100_000  # weights of a network without convolutions that one thread serves best
_one_thread, _alone = threading.Lock(), [0, 1]  # how many want it now, and how many threads there were before


class InstanceNorm(nn.Module):
    """InstanceNorm with affine weights, written out: these plain operations fuse and differentiate twice faster than
    torch's own in a compiled unroll, in any memory layout."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean((2, 3), keepdim=True)
        scale = (centred.square().mean((2, 3), keepdim=True) + 1e-5).rsqrt()
        return centred * (scale * self.weight[:, None, None]) + self.bias[:, None, None]


class _Shrink:
    """Keeps count of the map size while a network is put together."""

    def __init__(self, shape: Shape):
        self.height, self.width = shape[1:]

    def halve(self, pool: type[nn.Module]) -> list[nn.Module]:
        if min(self.height, self.width) < 4:
            return []
        self.height, self.width = self.height // 2, self.width // 2
        return [pool(2)]


def convnet(shape: Shape, classes: int, depth: int | None = None, width: int = 128) -> nn.Module:
    """`depth` blocks of conv 3x3, InstanceNorm, ReLU, average pooling 2; then one linear layer.

    Three blocks, or four for images of 64x64 and more. On 28x28 images the first convolution pads by 3, so that its maps
    are 32x32.
    """
    depth = depth or (4 if min(shape[1:]) >= 64 else 3)
    size, layers, channels = _Shrink(shape), [], shape[0]
    for block in range(depth):
        padding = 3 if block == 0 and shape[1:] == (28, 28) else 1
        size.height, size.width = size.height + 2 * padding - 2, size.width + 2 * padding - 2
        layers += [nn.Conv2d(channels, width, 3, padding=padding), InstanceNorm(width), nn.ReLU()]
        layers += size.halve(nn.AvgPool2d)
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * size.height * size.width, classes))


class _Residual(nn.Module):
    """ResNet-12's block: three conv 3x3 with norms beside a 1x1 shortcut."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        layers: list[nn.Module] = []
        for inputs in (channels, width, width):
            layers += [nn.Conv2d(inputs, width, 3, padding=1, bias=False), InstanceNorm(width), nn.ReLU()]
        self.body = nn.Sequential(*layers[:-1])
        self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, bias=False), InstanceNorm(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet12(shape: Shape, classes: int, width: int = 64) -> nn.Module:
    """Four residual blocks of 1, 2, 4 and 8 times `width`, max pooling 2 after each, no final pooling."""
    size, layers, channels = _Shrink(shape), [], shape[0]
    for block in range(4):
        layers += [_Residual(channels, width * 2**block), *size.halve(nn.MaxPool2d)]
        channels = width * 2**block
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * size.height * size.width, classes))


def alexnet(shape: Shape, classes: int, width: int = 64) -> nn.Module:
    """Five convolutions (5, 5, 3, 3, 3) of 2, 3, 4, 3 and 3 times `width` with norms; pooling after 1, 2 and 5."""
    size, layers, channels = _Shrink(shape), [], shape[0]
    for number, (kernel, times) in enumerate([(5, 2), (5, 3), (3, 4), (3, 3), (3, 3)]):
        layers += [nn.Conv2d(channels, times * width, kernel, padding=kernel // 2), InstanceNorm(times * width), nn.ReLU()]
        layers += size.halve(nn.MaxPool2d) if number in (0, 1, 4) else []
        channels = times * width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * size.height * size.width, classes))


def mlp(shape: Shape, classes: int, width: int = 256, depth: int = 2) -> nn.Module:
    """`depth` hidden layers of `width` with ReLU."""
    layers, inputs = [nn.Flatten()], shape[0] * shape[1] * shape[2]
    for _ in range(depth):
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


def lamaml(shape: Shape, classes: int, width: int = 160, hidden: int = 320) -> nn.Module:
    """La-MAML's network for CIFAR: three conv 3x3 of `width` with stride 2, two linear layers of `hidden`, ReLU after each."""
    channels, height, breadth = shape
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.ReLU()]
        channels, height, breadth = width, -(-height // 2), -(-breadth // 2)
    layers += [nn.Flatten(), nn.Linear(channels * height * breadth, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, classes))


NETWORKS = {"convnet": convnet, "resnet12": resnet12, "alexnet": alexnet, "mlp": mlp, "lamaml": lamaml}


def constructor(network: "str | Constructor") -> Constructor:
    """The function (shape, classes) -> nn.Module that a name with options stands for."""
    if not isinstance(network, str):
        return network
    name, _, options = network.partition(":")
    if name not in NETWORKS:
        raise unknown("network", name, NETWORKS, "In Python any function (image shape, classes) -> nn.Module will do.")
    build = NETWORKS[name]
    known = [p for p in inspect.signature(build).parameters if p not in ("shape", "classes")]
    chosen: dict[str, int] = {}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key not in known:
            raise unknown(f"option of {name}", key, known)
        most = MOST_DEPTH if key == "depth" else MOST_OPTION
        if not value.isdecimal() or len(value) > 9 or not 1 <= int(value) <= most:
            what = f"network '{network[:60]}': {key} is '{value[:20]}', not a positive whole number ({name}:{key}=2)"
            raise RecollectError(f"{what} of at most {most:,}")
        chosen[key] = int(value)
    return lambda shape, classes: build(shape, classes, **chosen)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error: the loss of continuous targets, [N, outputs] both."""
    return (outputs - targets).square().mean()  # torch's own has no tangent of its gradient


def shapes(network: "str | Constructor", shape: Shape, classes: int) -> dict[str, torch.Size]:
    """Of the parameters that a network has. None is made, whatever size a damaged file asks for: what its parameters would
    take, and its largest map of one image, is known before."""
    what = f"network '{network if isinstance(network, str) else 'custom'}' for {classes:,} classes of {list(shape)}"
    try:
        with torch.device("meta"):
            module = constructor(network)(shape, classes)
            found = {name: p.shape for name, p in module.named_parameters()}
            limits.check(what, 4 * sum(size.numel() for size in found.values()))
            largest = _largest_map(module, torch.empty(1, *shape)) if isinstance(network, str) else 0
    except RuntimeError as error:  # more numbers than can be counted
        raise RecollectError(f"{what} cannot be made ({str(error).splitlines()[0]}): give a smaller one") from None
    limits.check(f"an image in {what}", 4 * largest)
    return found


def _largest_map(module: nn.Module, image: Tensor) -> int:
    """Numbers in the largest output of any layer."""
    seen = [0]
    for layer in module.modules():
        layer.register_forward_hook(lambda _, given, out: seen.append(out.numel()))
    module(image)
    return max(seen)


def views(vector: Tensor, shapes: dict[str, torch.Size]) -> Params:
    """The numbers of a vector as parameters of these shapes."""
    pieces = vector.split([shape.numel() for shape in shapes.values()])
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


class Network:
    """One architecture for one image shape: fresh parameters by seed, the logits they give, and the loss of these.

    Examples:
        >>> import torch
        >>> network = recollect.Network("convnet:width=8,depth=2", (1, 8, 8), 10)
        >>> network.logits(network.fresh(seed=0), torch.zeros(4, 1, 8, 8)).shape
        torch.Size([4, 10])
    """

    def __init__(
        self, network: "str | Constructor", shape: Shape, classes: int, criterion: Criterion = nn.functional.cross_entropy
    ):
        """A name with options, or a function.

        Arguments:
            network: "convnet", "convnet:width=64,depth=4", "mlp", ...; or a function (shape, classes) -> nn.Module.
            shape: (channels, height, width) of an image.
            classes: outputs.
            criterion: (outputs [N, classes], labels) -> a scalar; cross-entropy where none is given.
        """
        self.construct, self.criterion = constructor(network), criterion
        self.pool: Sequence[Params] = ()
        """weights that inner networks begin with; none where they are fresh"""
        self.shape, self.classes, self.named = shape, classes, isinstance(network, str)
        if isinstance(network, str) and not network.startswith("mlp") and min(shape[1:]) < 2:
            raise RecollectError(f"images of {shape[1]}x{shape[2]} are too small for '{network}': use mlp")
        if self.named:
            shapes(network, shape, classes)  # what it would take is known before it is made
        self.module = self._build(0)
        if next(self.module.buffers(), None) is not None:
            raise RecollectError(
                "the network keeps buffers (BatchNorm's running statistics?), which an unroll cannot differentiate "
                "through: use InstanceNorm or GroupNorm without running statistics"
            )

    @property
    def convolves(self) -> bool:
        """Whether it has convolutions."""
        return any(isinstance(module, nn.Conv2d) for module in self.module.modules())

    def _build(self, seed: int) -> nn.Module:
        with _default_generator, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed every GPU too
            return self.construct(self.shape, self.classes)

    def fresh(self, seed: int, device: "torch.device | str" = "cpu") -> Params:
        """Newly initialised parameters, by name.

        Arguments:
            seed: the same seed gives the same floats.
            device: where they shall be.
        """
        return {name: p.detach().to(device) for name, p in self._build(seed).named_parameters()}

    def drawn(self, seed: int, device: "torch.device | str") -> Params:
        """Fresh parameters where they are needed: on a GPU drawn there, from the same distributions, which costs the host
        nothing; other numbers than `fresh` has for that seed. Where there is a pool, those of one of its networks.

        Arguments:
            seed: of the draw.
            device: where they are drawn.
        """
        if self.pool:
            return {name: p.to(device) for name, p in self.pool[seed % len(self.pool)].items()}
        if torch.device(device).type == "cpu" or not self.named:
            return self.fresh(seed, device)
        return self._uniform(torch.Generator(device).manual_seed(seed))

    def _uniform(self, generator: torch.Generator) -> Params:
        """As the modules of named networks initialise themselves: weights and biases uniform, norms one and zero."""
        low, width = self._bounds(generator.device)
        vector = torch.addcmul(low, torch.rand(len(low), generator=generator, device=generator.device), width)
        return views(vector, {name: p.shape for name, p in self.module.named_parameters()})

    @lru_cache(maxsize=4)  # noqa: B019 (a network lives as long as its run)
    def _bounds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The least value of every parameter, and how much further it can be; in one vector each."""
        low, width = [], []
        for name, p in self.module.named_parameters():
            owner = self.module.get_submodule(name.rpartition(".")[0])
            assert isinstance(owner, nn.Linear | nn.Conv2d | InstanceNorm), type(owner)
            bound = 0.0 if isinstance(owner, InstanceNorm) else owner.weight[0].numel() ** -0.5
            low.append(torch.full_like(p, -bound).flatten() if bound else p.detach().flatten())
            width.append(torch.full((p.numel(),), 2 * bound))
        return torch.cat(low).to(device), torch.cat(width).to(device)

    def logits(self, params: Params, images: Tensor) -> Tensor:
        """What the network puts out.

        Arguments:
            params: the weights, by name.
            images: [N, C, H, W], preprocessed.

        Returns:
            [N, classes]
        """
        return functional_call(self.module, params, (images,))

    def features(self, params: Params, images: Tensor) -> Tensor:
        """What the last linear layer sees.

        Arguments:
            params: the weights, by name.
            images: [N, C, H, W], preprocessed.

        Returns:
            [N, D]
        """
        linear = [module for module in self.module.modules() if isinstance(module, nn.Linear)][-1]
        seen: list[Tensor] = []
        with linear.register_forward_pre_hook(lambda _, given: seen.append(given[0])):
            self.logits(params, images)
        return seen[0]

    def loss(self, params: Params, images: Tensor, labels: Tensor) -> Tensor:
        """The l of the paper: mean cross-entropy, or the network's own criterion.

        Arguments:
            params: the weights, by name.
            images: [N, C, H, W], preprocessed.
            labels: [N].

        Returns:
            A scalar.
        """
        return self.criterion(self.logits(params, images), labels)


@contextmanager
def threads_for(network: Network) -> Iterator[None]:
    """One thread of the processor for a small network: more would wait for each other longer than they work, and hundreds of
    times longer on a machine that has other work too."""
    if network.convolves or sum(p.numel() for p in network.module.parameters()) > SMALL:
        yield
        return
    with _one_thread:
        if not _alone[0]:
            _alone[1] = torch.get_num_threads()
            torch.set_num_threads(1)
        _alone[0] += 1
    try:
        yield
    finally:
        with _one_thread:
            _alone[0] -= 1
            if not _alone[0]:
                torch.set_num_threads(_alone[1])
