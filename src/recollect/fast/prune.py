"""Two rewrites of a traced graph that torch.compile does not do: a convolution of zeros is zeros, and what nobody reads of
a convolution's backward is not computed.

Both come up in every adjoint: the images have no tangent, so the first layer's forward-mode rule convolves zeros; and the
second derivative does not need all of the first.
"""

from typing import cast

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

aten = torch.ops.aten


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
