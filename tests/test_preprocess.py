"""Normalisation and ZCA against float64 numpy; both undone to within half a grey level; damaged headers and sidecars."""

import json

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recollect.data.preprocess import Preprocess
from recollect.errors import RecollectError
from recollect.files import sha256

RNG = np.random.default_rng(0)


def smooth_pixels(count: int, channels: int, side: int) -> torch.Tensor:
    """Correlated like photographs, so that a few eigenvalues are large and most are next to nothing."""
    waves = np.cumsum(np.cumsum(RNG.normal(size=(count, channels, side, side)), -1), -2) + RNG.normal(size=(count, 1, 1, 1))
    scaled = (waves - waves.min((1, 2, 3), keepdims=True)) / np.ptp(waves, (1, 2, 3), keepdims=True)
    return torch.from_numpy((scaled * 255).round().astype(np.uint8))


def noise_pixels(*shape: int) -> torch.Tensor:
    return torch.from_numpy(RNG.integers(0, 256, shape, dtype=np.uint8))


def by_numpy(pixels: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """mean, std, and the normalised images, all in float64."""
    x = pixels.numpy().astype(np.float64) / 255
    mean, std = x.mean((0, 2, 3)), x.std((0, 2, 3))
    return mean, std, (x - mean[:, None, None]) / std[:, None, None]


def zca_by_numpy(pixels: torch.Tensor) -> np.ndarray:
    """Normalise per channel, whiten with eigenvalues + 0.1 under the root."""
    flat = by_numpy(pixels)[2].reshape(len(pixels), -1)
    values, vectors = np.linalg.eigh(np.cov(flat.T, bias=True))
    whitening = vectors @ np.diag(1 / np.sqrt(values + 0.1)) @ vectors.T
    return ((flat - flat.mean(0)) @ whitening).reshape(pixels.shape)


@pytest.mark.parametrize("shape", [(50, 3, 5, 7), (1, 1, 4, 4), (300, 1, 8, 8)])
def test_mean_and_std_against_numpy(shape):
    pixels = noise_pixels(*shape) // 3
    found = Preprocess.fit(pixels)
    mean, std, images = by_numpy(pixels)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(found.std, std, rtol=1e-12)
    assert found(pixels).dtype == torch.float32
    np.testing.assert_allclose(found(pixels), images, rtol=1e-5, atol=1e-5)


def test_std_of_a_channel_with_one_grey_pixel():
    pixels = torch.full((1000, 1, 10, 10), 250, dtype=torch.uint8)
    pixels[7, 0, 3, 3] = 251
    np.testing.assert_allclose(Preprocess.fit(pixels).std, by_numpy(pixels)[1], rtol=1e-9)


@pytest.mark.parametrize("count", [1, 10, 97])
def test_a_constant_channel_is_only_shifted(count):
    for level in range(256):  # some levels are not exact in float64, and none may be divided by what is left over
        pixels = torch.cat([torch.full((count, 1, 2, 2), level, dtype=torch.uint8), noise_pixels(count, 1, 2, 2)], 1)
        found = Preprocess.fit(pixels)
        assert found.std[0] == 1.0
        np.testing.assert_allclose(found(pixels)[:, 0], 0.0, atol=1e-6)
        another = found(255 - pixels)[:, 0]
        np.testing.assert_allclose(another, (255 - 2 * level) / 255, atol=1e-6)


@pytest.mark.parametrize(
    "pixels",
    [smooth_pixels(300, 3, 6), smooth_pixels(5000, 1, 4), smooth_pixels(20, 2, 5), noise_pixels(200, 1, 6, 4)],
    ids=["smooth", "several blocks", "fewer images than pixels", "noise"],
)
def test_zca_against_numpy(pixels):
    found = Preprocess.fit(pixels, "zca")
    np.testing.assert_allclose(found(pixels), zca_by_numpy(pixels), atol=2e-4)
    assert torch.allclose(found.zca.matrix, found.zca.matrix.T, atol=1e-5)


def test_zca_of_a_constant_channel_is_finite():
    pixels = noise_pixels(50, 2, 4, 4)
    pixels[:, 0] = 77
    images = Preprocess.fit(pixels, "zca")(pixels)
    assert images.isfinite().all()
    np.testing.assert_allclose(images[:, 0], 0.0, atol=1e-4)


@pytest.mark.parametrize("kind", ["normalise", "zca"])
@pytest.mark.parametrize("pixels", [smooth_pixels(200, 3, 8), noise_pixels(40, 1, 7, 5)], ids=["smooth", "noise"])
def test_undo_gives_the_pixels_back(kind, pixels):
    preprocess = Preprocess.fit(pixels, kind)
    unseen = torch.cat([pixels[:9], noise_pixels(9, *pixels.shape[1:])])
    grey_levels = preprocess.undo(preprocess(unseen)) * 255
    assert (grey_levels - unseen).abs().max() < 0.5
    assert torch.equal(grey_levels.round().to(torch.uint8), unseen)


def test_undo_of_one_and_of_many_channels_keeps_them_apart():
    preprocess = Preprocess((0.25, 0.5), (0.5, 2.0))
    found = preprocess.undo(torch.ones(1, 2, 1, 1))
    assert found.flatten().tolist() == [0.75, 2.5]


def test_an_unknown_kind_offers_the_nearest():
    with pytest.raises(RecollectError, match="unknown preprocessing 'normalize': did you mean 'normalise'"):
        Preprocess.fit(noise_pixels(2, 1, 2, 2), "normalize")


# Header and sidecar


def whitened(seed_pixels: torch.Tensor | None = None) -> Preprocess:
    return Preprocess.fit(noise_pixels(30, 2, 3, 3) if seed_pixels is None else seed_pixels, "zca")


@pytest.mark.parametrize("kind", ["normalise", "zca"])
def test_what_is_written_is_what_is_read(tmp_path, kind):
    pixels = noise_pixels(30, 2, 3, 3)
    preprocess = Preprocess.fit(pixels, kind)
    preprocess.save_sidecar(tmp_path)
    assert len(list(tmp_path.iterdir())) == (kind == "zca")
    found = Preprocess.from_json(json.loads(json.dumps(preprocess.to_json())), tmp_path)
    assert (found.mean, found.std) == (preprocess.mean, preprocess.std)
    assert torch.equal(found(pixels), preprocess(pixels))
    assert found.to_json() == preprocess.to_json()


def test_memories_of_one_dataset_share_a_sidecar(tmp_path):
    pixels = noise_pixels(30, 2, 3, 3)
    for _ in range(2):
        whitened(pixels).save_sidecar(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    whitened().save_sidecar(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_missing_sidecar_is_named(tmp_path):
    header = whitened().to_json()
    with pytest.raises(RecollectError, match=f"{header['zca']['file']} is not beside the memory in {tmp_path}: copy it"):
        Preprocess.from_json(header, tmp_path)


def test_any_damage_to_a_sidecar_is_noticed(tmp_path):
    preprocess = whitened()
    preprocess.save_sidecar(tmp_path)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    damaged = [data[:length] for length in range(0, len(data), 50)]
    damaged += [data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :] for i in range(0, len(data), 11)]
    damaged += [whitened().zca.file_bytes(), data + b"\0"]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(RecollectError, match="damaged: its content does not match its name; copy it again"):
            Preprocess.from_json(preprocess.to_json(), tmp_path)


@pytest.mark.parametrize(
    "tensors",
    [
        {"mean": torch.zeros(4), "matrix": torch.zeros(3, 3)},
        {"mean": torch.zeros(2, 2), "matrix": torch.zeros(4, 4)},
        {"mean": torch.zeros(4), "matrix": torch.zeros(4, 4).double()},
        {"mean": torch.zeros(4, dtype=torch.int32), "matrix": torch.zeros(4, 4)},
        {"mean": torch.zeros(4)},
        {},
    ],
)
def test_a_sidecar_of_other_things_is_refused_by_any_name(tmp_path, tensors):
    data = safetensors.torch.save(tensors)
    for content in (data, b"no tensors at all"):
        name = f"zca-{sha256(content)[:16]}.safetensors"  # undamaged, by its name
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RecollectError, match=f"whitening file .*{name}"):
            Preprocess.from_json({"mean": [0.0], "std": [1.0], "zca": {"file": name}}, tmp_path)


def test_a_sidecar_is_looked_for_beside_the_memory_and_nowhere_else(tmp_path):
    preprocess, folder = whitened(), tmp_path / "memories"
    (folder / "deeper").mkdir(parents=True)
    preprocess.save_sidecar(tmp_path)
    preprocess.save_sidecar(folder / "deeper")
    file = preprocess.zca.file_name
    names = [f"../{file}", f"deeper/{file}", str(tmp_path / file), f"../memories/deeper/{file}"]
    names += ["../../etc/passwd", "/etc/passwd", "", ".", "..", "deeper", "x" * 300, "nul\0byte", file + "/"]
    for name in names:
        header = preprocess.to_json() | {"zca": {"file": name}}
        with pytest.raises(RecollectError, match="is not beside the memory"):
            Preprocess.from_json(header, folder)


@pytest.mark.parametrize(
    "edit",
    [
        {"std": [0.0, 1.0]},
        {"std": [-1.0, 1.0]},
        {"std": [float("nan"), 1.0]},
        {"std": [float("inf"), 1.0]},
        {"mean": [float("nan"), 0.0]},
        {"mean": [float("-inf"), 0.0]},
        {"mean": [10**400, 0]},
        {"mean": [0.5]},
        {"mean": [], "std": []},
        {"mean": None},
        {"mean": 0.5},
        {"mean": [[0.5], [0.5]]},
        {"mean": ["a", "b"]},
        {"std": {}},
        {"zca": "zca.safetensors"},
        {"zca": {}},
        {"zca": []},
        {"zca": 1},
    ],
)
def test_a_damaged_header_is_refused(tmp_path, edit):
    whole = {"mean": [0.5, 0.5], "std": [0.5, 0.5], "zca": None}
    assert Preprocess.from_json(whole, tmp_path).std == (0.5, 0.5)
    with pytest.raises(RecollectError, match="is damaged: mean, std and zca are expected"):
        Preprocess.from_json(whole | edit, tmp_path)


@pytest.mark.parametrize("name", ["mean", "std", "zca"])
def test_a_header_without_a_field_is_refused(tmp_path, name):
    header = {"mean": [0.5], "std": [0.5], "zca": None}
    del header[name]
    with pytest.raises(RecollectError, match="is damaged"):
        Preprocess.from_json(header, tmp_path)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["file", "mean"]), inner, max_size=2),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(st.fixed_dictionaries({}, optional={"mean": values, "std": values, "zca": values}) | values)
def test_no_header_gets_past(tmp_path_factory, header):
    try:
        found = Preprocess.from_json(header, tmp_path_factory.getbasetemp())
    except RecollectError:
        return
    assert len(found.mean) == len(found.std) > 0
    assert np.isfinite([*found.mean, *found.std]).all()
    assert min(found.std) > 0


@pytest.mark.parametrize("kind", ["normalise", "zca"])
def test_on_a_device_some_at_a_time(kind, monkeypatch):
    pixels = torch.randint(256, (10, 1, 4, 4), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    preprocess = Preprocess.fit(pixels, kind)
    monkeypatch.setattr("recollect.data.preprocess.MOST_PREPARED", 4)
    assert torch.equal(preprocess.on("cpu", pixels), preprocess(pixels))
    assert torch.allclose(preprocess.on("cpu:0", pixels), preprocess(pixels), atol=1e-5)
