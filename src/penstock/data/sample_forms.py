"""Takes samples apart into values, which become columns or archive members, and rebuilds samples from these values.

In:  a sample, which is a dict, tuple or list of values, or a single value.
Out: the sample's outline and values; for tar shards, members that other programs can read, and a form, which says how
     to rebuild the sample from its members.
Runs in: trainer and worker, command line.

The form is a JSON text. A shard has one form. A sample that needs a different form has that form as an additional
member.
"""

from __future__ import annotations

import functools
import io
import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.arena.codec import is_plain
from penstock.cache.store.portable import Portable, read_portable
from penstock.data.tar.decoders import decode_array
from penstock.errors import CacheError, DataError

FORM_VERSION = 1
FORM_HEADER = "PENSTOCK.form"
"""The global header of a tar shard that holds the form of the shard."""
OWN_FORM = "penstock-form.json"
"""The member that holds the form of its sample, if this form differs from the form of the shard."""

_MOST_NAMES = 256
_LARGEST_FORM_BYTES = 1 << 19
"""The largest form: readers refuse a header above 1 MiB. A sample with a larger form is stored as a single value."""
_BITS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
"""A dtype that numpy lacks -> the dtype that holds its bits."""
_BITS_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in _BITS}
_NUMBERS = "biufc"
_NATIVE = "<|="
_DEEPEST_JSON = 20
_TEXTS = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}(\.[a-z0-9][a-z0-9_-]{0,63}){0,3}")
"""Names that can be part of a file name unchanged, even if a reader ignores capitals."""


class CannotCarry(Exception):
    """A value cannot be stored without storing code; the message names the type of the value."""


@dataclass(frozen=True)
class Outline:
    """How a sample is composed of its values."""

    kind: str
    """``dict``, ``tuple`` or ``list``; ``value`` if the sample is a single value."""
    names: tuple[str, ...]
    """Names of the values, in order."""


WHOLE = Outline("value", ("value",))


def take_apart(sample: Any) -> tuple[Outline, list[Any]]:
    """The outline and the values of a sample. A sample whose names cannot name columns is not taken apart."""
    kind = type(sample)
    if kind is dict and 0 < len(sample) <= _MOST_NAMES and all(map(_is_name, sample)):
        return Outline("dict", tuple(sample)), list(sample.values())
    if kind in (tuple, list) and 0 < len(sample) <= _MOST_NAMES:
        return Outline(kind.__name__, _numbered(len(sample))), list(sample)
    return WHOLE, [sample]


def put_together(outline: Outline, values: list[Any]) -> Any:
    if outline.kind == "dict":
        return dict(zip(outline.names, values, strict=True))
    if outline.kind == "value":
        return values[0]
    return tuple(values) if outline.kind == "tuple" else values


def read_outline(kind: Any, names: Any) -> Outline:
    """The outline that a file describes. Raises ValueError if the description is not valid."""
    names = tuple(names)
    if not all(map(_is_name, names)) or len(set(names)) < len(names) or not names:
        raise ValueError(f"names {names}")
    if kind not in ("dict", "tuple", "list", "value") or (kind == "value" and len(names) > 1):
        raise ValueError(f"a {kind} of {names}")
    return Outline(kind, names)


def portable_bytes(value: Any) -> np.ndarray:
    """A value in penstock's own encoding, padded to whole cache lines."""
    try:
        portable = Portable(value)
        target = np.zeros(-(-portable.total_bytes // 64) * 64, np.uint8)
        portable.write(target)
    except (CacheError, ValueError, TypeError, OverflowError, RuntimeError) as problem:
        raise CannotCarry(str(problem).replace("kept on disk", "packed")) from None
    return target


def read_portable_bytes(source: np.ndarray) -> Any:
    """The value that was given to ``portable_bytes``. Raises ValueError if the bytes are incomplete or do not come from
    ``portable_bytes``."""
    if len(source) < 8 or int.from_bytes(source[:8].tobytes(), "little") > len(source) - 8:
        raise ValueError(f"a value is longer than the {len(source)} bytes that hold it")
    return read_portable(source)


def array_of(value: Any) -> tuple[str, str, np.ndarray] | None:
    """Kind, dtype and bits (as a numpy array) of an array, a tensor or a numpy number; None for other values."""
    kind = type(value)
    if kind is torch.Tensor:
        if not is_plain(value):
            return None
        if value.dtype in _BITS:
            bits = value.contiguous().view(_BITS[value.dtype]).numpy()
            return "tensor", str(value.dtype).removeprefix("torch."), bits
        try:
            bits = value.numpy()
        except TypeError:
            return None
        return ("tensor", bits.dtype.str, bits) if bits.dtype.kind in _NUMBERS else None
    if kind is np.ndarray or issubclass(kind, np.generic):
        if value.dtype.kind not in _NUMBERS or value.dtype.str[0] not in _NATIVE or value.dtype.itemsize > 16:
            return None
        return "array" if kind is np.ndarray else "scalar", value.dtype.str, np.asarray(value)
    return None


def bits_dtype(dtype: str) -> np.dtype:
    """The numpy dtype for the bits of ``dtype``. Raises ValueError or TypeError if it is not a dtype of numbers."""
    if dtype in _BITS_BY_NAME:
        return np.dtype(f"u{_BITS_BY_NAME[dtype].itemsize}")
    found = np.dtype(dtype)
    if found.kind not in _NUMBERS or found.itemsize > 16:
        raise ValueError(f"an array cannot have values of type {found}")
    return found


def array_again(kind: str, dtype: str, bits: np.ndarray) -> Any:
    """The value that was given to ``array_of``, as a view of ``bits``."""
    if kind == "tensor":
        tensor = torch.from_numpy(bits)
        return tensor.view(_BITS_BY_NAME[dtype]) if dtype in _BITS_BY_NAME else tensor
    return bits if kind == "array" else bits[()]


# -- tar members ----------------------------------------------------------------------------------


def to_members(sample: Any) -> tuple[str, list[tuple[str, bytes]]]:
    """The form of a sample, and its members: pairs of a name, without the key, and bytes. Raises CannotCarry."""
    form, members = _members_of(*take_apart(sample))
    return (form, members) if len(form) <= _LARGEST_FORM_BYTES else _members_of(WHOLE, [sample])


def _members_of(outline: Outline, values: list[Any]) -> tuple[str, list[tuple[str, bytes]]]:
    hows = [_how(value) for value in values]
    bundled = [at for at, (how, _) in enumerate(hows) if how in ("int", "str", "json")]
    if len(bundled) < 2:
        bundled = []
    fields: list[list[str]] = []
    members: list[tuple[str, bytes]] = []
    taken = {"json"} if bundled else set()
    for at, (name, value, (how, extension)) in enumerate(zip(outline.names, values, hows, strict=True)):
        if at in bundled:
            fields.append([name, "json", "bundled"])
            continue
        member = name.lower()
        if not _TEXTS.fullmatch(member) or member.startswith("penstock-form"):
            member = f"field{at}"
        while f"{member}.{extension}" in taken:
            member = f"field{at}-{member}"
        member = f"{member}.{extension}"
        taken.add(member)
        fields.append([name, member, how])
        members.append((member, _to_raw(value, how)))
    if bundled:
        text = json.dumps({outline.names[at]: values[at] for at in bundled}, ensure_ascii=False)
        members.append(("json", text.encode()))
    form = {"version": FORM_VERSION, "kind": outline.kind, "fields": fields}
    return json.dumps(form, separators=(",", ":")), members


def restore(form: str, members: dict[str, Any]) -> Any:
    """Rebuild a sample from ``members``: the bytes of its members in a packed shard by name, and ``__key__``."""
    own = members.get(OWN_FORM)
    try:
        outline, fields = _parse_form(form if own is None else bytes(own).decode())
        bundle = json.loads(bytes(members["json"])) if any(how == "bundled" for _, _, how in fields) else {}
        values = [bundle[name] if how == "bundled" else _from_raw(members[member], how) for name, member, how in fields]
    except KeyError as missing:
        raise DataError(
            f"sample {members.get('__key__')} has no member {missing}, although the shard's PENSTOCK.form lists it"
        ) from missing
    except (ValueError, TypeError, LookupError, RecursionError, RuntimeError, MemoryError) as problem:
        raise DataError(
            f"sample {members.get('__key__')} does not match the shard's PENSTOCK.form: {problem}"
        ) from problem
    return put_together(outline, values)


@functools.lru_cache(64)
def _parse_form(text: str) -> tuple[Outline, list[tuple[str, str, str]]]:
    form = json.loads(text)
    if form["version"] != FORM_VERSION:
        raise ValueError(f"the form has version {form['version']}; this penstock reads version {FORM_VERSION}")
    fields = [(str(name), str(member), str(how)) for name, member, how in form["fields"]]
    return read_outline(form["kind"], [name for name, _, _ in fields]), fields


def _how(value: Any) -> tuple[str, str]:
    """How to write a value, and the extension of its member."""
    kind = type(value)
    if kind is bytes:
        return "bytes", "bin"
    if kind is str and is_text(value):
        return "str", "txt"
    if kind is int and -(1 << 63) <= value < 1 << 63:
        return "int", "cls"
    if _is_json(value, 0):
        return "json", "json"
    found = array_of(value)
    if found is None:
        return "portable", "pst"
    return (f"tensor:{found[1]}" if found[1] in _BITS_BY_NAME else found[0]), "npy"


def _to_raw(value: Any, how: str) -> bytes:
    if how == "bytes":
        return value
    if how == "str":
        return value.encode()
    if how == "int":
        return str(value).encode()
    if how == "json":
        return json.dumps(value, ensure_ascii=False).encode()
    if how == "portable":
        return portable_bytes(value).tobytes()
    found = array_of(value)
    assert found is not None
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(found[2], order="C"), version=(1, 0), allow_pickle=False)
    return stream.getvalue()


def _from_raw(raw: Any, how: str) -> Any:
    raw = bytes(raw)
    if how == "bytes":
        return raw
    if how == "str":
        return raw.decode()
    if how == "int":
        return int(raw)
    if how == "json":
        return json.loads(raw)
    if how == "portable":
        return read_portable_bytes(np.frombuffer(bytearray(raw), np.uint8))
    kind, _, dtype = how.partition(":")
    if kind not in ("tensor", "array", "scalar") or (dtype and dtype not in _BITS_BY_NAME):
        raise ValueError(f"a member is stored as {how!r}, which penstock does not know")
    bits = decode_array(raw)
    bits_dtype(bits.dtype.str)
    return array_again(kind, dtype, bits)


def _is_json(value: Any, depth: int) -> bool:
    """Whether JSON preserves the value and the types of its parts."""
    kind = type(value)
    if value is None or kind is bool or kind is float:
        return True
    if kind is int:
        return -(1 << 63) <= value < 1 << 63
    if kind is str:
        return is_text(value)
    if depth >= _DEEPEST_JSON:
        return False
    if kind is list:
        return all(_is_json(item, depth + 1) for item in value)
    return kind is dict and all(_is_name(name) and _is_json(item, depth + 1) for name, item in value.items())


def is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_name(value: Any) -> bool:
    return type(value) is str and is_text(value)


@functools.cache
def _numbered(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))
