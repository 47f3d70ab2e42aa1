"""The ConvNet's kernels and the passes made of them against float64 autograd, on a GPU or in Triton's interpreter."""

from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp
from torch.nn import functional as F

pytest.importorskip("triton")

from recollect import unroll
from recollect.fast import convnet
from recollect.fast.byhand import Given
from recollect.fast.convnet import ConvNet
from recollect.fast.engine import precision
from recollect.fast.flat import Pieces
from recollect.fast.layout import unfit
from recollect.nets import InstanceNorm, Network

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter computes neither in TF32 nor in bf16")
PRECISIONS = ["fp32", pytest.param("tf32", marks=needs_cuda), pytest.param("bf16", marks=needs_cuda)]
TOLERANCE = {"fp32": 1e-5, "tf32": 5e-3, "bf16": 5e-2}
LOOSE = {"fp32": 1e-5, "tf32": 0.2, "bf16": 0.4}  # after several blocks: rounding moves pixels across ReLU's kink
KIND = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
ROUND = {"fp32": torch.float32, "tf32": torch.bfloat16, "bf16": torch.bfloat16}  # what is given is exact in the products


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


def random(*shape: int, kind: torch.dtype = torch.float32, seed: int) -> Tensor:
    """The same numbers on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, kind)


def exact(params):
    return {name: p.double() for name, p in params.items()}


def nearest_kink(net: Network, params, images: Tensor) -> float:
    """The smallest input of any ReLU."""
    found = []
    hooks = [
        layer.register_forward_hook(lambda _, given, __: found.append(float(given[0].abs().min())))
        for layer in net.module.modules()
        if isinstance(layer, nn.ReLU)
    ]
    net.logits(exact(params), images.double())
    for hook in hooks:
        hook.remove()
    return min(found)


def drawn(net: Network, count: int, name: str, seed: int):
    """Parameters with norms and biases no longer fresh, images and a direction; exact in the precision's products."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(p: Tensor, size: float = 1.0) -> Tensor:
        return (p + size * torch.randn(p.shape, generator=generator)).to(ROUND[name]).float().to(DEVICE)

    params = {n: noisy(p, 0.2) for n, p in net.fresh(0).items()}
    return params, noisy(torch.zeros(count, *net.shape)), {n: noisy(torch.zeros(p.shape)) for n, p in params.items()}


def setting(network: str, shape: tuple[int, int, int], classes: int, count: int, name: str = "fp32"):
    """The first draw with no pixel so near ReLU's kink that float32 could put it on the other side."""
    net = Network(network, shape, classes)
    for seed in range(20):
        params, images, mu = drawn(net, count, name, seed)
        if nearest_kink(net, params, images) > 5e-6:
            return net, params, images, torch.arange(count, device=DEVICE) % classes, mu
    raise AssertionError("every draw came too near")


@contextmanager
def poisoned():
    """New memory is full of NaN while this lasts, so that it shows where nothing was written."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device=DEVICE).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def cut(monkeypatch):
    """Has the kernels take so many pixels and channels at a time."""
    before = convnet._tiles

    def into(rows: int, channels: int) -> None:
        def tiles(kernel, block, *others):
            chosen = {"ROWS": min(rows, block.side**2), "CHANNELS": channels}
            return before(kernel, block, *others) | chosen

        monkeypatch.setattr(convnet, "_tiles", tiles)

    return into


# ---- each kernel by itself ------------------------------------------------------------------------------------------


def by_square(maps: Tensor) -> Tensor:
    """[N, C, S, S] -> [N, S * S, C], the pixels as the kernels number them: by their place in a 2x2 square first."""
    half = maps.shape[-1] // 2
    return maps.unflatten(3, (half, 2)).unflatten(2, (half, 2)).permute(0, 3, 5, 2, 4, 1).flatten(1, 4)


def spread(pixels: Tensor) -> Tensor:
    """The way back."""
    half = round(pixels.shape[1] ** 0.5) // 2
    return pixels.unflatten(1, (2, 2, half, half)).permute(0, 5, 3, 1, 4, 2).flatten(4, 5).flatten(2, 3)


def test_by_square_and_back():
    maps = torch.arange(16.0).view(1, 1, 4, 4)
    assert by_square(maps).flatten(0, 1).squeeze(1).tolist() == [0, 2, 8, 10, 1, 3, 9, 11, 4, 6, 12, 14, 5, 7, 13, 15]
    assert torch.equal(spread(by_square(maps)), maps)


def launched(net: ConvNet, params, mu, images: Tensor) -> convnet._Launch:
    """A pass that has begun; without `mu`, one without a tangent."""
    given, moved = (None if p is None else Given(net, net.pack(p)) for p in (params, mu))
    return convnet._Launch(net, given, moved, images, torch.empty(net.size, device=DEVICE))


SHAPES = [(1, 8, 8), (3, 8, 8), (2, 28, 28)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unfold(shape):
    net = ConvNet(Network("convnet:width=16,depth=1", shape, 3), "fp32")
    images = random(2, *shape, seed=0) + 0.5
    with poisoned():
        run = launched(net, net.network.fresh(0, DEVICE), None, images)
    side = 8 if shape[1] == 8 else 32
    expected = by_square(F.unfold(images, 3, padding=3 if shape[1] == 28 else 1).unflatten(2, (side, side)))
    assert torch.equal(run.patches, F.pad(expected, (0, net.patch - 9 * shape[0])))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fold(shape, parts):
    net = ConvNet(Network("convnet:width=16,depth=1", shape, 3), "fp32")
    params = net.network.fresh(0, DEVICE)
    run = launched(net, params, params, random(2, *shape, seed=0))
    run.by_patch = random(parts, 2, 9 * shape[0], net.blocks[0].side ** 2, seed=1)
    with poisoned():
        found = run.fold()
    columns = spread(run.by_patch.double().sum(0).mT).flatten(2)
    assert distance(found, F.fold(columns, shape[1:], 3, padding=net.padding)) < 1e-6


def block(y: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """What follows a convolution: [N, C, S, S] -> [N, C, S / 2, S / 2]."""
    normed = functional_call(InstanceNorm(len(gamma)), {"weight": gamma, "bias": beta}, (y,))
    return F.avg_pool2d(normed.relu(), 2)


def fused(images: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor) -> Tensor:
    return block(F.conv2d(images, weight, padding=1), gamma, beta)


def stacked(*maps: Tensor) -> Tensor:
    return torch.cat(maps).contiguous(memory_format=torch.channels_last)


class Case:
    """One block of 32 channels: what its kernels are given, and the function that they differentiate in float64."""

    def __init__(self, name: str, first: bool, tangent: bool, offset: float = 0.5):
        net, params, images, _, mu = setting("convnet:width=32,depth=2", (2, 16, 16), 5, 2, name)
        self.net, self.tangent, self.name = ConvNet(net, name), tangent, name
        self.number = 0 if first else 1
        self.block = self.net.blocks[self.number]
        norm, dnorm = ([p[f"{self.block.norm}.{part}"].double() for part in ("weight", "bias")] for p in (params, mu))
        with poisoned():
            self.run = launched(self.net, params, mu if tangent else None, images)
        if first:
            weight, dweight, images = params["0.weight"].double(), mu["0.weight"].double(), images.double()
            self.maps = (None, None)
            self.function, self.inputs = fused, (images, *norm, weight)
            self.moves = (torch.zeros_like(images), *dnorm, dweight)
        else:
            maps = [self.map(8, seed, offset) for seed in range(3 if tangent else 1)]
            y, *dy = (m.double() for m in maps)
            self.function, self.inputs = block, (y, *norm)
            self.moves = (sum(dy, torch.zeros_like(y)), *dnorm)
            self.maps = stacked(*maps[:2]), maps[2] if tangent else None

    def map(self, side: int, seed: int, offset: float = 0.0) -> Tensor:
        numbers = random(2, side, side, 32, seed=seed) + offset
        return numbers.to(ROUND[self.name]).to(KIND[self.name]).permute(0, 3, 1, 2)

    def forward(self) -> Tensor:
        with precision(self.name), poisoned():
            return self.run.forward(self.number, *self.maps)

    def backward(self, ga: Tensor, dga: Tensor | None = None, rest: Tensor | None = None) -> Tensor | None:
        with precision(self.name), poisoned():
            return self.run.backward(self.number, *self.maps, ga if dga is None else stacked(dga, ga), rest)


def over_blocks(test):
    for mark in [
        pytest.mark.parametrize(("rows", "channels"), [(64, 32), (16, 16)]),
        pytest.mark.parametrize("tangent", [False, True], ids=["value", "tangent"]),
        pytest.mark.parametrize("first", [True, False], ids=["fused", "maps"]),
        pytest.mark.parametrize("name", PRECISIONS),
    ]:
        test = mark(test)
    return test


@over_blocks
def test_forward(cut, name, first, tangent, rows, channels):
    cut(rows, channels)
    case = Case(name, first, tangent)
    found = case.forward()
    value, moved = jvp(case.function, case.inputs, case.moves)
    assert distance(found[:2], value) < TOLERANCE[name]
    if tangent:
        assert distance(found[2:], moved) < TOLERANCE[name]


@pytest.mark.parametrize("tangent", [False, True], ids=["value", "tangent"])
def test_forward_far_from_zero(tangent):
    """A map whose mean is large beside its deviation: the mean square less the squared mean would be off by 1e-3."""
    case = Case("fp32", False, tangent, offset=100.0)
    value, moved = jvp(case.function, case.inputs, case.moves)
    assert distance(case.forward(), torch.cat([value, moved]) if tangent else value) < 1e-4


@over_blocks
def test_backward(cut, name, first, tangent, rows, channels):
    cut(rows, channels)
    case = Case(name, first, tangent)
    back = [case.map(case.block.side // 2, seed) for seed in ((8, 9, 10) if tangent else (8,))]
    case.forward()
    found = case.backward(*back)

    def slopes(by_a: Tensor, *inputs: Tensor):
        return vjp(case.function, *inputs)[1](by_a)

    ga, *dga = (m.double() for m in back)
    moves = (sum(dga, torch.zeros_like(ga)), *case.moves)
    values, tangents = jvp(slopes, (ga, *case.inputs), moves)
    wanted = tangents if tangent else values
    partial = case.run.partial.double().sum(0)  # [rows, C]
    assert distance(partial[case.block.row], wanted[1]) < TOLERANCE[name]
    assert distance(partial[case.block.row + 1], wanted[2]) < TOLERANCE[name]
    if first:
        by_weight = wanted[3].flatten(1).T
        assert distance(partial[: len(by_weight)], by_weight) < TOLERANCE[name]
        assert (partial[len(by_weight) : case.net.patch] == 0).all()
        if tangent:
            assert distance(case.run.fold(), tangents[0]) < TOLERANCE[name]
    else:
        assert distance(found[-2:], values[0]) < TOLERANCE[name]
        if tangent:
            assert distance(found[:2], tangents[0]) < TOLERANCE[name]


@pytest.mark.parametrize("first", [True, False], ids=["fused", "maps"])
def test_backward_with_the_tangent_in_one_part(first):
    """As in the last block, where nothing comes back beside it."""
    case, results = Case("fp32", first, tangent=True), []
    ga, dga = (case.map(case.block.side // 2, seed) for seed in (8, 9))
    case.forward()
    for back in ((ga, dga, None), (ga, torch.zeros_like(dga), dga)):
        found = case.backward(*back)
        rows = slice(case.block.row, case.block.row + 2)
        results.append((case.run.partial[:, rows].clone(), case.run.fold() if first else found))
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


IMAGES, CLASSES, TOTAL = 19, 5, 23


def head_of(name: str, tangent: bool, scale: float = 1.0):
    """The last layer, with more images than a tile and classes that are no power of two."""
    net, params, images, labels, mu = setting("convnet:width=32,depth=2", (1, 8, 8), CLASSES, IMAGES, name)
    fast = ConvNet(net, name)
    features, dfeatures = (
        scale * random(IMAGES, 2, 2, 32, kind=ROUND[name], seed=seed).to(KIND[name]).permute(0, 3, 1, 2) for seed in (0, 1)
    )
    features = torch.cat([features, dfeatures]) if tangent else features
    rest = torch.full((32, fast.features), torch.nan, device=DEVICE), torch.full((32,), torch.nan, device=DEVICE)
    with precision(name), poisoned():
        run = launched(fast, params, mu if tangent else None, images)
        run.found = {name: t[:CLASSES] for name, t in zip(("9.weight", "9.bias"), rest, strict=True)}
        both, losses = run.head(features.contiguous(memory_format=torch.channels_last), labels, TOTAL)
    inputs, moves = ([p["9.weight"].double(), p["9.bias"].double()] for p in (params, mu))
    inputs, moves = (features[:IMAGES].double(), *inputs), (features[-IMAGES:].double(), *moves)
    return inputs, moves, labels, both, losses, rest


@pytest.mark.parametrize("tangent", [False, True], ids=["value", "tangent"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_head(name, tangent):
    """The rows after the last class belong to others: they stay as they were."""
    inputs, moves, labels, both, losses, (by_weight, by_bias) = head_of(name, tangent)

    def loss(a: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.cross_entropy(a.flatten(1) @ weight.T + bias, labels, reduction="sum") / TOTAL

    values, tangents = jvp(grad(loss, argnums=(0, 1, 2)), inputs, moves)
    assert distance(losses.sum() / TOTAL, loss(*inputs)) < TOLERANCE[name]
    assert distance(both[-IMAGES:], values[0]) < TOLERANCE[name]
    if tangent:
        assert distance(both[:IMAGES], tangents[0]) < TOLERANCE[name]
    wanted = tangents if tangent else values
    order = wanted[1].unflatten(1, (32, 2, 2)).permute(0, 2, 3, 1).flatten(1)  # as the features of channels-last maps
    assert distance(by_weight[:CLASSES], order) < TOLERANCE[name]
    assert distance(by_bias[:CLASSES], wanted[2]) < TOLERANCE[name]
    assert by_weight[CLASSES:].isnan().all()
    assert by_bias[CLASSES:].isnan().all()


def test_head_with_huge_logits():
    inputs, _, labels, _, losses, _ = head_of("fp32", tangent=False, scale=1000.0)
    logits = inputs[0].flatten(1) @ inputs[1].T + inputs[2]
    assert logits.abs().max() > 1000
    assert distance(losses, F.cross_entropy(logits, labels, reduction="none")) < 1e-5


# ---- the passes -----------------------------------------------------------------------------------------------------

CASES = {
    "grey 8x8, one block, one image": ("convnet:width=64,depth=1", (1, 8, 8), 3, 1),
    "grey 8x8, two blocks": ("convnet:width=16,depth=2", (1, 8, 8), 5, 2),
    "colour 8x8, more classes than a tile": ("convnet:width=16,depth=2", (3, 8, 8), 17, 2),
    "colour 16x16, three blocks": ("convnet:width=32,depth=3", (3, 16, 16), 10, 2),
    "grey 28x28": ("convnet:width=16", (1, 28, 28), 10, 2),
    "colour 32x32": ("convnet:width=16", (3, 32, 32), 10, 1),
}


def agree(net: ConvNet, found: Tensor, expected: dict[str, Tensor], tolerance: float) -> None:
    """A vector with named tensors, one by one. The vector has no biases of convolutions: theirs must be zero."""
    zeros = {name: torch.zeros_like(p) for name, p in expected.items()}
    biases = {f"{block.name}.bias" for block in net.blocks}
    size = max(p.abs().max() for p in expected.values())
    for name, p in net.unpack(found, zeros).items():
        if name in biases:
            assert expected[name].abs().max() < 1e-12 * size
        else:
            assert distance(p, expected[name]) < tolerance, name
    again = net.pack(net.unpack(found, zeros))
    assert torch.equal(again, found), "the padding of the first weights is not zero"


def passed(flat: ConvNet | Pieces, params, images: Tensor, labels: Tensor, mu) -> list[Tensor]:
    """What judge and adjoint give of one network."""
    given = flat.pack(params)[None], images[None], labels[None]
    return [each[0] for each in (*flat.judge(*given), *flat.adjoint(*given, flat.pack(mu)[None]))]


def compare(name: str, network: str, shape: tuple[int, int, int], classes: int, count: int) -> None:
    net, params, images, labels, mu = setting(network, shape, classes, count, name)
    fast, reference = ConvNet(net, name), unroll.eager(net.loss)
    with precision(name), poisoned():
        slope, loss, curvature, by_images = passed(fast, params, images, labels, mu)
    expected_slope, expected_loss = reference.judge(exact(params), images.double(), labels)
    expected = reference.adjoint(exact(params), images.double(), labels, exact(mu))
    assert distance(loss, expected_loss) < LOOSE[name]
    agree(fast, slope, expected_slope, LOOSE[name])
    agree(fast, curvature, expected[0], LOOSE[name])
    assert distance(by_images, expected[1]) < LOOSE[name]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", PRECISIONS)
def test_passes(name, case):
    compare(name, *case)


@pytest.mark.parametrize("name", PRECISIONS)
def test_passes_at_64x64(name, cut):
    """In larger tiles where the interpreter runs: it gets through them faster."""
    cut(256 if DEVICE == "cpu" else 32, 16)
    compare(name, "convnet:width=16,depth=4", (1, 64, 64), 10, 1)


def test_more_images_than_a_tile():
    net, params, images, labels, _ = setting("convnet:width=16,depth=1", (1, 8, 8), 5, 18)
    fast = ConvNet(net, "fp32")
    with precision("fp32"), poisoned():
        (slope,), (loss,) = fast.judge(fast.pack(params)[None], images, labels)
    expected, value = unroll.eager(net.loss).judge(exact(params), images.double(), labels)
    assert distance(loss, value) < 1e-5
    agree(fast, slope, expected, 1e-5)


def test_gradient_is_that_of_judge():
    net, params, images, labels, _ = setting(*CASES["grey 8x8, two blocks"])
    fast = ConvNet(net, "fp32")
    with precision("fp32"), poisoned():
        gradient = fast.gradient(fast.pack(params)[None], images[None], labels[None])
        assert torch.equal(gradient, fast.judge(fast.pack(params)[None], images, labels)[0])


def test_labels_may_be_a_view():
    net, params, images, labels, _ = setting("convnet:width=16,depth=1", (1, 8, 8), 5, 3)
    fast, every_second = ConvNet(net, "fp32"), torch.stack([labels, (labels + 1) % 5], 1)[:, 0]
    vector = fast.pack(params)[None]
    assert torch.equal(fast.judge(vector, images, every_second)[1], fast.judge(vector, images, labels)[1])


def test_passes_in_pieces():
    net, params, images, labels, mu = setting("convnet:width=16,depth=1", (1, 8, 8), 5, 3)
    fast = ConvNet(net, "fp32")
    pieces, given = Pieces(fast, 2), (fast.pack(params)[None], images[None], labels[None])
    with precision("fp32"):
        whole = passed(fast, params, images, labels, mu)
        for found, expected in zip(passed(pieces, params, images, labels, mu), whole, strict=True):
            assert distance(found, expected.double()) < 1e-6
        assert distance(pieces.gradient(*given)[0], whole[0].double()) < 1e-6


# ---- the vector, and who fits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*CASES.values(), ("convnet:width=16", (3, 64, 64), 10, 1)], ids=str)
def test_pack_and_unpack(case):
    net, params, *_ = setting(*case)
    fast, other = ConvNet(net, "fp32"), {name: p + 1 for name, p in params.items()}
    vector = fast.pack(params)
    back = fast.unpack(vector, other)
    assert list(back) == list(params)
    for name, p in params.items():
        bias_of_convolution = name in {f"{block.name}.bias" for block in fast.blocks}
        assert torch.equal(back[name], other[name] if bias_of_convolution else p)
    assert torch.equal(fast.pack(back), vector)
    assert len(vector) == fast.size
    vector.zero_()
    assert torch.equal(fast.unpack(fast.pack(back), other)["0.weight"], params["0.weight"]), "unpack gave views"


@pytest.mark.parametrize(
    ("network", "shape"),
    [(case[0], case[1]) for case in CASES.values()]
    + [("convnet", (3, 32, 32)), ("convnet", (3, 64, 64)), ("convnet:width=256", (7, 32, 32))],
)
def test_fit(network, shape):
    assert unfit(Network(network, shape, 3)) is None


@pytest.mark.parametrize(
    ("network", "shape", "reason"),
    [
        ("mlp", (3, 32, 32), "not a ConvNet"),
        ("alexnet:width=2", (3, 32, 32), "not a ConvNet"),
        ("resnet12:width=2", (3, 32, 32), "not a ConvNet"),
        ("resnet12:width=2", (1, 8, 8), "not a ConvNet"),
        ("convnet:width=16,depth=3", (1, 8, 8), "not a ConvNet"),
        ("convnet:width=16,depth=6", (1, 8, 8), "its layer is Conv2d"),
        ("convnet:width=48", (3, 32, 32), "its width is 48, not 16"),
        ("convnet:width=4", (3, 32, 32), "its width is 4, not 16"),
        ("convnet:width=16,depth=2", (1, 12, 12), "its maps are 12x12, not square"),
        ("convnet:width=16,depth=2", (1, 8, 16), "its maps are 8x16, not square"),
        ("convnet:width=16,depth=2", (1, 128, 128), "its maps are 128x128"),
        ("convnet:width=16,depth=2", (8, 32, 32), "8 channels, not 1 to 7"),
        (lambda shape, classes: nn.Flatten(), (3, 32, 32), "not a ConvNet"),
    ],
)
def test_unfit(network, shape, reason):
    assert reason in unfit(Network(network, shape, 3))


def made(*, conv=None, later=None, pool=None, flatten=None, linear=None):
    """A function that makes a ConvNet of two blocks on 8x8 images, but for one thing."""
    conv, pool, linear = conv or {}, pool or {}, linear or {}
    second = {"out_channels": 16, "padding": 1} | (later or {})

    def build(shape, classes):
        layers = [nn.Conv2d(shape[0], 16, 3, **{"padding": 1} | conv), InstanceNorm(16), nn.ReLU(), nn.AvgPool2d(2)]
        layers += [nn.Conv2d(16, kernel_size=3, **second), InstanceNorm(second["out_channels"]), nn.ReLU()]
        layers += [nn.AvgPool2d(2, **pool), flatten or nn.Flatten()]
        features = nn.Sequential(*layers)(torch.zeros(1, *shape)).shape[1]
        return nn.Sequential(*layers, nn.Linear(features, classes, **linear))

    return build


def test_a_function_that_makes_the_same_network_fits():
    assert unfit(Network(made(), (1, 8, 8), 3)) is None
    assert unfit(Network(made(conv={"bias": False}), (1, 8, 8), 3)) is None


@pytest.mark.parametrize(
    "change",
    [
        dict(conv={"stride": 2, "padding": 5}),
        dict(conv={"dilation": 2}),
        dict(conv={"padding_mode": "circular"}),
        dict(conv={"padding": (1, 3)}),
        dict(later={"padding": 2}),
        dict(later={"stride": 2}),
        dict(later={"groups": 2}),
        dict(later={"out_channels": 32}),
        dict(pool={"stride": 1}),
        dict(pool={"padding": 1}),
        dict(linear={"bias": False}),
    ],
    ids=str,
)
def test_a_function_that_makes_another_network_does_not(change):
    assert unfit(Network(made(**change), (1, 8, 8), 3)) is not None
