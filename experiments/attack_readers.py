"""Files of data that the attack damages, and their readers: official files, archives, pictures."""

import contextlib
import gzip
import io
import pickle
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from random import Random

import numpy as np
from attack_damage import SNIPPETS, Files, Kind, hurt, png_chunks, program
from PIL import Image

from recollect import data
from recollect.classifier import read_picture
from recollect.data import fitting, readers
from recollect.data.check import check
from recollect.data.images import Parts, make_images
from recollect.reading import Reading
from recollect.studio import uploads

CLASSES = ("cat", "dog", "frog")


def toy_arrays(channels: int = 1, per_class: int = 12, side: int = 8) -> dict[str, np.ndarray]:
    labels = np.arange(len(CLASSES) * per_class) % len(CLASSES)
    images = np.random.default_rng(0).integers(0, 100, (len(labels), channels, side, side), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[:, 2 * label : 2 * label + 2] += 150
    return {"images": images, "labels": labels, "class_names": np.array(CLASSES)}


# --- data ----------------------------------------------------------------------------------------------------------------


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@cache
def idx_whole() -> tuple[bytes, ...]:
    images, labels = np.arange(40 * 16, dtype=np.uint8).reshape(40, 4, 4), np.arange(40, dtype=np.uint8) % 10
    return idx_bytes(images), idx_bytes(labels), idx_bytes(images[:20]), idx_bytes(labels[:20])


def damaged_idx(rng: Random) -> Files:
    parts, at = list(idx_whole()), rng.randrange(4)
    if rng.random() < 0.5:
        parts[at] = hurt(rng, gzip.compress(parts[at], 1))
    else:
        parts[at] = hurt(rng, parts[at])
        if rng.random() < 0.4:
            parts[at] = gzip.compress(parts[at] + bytes(rng.choice((0, 10**6))), 1) * rng.choice((1, 1, 2))
    return {str(number): data for number, data in enumerate(parts)}


def _read_parts(read: Callable[[Sequence[Path]], Parts], count: int, *suffixes: str) -> Callable[[Path, Random], None]:
    def reads(folder: Path, rng: Random) -> None:
        make_images("x", read([folder / name for name in (suffixes or map(str, range(count)))]))

    return reads


@cache
def cifar_whole(columns: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    records = [rng.integers(0, 256, (60 if columns == 1 else 300, columns + 3072), dtype=np.uint8) for _ in range(2)]
    for each in records:
        each[:, columns - 1] = np.arange(len(each)) % (10 if columns == 1 else 100)
        if columns == 2:
            each[:, 0] = each[:, 1] // 5
    return tuple(records)


def damaged_cifar10(rng: Random) -> Files:
    train, test = cifar_whole(1)
    parts = [each.tobytes() for each in np.array_split(train, 5)] + [test[:20].tobytes()]
    at = rng.randrange(6)
    parts[at] = hurt(rng, parts[at])
    return {f"{number}.bin": data for number, data in enumerate(parts)}


def damaged_cifar100(rng: Random) -> Files:
    train, test = cifar_whole(2)
    parts = [train.tobytes(), test[:100].tobytes(), "\n".join(f"n{i}" for i in range(100)).encode()]
    at = rng.randrange(3)
    parts[at] = hurt(rng, parts[at])
    return dict(zip(("train.bin", "test.bin", "names.txt"), parts, strict=True))


@cache
def pickled(protocol: int) -> tuple[bytes, ...]:
    train, test = cifar_whole(1)
    batches = [*np.array_split(train[:30], 5), test[:10]]
    values = [{"batch_label": "x", "labels": each[:, 0].tolist(), "data": each[:, 1:].copy(), "n": None} for each in batches]
    return tuple(pickle.dumps(value, protocol=protocol) for value in values)


def damaged_pickle(rng: Random) -> Files:
    parts = list(pickled(rng.choice((0, 2, 3, 4, 5))))
    at = rng.randrange(6)
    parts[at] = hurt(rng, parts[at]) if rng.random() < 0.4 else program(rng, parts[at], SNIPPETS)
    return {str(number): data for number, data in enumerate(parts)}


@cache
def pickled_hundred(protocol: int) -> tuple[bytes, ...]:
    train, test = cifar_whole(2)
    splits = [train, test[:100]]
    values: list[dict[str, object]] = [
        {"coarse_labels": each[:, 0].tolist(), "fine_labels": each[:, 1].tolist(), "data": each[:, 2:].copy()} for each in splits
    ]
    values.append({"fine_label_names": [f"n{i}" for i in range(100)], "coarse_label_names": ["c"] * 20})
    return tuple(pickle.dumps(value, protocol=protocol) for value in values)


def damaged_pickle_hundred(rng: Random) -> Files:
    parts, at = list(pickled_hundred(rng.choice((2, 4)))), rng.randrange(3)
    parts[at] = hurt(rng, parts[at]) if rng.random() < 0.4 else program(rng, parts[at], SNIPPETS)
    return dict(zip(("train", "test", "meta"), parts, strict=True))


def element(kind: int, data: bytes) -> bytes:
    return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)


def mat_variable(name: bytes, array: np.ndarray, rng: Random | None = None) -> bytes:
    """A matrix of bytes; with a generator, one of whose elements lies."""
    parts = [
        element(6, struct.pack("<II", 9, 0)),
        element(5, struct.pack(f"<{array.ndim}i", *array.shape)),
        element(1, name),
        element(2, array.tobytes(order="F")),
    ]
    if rng:
        at = rng.randrange(4)
        parts[at] = hurt(rng, parts[at])
        if rng.random() < 0.2:
            parts[at] = struct.pack("<II", rng.randrange(20), rng.choice((0, 4, 2**31, 2**32 - 8))) + parts[at]
    return element(14, b"".join(parts))


def damaged_mat(rng: Random) -> Files:
    images = np.arange(4 * 4 * 3 * 40, dtype=np.uint32).astype(np.uint8).reshape(4, 4, 3, 40)
    labels, files = (1 + np.arange(40, dtype=np.uint8) % 10)[:, None], {}
    damaged = rng.choice("01")
    for number in "01":
        hostile = rng if number == damaged and rng.random() < 0.6 else None
        bad = rng.randrange(2) if hostile else 2
        variables = [
            mat_variable(*each, hostile if place == bad else None) for place, each in enumerate(((b"X", images), (b"y", labels)))
        ]
        if rng.random() < 0.5:
            packed = [zlib.compress(each, 1) for each in variables]
            variables = [struct.pack("<II", 15, len(each)) + each for each in packed]
        raw = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM" + b"".join(variables)
        files[number] = hurt(rng, raw) if number == damaged and not hostile else raw
    return files


def damaged_npz(rng: Random) -> Files:
    arrays = dict(toy_arrays(rng.choice((1, 3)), 4, 4))
    style = rng.randrange(3)
    if style == 1:
        arrays = {
            "x_train": arrays["images"],
            "y_train": arrays["labels"],
            "x_test": arrays["images"],
            "y_test": arrays["labels"],
        }
    if style == 2:
        arrays["images"] = arrays["images"].astype(rng.choice(("f4", "f8", "f2", "i8", "?", "c8"))) / 255
    buffer, lie = io.BytesIO(), rng.choice(list(arrays)) if rng.random() < 0.6 else ""
    with zipfile.ZipFile(buffer, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for name, array in arrays.items():
            raw = io.BytesIO()
            np.save(raw, array)
            data = _npy(rng, raw.getvalue()) if name == lie else raw.getvalue()
            archive.writestr(f"{name}.npy", data)
    return {"x.npz": buffer.getvalue() if lie else hurt(rng, buffer.getvalue())}


def _npy(rng: Random, data: bytes) -> bytes:
    """An array whose header lies."""
    if rng.random() < 0.3:
        return hurt(rng, data)
    shape = rng.choice(
        ("(2,)", "()", "(-1,)", "(99999999999,)", "(4, 4, 99999999)", "(0, 1, 8, 8)", "(1" + ",1" * 40 + ")", "(2.5,)", "x")
    )
    kind = rng.choice(("|u1", "|O", "<f8", "<U9", "<M8[s]", "|V8", ">i2", "|S0", "<U999999999", "<f16", "[('a','|u1')]", "<c16"))
    text = f"{{'descr': '{kind}', 'fortran_order': {rng.choice(('True', 'False', '1', 'None'))}, 'shape': {shape}}}"
    if rng.random() < 0.2:
        text = rng.choice(
            ("{" * 5000, "[" * 9000, "__import__('os')", "{'descr': " + "(" * 200 + ")" * 200 + "}", "\0", "9" * 9000)
        )
    head = (text + "\n").encode()
    version = rng.choice((b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x00"))
    size = struct.pack("<H" if version[:1] == b"\x01" else "<I", min(len(head), 65535))
    return b"\x93NUMPY" + version + size + head + data[128:]


@cache
def picture_bytes() -> tuple[tuple[str, bytes], ...]:
    rng, found = np.random.default_rng(0), []
    for mode, shape in (
        ("L", (9, 7)),
        ("RGB", (9, 7, 3)),
        ("RGBA", (9, 7, 4)),
        ("P", (9, 7)),
        ("1", (9, 7)),
        ("I;16", (9, 7)),
        ("LA", (9, 7, 2)),
    ):
        kind = np.uint16 if mode == "I;16" else np.uint8
        picture = Image.fromarray(rng.integers(0, 255, shape).astype(kind))
        picture = picture.convert(mode) if mode in ("P", "1") else picture
        for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
            buffer = io.BytesIO()
            with contextlib.suppress(Exception):
                options = {"save_all": True, "append_images": [picture]} if form == "GIF" else {}
                picture.save(buffer, form, **options)
                found.append((form, buffer.getvalue()))
    return tuple(found)


def damaged_picture(rng: Random) -> Files:
    form, raw = rng.choice(picture_bytes())
    if form == "PNG" and rng.random() < 0.6:
        return {"x.png": png_chunks(rng, raw)}
    if rng.random() < 0.03:
        raw = rng.choice(
            (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", b"<svg/>", b"II*\0", b"\0\0\1\0", b"8BPS", b"qoif", b"\x97JB2")
        )
    return {"x.png": hurt(rng, raw)}


def read(rng: Random) -> Reading:
    """Some way to read a picture."""
    return Reading(colour=rng.choice((None, "rgb", "grey")), fit=rng.choice(("stretch", "crop", "pad")))


def read_image(folder: Path, rng: Random) -> None:
    path = folder / "x.png"
    raw = path.read_bytes()
    calls = [
        lambda: fitting.fitted("x", fitting.open_picture(path, 5), rng.choice((None, (5, 4))), read(rng)).on("red"),
        lambda: read_picture(path, (rng.choice((1, 3)), 8, 8)),
        lambda: uploads.picture(raw),
    ]
    with readers.parsing("x", "x"):  # as every caller does
        rng.choice(calls)()


def damaged_folder(rng: Random) -> Files:
    """Class folders, one picture damaged, or one too many of anything."""
    good = [raw for form, raw in picture_bytes() if form == "PNG"][:2]
    files = {f"{split}/{name}/{number}.png": good[0] for split in ("train", "test") for name in "ab" for number in range(4)}
    match rng.randrange(4):
        case 0:
            files["train/a/1.png"] = hurt(rng, good[0])
        case 1:
            files["train/a/1.png"] = rng.choice(picture_bytes())[1]
        case 2:
            files[rng.choice(("test/c/1.png", "train/x.txt", "x.txt", "train/a/b/c.png", "val/a/1.png"))] = good[1]
        case 3:
            files[f"train/{rng.choice(('$', 'x' * 200, '漢'))}/1.png"] = good[0]
    return files


def damaged_tiny(rng: Random) -> Files:
    """TinyImageNet's folder, one of its texts or pictures damaged."""
    good = next(raw for form, raw in picture_bytes() if form == "JPEG")
    files = {f"train/{wnid}/images/{number}.JPEG": good for wnid in ("n1", "n2") for number in range(4)}
    files |= {f"val/images/{number}.JPEG": good for number in range(4)}
    files["val/val_annotations.txt"] = b"".join(b"%d.JPEG\tn%d\t0\t0\t1\t1\n" % (n, 1 + n % 2) for n in range(4))
    files["words.txt"] = b"n1\tcrane, bird\nn2\tgoldfish\n"
    bad = rng.choice(("words.txt", "val/val_annotations.txt", "val/val_annotations.txt", rng.choice(list(files))))
    files[bad] = hurt(rng, files[bad])
    if rng.random() < 0.2:
        other = rng.choice(("../../x", "/etc/hostname", ".", "..", "x" * 300, "\0", "/dev/zero")).encode()
        files["val/val_annotations.txt"] = files["val/val_annotations.txt"].replace(b"1.JPEG", other)
    return {f"tiny-imagenet-200/{name}": raw for name, raw in files.items()}


@cache
def tables() -> tuple[Files, ...]:
    """Rows of pictures as the datasets package keeps them: Parquet, and saved to disk."""
    import datasets

    datasets.disable_progress_bars()
    good = [raw for form, raw in picture_bytes() if form == "PNG"][1]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    columns = {"image": [{"bytes": good, "path": None}] * 12, "label": [n % 2 for n in range(12)]}
    rows = datasets.Dataset.from_dict(columns, features=features)
    with tempfile.TemporaryDirectory() as place:
        rows.to_parquet(Path(place) / "parquet" / "train.parquet")
        datasets.DatasetDict(train=rows).save_to_disk(Path(place) / "saved")
        folders = [Path(place) / "parquet", Path(place) / "saved"]
        return tuple(
            {str(p.relative_to(each)): p.read_bytes() for p in sorted(each.rglob("*")) if p.is_file()} for each in folders
        )


def damaged_table(rng: Random) -> Files:
    files = dict(rng.choice(tables()))
    bad = rng.choice(list(files))
    return files | {bad: hurt(rng, files[bad])}


def read_table(folder: Path, rng: Random) -> None:
    import datasets

    for name in ("HF_DATASETS_CACHE", "HF_MODULES_CACHE", "DOWNLOADED_DATASETS_PATH", "EXTRACTED_DATASETS_PATH"):
        setattr(datasets.config, name, folder.parent / "cache" / name.lower())
    data.load(f"hf:{folder}", size=4)


def damaged_csv(rng: Random) -> Files:
    words, numbers = ("red", "green", "blue"), range(40)
    lines = [f"{rng.random():.3f},{rng.choice(words)},{n % 3},c{n % 2}" for n in numbers]
    lines[rng.randrange(40)] += rng.choice(("", "", ",", ",1", '"', "\0", "\r", "\n\n", "x" * 200_000, "," * 9000))
    odd = rng.choice(("nan", "1e999", "", "-", "٣", "1_0", "9" * 5000, "=1", "\x1b[2J", '"a\nb"', "0x1"))
    text = "\n".join(["size,colour,kind,label", *lines]).replace("red", odd if rng.random() < 0.3 else "red", 1)
    return {"x.csv": hurt(rng, text.encode()) if rng.random() < 0.7 else text.encode()}


def read_csv(folder: Path, rng: Random) -> None:
    asked = rng.choice(
        ({"label": "label"}, {"target": "size"}, {"target": ["size", "kind"]}, {"label": "kind"}, {"target": "colour"}, {})
    )
    data.load(folder / "x.csv", **asked)


def damaged_labels(rng: Random) -> Files:
    """Pictures whose labels are in a table."""
    good = next(raw for form, raw in picture_bytes() if form == "PNG")
    files = {f"{number % 3}/{number}.png": good for number in range(12)}
    wrong = rng.choice(("../x.png", "/etc/hostname", "0", ".", "x" * 300 + ".png", "\0", "0/0.png", "\x1b[2J"))
    lines = [f"{name},{'ab'[place % 2]}" for place, name in enumerate(files)]
    if rng.random() < 0.4:
        lines[rng.randrange(12)] = rng.choice((f"{wrong},a", "x"))
    text = "\n".join(["file,label", *lines]).encode()
    return files | {"labels.csv": hurt(rng, text) if rng.random() < 0.6 else text}


def damaged_vectors(rng: Random) -> Files:
    """Query vectors of classes."""
    arrays = {
        "vectors": np.ones((3, 4), rng.choice(("f4", "f8", "i8", "f2"))),
        "names": np.array(CLASSES),
        "model": np.array("m"),
    }
    arrays |= {"projection": np.ones((5, 4), "f4"), "mean": np.ones(5, "f4")} if rng.random() < 0.5 else {}
    buffer, lie = io.BytesIO(), rng.choice(list(arrays)) if rng.random() < 0.6 else ""
    with zipfile.ZipFile(buffer, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for name, array in arrays.items():
            raw = io.BytesIO()
            np.save(raw, array)
            archive.writestr(f"{name}.npy", _npy(rng, raw.getvalue()) if name == lie else raw.getvalue())
    toys = io.BytesIO()
    np.savez(toys, **toy_arrays(1, 8, 4))
    return {"v.npz": buffer.getvalue() if lie else hurt(rng, buffer.getvalue()), "x.npz": toys.getvalue()}


def read_folder(folder: Path, rng: Random) -> None:
    size, options = rng.choice((None, None, 4)), read(rng).given() | {"skip_bad": rng.random() < 0.5}
    if rng.random() < 0.3:
        options["pattern"] = rng.choice(("{split}/{label}/**/*", "train/{label}/*.png"))
    if rng.random() < 0.5:
        check(folder, size, **options)
    else:
        data.load(folder, size=size, **options)


READERS = [
    Kind("IDX", damaged_idx, _read_parts(partial(readers.idx_set, class_names=readers.DIGITS), 4), 15),
    Kind("CIFAR-10, binary", damaged_cifar10, _read_parts(readers.cifar10, 6, *(f"{n}.bin" for n in range(6))), 8),
    Kind("CIFAR-100, binary", damaged_cifar100, _read_parts(readers.cifar100, 3, "train.bin", "test.bin", "names.txt"), 5),
    Kind("CIFAR-10, pickled", damaged_pickle, _read_parts(readers.cifar10, 6), 20),
    Kind(".mat", damaged_mat, _read_parts(readers.svhn, 2), 20),
    Kind(".npz", damaged_npz, lambda folder, _: data.load(folder / "x.npz"), 15),
    Kind("picture", damaged_picture, read_image, 25),
    Kind("folder of pictures", damaged_folder, read_folder, 3),
    Kind("CIFAR-100, pickled", damaged_pickle_hundred, _read_parts(readers.cifar100, 3, "train", "test", "meta"), 3),
    Kind("TinyImageNet", damaged_tiny, lambda folder, _: data.load("tinyimagenet", root=folder), 3),
    Kind("table of values", damaged_csv, read_csv, 5),
    Kind("table of labels", damaged_labels, lambda folder, _: data.load(folder, labels=folder / "labels.csv"), 5),
    Kind("vectors", damaged_vectors, lambda folder, _: data.load(folder / "x.npz", vectors=folder / "v.npz"), 5),
    Kind("table of the datasets package", damaged_table, read_table, 0.2),
]
