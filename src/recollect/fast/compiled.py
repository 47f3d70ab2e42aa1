"""The passes of unroll.py through torch.compile, for any network; with two rewrites of a traced graph that torch.compile does not
do: a convolution of zeros is zeros, and what nobody reads of a convolution's backward is not computed.

Both come up in every adjoint: the images have no tangent, so the first layer's forward-mode rule convolves zeros; and the
second derivative does not need all of the first.
"""

import shutil
import warnings
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.func import grad, grad_and_value, jvp
from torch.fx import Graph, Node

from recollect.unroll import Loss, Params, Passes, eager

aten = torch.ops.aten


def compiled(loss: Loss) -> Passes:
    """The same passes through torch.compile; without a C++ compiler it says so once, and gives the eager ones.

    The adjoint is taken the other way round, as the gradient of the directional derivative <g, mu>: the same two products,
    for one convolution in nine less. Channels-last is what the processor's convolutions like best.
    """
    if not any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++")):
        warnings.warn("no C++ compiler (g++ or clang++) found: the unroll runs uncompiled, slower", stacklevel=2)
        return eager(loss)

    def gradient(params: Params, images: Tensor, labels: Tensor) -> Params:
        return grad(loss)(*_channels_last(params, images), labels)

    def adjoint(params: Params, images: Tensor, labels: Tensor, mu: Params) -> tuple[Params, Tensor]:
        direction, _ = _channels_last(mu, images)

        def slope(theta: Params, x: Tensor) -> Tensor:
            return jvp(lambda p: loss(p, x, labels), (theta,), (direction,))[1]

        return grad(slope, argnums=(0, 1))(*_channels_last(params, images))

    def judge(params: Params, images: Tensor, labels: Tensor) -> tuple[Params, Tensor]:
        return grad_and_value(loss)(*_channels_last(params, images), labels)

    options: dict[str, Any] = {"post_grad_custom_pre_pass": PruneConvolutions()}
    faster = partial(torch.compile, dynamic=False, options=options)
    return Passes(faster(gradient), faster(adjoint), faster(judge))


def _channels_last(params: Params, images: Tensor) -> tuple[Params, Tensor]:
    laid = {n: p.contiguous(memory_format=torch.channels_last) if p.ndim == 4 else p for n, p in params.items()}
    return laid, images.contiguous(memory_format=torch.channels_last)


class PruneConvolutions(CustomGraphPass):
    """For torch.compile's option post_grad_custom_pre_pass."""

    def uuid(self) -> str:
        """Part of the key of torch.compile's cache: change it with the rewrites."""
        return "recollect-prune-convolutions-3"

    def __call__(self, graph: Graph) -> None:
        zeros: set[Node] = set()
        for node in list(graph.nodes):
            if _is_zeros(node, zeros):
                zeros.add(node)
            elif node.target is aten.convolution.default and node.args[0] in zeros and node.args[2] is None and _is_static(node):
                zeros.add(_become_zeros(graph, node))
            elif node.target is aten.convolution_backward.default:
                _prune_backward(graph, node, zeros)


def _is_zeros(node: Node, zeros: set[Node]) -> bool:
    if node.target in (aten.expand.default, aten.clone.default):
        return node.args[0] in zeros
    return node.target is aten.full.default and node.args[1] in (0, 0.0)


def _prune_backward(graph: Graph, node: Node, zeros: set[Node]) -> None:
    """Outputs: 0 by the input, 1 by the weight (zeros if the input is), 2 by the bias; the last argument masks them."""
    for part in list(node.users):
        if part.args[1] == 1 and node.args[1] in zeros and _is_static(part):
            zeros.add(_become_zeros(graph, part))
    read = [part.args[1] for part in node.users]
    *rest, mask = node.args
    node.args = (*rest, [wanted and number in read for number, wanted in enumerate(cast(list[bool], mask))])
    if not read:
        graph.erase_node(node)


def _is_static(node: Node) -> bool:
    """Of a shape known in numbers: under torch.compile's dynamic shapes there is none to write zeros of."""
    return all(isinstance(side, int) for side in node.meta["val"].shape)


def _become_zeros(graph: Graph, node: Node) -> Node:
    """Put zeros of the node's shape in its place."""
    value = node.meta["val"]
    options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    with graph.inserting_before(node):
        zeros = graph.call_function(aten.full.default, (list(value.shape), 0), options)
    zeros.meta["val"] = value
    node.replace_all_uses_with(zeros)
    graph.erase_node(node)
    return zeros
