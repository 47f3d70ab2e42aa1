"""A network's passes, judged by where its weights are: J = |theta - goal|^2 / way, for goals that are weights too."""

from functools import cached_property

from torch import Tensor

from recollect.fast.flat import Flat, General, Pair
from recollect.unroll import Params, Passes


class Towards:
    """Passes of another Flat, whose judge looks at no image: in the place of images it is given goals [S, 1, 1, 1, P], as
    `pack` makes them of weights, and in that of labels their ways [S, 1]; without S they are for all."""

    def __init__(self, flat: Flat):
        self.flat, self.network = flat, flat.network
        self.benchmark, self.stacks, self.splits, self.held = flat.benchmark, flat.stacks, flat.splits, flat.held
        self.pack, self.unpack, self.gradient, self.adjoint = flat.pack, flat.unpack, flat.gradient, flat.adjoint

    def judge(self, vectors: Tensor, images: Tensor, labels: Tensor) -> Pair:
        away, ways = vectors - images.reshape(-1, images.shape[-1]), labels.reshape(-1, 1)
        return 2 * away / ways, (away.square() / ways).sum(1)

    @cached_property
    def passes(self) -> Passes:
        """The same for `unroll.metagradient`, of any network's passes."""
        assert isinstance(self.flat, General)

        def judge(params: Params, goal: Tensor, way: Tensor) -> tuple[Params, Tensor]:
            slope, value = self.judge(self.pack(params)[None], goal, way)
            return self.unpack(slope[0], params), value[0]

        return Passes(self.flat.passes.gradient, self.flat.passes.adjoint, judge)
