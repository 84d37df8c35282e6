"""Reads the options of torch's CUDA caching allocator from their environment variable.

In:  "max_split_size_mb:128,expandable_segments:True", from PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF.
Out: ``AllocatorSettings``.
Runs in: anywhere; pure.

Options that do not change device memory (pinned memory, backends, locks) are ignored. torch accepts
``large_segment_size_mb`` since 2.10; an older torch refuses this option itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.units import MIB

_INTERVALS = 16
"""The number of size classes with their own rounding: 1 MiB, 2 MiB, ... 32 GiB and above."""
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The environment variables, in the order in which torch reads them."""
_TOKENS = re.compile(r"[,:\[\]]|[^,:\[\]\s]+")


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """The rules by which the allocator rounds, splits and releases memory. The defaults are torch's."""

    large_segment_bytes: int = 20 * MIB
    """The size of a segment for requests between 1 and 10 MiB."""
    max_split_bytes: int | None = None
    """Blocks of this size or larger are never split; None if every block may be split."""
    max_non_split_rounding_bytes: int = 20 * MIB
    """How many bytes larger than the request a block may be that cannot be split."""
    roundup_power2_divisions: tuple[int, ...] = (0,) * _INTERVALS
    """For each size class, the number of steps between two powers of two to which sizes are rounded; 0 for no such
    rounding."""
    garbage_collection_threshold: float = 0.0
    """The share of the limit above which old unused segments are released; 0 if they are never released."""
    expandable_segments: bool = False
    """Whether segments grow in place, so that no new segments are allocated for larger requests."""
    memory_fraction: float = 1.0
    """The share of the device's memory that torch may take."""

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Read the value of the environment variable. Raises ConfigError with the name of an option that cannot be
        read."""
        options = dict(_options(text))
        large = _megabytes(options, "large_segment_size_mb", least=11) or 20 * MIB
        return cls(
            large_segment_bytes=large,
            max_split_bytes=_megabytes(options, "max_split_size_mb", least=large // MIB),
            max_non_split_rounding_bytes=_megabytes(options, "max_non_split_rounding_mb", least=large // MIB) or large,
            roundup_power2_divisions=_divisions(options.get("roundup_power2_divisions", ["0"])),
            garbage_collection_threshold=_share(options, "garbage_collection_threshold", 0.0),
            expandable_segments=options.get("expandable_segments", ["False"])[0] == "True",
            memory_fraction=_share(options, "per_process_memory_fraction", 1.0),
        )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> AllocatorSettings:
        """Read the settings from the environment as torch does: only the first variable that is set counts."""
        return cls.parse(next((environment[name] for name in _VARIABLES if name in environment), ""))

    def divisions(self, size_bytes: int) -> int:
        """The entry of ``roundup_power2_divisions`` for a request of this size."""
        return self.roundup_power2_divisions[min(max(size_bytes.bit_length() - 21, 0), _INTERVALS - 1)]


def _options(text: str) -> Iterator[tuple[str, list[str]]]:
    """The name of each option and the tokens of its value."""
    tokens = _TOKENS.findall(text)
    at = 0
    while at < len(tokens):
        name, at = tokens[at], at + 1
        if at + 1 >= len(tokens) or tokens[at] != ":":
            raise ConfigError(f"PYTORCH_ALLOC_CONF={text!r}: {name} has no value; write name:value,name:value")
        end = at + 2
        if tokens[at + 1] == "[":
            while end < len(tokens) and tokens[end - 1] != "]":
                end += 1
        yield name, tokens[at + 1 : end]
        at = end + 1  # skip the comma


def _megabytes(options: Mapping[str, list[str]], name: str, *, least: int) -> int | None:
    if name not in options:
        return None
    written = options[name][0]
    if not written.isdecimal() or int(written) < least:
        raise ConfigError(f"PYTORCH_ALLOC_CONF: {name}:{written} is not a whole number of MiB of at least {least}")
    return int(written) * MIB


def _share(options: Mapping[str, list[str]], name: str, default: float) -> float:
    if name not in options:
        return default
    try:
        share = float(options[name][0])
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise ConfigError(f"PYTORCH_ALLOC_CONF: {name}:{options[name][0]} is not between 0 and 1")
    return share


def _divisions(tokens: list[str]) -> tuple[int, ...]:
    """Read one number for all sizes, or a list such as [256:1,512:2,1024:4,>:8] with sizes in MiB before the colons."""
    if tokens[0] != "[":
        return (_power_of_two(tokens[0]),) * _INTERVALS
    found, last = [0] * _INTERVALS, -1
    pairs = [token for token in tokens[1:] if token not in ":,]"]
    for boundary, written in zip(pairs[::2], pairs[1::2], strict=False):
        value = _power_of_two(written)
        if boundary == ">":
            found[last + 1 :] = [value] * (_INTERVALS - last - 1)
            continue
        index = min(_power_of_two(boundary).bit_length() - 1, _INTERVALS - 1)
        if last < 0:
            found[:index] = [value] * index
        found[index] = value
        last = index
    return tuple(found)


def _power_of_two(written: str) -> int:
    value = int(written) if written.isdecimal() else -1
    if value < 0 or value & (value - 1):
        raise ConfigError(f"PYTORCH_ALLOC_CONF: roundup_power2_divisions: {written} is not a power of two")
    return value
