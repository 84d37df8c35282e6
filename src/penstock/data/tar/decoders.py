"""Turns the bytes of a member into a value, depending on the last extension of the member's name.

In:  bytes from an archive that may come from an untrusted source.
Out: texts, numbers, arrays, tensors; for unknown extensions, the bytes.
Runs in: worker; trainer if there are no workers.

Only objects that ``torch.load(weights_only=True)`` allows are unpickled. Data that would have more than
``MOST_DECODED_BYTES`` after decompression, by their header, are refused before any memory is allocated.
"""

from __future__ import annotations

import io
import json
import math
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from penstock.errors import ConfigError, DataError
from penstock.units import GIB, format_bytes

Decoder = Callable[[bytes], Any]

MOST_DECODED_BYTES = GIB
_MOST_PICKLES = 8
"""The most pickles in one member: torch's older format has five pickles, one after another."""
_IMAGES = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WEBP", "ppm": "PPM", "pgm": "PPM", "bmp": "BMP"}


def decoder_of(suffix: str, own: Mapping[str, Decoder]) -> Decoder | None:
    """The decoder of a suffix such as ``"left.png"``: the user's decoder for the suffix or its last part, else
    penstock's decoder, else None."""
    last = suffix.rpartition(".")[2]
    return own.get(suffix) or own.get(last) or _DECODERS.get(last)


def checked_decoders(own: Mapping[str, Decoder] | None) -> dict[str, Decoder]:
    """The user's decoders by extension, in lower case and without a leading dot."""
    own = own or {}
    for name, decoder in own.items():
        if not isinstance(name, str) or not callable(decoder):
            raise ConfigError(
                f"decoders={{{name!r}: {decoder!r}}} is not valid; give a mapping from extensions to functions of bytes"
            )
    return {name.lower().lstrip("."): decoder for name, decoder in own.items()}


def _text(data: bytes) -> str:
    return data.decode("utf-8")


def decode_array(data: bytes) -> np.ndarray:
    """The array of an npy file, which the caller may write to."""
    start = len(data) if len(data) < 12 else _header_bytes(data)
    shape, is_fortran, dtype = _layout(data[:start])
    count = math.prod(shape)
    if dtype.hasobject:
        raise DataError("it is an array of Python objects; to read it, penstock would have to unpickle it")
    if count * dtype.itemsize != len(data) - start:
        raise DataError(
            f"an array {shape} of {dtype} takes {count * dtype.itemsize} bytes, but {len(data) - start} follow"
        )
    if not len(data) - start:
        if count:
            raise DataError(f"it is an array {shape} of {dtype}, whose values take no bytes")
        return np.empty(shape, dtype, "F" if is_fortran else "C")
    # A copy, because a view of bytes is read-only and torch would warn about that.
    flat = np.frombuffer(data, dtype, count, start).copy()
    return flat.reshape(shape, order="F" if is_fortran else "C")


def _header_bytes(data: bytes) -> int:
    """Where the header ends. The length of the header takes two bytes in version 1 and four bytes in later versions."""
    return 10 + int.from_bytes(data[8:10], "little") if data[6] == 1 else 12 + int.from_bytes(data[8:12], "little")


@lru_cache(maxsize=256)
def _layout(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and dtype from a header. The result is cached, because parsing a header takes longer than reading
    most arrays, and most arrays have the same header."""
    stream = io.BytesIO(header)
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            return np.lib.format.read_array_header_1_0(stream)
        if version == (2, 0):
            return np.lib.format.read_array_header_2_0(stream)
    except Exception as problem:
        # numpy parses the header as Python source, which can fail with many exceptions.
        raise DataError(f"the header of the array cannot be read: {problem}") from problem
    raise DataError(f"the array has format {version[0]}.{version[1]}; penstock reads formats 1.0 and 2.0")


def _arrays(data: bytes) -> dict[str, Any]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        _check_unfolded(archive)
        found = {}
        for entry in archive.infolist():
            # With a size, read() decompresses at most that many bytes, even if the data continue.
            with archive.open(entry) as stream:
                content = stream.read(entry.file_size)
            is_array = entry.filename.endswith(".npy")
            found[entry.filename.removesuffix(".npy")] = decode_array(content) if is_array else content
        return found


def _check_unfolded(archive: zipfile.ZipFile) -> None:
    odd = next(
        (e for e in archive.infolist() if e.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)), None
    )
    if odd is not None:
        raise DataError(f"{odd.filename} is compressed with a method that neither numpy nor torch writes")
    _check_size(sum(entry.file_size for entry in archive.infolist()))


def _check_size(decoded_bytes: int) -> None:
    if not 0 <= decoded_bytes <= MOST_DECODED_BYTES:
        most = format_bytes(MOST_DECODED_BYTES)
        raise DataError(f"it decompresses to {format_bytes(decoded_bytes)}, more than the limit of {most}")


def _tensors(data: bytes) -> Any:
    import torch

    stream = io.BytesIO(data)
    if zipfile.is_zipfile(stream):
        with zipfile.ZipFile(stream) as archive:
            _check_unfolded(archive)
            for entry in archive.infolist():
                if entry.filename.endswith(".pkl"):
                    with archive.open(entry) as pickled:
                        _check_pickles(pickled.read(entry.file_size))
    else:
        _check_pickles(data)
    stream.seek(0)
    return torch.load(stream, map_location="cpu", weights_only=True)


def _check_pickles(data: bytes) -> None:
    """Refuse ``bytearray``, which torch allows: a pickle that calls it with a number allocates that many bytes."""
    if b"bytearray" not in data:
        return
    stream = io.BytesIO(data)
    for _ in range(_MOST_PICKLES):
        names: list[Any] = []
        try:
            for operation, argument, _ in pickletools.genops(stream):
                names.append(argument)
                is_named = operation.name == "GLOBAL" and "bytearray" in str(argument)
                if is_named or (operation.name == "STACK_GLOBAL" and "bytearray" in names):
                    raise DataError(
                        "it contains a bytearray, which may take any amount of memory; store a tensor of uint8 instead"
                    )
        except DataError:
            raise
        except ValueError:
            # The last pickle has ended, or a pickle is damaged, which torch refuses.
            return


def _image(data: bytes) -> np.ndarray:
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError('to decode images, install Pillow: pip install "penstock[images]"') from None
    # Only these formats are opened, because some others of Pillow start programs or are barely maintained.
    with Image.open(io.BytesIO(data), formats=tuple(dict.fromkeys(_IMAGES.values()))) as image:
        pixels, most = image.width * image.height, Image.MAX_IMAGE_PIXELS
        if most is not None and pixels > most:
            raise DataError(f"the image has {image.width} x {image.height} pixels, more than the limit of {most}")
        if image.mode == "I" or image.mode.startswith("I;16"):
            # Values of these formats have at most 16 bits. In RGB, values above 255 would become 255, and a depth map
            # white.
            return np.array(image).astype(np.uint16)
        # A copy, because the array that Pillow returns is read-only.
        return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _audio(data: bytes) -> tuple[np.ndarray, int]:
    try:
        import soundfile
    except ImportError:
        raise ConfigError('to decode audio, install soundfile: pip install "penstock[audio]"') from None
    with soundfile.SoundFile(io.BytesIO(data)) as sound:
        _check_size(sound.frames * sound.channels * 4)
        return sound.read(dtype="float32"), sound.samplerate


_DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    "npy": decode_array,
    "npz": _arrays,
    **dict.fromkeys(("pt", "pth"), _tensors),
    **dict.fromkeys(_IMAGES, _image),
    **dict.fromkeys(("wav", "flac", "ogg", "mp3"), _audio),
}
