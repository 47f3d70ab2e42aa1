"""The rewrites of a traced graph: fewer convolutions, the same numbers."""

import operator
import shutil
import uuid

import pytest
import torch
from torch.func import grad, jvp
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from recollect.fast.prune import PruneConvolutions

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
def test_compiled_with_the_pass():
    counts = []

    class Counting(PruneConvolutions):
        def uuid(self):
            return str(uuid.uuid4())  # in no cache: the pass does run

        def __call__(self, graph):
            before = convolutions(graph.owning_module)
            super().__call__(graph)
            counts.append((len(before), len(convolutions(graph.owning_module))))

    inputs = adjoint_inputs(torch.float32)
    fast = torch.compile(adjoint, options={"post_grad_custom_pre_pass": Counting()})
    assert_same_adjoint(fast(*inputs), adjoint(*inputs), 1e-6)
    ((before, after),) = counts
    assert after < before
