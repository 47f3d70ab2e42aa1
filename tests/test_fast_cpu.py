"""The ConvNet's kernels on a CPU and the passes made of them, against float64 autograd; what `bench cpu` measures."""

import importlib.util
import platform
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp
from torch.nn import functional as F

pytest.importorskip("numba")

from recollect import fast, training, unroll
from recollect.bench import cpu as bench
from recollect.config import Recipe
from recollect.data.augment import Schedule
from recollect.errors import RecollectError
from recollect.fast import cpu, keep_pages
from recollect.fast import cpu_kernels as kernels
from recollect.fast.cpu import CpuConvNet
from recollect.fast.engine import Engine
from recollect.fast.flat import General
from recollect.nets import InstanceNorm, Network

PRECISIONS = ["fp32", "bf16"]
TOLERANCE = {"fp32": 2e-6, "bf16": 2e-2}
LOOSE = {"fp32": 5e-6, "bf16": 0.3}  # after several blocks: rounding moves pixels across ReLU's kink
KIND = {"fp32": torch.float32, "bf16": torch.bfloat16}
CONVNET = Network("convnet:width=16,depth=2", (1, 8, 8), 3)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


def random(*shape: int, seed: int, kind: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(kind)


def double(params):
    return {name: p.double() for name, p in params.items()}


def nearest_kink(net: Network, params, images: Tensor) -> float:
    """The smallest input of any ReLU."""
    found = []
    layers = [layer for layer in net.module.modules() if isinstance(layer, nn.ReLU)]
    hooks = [layer.register_forward_hook(lambda _, x, __: found.append(float(x[0].abs().min()))) for layer in layers]
    net.logits(double(params), images.double())
    for hook in hooks:
        hook.remove()
    return min(found)


def setting(network: str, shape: tuple[int, int, int], classes: int, count: int):
    """Parameters no longer fresh, images, labels and a direction: the first draw with no pixel so near ReLU's kink that float32
    could put it on the other side."""
    net = Network(network, shape, classes)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        params = {n: p + 0.2 * torch.randn(p.shape, generator=generator) for n, p in net.fresh(0).items()}
        images = torch.randn(count, *shape, generator=generator)
        if nearest_kink(net, params, images) > 2e-6:
            mu = {name: torch.randn(p.shape, generator=generator) for name, p in params.items()}
            return net, params, images, torch.arange(count) % classes, mu
    raise AssertionError("every draw came too near")


@pytest.fixture
def threads():
    """Sets how many threads compute, for this test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# ---- each kernel by itself ------------------------------------------------------------------------------------------


def block(y: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """What follows a convolution."""
    normed = functional_call(InstanceNorm(len(gamma)), {"weight": gamma, "bias": beta}, (y,))
    return F.avg_pool2d(normed.relu(), 2)


COUNT, WIDTH, SIDE = 2, 32, 8


class Case:
    """One block on maps of its own, and the function that its kernels differentiate, in float64."""

    def __init__(self, name: str, maps: int, offset: float = 0.5):
        self.kind, self.tangent = KIND[name], maps > 1
        self.maps = [self.map(SIDE, seed, offset) for seed in range(maps)]
        self.norm = [random(WIDTH, seed=seed) for seed in (10, 11, 12, 13)]
        y, *dy = (m.double() for m in self.maps)
        gamma, beta, dgamma, dbeta = (p.double() for p in self.norm)
        self.inputs, self.moves = (y, gamma, beta), (sum(dy, torch.zeros_like(y)), dgamma, dbeta)
        nothing = self.map(SIDE // 2, 0) * torch.nan  # it shows where nothing was written
        self.a, self.da, self.above, self.dabove = (nothing.clone() for _ in range(4))
        self.stats = torch.full((4, COUNT, WIDTH), torch.nan)
        self.alive = torch.zeros(COUNT, SIDE * SIDE // 4, WIDTH, dtype=torch.uint8)

    def map(self, side: int, seed: int, offset: float = 0.0) -> Tensor:
        numbers = random(COUNT, side, side, WIDTH, seed=seed) + offset
        return numbers.to(self.kind).permute(0, 3, 1, 2)

    def arrays(self, *tensors: Tensor | None, count: int = 0) -> list[np.ndarray | None]:
        """As the kernels take them, and None up to `count`."""
        found = [cpu._array(t) for t in tensors]
        return found + [None] * (count - len(found))

    def forward(self) -> tuple[Tensor, Tensor]:
        moved = (lambda *tensors: tensors) if self.tangent else lambda *tensors: (None,) * len(tensors)
        norm = self.arrays(*self.norm[:2], *moved(*self.norm[2:]))
        out = self.arrays(self.a, *moved(self.da), self.stats, self.alive, self.above, *moved(self.dabove))
        kernels.forward(*self.arrays(*self.maps, count=3), *norm, *out)
        return self.a, self.da

    def backward(self, *back: Tensor) -> tuple[list[Tensor], np.ndarray, np.ndarray]:
        """The maps, overwritten; the gradients by gamma and beta, or their tangents."""
        self.forward()
        maps, sums = [m.clone() for m in self.maps], np.ones((2, WIDTH), np.float32)
        gamma, beta, dgamma = self.arrays(*self.norm[:3])
        kept = self.arrays(self.stats, self.alive, self.above, self.dabove if self.tangent else None)
        arguments = gamma, beta, dgamma if self.tangent else None, *kept, *self.arrays(*back, count=3)
        kernels.backward(*self.arrays(*maps, count=3), *arguments, *sums)
        return maps, *(sums - 1)


maps_given = pytest.mark.parametrize("maps", [1, 2, 3], ids=["value", "tangent", "tangent in two parts"])


@maps_given
@pytest.mark.parametrize("name", PRECISIONS)
def test_forward(name, maps):
    case = Case(name, maps)
    a, da = case.forward()
    value, moved = jvp(block, case.inputs, case.moves)
    assert distance(a, value) < TOLERANCE[name]
    if case.tangent:
        assert distance(da, moved) < TOLERANCE[name]


def test_forward_far_from_zero():
    """A map whose mean is large beside its deviation: the mean square less the squared mean would be off by 1e-3."""
    case = Case("fp32", 2, offset=100.0)
    for found, wanted in zip(case.forward(), jvp(block, case.inputs, case.moves), strict=True):
        assert distance(found, wanted) < 1e-4


@maps_given
@pytest.mark.parametrize("name", PRECISIONS)
def test_backward(name, maps):
    case = Case(name, maps)
    back = [case.map(SIDE // 2, seed) for seed in range(20, 20 + maps)]
    found, by_gamma, by_beta = case.backward(*back)

    def slopes(by_a: Tensor, *inputs: Tensor):
        return vjp(block, *inputs)[1](by_a)

    ga, *dga = (m.double() for m in back)
    moves = (sum(dga, torch.zeros_like(ga)), *case.moves)
    values, tangents = jvp(slopes, (ga, *case.inputs), moves)
    wanted = tangents if case.tangent else values
    assert distance(found[0], wanted[0]) < TOLERANCE[name]
    assert distance(torch.from_numpy(by_gamma), wanted[1]) < TOLERANCE[name]
    assert distance(torch.from_numpy(by_beta), wanted[2]) < TOLERANCE[name]
    if case.tangent:
        assert distance(found[1], values[0]) < TOLERANCE[name]


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 8), (2, 28, 28)], ids=str)
def test_patches_and_back(shape):
    net = CpuConvNet(Network("convnet:width=16,depth=1", shape, 3), "fp32")
    images = random(2, *shape, seed=0)
    patches = torch.full((2, net.blocks[0].side ** 2, net.patch), torch.nan)
    across = torch.full((net.patch, 2 * patches.shape[1]), torch.nan)
    kernels.unfold(images.numpy(), net.padding, patches.numpy(), across.numpy())
    expected = F.unfold(images, 3, padding=net.padding).mT
    assert torch.equal(patches, F.pad(expected, (0, net.patch - 9 * shape[0])))
    assert torch.equal(across, patches.flatten(0, 1).T)
    by_patches, by_images = random(*patches.shape, seed=1), torch.full_like(images, torch.nan)
    kernels.fold(by_patches.numpy(), net.padding, by_images.numpy())
    columns = by_patches[..., : 9 * shape[0]].double().mT
    assert distance(by_images, F.fold(columns, shape[1:], 3, padding=net.padding)) < 1e-6


def test_bfloat16_is_rounded_to_the_nearest():
    """As torch rounds: ties to even, infinities and NaN as they are."""
    numbers = torch.cat([random(1000, seed=0), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, torch.inf, -torch.inf, 0.0])])
    patches, across = torch.zeros(1, 64, 16, dtype=torch.bfloat16), torch.zeros(16, 64, dtype=torch.bfloat16)
    for part in F.pad(numbers, (0, 19)).split(64):
        kernels.unfold(part.view(1, 1, 8, 8).numpy(), 1, cpu._array(patches), cpu._array(across))
        assert torch.equal(patches[0, :, 4], part.bfloat16())  # the middle of each patch


# ---- the passes -----------------------------------------------------------------------------------------------------

CASES = {
    "grey 8x8, one block, one image": ("convnet:width=64,depth=1", (1, 8, 8), 3, 1),
    "grey 8x8, two blocks": ("convnet:width=16,depth=2", (1, 8, 8), 5, 9),
    "colour 16x16, three blocks": ("convnet:width=32,depth=3", (3, 16, 16), 10, 3),
    "grey 28x28": ("convnet:width=16", (1, 28, 28), 10, 2),
    "colour 32x32": ("convnet:width=128", (3, 32, 32), 10, 1),
    "colour 64x64, four blocks": ("convnet:width=16", (3, 64, 64), 4, 1),
    "seven channels": ("convnet:width=256,depth=1", (7, 8, 8), 3, 2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("name", PRECISIONS)
def test_passes(name, case):
    net, params, images, labels, mu = setting(*case)
    flat, exact = CpuConvNet(net, name), unroll.eager(net.loss)
    vector = flat.pack(params)
    slope, value = exact.judge(double(params), images.double(), labels)
    curvature, by_images = exact.adjoint(double(params), images.double(), labels, double(mu))
    found, loss, moved, by_seen = passed(flat, params, images, labels, mu)
    assert torch.equal(flat.gradient(vector[None], images[None], labels[None])[0], found)
    assert distance(loss, value) < TOLERANCE[name]
    assert distance(found, flat.pack(slope).double()) < LOOSE[name]
    assert distance(moved, flat.pack(curvature).double()) < LOOSE[name]
    assert distance(by_seen, by_images) < LOOSE[name]


def passed(flat: CpuConvNet, params, images: Tensor, labels: Tensor, mu) -> list[Tensor]:
    given = flat.pack(params)[None], images[None], labels[None]
    return [each[0] for each in (*flat.judge(*given), *flat.adjoint(*given, flat.pack(mu)[None]))]


@pytest.mark.parametrize("name", PRECISIONS)
def test_threads_share_a_batch(threads, monkeypatch, name):
    """The same bytes every time; and the same numbers as from one thread, but for the order of sums."""
    monkeypatch.setattr(cpu, "LEAST", 1)
    net, *given = setting("convnet:width=16,depth=2", (1, 8, 8), 5, 23)
    flat = CpuConvNet(net, name)
    threads(1)
    alone = passed(flat, *given)
    threads(3)
    together, again = passed(flat, *given), passed(flat, *given)
    for one, two, three in zip(alone, together, again, strict=True):
        assert torch.equal(two, three)
        assert distance(two, one.double()) < (2e-6 if name == "fp32" else 2e-2)
    assert torch.get_num_threads() == 3


def test_a_batch_in_pieces():
    """However many images go through the network together."""
    net, params, images, labels, mu = setting("convnet:width=16,depth=2", (1, 8, 8), 5, 23)
    flat = CpuConvNet(net, "fp32")
    whole = passed(flat, params, images, labels, mu)
    flat.piece = 5
    for one, two in zip(whole, passed(flat, params, images, labels, mu), strict=True):
        assert distance(two, one.double()) < 2e-6


def test_pack_and_unpack():
    net, params, *_ = setting("convnet:width=16,depth=2", (3, 8, 8), 5, 1)
    flat, other = CpuConvNet(net, "fp32"), net.fresh(1)
    vector = flat.pack(params)
    back = flat.unpack(vector, other)
    for name, p in back.items():
        still = name in ("0.bias", "4.bias")  # the norm takes them away
        assert torch.equal(p, other[name] if still else params[name]), name
    assert len(vector) == flat.size
    assert flat.held(100, True) > flat.held(1, False) > 0


@pytest.mark.parametrize(("optimiser", "window"), [("sgd", None), ("sgd", 2), ("adam", None)])
def test_an_unroll_against_the_reference(optimiser, window):
    net = CONVNET
    images, labels = random(6, 1, 8, 8, seed=0), torch.arange(6) % 3
    batches = torch.randint(6, (4, 4), generator=torch.Generator().manual_seed(0))
    query = random(5, 1, 8, 8, seed=1), torch.arange(5) % 3
    options = dict(lr=0.05 if optimiser == "sgd" else 1e-3, momentum=0.9, optimiser=optimiser, window=window)
    ours = Engine(CpuConvNet(net, "fp32")).metagradient(net.fresh(0), images, labels, batches, query, **options)
    exact = double(net.fresh(0)), images.double(), labels, batches, (query[0].double(), query[1])
    theirs = unroll.metagradient(net.loss, *exact, **options)
    assert distance(ours.loss, theirs.loss) < 1e-5
    assert distance(ours.images, theirs.images) < 1e-4
    moved = torch.cat([p.flatten() for p in ours.params.values()])
    assert distance(moved, torch.cat([p.flatten() for p in theirs.params.values()])) < 1e-5


def test_augmentation_on_the_way():
    """`Schedule` differentiates what it does by itself; the passes see plain images."""
    net = CONVNET
    images, labels, batches = random(6, 1, 8, 8, seed=0), torch.arange(6) % 3, torch.tensor([[0, 1, 2, 3]] * 3)
    augment = Schedule({"flip": random(3, 4, 2, seed=1).sigmoid()})
    given = images, labels, batches, (images, labels)
    ours = Engine(CpuConvNet(net, "fp32")).metagradient(net.fresh(0), *given, lr=0.05, momentum=0.9, augment=augment)
    theirs = unroll.metagradient(net.loss, net.fresh(0), *given, lr=0.05, momentum=0.9, augment=augment)
    assert distance(ours.images, theirs.images.double()) < 1e-3


def test_training(monkeypatch):
    """Fresh networks by the passes, beside autograd's."""
    recipe = Recipe(epochs=2, batch=4, lr=0.05)
    part = random(6, 1, 8, 8, seed=0), torch.arange(6) % 3
    (ours,) = training.train(CONVNET, [part], recipe, [3])
    monkeypatch.setattr(fast, "passes", lambda net, *_, **__: (General(net, unroll.eager(net.loss)), "fp32"))
    (theirs,) = training.train(CONVNET, [part], recipe, [3])
    for name, p in theirs.items():
        assert float((ours[name] - p).norm()) < 1e-4, name


# ---- which passes, and in which precision ---------------------------------------------------------------------------


@pytest.fixture
def chip(monkeypatch):
    """A processor as `passes` sees it: with bf16 or without, and whether numba is installed."""

    def pretend(bf16: bool = True, numba: bool = True) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": bf16, "avx2": True}, raising=False)
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "numba" and not numba else find(n))
        monkeypatch.setattr(fast, "_said", set())

    return pretend


@pytest.mark.parametrize(("compute", "name"), [("auto", "fp32"), ("fp32", "fp32"), ("bf16", "bf16")])
def test_the_convnet_on_a_cpu(chip, compute, name):
    chip()
    flat, found = fast.passes(CONVNET, "cpu", compute)
    assert isinstance(flat, CpuConvNet)
    assert found == name
    assert flat.kind == KIND[name]


@pytest.mark.parametrize(("width", "bf16", "name"), [(32, True, "bf16"), (32, False, "fp32"), (16, True, "fp32")])
def test_wide_networks_take_half_precision_by_themselves(chip, width, bf16, name):
    chip(bf16)
    flat, found = fast.passes(Network(f"convnet:width={width},depth=2", (1, 8, 8), 3), "cpu", half=False)
    assert isinstance(flat, CpuConvNet)
    assert (flat.kind, found) == (KIND[name], name)


def test_half_precision_needs_a_chip_that_has_it(chip):
    chip(bf16=False)
    with pytest.raises(RecollectError, match="which this processor has no instructions for"):
        fast.passes(CONVNET, "cpu", "bf16")


def test_half_precision_of_other_networks(chip):
    chip()
    with pytest.warns(UserWarning, match="bf16 on a CPU is for the ConvNet's kernels, and it is not a ConvNet"):
        flat, name = fast.passes(Network("mlp", (1, 8, 8), 3), "cpu", "bf16")
    assert isinstance(flat, General)
    assert name == "fp32"


def test_without_numba_the_general_path_runs_and_says_so_once(chip):
    chip(numba=False)
    with pytest.warns(UserWarning, match="several times slower: numba is not installed"):
        flat, name = fast.passes(CONVNET, "cpu")
    assert isinstance(flat, General)
    assert name == "fp32"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(fast.passes(CONVNET, "cpu")[0], General)


def test_pages_are_kept_where_the_allocator_can():
    assert keep_pages() == (platform.libc_ver()[0] == "glibc")


SMALL = Network("convnet:width=16,depth=1", (1, 8, 8), 3)


@pytest.fixture
def small(monkeypatch):
    sizes = dict(batch=4, steps=2, real=3, per_class=2)
    monkeypatch.setattr(bench, "CONVNET", SMALL)
    monkeypatch.setattr(bench, "SETTINGS", (("short", SMALL, sizes, None, True), ("long", SMALL, sizes, 1, False)))
    monkeypatch.setattr(bench, "DIGITS", {"network": "convnet:width=16,depth=1", "inner_steps": 2, "window": 2, "outer_steps": 2})
    monkeypatch.setattr(bench, "EPOCHS", 1)


@pytest.mark.parametrize("bf16", [False, True])
def test_the_figures(small, monkeypatch, bf16):
    monkeypatch.setattr(fast, "computes_in_bf16", lambda: bf16)
    *_, found = bench.cpu()
    modes = ["fp32", "bf16"] if bf16 else ["fp32"]
    ways = [f"short: {way}" for way in ("full graph", "general", *modes)] + [f"long: {way}" for way in ("general", *modes)]
    assert [name for name in found if name.endswith("s an outer step")] == [f"{way}, s an outer step" for way in ways]
    for mode in modes:
        assert found[f"short: full graph / {mode}"] > 0
        assert found[f"long: {mode}, of the convolutions' rate"] > 0
        assert 0 < found[f"one pass of 12 images, gradient, {mode}: relative error"] < (1e-4 if mode == "fp32" else 0.5)
    accuracies = [value for name, value in found.items() if "validation accuracy" in name]
    assert len(accuracies) == (2 if bf16 else 0)
    assert all(0 <= value <= 100 for value in accuracies)
