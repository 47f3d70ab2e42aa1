"""Networks without kernels of their own: patches of maps and the way back, the inner loop in the coordinates of a few bases, and
the rewrites of a traced graph."""

import operator
import shutil
import uuid

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fast_engine import DEVICE, distance
from test_unroll import distance as relative
from test_unroll import setting
from torch.func import grad, jvp
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from recollect import unroll
from recollect.fast import compiled, patches, span
from recollect.fast.chain import Chain, Half
from recollect.fast.compiled import PruneConvolutions
from recollect.fast.engine import Engine, Start
from recollect.fast.patches import Window
from recollect.nets import Network


@settings(max_examples=12, deadline=None)
@given(
    size=st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(2, 7)] * 2),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
)
@pytest.mark.parametrize("kind", ["torch", "triton"])
def test_there_and_back(kind, size, kernel, stride, padding):
    if kind == "triton":
        pytest.importorskip("triton")
    count, channels, height, width = size
    window = Window(channels, height, width, min(kernel, height, width), stride, padding)
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(count, height, width, channels, generator=generator).to(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patches, "_has_kernels", lambda *_: kind == "triton")
        found = window.spread(maps)
        columns = F.unfold(maps.movedim(-1, 1), window.kernel, padding=padding, stride=stride)  # [N, C k k, L]
        expected = columns.unflatten(1, (channels, -1)).permute(0, 3, 2, 1).reshape(found.shape)
        assert torch.equal(found, expected)
        other = torch.randn(found.shape, generator=generator).to(DEVICE)
        back = window.gather(other)
        alive = torch.randn(maps.shape, generator=generator).to(DEVICE)
        alive[0, 0, 0, 0] = torch.nan  # which a ReLU lets through
        dead = alive <= 0
        assert torch.equal(window.spread(maps, alive), window.spread(maps.masked_fill(dead, 0)))
        assert torch.equal(window.spread(alive, alive).nan_to_num(), window.spread(alive.relu()).nan_to_num())
        assert window.spread(alive, alive).isnan().sum() == window.spread(alive.isnan().float()).sum()
        assert torch.equal(window.gather(other, alive), back.masked_fill(dead, 0))
    assert back.shape == maps.shape
    assert torch.isclose((back.double() * maps).sum(), (other.double() * found).sum(), rtol=1e-5, atol=1e-4)
    columns = other.unflatten(3, (-1, channels)).permute(0, 4, 3, 1, 2).reshape(columns.shape)
    expected = F.fold(columns, (height, width), window.kernel, padding=padding, stride=stride).movedim(1, -1)
    assert torch.allclose(back, expected, atol=1e-5)


@pytest.mark.parametrize(("passes", "tolerance"), [(Chain, 1e-4), (Half, 0.1)])
def test_a_network_s_passes_by_the_kernels(monkeypatch, passes, tolerance):
    """La-MAML's network in float32 and bf16, one captured step after another, against float64."""
    pytest.importorskip("triton")
    if DEVICE == "cpu":
        monkeypatch.setattr(patches, "_has_kernels", lambda tensor, _: tensor.dtype != torch.double)
    net = Network("lamaml:width=4,hidden=5", (2, 5, 6), 3)
    engine = Engine(passes(net))
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        images, query = (torch.randn(n, 2, 5, 6, generator=generator).to(DEVICE) for n in (6, 4))
        labels, truth = (torch.randint(3, (n,), generator=generator).to(DEVICE) for n in (6, 4))
        batches = torch.randint(6, (3, 4), generator=generator).to(DEVICE)
        params = net.fresh(seed, DEVICE)
        ours = engine.metagradient(params, images, labels, batches, (query, truth), lr=0.1, momentum=0.9)
        exact = {name: p.double() for name, p in params.items()}
        theirs = unroll.metagradient(
            net.loss, exact, images.double(), labels, batches, (query.double(), truth), lr=0.1, momentum=0.9
        )
        assert theirs.images.norm() > 0
        assert float((ours.images - theirs.images).norm() / theirs.images.norm()) < tolerance


def test_half_precision_against_float64():
    """Of two unrolls that learn, side by side; their queries are judged in full."""
    net, generator = Network("lamaml:width=16,hidden=32", (3, 8, 8), 3), torch.Generator().manual_seed(0)
    labels = torch.arange(3).repeat_interleave(20)
    images = (torch.randn(3, 3, 8, 8, generator=generator)[labels] + torch.randn(60, 3, 8, 8, generator=generator)).to(DEVICE)
    batches = torch.stack([torch.randperm(60, generator=generator)[:30] for _ in range(30)]).to(DEVICE)
    labels, query = labels.to(DEVICE), (images[::2], labels[::2].to(DEVICE))
    asked = {"lr": 0.02, "momentum": 0.9, "window": 10}
    starts = [Start(net.fresh(seed, DEVICE), batches) for seed in range(2)]
    exact = [
        unroll.metagradient(
            net.loss, {name: p.double() for name, p in start.params.items()}, images.double(), labels, batches,
            (query[0].double(), query[1]), **asked,
        ).images
        for start in starts
    ]  # fmt: skip
    for passes, least, most in ((Chain(net), 0, 1e-3), (Half(net), 1e-3, 0.1)):
        for found, expected in zip(Engine(passes).together(starts, images, labels, query, **asked), exact, strict=True):
            assert least <= float((found.images - expected).norm() / expected.norm()) < most
    vector = Chain(net).pack(starts[0].params)
    assert torch.equal(Half(net).judge(vector[None], *query)[0], Chain(net).judge(vector[None], *query)[0])
    assert Half(net).held(10, adjoint=True) < Chain(net).held(10, adjoint=True)


def test_kernels_are_for_float32_and_bf16_on_a_gpu_that_they_reach():
    near, far = Window(1, 4, 4, 3, 1, 1), Window(1, 4, 4, 1, 4, 0)  # the second has more maps than patches
    assert not patches._has_kernels(torch.zeros(1), near)
    if DEVICE == "cuda":
        for kind in (torch.float32, torch.bfloat16):
            assert patches._has_kernels(torch.zeros(1, device=DEVICE, dtype=kind), near) == patches._triton
        assert not patches._has_kernels(torch.zeros(1, device=DEVICE, dtype=torch.double), near)
        for window in (near, far):
            many = torch.zeros(1, device=DEVICE).expand(patches.MOST // 16 + 1)
            assert not patches._has_kernels(many, window)


SHAPE, BASES, IMAGES, NETWORKS = (1, 5, 4), 3, 6, 2


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double).to(DEVICE)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("bridge", ["full", "forward-only", "none"])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("dependent", [False, True])
def test_the_same_metagradient(dependent, window, bridge, depth):
    net = Network(f"mlp:width=8,depth={depth}", SHAPE, 3)
    bases = numbers(NETWORKS, BASES, *SHAPE, seed=0)
    if dependent:
        bases[:, 2] = 0.5 * bases[:, 0] - bases[:, 1]
    images = torch.einsum("snk,skchw->snchw", numbers(NETWORKS, IMAGES, BASES, seed=1), bases)
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(3, (NETWORKS, IMAGES), generator=generator).to(DEVICE)
    query = numbers(NETWORKS, 5, *SHAPE, seed=3), torch.randint(3, (NETWORKS, 5), generator=generator).to(DEVICE)
    starts = [
        Start(
            {name: p.double() for name, p in net.fresh(seed, DEVICE).items()}, torch.randint(IMAGES, (6, 4), generator=generator)
        )
        for seed in range(NETWORKS)
    ]
    options = {"lr": 0.1, "momentum": 0.9, "bridge": bridge, "window": window}
    engine = Engine(span.Spanned(net, BASES))
    for real in (query[0], -query[0]):  # the second with what the first has captured
        _, found = span.by_images(engine, starts, images, labels, (real, query[1]), bases, **options)
        for k, start in enumerate(starts):
            judged = real[k], query[1][k]
            theirs = unroll.metagradient(
                net.loss, start.params, images[k], labels[k], start.batches.to(DEVICE), judged, **options
            )
            assert theirs.images.norm() > 0
            assert distance(found[k], theirs.images) < (1e-6 if dependent else 1e-11)


def test_a_vector_has_room_for_one_more_weight():
    net = Network("mlp:width=8,depth=1", SHAPE, 8)  # whose 8 x 3 + 8 + 8 x 8 + 8 numbers fill no whole number of 32
    for bases in (3, 6):  # 8 x 6 + 80 = 128 do
        flat = span.Spanned(net, bases)
        params = {**net.fresh(0), "1.weight": torch.ones(8, bases)}
        packed = flat.pack(params)
        assert len(packed) % 32 == 0
        assert len(packed) > flat.size
        assert not packed[flat.size :].any()


def test_it_pays_for_perceptrons_and_few_bases():
    assert span.pays(Network("mlp", (1, 28, 28), 10), 24)
    assert not span.pays(Network("mlp:width=8", (1, 4, 4), 10), 9)
    assert not span.pays(Network("lamaml:width=4", (3, 32, 32), 10), 24)
    assert not span.pays(Network("convnet:width=4", (3, 32, 32), 10), 24)


def test_rows_are_orthonormal():
    frame = span.orthonormal(numbers(2, 3, 10, seed=0))
    assert torch.allclose(frame @ frame.mT, torch.eye(3, dtype=torch.double).to(DEVICE).expand(2, 3, 3), atol=1e-8)
    assert not span.orthonormal(torch.zeros(2, 3, 10)).any()  # no span, and no NaN


aten = torch.ops.aten
GEOMETRY = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)  # stride, padding, dilation, transposed, output padding, groups


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def trace(function, *inputs, mode: str = "fake", **options) -> GraphModule:
    return make_fx(function, tracing_mode=mode, **options)(*inputs)


def prune(module: GraphModule) -> GraphModule:
    """Rewrite the graph in place, and check that what is left is a graph."""
    PruneConvolutions()(module.graph)
    module.graph.lint()
    module.recompile()
    return module


def convolutions(module: GraphModule) -> list:
    targets = (aten.convolution.default, aten.convolution_backward.default)
    return [node for node in module.graph.nodes if node.target in targets]


def zeros(*shape: int) -> torch.Tensor:
    return aten.full.default(list(shape), 0, dtype=torch.float64, device="cpu", pin_memory=False)


# A convolution of zeros


@pytest.mark.parametrize(
    "nothing",
    [lambda: zeros(2, 3, 5, 5), lambda: zeros(1, 1, 1, 1).expand(2, 3, 5, 5), lambda: zeros(2, 3, 5, 5).clone()],
    ids=["full", "expand", "clone"],
)
def test_a_convolution_of_zeros_vanishes(nothing):
    def function(x, w):
        return aten.convolution(nothing(), w, None, *GEOMETRY), aten.convolution(x, w, None, *GEOMETRY)

    inputs = seeded(2, 3, 5, 5), seeded(4, 3, 3, 3, seed=1)
    module = trace(function, *inputs)
    assert len(convolutions(module)) == 2
    assert len(convolutions(prune(module))) == 1
    for found, expected in zip(module(*inputs), function(*inputs), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_zeros_pass_through_one_convolution_into_the_next():
    def function(w, v):
        return aten.convolution(aten.convolution(zeros(2, 3, 5, 5), w, None, *GEOMETRY), v, None, *GEOMETRY)

    inputs = seeded(4, 3, 3, 3), seeded(2, 4, 3, 3, seed=1)
    module = prune(trace(function, *inputs))
    assert convolutions(module) == []
    assert torch.equal(module(*inputs), torch.zeros(2, 2, 5, 5, dtype=torch.float64))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: aten.convolution(zeros(2, 3, 5, 5), w, b, *GEOMETRY),
        lambda x, w, b: aten.convolution(zeros(2, 3, 5, 5) + 1, w, None, *GEOMETRY),
        lambda x, w, b: aten.convolution(aten.full([2, 3, 5, 5], 1e-30, dtype=torch.float64), w, None, *GEOMETRY),
        lambda x, w, b: aten.convolution(x, w, b, *GEOMETRY),
    ],
    ids=["a bias", "no zeros any more", "small", "nothing is zero"],
)
def test_any_other_convolution_stays(function):
    inputs = seeded(2, 3, 5, 5), seeded(4, 3, 3, 3, seed=1), seeded(4, seed=2)
    module = prune(trace(function, *inputs))
    assert len(convolutions(module)) == 1
    assert torch.equal(module(*inputs), function(*inputs))


# A convolution's backward


def backward(x, w, g):
    return aten.convolution_backward(g, x, w, [4], *GEOMETRY, [True, True, True])


BACKWARD_INPUTS = seeded(2, 3, 5, 5), seeded(4, 3, 3, 3, seed=1), seeded(2, 4, 5, 5, seed=2)


@pytest.mark.parametrize("read", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)], ids=str)
def test_what_nobody_reads_is_masked(read):
    def function(*inputs):
        parts = backward(*inputs)
        return [parts[number] for number in read]

    module = trace(function, *BACKWARD_INPUTS)
    module.graph.eliminate_dead_code()  # as torch.compile hands it over: only what is read is taken out
    prune(module)
    (node,) = convolutions(module)
    assert node.args[-1] == [number in read for number in range(3)]
    for found, expected in zip(module(*BACKWARD_INPUTS), function(*BACKWARD_INPUTS), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_what_was_masked_before_stays_masked():
    def function(x, w, g):
        return aten.convolution_backward(g, x, w, [4], *GEOMETRY, [False, True, False])[1]

    module = trace(function, *BACKWARD_INPUTS)
    module.graph.eliminate_dead_code()
    (node,) = convolutions(prune(module))
    assert node.args[-1] == [False, True, False]
    assert torch.equal(module(*BACKWARD_INPUTS), function(*BACKWARD_INPUTS))


@pytest.mark.parametrize(("read", "left"), [((1,), 0), ((0, 1), 1), ((1, 2), 1), ((0, 1, 2), 1)], ids=str)
def test_the_weights_gradient_of_zeros_is_zeros(read, left):
    def function(_, w, g):
        parts = backward(zeros(2, 3, 5, 5), w, g)
        return [parts[number] for number in read]

    module = trace(function, *BACKWARD_INPUTS)
    module.graph.eliminate_dead_code()
    prune(module)
    assert len(convolutions(module)) == left
    assert all(node.args[-1][1] is False for node in convolutions(module))
    for found, expected in zip(module(*BACKWARD_INPUTS), function(*BACKWARD_INPUTS), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_an_output_that_is_taken_out_twice():
    def function(_, w, g):
        return backward(zeros(2, 3, 5, 5), w, g)[1]

    module = trace(function, *BACKWARD_INPUTS)
    module.graph.eliminate_dead_code()
    (node,) = convolutions(module)
    (taken,) = node.users
    with module.graph.inserting_after(taken):
        again = module.graph.call_function(operator.getitem, (node, 1))
    again.meta["val"] = taken.meta["val"]
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    output.args = ((taken, again),)
    first, second = prune(module)(*BACKWARD_INPUTS)
    assert torch.equal(first, function(*BACKWARD_INPUTS))
    assert torch.equal(second, function(*BACKWARD_INPUTS))


# Whole adjoints


def adjoint(weights, x, mu):
    """As compiled takes it: the gradient of a directional derivative; two convolutions and what lies between."""

    def slope(weights, x):
        def loss(w):
            return F.conv2d(torch.tanh(F.conv2d(x, w[0], padding=1)), w[1], padding=1).square().mean()

        return jvp(loss, (weights,), (mu,))[1]

    return grad(slope, argnums=(0, 1))(weights, x)


def adjoint_inputs(dtype: torch.dtype):
    def pair(seed: int) -> list[torch.Tensor]:
        return [seeded(4, 3, 3, 3, seed=seed, dtype=dtype), seeded(2, 4, 3, 3, seed=seed + 1, dtype=dtype)]

    return pair(0), seeded(2, 3, 5, 5, seed=9, dtype=dtype), pair(5)


def assert_same_adjoint(found, expected, tolerance: float) -> None:
    for mine, theirs in zip([*found[0], found[1]], [*expected[0], expected[1]], strict=True):
        assert (mine - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)], ids=str)
def test_a_whole_adjoint_is_the_same_with_fewer_convolutions(dtype, tolerance, mode):
    from torch._inductor.decomposition import select_decomp_table

    inputs = adjoint_inputs(dtype)
    module = trace(adjoint, *inputs, mode=mode, decomposition_table=select_decomp_table())
    module.graph.eliminate_dead_code()
    before, unpruned = len(convolutions(module)), module(*inputs)
    outputs = sum(sum(node.args[-1]) for node in convolutions(module) if len(node.args) == 11)
    prune(module)
    assert_same_adjoint(module(*inputs), unpruned, tolerance)
    assert_same_adjoint(module(*inputs), adjoint(*inputs), tolerance)
    if mode == "fake":
        assert len(convolutions(module)) < before
        assert sum(sum(node.args[-1]) for node in convolutions(module) if len(node.args) == 11) < outputs


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_compiled_passes_are_the_same_passes(monkeypatch):
    """And their adjoint has been through the rewrites, with fewer convolutions after than before."""
    counts = []

    class Counting(PruneConvolutions):
        def uuid(self):
            return str(uuid.uuid4())  # in no cache: the pass does run

        def __call__(self, graph):
            before = convolutions(graph.owning_module)
            super().__call__(graph)
            counts.append((len(before), len(convolutions(graph.owning_module))))

    monkeypatch.setattr(compiled, "PruneConvolutions", Counting)
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)
    problem, options = setting("convnet:width=4,depth=1", steps=2), {"lr": 0.05, "momentum": 0.9}
    eager = unroll.metagradient(*problem, **options)
    fast = unroll.metagradient(*problem, **options, passes=compiled.compiled(problem[0]))
    assert relative(fast.images, eager.images) < 1e-10
    assert len(counts) == 3  # gradient, adjoint, judge
    assert any(after < before for before, after in counts)
