"""Sizes of memory: the only parser for sizes that users write, and the only formatter for sizes that penstock prints.

In:  "8GB", "512MiB", 1048576, 0.5, "50%", "auto".
Out: a ``Size``, which is the requested size, and the bytes once the machine's memory is known.
Runs in: trainer, command line.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import SupportsFloat, SupportsIndex

from penstock.errors import ConfigError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

LARGEST_BYTES = 1 << 50
"""A petabyte of host memory is a typing mistake, not a machine."""

_UNITS = {
    "": 1, "B": 1,
    "K": 10**3, "KB": 10**3, "KIB": KIB,
    "M": 10**6, "MB": 10**6, "MIB": MIB,
    "G": 10**9, "GB": 10**9, "GIB": GIB,
    "T": 10**12, "TB": 10**12, "TIB": TIB,
}  # fmt: skip

ABSOLUTE = 'a size such as "8GB" or "512MiB", or a number of bytes'
ACCEPTED = 'a size such as "8GB" or "512MiB", a number of bytes, a fraction such as 0.5 or "50%", or "auto"'

_WRITTEN = re.compile(r"\s*(\d+(?:_\d+)*(?:\.\d+)?|\.\d+)(?:e([+-]?\d+))?\s*([a-z]*|%)\s*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size that the user requested. One field is set; both are None for "auto"."""

    fixed_bytes: int | None = None
    """An absolute number of bytes."""
    fraction: float | None = None
    """A share of the available memory, above 0 and up to 1."""

    @property
    def is_auto(self) -> bool:
        return self.fixed_bytes is None and self.fraction is None

    def resolve(self, available_bytes: int, *, auto_fraction: float) -> int:
        """The size in bytes on a machine that has ``available_bytes`` left."""
        if self.fixed_bytes is not None:
            return self.fixed_bytes
        fraction = auto_fraction if self.fraction is None else self.fraction
        return max(1, int(available_bytes * fraction))


def parse_size(value: object, *, name: str = "memory") -> Size:
    """Read a size. Error messages call the argument or option ``name``.

    A whole number is bytes and a float up to 1 is a fraction, so ``1`` is one byte and ``1.0`` is all available memory.
    """
    return _parse(value, name, ACCEPTED)


def parse_bytes(value: object, *, name: str = "size") -> int:
    """Read a size that must be absolute: a fraction or "auto" is refused."""
    size = _parse(value, name, ABSOLUTE)
    if size.fixed_bytes is None:
        raise _refused(name, value, "is not possible here" if size.is_auto else "is a fraction", ABSOLUTE)
    return size.fixed_bytes


def format_bytes(count: float) -> str:
    """A size for people: binary units, three significant digits, "1.50 GiB"."""
    sign, count = ("-" if count < 0 else ""), abs(count)
    if count < KIB:
        return f"{sign}{count:.0f} B"
    for unit, scale in (("KiB", KIB), ("MiB", MIB), ("GiB", GIB), ("TiB", TIB)):
        scaled = count / scale
        if scaled < 1023.5 or unit == "TiB":
            digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{sign}{scaled:.{digits}f} {unit}"
    raise AssertionError("unreachable: TiB takes every size")


def _parse(value: object, name: str, accepted: str) -> Size:
    if isinstance(value, Size):
        return value
    if isinstance(value, bool) or value is None:
        raise _refused(name, value, "is not a size", accepted)
    if isinstance(value, str):
        return _parse_text(value, name, accepted)
    if isinstance(value, SupportsIndex):
        return Size(fixed_bytes=_checked_bytes(value.__index__(), name, value, accepted))
    if isinstance(value, SupportsFloat):
        return _from_number(float(value), name, value, accepted)
    raise _refused(name, value, "is not a size", accepted)


def _parse_text(text: str, name: str, accepted: str) -> Size:
    if text.strip().lower() == "auto":
        return Size()
    match = _WRITTEN.fullmatch(text)
    if match is None:
        why = "is negative" if text.strip().startswith(("-", "−")) else "is not a size"
        raise _refused(name, text, why, accepted)
    digits, exponent, unit = match.group(1), match.group(2), match.group(3).upper()
    number = float(digits.replace("_", "") + (f"e{exponent}" if exponent else ""))
    if unit == "%":
        if not 0 < number <= 100:
            raise _refused(name, text, "is not between 0% and 100%", accepted)
        return Size(fraction=number / 100)
    if unit not in _UNITS:
        raise _refused(name, text, f"has the unknown unit {match.group(3)!r}", accepted)
    if unit == "" and ("." in digits or exponent):
        return _from_number(number, name, text, accepted)
    # Python refuses to convert thousands of digits to an integer; as a float the number is infinite and is refused
    # below.
    whole = "." not in digits and not exponent and len(digits) <= 100
    exact = int(digits.replace("_", "")) if whole else None
    scaled = exact * _UNITS[unit] if exact is not None else number * _UNITS[unit]
    return Size(fixed_bytes=_checked_bytes(scaled, name, text, accepted))


def _from_number(number: float, name: str, value: object, accepted: str) -> Size:
    if 0 < number <= 1:
        return Size(fraction=number)
    if number <= 0:
        raise _refused(name, value, "is zero" if number == 0 else "is negative", accepted)
    # 1.5 and 2.0 are mistaken fractions, not budgets of two bytes.
    if math.isfinite(number) and number == int(number) and number >= KIB:
        return Size(fixed_bytes=_checked_bytes(number, name, value, accepted))
    share = "" if accepted is ABSOLUTE else "a fraction up to 1 nor "
    raise _refused(name, value, f"is {'neither' if share else 'not'} {share}a whole number of bytes", accepted)


def _checked_bytes(count: float, name: str, value: object, accepted: str) -> int:
    if count <= 0:
        raise _refused(name, value, "is zero" if count == 0 else "is negative", accepted)
    if count > LARGEST_BYTES:
        raise _refused(name, value, f"is more than {format_bytes(LARGEST_BYTES)}", accepted)
    if count < 1:
        raise _refused(name, value, "is less than one byte", accepted)
    return int(count)


def _refused(name: str, value: object, why: str, accepted: str) -> ConfigError:
    try:
        shown = repr(value)
    except ValueError:  # an integer of thousands of digits cannot be written out
        shown = "a number of thousands of digits"
    if len(shown) > 60:
        shown = shown[:57] + "..."
    return ConfigError(f"{name}={shown} {why}; write {accepted}")
