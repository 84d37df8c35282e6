"""A member's bytes as a value, by its name's last extension.

In:  bytes from an archive somebody else may have written.
Out: texts, numbers, arrays, tensors; bytes for what is not known here.
Runs in: worker (and trainer, without workers).

Nothing is unpickled beyond what ``torch.load(weights_only=True)`` allows, and what would unfold to more than
``MOST_DECODED_BYTES`` is refused by what its own header says, before memory is taken.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from penstock.errors import ConfigError, DataError
from penstock.units import GIB, format_bytes

Decoder = Callable[[bytes], Any]

MOST_DECODED_BYTES = GIB
_IMAGES = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WEBP", "ppm": "PPM", "pgm": "PPM", "bmp": "BMP"}


def decoder_of(suffix: str, own: Mapping[str, Decoder]) -> Decoder | None:
    """The decoder of a suffix such as ``"left.png"``: the user's for it or its last part, else ours; None: bytes."""
    last = suffix.rpartition(".")[2]
    return own.get(suffix) or own.get(last) or _DECODERS.get(last)


def checked_decoders(own: Mapping[str, Decoder] | None) -> dict[str, Decoder]:
    """Extensions as members have them: in lower case, without a dot before them."""
    own = own or {}
    for name, decoder in own.items():
        if not isinstance(name, str) or not callable(decoder):
            raise ConfigError(f"decoders={{{name!r}: {decoder!r}}}: an extension and a function of bytes are needed")
    return {name.lower().lstrip("."): decoder for name, decoder in own.items()}


def _text(data: bytes) -> str:
    return data.decode("utf-8")


def _array(data: bytes) -> np.ndarray:
    start = len(data) if len(data) < 12 else _header_bytes(data)
    shape, is_fortran, dtype = _layout(data[:start])
    count = math.prod(shape)
    if dtype.hasobject:
        raise DataError("an array of Python objects, which would have to be unpickled")
    if count * dtype.itemsize != len(data) - start:
        raise DataError(f"{shape} of {dtype} are {count * dtype.itemsize} bytes, {len(data) - start} follow")
    if not len(data) - start:
        if count:
            raise DataError(f"{shape} of {dtype}, which take no bytes")
        return np.empty(shape, dtype, "F" if is_fortran else "C")
    # A copy, because what views bytes cannot be written to and torch would warn of it.
    flat = np.frombuffer(data, dtype, count, start).copy()
    return flat.reshape(shape, order="F" if is_fortran else "C")


def _header_bytes(data: bytes) -> int:
    """Where the header ends: its length is two bytes in version 1, four later."""
    return 10 + int.from_bytes(data[8:10], "little") if data[6] == 1 else 12 + int.from_bytes(data[8:12], "little")


@lru_cache(maxsize=256)
def _layout(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and dtype. The text in it takes longer to read than most arrays, and most arrays share one."""
    stream = io.BytesIO(header)
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            return np.lib.format.read_array_header_1_0(stream)
        if version == (2, 0):
            return np.lib.format.read_array_header_2_0(stream)
    except Exception as problem:
        # numpy reads it as Python source, and fails in as many ways as that can.
        raise DataError(f"an array whose header cannot be read: {problem}") from problem
    raise DataError(f"an array in format {version[0]}.{version[1]}; 1.0 and 2.0 are read")


def _arrays(data: bytes) -> dict[str, Any]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        _check_unfolded(archive)
        found = {}
        for entry in archive.infolist():
            # Asked for so many bytes, it unfolds no more, whatever follows.
            with archive.open(entry) as stream:
                content = stream.read(entry.file_size)
            is_array = entry.filename.endswith(".npy")
            found[entry.filename.removesuffix(".npy")] = _array(content) if is_array else content
        return found


def _check_unfolded(archive: zipfile.ZipFile) -> None:
    odd = next(
        (e for e in archive.infolist() if e.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)), None
    )
    if odd is not None:
        raise DataError(f"{odd.filename} is compressed in a way neither numpy nor torch writes")
    total_bytes = sum(entry.file_size for entry in archive.infolist())
    if total_bytes > MOST_DECODED_BYTES:
        raise DataError(f"unfolds to {format_bytes(total_bytes)}, more than {format_bytes(MOST_DECODED_BYTES)}")


def _tensors(data: bytes) -> Any:
    import torch

    stream = io.BytesIO(data)
    if zipfile.is_zipfile(stream):
        with zipfile.ZipFile(stream) as archive:
            _check_unfolded(archive)
    stream.seek(0)
    return torch.load(stream, map_location="cpu", weights_only=True)


def _image(data: bytes) -> np.ndarray:
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError('images are decoded by Pillow: pip install "penstock[images]"') from None
    # Only these: others of Pillow's formats start programs, or are rarely looked after.
    with Image.open(io.BytesIO(data), formats=tuple(dict.fromkeys(_IMAGES.values()))) as image:
        pixels, most = image.width * image.height, Image.MAX_IMAGE_PIXELS
        if most is not None and pixels > most:
            raise DataError(f"an image of {image.width} x {image.height}, more than {most} pixels")
        if image.mode == "I" or image.mode.startswith("I;16"):
            # Of these formats 16 bits at most. As RGB, all above 255 would be 255: a depth map would be white.
            return np.array(image).astype(np.uint16)
        # A copy: what Pillow gives cannot be written to.
        return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _audio(data: bytes) -> tuple[np.ndarray, int]:
    try:
        import soundfile
    except ImportError:
        raise ConfigError('audio is decoded by soundfile: pip install "penstock[audio]"') from None
    with soundfile.SoundFile(io.BytesIO(data)) as sound:
        total_bytes = sound.frames * sound.channels * 4
        if not 0 <= total_bytes <= MOST_DECODED_BYTES:
            raise DataError(f"unfolds to {format_bytes(total_bytes)}, more than {format_bytes(MOST_DECODED_BYTES)}")
        return sound.read(dtype="float32"), sound.samplerate


_DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    "npy": _array,
    "npz": _arrays,
    **dict.fromkeys(("pt", "pth"), _tensors),
    **dict.fromkeys(_IMAGES, _image),
    **dict.fromkeys(("wav", "flac", "ogg", "mp3"), _audio),
}
