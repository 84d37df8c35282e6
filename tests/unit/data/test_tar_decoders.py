"""Values of members: what each extension gives, and bombs that are refused before they unfold."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.data.tar import decoders
from penstock.data.tar.dataset import TarDataset
from penstock.data.tar.decoders import decoder_of
from penstock.errors import ConfigError, DataError
from support.tar_archives import member, write


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


def decode(suffix: str, data: bytes) -> Any:
    decoder = decoder_of(suffix, {})
    assert decoder is not None
    return decoder(data)


def saved(array: np.ndarray, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


ARRAYS = [
    np.arange(6).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.float32(3.5),
    np.empty((0, 4), np.int8),
    np.array(["a", "bc"]),
    np.array([1 + 2j]),
    np.zeros(3, [("x", "<i4"), ("y", "<f8", (2,))]),
    np.arange(4, dtype=">i2"),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype.str}{array.shape}")
def test_arrays_come_back_as_they_were_saved(array: np.ndarray) -> None:
    array = np.asanyarray(array)
    found = decode("npy", saved(array))
    assert found.dtype == array.dtype and found.shape == array.shape and np.array_equal(found, array)
    assert found.flags.writeable and found.flags.f_contiguous == array.flags.f_contiguous


@pytest.mark.parametrize(
    "data",
    [
        saved(np.array([{}]), allow_pickle=True),
        saved(np.zeros(4))[:-1],
        saved(np.zeros(4)) + b"x",
        saved(np.zeros(4)).replace(b"(4,)", b"(9,)"),
        saved(np.zeros(4)).replace(b"(4,)", b"(9, "),
        saved(np.zeros(4)).replace(b"(4,), }           ", b"(99999999999999,)}"),
        b"",
        b"\x93NUMPY\x01\x00",
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
        b"\x93NUMPY\x09\x00" + bytes(200),
    ],
)
def test_arrays_with_false_headers_are_errors(data: bytes) -> None:
    with pytest.raises(DataError):
        decode("npy", data)


def test_a_zip_that_decompresses_to_too_much_is_refused_by_its_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.BytesIO()
    np.savez_compressed(stream, a=np.zeros(1 << 20, np.uint8))
    assert len(decode("npz", stream.getvalue())["a"]) == 1 << 20
    tensors = io.BytesIO()
    torch.save(torch.zeros(1 << 18), tensors)
    monkeypatch.setattr(decoders, "MOST_DECODED_BYTES", 1 << 20)
    for suffix, bomb in (("npz", stream), ("pt", tensors)):
        with pytest.raises(DataError, match="decompresses to"):
            decode(suffix, bomb.getvalue())


def test_a_zip_with_a_false_directory_yields_no_more_than_the_directory_says() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", saved(np.zeros(1 << 20, np.uint8)))
    length = (len(saved(np.zeros(1 << 20, np.uint8)))).to_bytes(4, "little")
    with pytest.raises((DataError, ValueError, zipfile.BadZipFile)):
        decode("npz", stream.getvalue().replace(length, (200).to_bytes(4, "little")))


class Code:
    def __reduce__(self) -> Any:
        return print, ("code ran",)


def test_code_in_a_tensor_file_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.BytesIO()
    torch.save({"x": Code()}, stream)
    dataset = TarDataset(write(tmp_path / "a.tar", member(b"a.pth", stream.getvalue())))
    with pytest.raises(DataError, match="cannot be decoded"):
        dataset[0]
    stream = io.BytesIO()
    torch.save({"x": torch.arange(3)}, stream)
    assert torch.equal(decode("pt", stream.getvalue())["x"], torch.arange(3))
    assert "code ran" not in capsys.readouterr().out


def test_images_are_arrays_of_height_width_and_rgb_and_16_bits_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    grey = np.arange(20, dtype=np.uint8).reshape(4, 5)
    for suffix, kind in (("png", "PNG"), ("bmp", "BMP"), ("ppm", "PPM"), ("WEBP".lower(), "WEBP")):
        stream = io.BytesIO()
        image.fromarray(grey).save(stream, kind, **({"lossless": True} if kind == "WEBP" else {}))
        found = decode(suffix, stream.getvalue())
        assert found.shape == (4, 5, 3) and found.dtype == np.uint8 and found.flags.writeable
        assert np.array_equal(found[..., 1], grey)
    deep = np.array([[0, 255, 256], [300, 40_000, 65_535]], np.uint16)
    png = io.BytesIO()
    image.fromarray(deep).save(png, "PNG")
    for suffix, data in (("png", png.getvalue()), ("pgm", b"P5 3 2 65535\n" + deep.astype(">u2").tobytes())):
        decoded = decode(suffix, data)
        assert decoded.dtype == np.uint16 and np.array_equal(decoded, deep) and decoded.flags.writeable
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 19)
    with pytest.warns(image.DecompressionBombWarning), pytest.raises(DataError, match="5 x 4"):
        decode("bmp", stream.getvalue())
    with pytest.raises(Exception, match="cannot identify"):
        decode("jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")


@pytest.mark.parametrize("suffix", ["wav", "flac"])
def test_audio_is_samples_and_their_rate(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    soundfile = pytest.importorskip("soundfile")
    stream = io.BytesIO()
    wave = np.sin(np.arange(800) / 10).astype(np.float32) / 2
    soundfile.write(stream, np.stack([wave, -wave], 1), 16000, format=suffix.upper())
    found, rate = decode(suffix, stream.getvalue())
    assert rate == 16000 and found.dtype == np.float32 and np.allclose(found[:, 1], -wave, atol=1e-4)
    monkeypatch.setattr(decoders, "MOST_DECODED_BYTES", 6399)
    with pytest.raises(DataError, match="decompresses to"):
        decode(suffix, stream.getvalue())


def test_the_users_decoders_take_precedence_and_the_longest_name_first(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.tar",
        member(b"a.json", b"1"),
        member(b"a.seg.JSON", b"2"),
        member(b"a.left.own", b"3"),
        member(b"a.x", b"4"),
    )
    own = {"seg.json": lambda data: "segments", ".OWN": len}
    assert TarDataset(path, decoders=own)[0] == {
        "__key__": "a",
        "json": 1,
        "seg.json": "segments",
        "left.own": 1,
        "x": b"4",
    }
    assert TarDataset(path, decode=False, decoders=own)[0]["seg.json"] == b"2"
    with pytest.raises(ConfigError, match="functions of bytes"):
        TarDataset(path, decoders={"txt": "utf-8"})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.txt", b"\xff"),
        ("a.cls", b"many"),
        ("a.cls", b"9" * 10_000),
        ("a.json", b"[" * 100_000),
        ("a.npz", b"PK\x05\x06"),
        ("a.png", b"\x89PNG\r\n\x1a\n"),
        ("a.wav", b"RIFF"),
        ("a.pt", b"PK\x03\x04"),
    ],
)
def test_members_that_are_not_what_their_name_says_are_named(tmp_path: Path, name: str, data: bytes) -> None:
    if needed := {"a.wav": "soundfile", "a.png": "PIL"}.get(name):
        pytest.importorskip(needed)
    dataset = TarDataset(write(tmp_path / "shard.tar", member(name.encode(), data)))
    with pytest.raises(DataError, match=rf"shard\.tar: member {name} .*cannot be decoded: ."):
        dataset[0]


def test_json_is_what_json_says() -> None:
    value = {"a": [1, 2.5, None, True, "ü"]}
    assert decode("json", json.dumps(value).encode()) == value
