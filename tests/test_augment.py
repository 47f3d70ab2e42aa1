"""Each transform on examples small enough to see; and what the adjoint of an unroll needs of all of them."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from recollect.data import augment
from recollect.data.augment import TRANSFORMS, apply, draw, draw_shared, parse
from recollect.errors import RecollectError

ALL = tuple(TRANSFORMS)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_images(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=seeded(), dtype=torch.float64)


def numbers(*rows: tuple[float, float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# Names and draws


def test_parse():
    assert parse("none") == parse("") == ()
    assert parse("rotate") == ("rotate",)
    assert parse("flip+rotate") == ("flip", "rotate")
    assert parse("+".join(ALL)) == ALL


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("flop", r"unknown augmentation 'flop': did you mean 'flip'.*Join several with '\+'"),
        ("flip,rotate", "unknown augmentation 'flip,rotate'"),
        ("flip+rotation", "unknown augmentation 'rotation': did you mean 'rotate'"),
        ("flip+", "unknown augmentation ''"),
    ],
)
def test_an_unknown_name_offers_the_nearest(names, message):
    with pytest.raises(RecollectError, match=message):
        parse(names)


def test_draws_are_fresh_for_every_image_and_fixed_by_the_generator():
    drawn = draw(ALL, 500, seeded(1))
    assert tuple(drawn) == ALL
    for values in drawn.values():
        assert values.shape == (500, 2)
        assert values.min() >= 0
        assert values.max() < 1
        assert len(values.unique()) > 990
    again, other = draw(ALL, 500, seeded(1)), draw(ALL, 500, seeded(2))
    assert all(torch.equal(drawn[name], again[name]) for name in ALL)
    assert not any(torch.equal(drawn[name], other[name]) for name in ALL)


def test_draws_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    apply(some_images(2, 3, 8, 8), draw(ALL, 2, seeded()) | draw_shared(ALL, seeded()))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_shared_draw_is_one_transform_with_one_parameter():
    generator, seen = seeded(), Counter()
    for _ in range(300):
        ((name, values),) = draw_shared(("flip", "rotate", "crop"), generator).items()
        assert values.shape == (1, 2)
        seen[name] += 1
    assert all(70 < seen[name] < 130 for name in ("flip", "rotate", "crop"))  # 100 each, +-4 deviations
    assert draw_shared((), generator) == {}


@pytest.mark.parametrize("name", ALL)
def test_one_parameter_does_the_same_to_every_image(name):
    picture = some_images(1, 3, 9, 7)
    drawn = {name: torch.rand(1, 2, generator=seeded(3))}
    found = apply(picture.expand(4, -1, -1, -1), drawn)
    assert torch.equal(found, apply(picture, drawn).expand(4, -1, -1, -1))


# What each does


def test_flip_is_left_to_right_for_a_half_of_the_draws():
    images = some_images(4, 2, 3, 5)
    found = apply(images, {"flip": numbers((0.0, 0.9), (0.49, 0.9), (0.5, 0.1), (0.99, 0.1))})
    columns = [4, 3, 2, 1, 0]
    assert torch.equal(found[:2], images[:2][..., columns])
    assert torch.equal(found[2:], images[2:])


@pytest.mark.parametrize(("height", "width"), [(16, 16), (16, 24), (9, 5), (2, 2)])
def test_crop_shifts_by_whole_pixels_and_fills_with_zeros(height, width):
    reach = max(1, round(min(height, width) / 8))
    steps = 2 * reach + 1
    image = some_images(1, 2, height, width)
    for down in range(-reach, reach + 1):
        for right in range(-reach, reach + 1):
            drawn = {"crop": numbers(((down + reach + 0.5) / steps, (right + reach + 0.5) / steps))}
            expected = torch.zeros_like(image)
            for i in range(height):
                for j in range(width):
                    if 0 <= i + down < height and 0 <= j + right < width:
                        expected[0, :, i, j] = image[0, :, i + down, j + right]
            assert torch.equal(apply(image, drawn), expected)


def test_crop_at_the_ends_of_the_draw():
    image = torch.ones(1, 1, 8, 8)
    nearly_one = math.nextafter(1.0, 0.0)
    for values in (numbers((0.0, 0.0)), numbers((nearly_one, nearly_one)), torch.tensor([[1 - 2**-24] * 2])):
        assert apply(image.to(values), {"crop": values}).sum() == 49


@pytest.mark.parametrize(("height", "width"), [(8, 8), (8, 12), (5, 7), (1, 3)])
def test_cutout_zeroes_a_square_of_half_a_side(height, width):
    side = max(1, round(min(height, width) / 2))
    image = some_images(1, 2, height, width)
    for row in range(height):
        for column in range(width):
            drawn = {"cutout": numbers(((row + 0.5) / height, (column + 0.5) / width))}
            top, left = row - side // 2, column - side // 2
            expected = image.clone()
            expected[:, :, max(top, 0) : top + side, max(left, 0) : left + side] = 0
            assert torch.equal(apply(image, drawn), expected)


def rotated_by_hand(image: Tensor, degrees: float) -> Tensor:
    """Bilinear, about the middle, counter-clockwise as one looks at it: distances are in pixels on both axes."""
    height, width = image.shape[1:]
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    found = torch.zeros_like(image)
    for i in range(height):
        for j in range(width):
            x, y = j - (width - 1) / 2, i - (height - 1) / 2
            column, row = cos * x - sin * y + (width - 1) / 2, sin * x + cos * y + (height - 1) / 2
            for r in (math.floor(row), math.floor(row) + 1):
                for c in (math.floor(column), math.floor(column) + 1):
                    if 0 <= r < height and 0 <= c < width:
                        found[:, i, j] += (1 - abs(row - r)) * (1 - abs(column - c)) * image[:, r, c]
    return found


@pytest.mark.parametrize("shape", [(2, 7, 7), (1, 6, 10), (3, 10, 5)], ids=str)
def test_rotation_against_one_written_out(shape):
    image = some_images(*shape)
    for number in (0.0, 0.2, 0.5, 0.8, 0.999):
        found = apply(image[None], {"rotate": numbers((number, 0.3))})[0]
        torch.testing.assert_close(found, rotated_by_hand(image, (2 * number - 1) * 15), rtol=0, atol=1e-12)
    torch.testing.assert_close(apply(image[None], {"rotate": numbers((0.5, 0.0))})[0], image)


def test_rotation_is_counter_clockwise_and_keeps_lengths():
    image = torch.zeros(1, 1, 21, 41, dtype=torch.float64)
    image[0, 0, 10, 35] = 1.0  # 15 to the right of the middle
    found = apply(image, {"rotate": numbers((0.5 + 10 / 30, 0.0))})[0, 0]  # by 10 degrees
    rows, columns = torch.arange(21.0) - 10, torch.arange(41.0) - 20
    up, right = -(found.sum(1) @ rows.double()) / found.sum(), (found.sum(0) @ columns.double()) / found.sum()
    assert math.degrees(math.atan2(up, right)) == pytest.approx(10, abs=1)
    assert math.hypot(up, right) == pytest.approx(15, abs=0.3)


def test_brightness_contrast_and_saturation_are_their_formulas():
    images, values = some_images(3, 3, 4, 5), numbers((0.0, 0.7), (0.3, 0.7), (0.9, 0.7))
    brightness, contrast, saturation = (apply(images, {n: values}) for n in ("brightness", "contrast", "saturation"))
    for n, number in enumerate([0.0, 0.3, 0.9]):
        mean, grey = images[n].mean(), images[n].mean(0)
        torch.testing.assert_close(brightness[n], images[n] + number - 0.5)
        torch.testing.assert_close(contrast[n], mean + (number + 0.5) * (images[n] - mean))
        torch.testing.assert_close(saturation[n], grey + 2 * number * (images[n] - grey))
    grey_images = images[:, :1]
    torch.testing.assert_close(apply(grey_images, {"saturation": values}), grey_images)


def test_several_are_applied_in_the_order_of_their_names():
    images, generator = some_images(5, 2, 8, 8), seeded(4)
    drawn = draw(("flip", "crop", "cutout"), 5, generator)
    one_by_one = images
    for name in ("flip", "crop", "cutout"):
        one_by_one = apply(one_by_one, {name: drawn[name]})
    assert torch.equal(apply(images, drawn), one_by_one)
    backwards = apply(images, {name: drawn[name] for name in ("cutout", "crop", "flip")})
    assert not torch.equal(backwards, one_by_one)
    assert apply(images, {}) is images


# What an unroll needs


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(6, 1, 8, 8), (6, 3, 5, 9)], ids=str)
def test_the_same_draw_gives_the_same_images_and_leaves_them_alone(name, shape):
    images, drawn = some_images(*shape), draw((name,), 6, seeded(5))
    before, values = images.clone(), drawn[name].clone()
    first, second = apply(images, drawn), apply(images, drawn)
    assert torch.equal(first, second)
    assert first.shape == images.shape
    assert first.dtype == images.dtype
    assert torch.equal(images, before)
    assert torch.equal(drawn[name], values)
    assert apply(images.float(), drawn).dtype == torch.float32


@pytest.mark.parametrize("name", ALL)
def test_every_transform_is_affine_and_its_gradient_is_right(name):
    x, y = some_images(2, 3, 3, 5, 4)
    drawn = draw((name,), 3, seeded(6))
    if name == "brightness":
        torch.testing.assert_close(apply(x, drawn) - x, apply(y, drawn) - y)
    mixed = 0.3 * apply(x, drawn) + 0.7 * apply(y, drawn)
    torch.testing.assert_close(apply(0.3 * x + 0.7 * y, drawn), mixed)
    assert torch.autograd.gradcheck(lambda images: apply(images, drawn), x[:, :, :4].requires_grad_())


@pytest.mark.parametrize("name", ALL)
def test_every_image_has_its_own_parameters(name):
    picture = some_images(1, 3, 16, 16).expand(40, -1, -1, -1)
    drawn = draw((name,), 40, seeded(7))
    found = apply(picture, drawn)
    assert not torch.equal(found[0].expand_as(found), found)
    for n in (0, 17):
        alone = apply(picture[:1], {name: drawn[name][n : n + 1]})
        torch.testing.assert_close(found[n : n + 1], alone)


def test_the_shares_are_the_documented_ones():
    assert (augment.ROTATION_DEGREES, augment.CROP_SHARE, augment.CUTOUT_SHARE, augment.SCALE) == (15.0, 0.125, 0.5, 1.2)


def test_scale_changes_each_side_by_itself():
    """A bright square covers 1/s of a side when its grid is s as wide; at s = 1 nothing moves."""
    low, high = 1 / augment.SCALE, augment.SCALE
    one = (1 - low) / (high - low)
    picture = some_images(1, 1, 12, 12)
    torch.testing.assert_close(apply(picture, {"scale": numbers((one, one))}), picture)
    square = torch.zeros(1, 1, 60, 60, dtype=torch.float64)
    square[..., 20:40, 20:40] = 1
    for row, wide, tall in (((0.0, one), high, 1), ((one, 1.0), 1, low)):
        found = apply(square, {"scale": numbers(row)})
        assert found.sum().item() == pytest.approx(400 * wide * tall, rel=0.03)
        assert found[0, 0, 30].sum().item() == pytest.approx(20 * wide, rel=0.06)
