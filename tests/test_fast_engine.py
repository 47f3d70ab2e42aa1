"""The engine against unroll.metagradient, with the same arguments: exact in float64, whatever was run before."""

import gc
import importlib.util
import threading
import warnings
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from recollect import fast, unroll
from recollect.data import augment
from recollect.data.augment import Schedule
from recollect.errors import RecollectError
from recollect.fast.chain import Chain, Half, fits
from recollect.fast.engine import MOST_PLANS, WARM_UP, Engine, Start, captured, no_garbage, precision
from recollect.fast.flat import General, Pieces
from recollect.nets import Network, squared_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter computes neither in TF32 nor in bf16")
SHAPE, SAMPLES = (2, 8, 8), 6


def distance(a: Tensor, b: Tensor) -> float:
    """Relative; 0 where both are zero."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-100))


def schedule(names: str, count: int, steps: int, seed: int = 0) -> Schedule | None:
    """Numbers for each of `count` images at every step: [T, count, 2]."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [augment.draw(augment.parse(names), count, generator) for _ in range(steps)]
    return Schedule.of(drawn) if names != "none" else None


def data(steps: int = 5, batch: int = 4, seed: int = 0, shape=SHAPE, kind: torch.dtype = torch.float64):
    """images, labels, batches, query"""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(SAMPLES, *shape, generator=generator, dtype=kind).to(DEVICE)
    labels = torch.randint(3, (SAMPLES,), generator=generator).to(DEVICE)
    batches = torch.randint(SAMPLES, (steps, batch), generator=generator).to(DEVICE)
    query = torch.randn(5, *shape, generator=generator, dtype=kind).to(DEVICE)
    return images, labels, batches, (query, torch.randint(3, (5,), generator=generator).to(DEVICE))


def mlp(seed: int = 0):
    net = Network("mlp:width=6", SHAPE, 3)
    return net, {name: p.double() for name, p in net.fresh(seed, DEVICE).items()}


def options(optimiser: str = "sgd", **others):
    return dict(lr=0.05 if optimiser == "sgd" else 1e-3, momentum=0.9, optimiser=optimiser) | others


def general(net: Network) -> General:
    return General(net, unroll.eager(net.loss))


both = pytest.mark.parametrize("passes", [general, Chain])


def new_engine(net: Network, passes=general) -> Engine:
    return Engine(passes(net))


def agree(ours: unroll.MetaGradient, theirs: unroll.MetaGradient, tolerance: float = 1e-12) -> None:
    assert distance(ours.loss, theirs.loss) < tolerance
    assert distance(ours.images, theirs.images) < tolerance
    assert list(ours.params) == list(theirs.params)
    for name, p in theirs.params.items():
        assert distance(ours.params[name], p) < tolerance, name


def same(ours: unroll.MetaGradient, theirs: unroll.MetaGradient) -> None:
    """Bit for bit; on a GPU sums have no fixed order."""
    if DEVICE == "cuda":
        return agree(ours, theirs)
    assert torch.equal(ours.loss, theirs.loss)
    assert torch.equal(ours.images, theirs.images)
    assert all(torch.equal(ours.params[name], p) for name, p in theirs.params.items())


# ---- against the reference ------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("names", ["none", "flip+rotate", "crop"])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("bridge", ["full", "forward-only", "none"])
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_against_the_reference(optimiser, bridge, window, names, passes):
    net, params = mlp()
    chosen = options(optimiser, bridge=bridge, window=window, augment=schedule(names, 4, 5))
    ours = new_engine(net, passes).metagradient(params, *data(), **chosen)
    agree(ours, unroll.metagradient(net.loss, params, *data(), **chosen))


@both
@pytest.mark.parametrize("networks", [1, 3])
@pytest.mark.parametrize("most", [None, 2])
def test_squared_error_against_the_reference(passes, networks, most):
    """Of continuous targets [N, outputs]; in pieces too. The reference is full-graph autograd."""
    net = Network("mlp:width=6", SHAPE, 3, squared_error)
    images, _, batches, (real, _) = data()
    labels, truth = (torch.randn(len(some), 3, dtype=torch.float64, device=DEVICE) for some in (images, real))
    weights = [{name: p.double() for name, p in net.fresh(seed, DEVICE).items()} for seed in range(networks)]
    flat = Pieces(passes(net), most) if most else passes(net)
    starts = [Start(params, batches.roll(number, 0)) for number, params in enumerate(weights)]
    found = Engine(flat).together(starts, images, labels, (real, truth), lr=0.05, momentum=0.9)
    for (params, rows, _), ours in zip(starts, found, strict=True):
        seen = images.clone().requires_grad_()
        theta, velocity = {name: p.clone().requires_grad_() for name, p in params.items()}, dict.fromkeys(params, 0)
        for step in rows:
            error = (net.logits(theta, seen[step]) - labels[step]).square().mean()
            gradients = torch.autograd.grad(error, list(theta.values()), create_graph=True)
            velocity = {name: 0.9 * velocity[name] + g for name, g in zip(theta, gradients, strict=True)}
            theta = {name: p - 0.05 * velocity[name] for name, p in theta.items()}
        value = (net.logits(theta, real) - truth).square().mean()
        assert distance(ours.loss, value.detach()) < 1e-12
        assert distance(ours.images, torch.autograd.grad(value, seen)[0]) < 1e-12


def convolutions(shape, classes: int) -> nn.Module:
    """Of all sizes; the second does not see the last row of its maps."""
    layers = [nn.Conv2d(shape[0], 4, 5, padding=2), nn.ReLU(), nn.Conv2d(4, 3, 2, stride=3), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(3, 5, 1, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 5 * 4, classes))


@pytest.mark.parametrize("names", ["none", "flip+rotate"])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("network", [convolutions, "lamaml:width=4,hidden=5"])
def test_convolutions_against_the_reference(network, window, names):
    shape = (2, 9, 6)
    net = Network(network, shape, 3)
    starts = [
        Start(
            {name: p.double() for name, p in net.fresh(seed, DEVICE).items()}, data(3, seed=seed)[2], schedule(names, 4, 3, seed)
        )
        for seed in range(2)
    ]
    images, query = (torch.stack([data(seed=seed, shape=shape)[n] for seed in range(2)]) for n in (0, 1))
    judged = [data(seed=seed, shape=shape)[3] for seed in range(2)]
    queries = tuple(torch.stack(parts) for parts in zip(*judged, strict=True))
    chosen = options(window=window)
    flat = fast.any_network(net)
    assert isinstance(flat, Chain)
    assert flat.stacks
    for engine in (Engine(flat), Engine(Pieces(flat, 2))):  # side by side; one after another, two images at a time
        found = engine.together(starts, images, query, queries, **chosen)
        for k, (ours, start) in enumerate(zip(found, starts, strict=True)):
            theirs = unroll.metagradient(
                net.loss, start.params, images[k], query[k], start.batches, judged[k], **chosen, augment=start.augment
            )
            agree(ours, theirs)
    one = unroll.metagradient(
        net.loss, starts[0].params, images[0], query[0], starts[0].batches, judged[0], **chosen, passes=flat.passes
    )  # as a CPU unrolls it
    agree(one, unroll.metagradient(net.loss, starts[0].params, images[0], query[0], starts[0].batches, judged[0], **chosen))


def test_weights_keep_their_places():
    net = Network(convolutions, (2, 9, 6), 3)
    flat, params = Chain(net), net.fresh(0)
    vector = flat.pack(params)
    assert len(vector) % 32 == 0
    for name, p in flat.unpack(vector, params).items():
        assert torch.equal(p, params[name]), name


@pytest.mark.parametrize("names", ["flip+rotate", "crop", "flip+crop+cutout+brightness+contrast+saturation"])
def test_one_augmentation_for_all_images_of_a_step(names):
    net, params = mlp()
    chosen = options(augment=schedule(names, 1, 5))
    ours = new_engine(net).metagradient(params, *data(), **chosen)
    agree(ours, unroll.metagradient(net.loss, params, *data(), **chosen))


@settings(max_examples=30, deadline=None)
@given(drawn=st.data(), steps=st.integers(1, 6), batch=st.integers(1, 7), count=st.integers(1, 3))
def test_any_unroll(drawn, steps, batch, count):
    window = drawn.draw(st.none() | st.integers(1, steps), "window")
    bridge = drawn.draw(st.sampled_from(["full", "forward-only", "none"]), "bridge")
    optimiser = drawn.draw(st.sampled_from(["sgd", "adam"]), "optimiser")
    names = drawn.draw(st.sampled_from(["none", "flip+rotate", "crop", "cutout+contrast"]), "augmentation")
    numbers = drawn.draw(st.sampled_from([1, batch]), "numbers")
    longest = drawn.draw(st.none() | st.integers(1, 9), "longest")
    passes = drawn.draw(st.sampled_from([general, Chain]), "passes")
    chosen = options(optimiser, bridge=bridge, window=window)
    starts = [Start(mlp(seed)[1], data(steps, batch, seed)[2], schedule(names, numbers, steps, seed)) for seed in range(count)]
    images, labels, _, query = data()
    net, _ = mlp()
    found = new_engine(net, passes).together(starts, images, labels, query, **chosen, longest=longest)
    for ours, start in zip(found, starts, strict=True):
        theirs = unroll.metagradient(
            net.loss, start.params, images, labels, start.batches, query, **chosen, augment=start.augment
        )
        # Adam divides by the root of squared gradients: where they are near zero, rounding grows
        agree(ours, theirs, 1e-12 if optimiser == "sgd" else 1e-9)


@pytest.mark.parametrize("window", [0, -1, 6])
def test_bad_window(window):
    net, params = mlp()
    with pytest.raises(RecollectError, match=f"window of {window} steps in an unroll of 5"):
        new_engine(net).metagradient(params, *data(), **options(window=window))


@needs_triton
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("fp32", 1e-4), pytest.param("tf32", 0.3, marks=needs_cuda), pytest.param("bf16", 0.4, marks=needs_cuda)],
)
def test_convnet_against_the_reference(name, tolerance, optimiser):
    from recollect.fast.convnet import ConvNet

    net = Network(f"convnet:width=16,depth={1 if optimiser == 'sgd' else 2}", (1, 8, 8), 3)
    chosen = options(optimiser, window=2, augment=schedule("flip+rotate", 2, 3))
    noise = torch.Generator().manual_seed(0)
    params = {n: (p + 0.1 * torch.randn(p.shape, generator=noise)).to(DEVICE) for n, p in net.fresh(0).items()}
    images, labels, batches, (query, truth) = data(3, 2, shape=(1, 8, 8), kind=torch.float32)
    query, truth = query[:3], truth[:3]
    ours = Engine(ConvNet(net, name), name).metagradient(params, images, labels, batches, (query, truth), **chosen)
    wide = {n: p.double() for n, p in params.items()}
    theirs = unroll.metagradient(net.loss, wide, images.double(), labels, batches, (query.double(), truth), **chosen)
    agree(ours, theirs, tolerance)


# ---- several networks, several calls --------------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["mlp:width=6", "convnet:width=4,depth=1"])  # stacked; side by side
@pytest.mark.parametrize("options", [{}, {"window": 2, "bridge": "forward-only"}, {"optimiser": "adam"}, {"names": ("flip",)}])
def test_together_with_images_of_their_own(network, options):
    """As many tasks at a time: each inner network has its own recalled set, labels and real images."""
    options, net = dict(options), Network(network, (1, 4, 4), 3)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3, 9, 1, 4, 4, generator=generator, dtype=torch.float64).to(DEVICE)
    labels = torch.stack([torch.randperm(9, generator=generator) % 3 for _ in range(3)]).to(DEVICE)
    query = torch.randn(3, 5, 1, 4, 4, generator=generator, dtype=torch.float64).to(DEVICE), labels[:, :5]
    names, starts = options.pop("names", ()), []
    for seed in range(3):
        params = {name: p.double().to(DEVICE) for name, p in net.fresh(seed).items()}
        batches = torch.stack([torch.randperm(9, generator=generator)[:4] for _ in range(4)]).to(DEVICE)
        drawn = augment.Schedule.of([augment.draw(names, 4, generator) for _ in range(4)]) if names else None
        starts.append(Start(params, batches, drawn))
    options = {"lr": 0.1, "momentum": 0.9, **options}
    engine = new_engine(net)
    # Adam makes steps of the rounding of a gradient that is 0 (a bias before a norm), and a GPU's sums have no fixed order
    tolerance = 1e-8 if DEVICE == "cuda" and options.get("optimiser") == "adam" else 1e-12
    for _ in range(2):
        found = engine.together(starts, images, labels, query, **options)
        for k, (ours, start) in enumerate(zip(found, starts, strict=True)):
            real = query[0][k], query[1][k]
            theirs = unroll.metagradient(
                net.loss, start.params, images[k], labels[k], start.batches, real, augment=start.augment, **options
            )
            agree(ours, theirs, tolerance)


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_together_is_one_by_one(optimiser):
    net, _ = mlp()
    starts = [Start(mlp(seed)[1], data(seed=seed)[2], schedule("rotate", 4, 5, seed)) for seed in range(3)]
    images, labels, _, query = data()
    found = new_engine(net).together(starts, images, labels, query, **options(optimiser, window=4))
    for ours, start in zip(found, starts, strict=True):
        alone = options(optimiser, window=4, augment=start.augment)
        agree(ours, new_engine(net).metagradient(start.params, images, labels, start.batches, query, **alone))
    assert distance(found[0].images, found[1].images) > 0.1


@pytest.mark.parametrize("first", ["other", "nan"])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_a_call_leaves_nothing_behind(optimiser, window, first):
    net, _ = mlp()
    used = new_engine(net)
    images, labels, batches, query = data(seed=1)
    before = images * torch.nan if first == "nan" else images
    chosen = options(optimiser, window=window)
    used.metagradient(mlp(1)[1], before, labels, batches, query, **chosen, augment=schedule("rotate", 4, 5, seed=1))
    (plan,) = used.plans.values()
    ours = used.metagradient(mlp(2)[1], *data(seed=2), **chosen, augment=schedule("rotate", 4, 5, seed=2))
    assert list(used.plans.values()) == [plan]
    theirs = new_engine(net).metagradient(mlp(2)[1], *data(seed=2), **chosen, augment=schedule("rotate", 4, 5, seed=2))
    same(ours, theirs)


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_steps_that_ran_before_they_were_captured(monkeypatch, optimiser, steps):
    """As on a GPU, where every step is run a few times before its capture."""
    module = importlib.import_module("recollect.fast.engine")

    def warmed(step, *_):
        for _ in range(module.WARM_UP):
            step()
        return step

    monkeypatch.setattr(module, "captured", warmed)
    net, params = mlp()
    chosen = options(optimiser, augment=schedule("rotate", 4, steps))
    ours = new_engine(net).metagradient(params, *data(steps), **chosen)
    agree(ours, unroll.metagradient(net.loss, params, *data(steps), **chosen))


def test_what_was_returned_stays():
    net, params = mlp()
    used = new_engine(net)
    found = used.metagradient(params, *data(), **options())
    kept = unroll.MetaGradient(found.loss.clone(), found.images.clone(), {n: p.clone() for n, p in found.params.items()})
    used.metagradient(mlp(1)[1], *data(seed=1), **options())
    same(found, kept)


def test_what_was_given_stays():
    net, params = mlp()
    images, labels, batches, query = data()
    new_engine(net).metagradient(params, images, labels, batches, query, **options(augment=schedule("rotate", 4, 5)))
    for ours, theirs in zip((images, labels, batches, *query), (*data()[:3], *data()[3]), strict=True):
        assert torch.equal(ours, theirs)
    assert all(torch.equal(p, mlp()[1][name]) for name, p in params.items())


class Cycle:
    """What only the garbage collector frees."""

    def __init__(self, held: object):
        self.held, self.itself = held, self


@pytest.fixture
def eager_collector():
    """The garbage collector runs whenever a few objects are made."""
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    yield
    gc.enable()
    gc.set_threshold(*before)


def busy() -> None:
    _ = [[number] for number in range(100)]


def test_nothing_is_collected_meanwhile(eager_collector):
    with no_garbage():
        freed = weakref.ref(Cycle(None))
        busy()
        assert freed() is not None
    busy()
    assert freed() is None
    gc.disable()
    with no_garbage():
        pass
    assert not gc.isenabled()  # as it was


def test_one_thread_at_a_time_is_without_the_collector():
    order, first_is_in = [], threading.Event()

    def other() -> None:
        first_is_in.wait()
        with no_garbage():
            order.append(("other", gc.isenabled()))

    thread = threading.Thread(target=other)
    thread.start()
    with no_garbage():
        first_is_in.set()
        thread.join(0.1)
        order.append(("first", gc.isenabled()))
    thread.join()
    assert order == [("first", False), ("other", False)]
    assert gc.isenabled()


@pytest.mark.skipif(DEVICE == "cpu", reason="captures need a GPU")
def test_an_old_graph_does_not_spoil_a_capture(eager_collector):
    """Freed while another is captured, it would invalidate that one."""
    counter, calls, old = torch.zeros(1, device=DEVICE), 0, []

    def step() -> None:
        nonlocal calls
        calls += 1
        counter.add_(1)
        if calls == WARM_UP + 1:  # this is the capture
            old.clear()
        busy()

    old.append(Cycle(captured(lambda: counter.add_(1), counter.device)))
    replay = captured(step, counter.device)
    counter.zero_()
    replay()
    assert counter.item() == 1


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_unrolls_of_different_lengths_share_a_plan(optimiser):
    """Longer, shorter, longer: what the longer ones kept must not show in the shorter one."""
    net, params = mlp()
    used, plans = new_engine(net), set()
    for seed, steps in enumerate((5, 3, 2, 4)):
        chosen = options(optimiser, window=2)
        numbers = schedule("rotate", 4, steps, seed)
        given = data(steps, seed=seed)
        images, labels, batches, query = given
        start = Start(params, batches, numbers)
        (ours,) = used.together([start], images, labels, query, **chosen, longest=5)
        agree(ours, unroll.metagradient(net.loss, params, *given, **chosen, augment=numbers))
        plans |= {id(plan) for plan in used.plans.values()}
    assert len(plans) == len(used.plans) == 1


CHANGES = {
    "rate": dict(lr=0.1),
    "momentum": dict(momentum=0.5),
    "no bridge": dict(bridge="none"),
    "bridge cut": dict(bridge="forward-only"),
    "window": dict(window=2),
    "optimiser": dict(optimiser="adam"),
    "no augmentation": dict(augment=None),
    "two augmentations": dict(augment=schedule("rotate+contrast", 4, 5)),
    "two in another order": dict(augment=schedule("contrast+rotate", 4, 5)),
    "one for all images": dict(augment=schedule("rotate", 1, 5)),
    "other numbers": dict(augment=schedule("rotate", 4, 5, seed=3)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_call_with_another_option(change):
    """Whatever a plan depends on, changed by itself and back."""
    net, params = mlp()
    used = new_engine(net)
    for one in (change, {}, change):
        chosen = options(augment=schedule("rotate", 4, 5)) | one
        ours = used.metagradient(params, *data(), **chosen)
        agree(ours, unroll.metagradient(net.loss, params, *data(), **chosen))


@pytest.mark.parametrize(("steps", "batch", "samples"), [(6, 4, 6), (4, 4, 6), (5, 3, 6), (5, 4, 5)])
def test_another_call_with_another_shape(steps, batch, samples):
    net, params = mlp()
    used = new_engine(net)
    used.metagradient(params, *data(), **options())
    images, labels, batches, query = data(steps, batch)
    given = (images[:samples], labels[:samples], batches % samples, (query[0][:samples], query[1][:samples]))
    agree(used.metagradient(params, *given, **options()), unroll.metagradient(net.loss, params, *given, **options()))


def test_another_call_in_another_type():
    net, params = mlp()
    used = new_engine(net)
    images, labels, batches, (query, truth) = data()
    narrow = {name: p.float() for name, p in params.items()}
    used.metagradient(narrow, images.float(), labels, batches, (query.float(), truth), **options())
    ours = used.metagradient(params, images, labels, batches, (query, truth), **options())
    agree(ours, unroll.metagradient(net.loss, params, images, labels, batches, (query, truth), **options()))


def test_another_call_with_another_augmentation_of_one_network():
    net, params = mlp()
    used = new_engine(net)
    images, labels, batches, query = data()
    rotate, crop = schedule("rotate", 4, 5), schedule("crop", 4, 5)
    for second in (rotate, None, crop):
        starts = [Start(params, batches, rotate), Start(params, batches, second)]
        _, ours = used.together(starts, images, labels, query, **options())
        agree(ours, unroll.metagradient(net.loss, params, *data(), **options(), augment=second))


def test_plans_are_kept_for_a_while():
    """An outer step that draws one of two augmentations comes back to both; of many, some are dropped."""
    net, params = mlp()
    used, seen = new_engine(net), []
    for names in ("rotate", "crop", "rotate", "crop"):
        used.metagradient(params, *data(), **options(augment=schedule(names, 4, 5)))
        seen.append(list(used.plans.values()))
    assert len(seen[3]) == 2
    assert seen[1] == seen[2] == seen[3]
    for lr in range(1, 10):
        used.metagradient(params, *data(), **options(lr=lr / 100))
    assert 1 <= len(used.plans) <= MOST_PLANS


# ---- in pieces ------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("most", [1, 2, 3, 5, 6, 7, 100])
def test_pieces_are_the_whole(most, passes):
    net, params = mlp()
    whole = passes(net)
    pieces = Pieces(whole, most)
    images = torch.randn(7, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(DEVICE)
    labels = torch.arange(7, device=DEVICE) % 3
    vector, mu = pieces.pack(params), pieces.pack(mlp(1)[1])
    given, mu = (vector[None], images[None], labels[None]), mu[None]
    assert distance(pieces.gradient(*given), whole.gradient(*given)) < 1e-12
    for found, expected in zip(pieces.judge(*given), whole.judge(*given), strict=True):
        assert distance(found, expected) < 1e-12
    for found, expected in zip(pieces.adjoint(*given, mu), whole.adjoint(*given, mu), strict=True):
        assert distance(found, expected) < 1e-12


@pytest.mark.parametrize("most", [1, 3, 4])
def test_an_unroll_in_pieces(most):
    """Three divides neither the batch of four nor the query of five."""
    net, params = mlp()
    chosen = options(augment=schedule("flip+rotate", 4, 5))
    ours = Engine(Pieces(general(net), most)).metagradient(params, *data(), **chosen)
    agree(ours, unroll.metagradient(net.loss, params, *data(), **chosen))


def pretend_memory(monkeypatch, most: int) -> None:
    """No plan fits that takes more than `most` images at a time."""
    module = importlib.import_module("recollect.fast.engine")
    real = module._Plan

    def plan(flat, *others):
        if not isinstance(flat, Pieces) or flat.most > most:
            raise torch.OutOfMemoryError("pretended")
        return real(flat, *others)

    monkeypatch.setattr(module, "_Plan", plan)


def test_out_of_memory_it_says_so_and_goes_on_in_pieces(monkeypatch):
    pretend_memory(monkeypatch, most=2)
    net, params = mlp()
    used, reference = new_engine(net), unroll.metagradient(net.loss, params, *data(), **options())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        agree(used.metagradient(params, *data(), **options()), reference)
    assert "at most 2 images in one pass" in str(said[-1].message)
    agree(used.metagradient(params, *data(), **options()), reference)


@pytest.mark.filterwarnings("ignore:out of GPU memory")
def test_out_of_memory_for_a_single_image(monkeypatch):
    pretend_memory(monkeypatch, most=0)
    net, params = mlp()
    with pytest.raises(torch.OutOfMemoryError, match="pretended"):
        new_engine(net).metagradient(params, *data(), **options())


@both
def test_packs_and_unpacks(passes):
    net, params = mlp()
    flat = passes(net)
    vector = flat.pack(params)
    back = flat.unpack(vector, {})
    assert list(back) == list(params)
    assert torch.equal(flat.pack(back), vector)
    vector.zero_()
    assert all(torch.equal(back[name], p) for name, p in params.items())


# ---- which passes, and in which precision ---------------------------------------------------------------------------


@pytest.mark.parametrize("compute", ["auto", "fp32"])
def test_on_the_processor(compute):
    net = Network("mlp", (1, 8, 8), 3)
    flat, name = fast.passes(net, "cpu", compute)
    assert isinstance(flat, General)
    assert name == "fp32"


def test_what_the_processor_refuses():
    with pytest.raises(RecollectError, match="compute is tf32, which needs a CUDA device: give fp32 or auto"):
        fast.passes(Network("mlp", (1, 8, 8), 3), "cpu", "tf32")


@pytest.fixture
def chip(monkeypatch):
    """A GPU as `passes` sees it; the number is its compute capability."""

    def pretend(major: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Chip")
        monkeypatch.setattr(fast, "_said", set())

    return pretend


@needs_triton
@pytest.mark.parametrize(
    ("compute", "half", "name"),
    [("auto", True, "bf16"), ("auto", False, "tf32"), ("bf16", False, "bf16"), ("tf32", True, "tf32"), ("fp32", True, "fp32")],
)
def test_the_convnet_on_a_gpu(chip, compute, half, name):
    from recollect.fast.convnet import ConvNet

    chip(9)
    flat, found = fast.passes(Network("convnet:width=16,depth=2", (1, 8, 8), 3), "cuda", compute, half=half)
    assert isinstance(flat.flat, ConvNet)
    assert flat.flat.precision == found == name


@needs_triton
def test_another_network_on_a_gpu_says_why_once(chip):
    chip(9)
    net = Network("alexnet:width=2", (3, 8, 8), 3)
    with pytest.warns(UserWarning, match="the general path runs this network: it is not a ConvNet"):
        flat, name = fast.passes(net, "cuda")
    assert isinstance(flat, General)
    assert name == "tf32"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fast.passes(net, "cuda:0", "fp32")[1] == "fp32"
    with pytest.warns(
        UserWarning, match="bf16 is for the ConvNet's kernels and chains with convolutions, and it is not a ConvNet"
    ):
        assert fast.passes(net, "cuda", "bf16")[1] == "tf32"


@needs_triton
@pytest.mark.parametrize(
    ("network", "half", "passes", "precision"),
    [("mlp", True, Chain, "tf32"), ("lamaml", True, Half, "bf16"), ("lamaml", False, Chain, "tf32")],
)
def test_chains_on_a_gpu(chip, network, half, passes, precision):
    chip(9)
    flat, name = fast.passes(Network(network, (1, 8, 8), 3), "cuda", half=half)  # a warning would be an error
    assert type(flat) is passes
    assert name == precision


@needs_triton
def test_half_precision_of_chains_on_a_gpu(chip):
    chip(9)
    flat, name = fast.passes(Network("lamaml", (1, 8, 8), 3), "cuda", "bf16")
    assert type(flat) is Half
    assert name == "bf16"
    with pytest.warns(UserWarning, match="it is not a ConvNet.*computing in TF32"):
        flat, name = fast.passes(Network("mlp", (1, 8, 8), 3), "cuda", "bf16")
    assert type(flat) is Chain
    assert name == "tf32"
    chip(7)
    with pytest.warns(UserWarning, match="Chip has neither bf16 nor TF32"):
        flat, name = fast.passes(Network("lamaml", (1, 8, 8), 3), "cuda", "bf16")
    assert type(flat) is Chain
    assert name == "fp32"


class Squared(nn.Sequential):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images**2)


def hooked() -> nn.Linear:
    layer = nn.Linear(64, 3)
    layer.register_forward_hook(lambda *_: None)
    return layer


TWICE = nn.Linear(64, 64)


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Flatten(), TWICE, nn.ReLU(), TWICE, nn.ReLU(), nn.Linear(64, 3)],
        [nn.Flatten(), hooked()],
        [nn.Flatten(2), nn.Linear(64, 3)],
        [nn.Flatten(), nn.Linear(64, 3, bias=False)],
        [nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3)],
        [nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3), nn.ReLU()],
        [nn.Linear(8, 3), nn.Flatten()],
        [nn.Conv2d(1, 3, 8), nn.Flatten()],
        [nn.Conv2d(1, 3, 8), nn.ReLU(), nn.Flatten()],
        [nn.Flatten()],
        [nn.Conv2d(1, 4, 3, padding="same"), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3)],
        [nn.Conv2d(1, 4, (3, 1)), nn.ReLU(), nn.Flatten(), nn.Linear(192, 3)],
        [nn.Conv2d(1, 4, 3, stride=(1, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3)],
        [nn.Conv2d(1, 4, 3, dilation=2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)],
        [nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3)],
        [nn.Conv2d(1, 4, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)],
        [nn.Conv2d(1, 4, 3), nn.Flatten(), nn.ReLU(), nn.Linear(144, 3)],
        [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)],
    ],
)
def test_what_is_no_chain(layers):
    assert not fits(Network(lambda shape, classes: nn.Sequential(*layers), (1, 8, 8), 3))


def test_what_is_a_chain():
    linear = [nn.Flatten(), nn.Linear(64, 3)]
    assert fits(Network("mlp:width=8,depth=3", (1, 8, 8), 3))
    assert fits(Network("lamaml", (1, 8, 8), 3))
    assert fits(Network(lambda shape, classes: nn.Sequential(*linear), (1, 8, 8), 3))
    assert not fits(Network(lambda shape, classes: Squared(*linear), (1, 8, 8), 3))


@needs_triton
def test_an_old_gpu_computes_in_fp32(chip):
    chip(7)
    with pytest.warns(UserWarning, match="Chip has neither bf16 nor TF32"):
        flat, name = fast.passes(Network("convnet:width=16,depth=2", (1, 8, 8), 3), "cuda")
    assert flat.flat.precision == name == "fp32"


def test_a_gpu_without_triton(chip, monkeypatch):
    chip(9)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.warns(UserWarning, match="Triton is not installed"):
        flat, name = fast.passes(Network("convnet:width=16,depth=2", (1, 8, 8), 3), "cuda")
    assert isinstance(flat, General)
    assert name == "tf32"


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16"])
def test_precision_is_put_back(name):
    def flags() -> tuple[bool, bool, bool]:
        products = torch.backends.cuda.matmul
        return products.allow_tf32, torch.backends.cudnn.allow_tf32, products.allow_bf16_reduced_precision_reduction

    def fails() -> None:
        with precision(name):
            assert flags() == (name != "fp32", name != "fp32", False)
            raise KeyError

    before = flags()
    with pytest.raises(KeyError):
        fails()
    assert flags() == before
