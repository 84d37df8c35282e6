"""What a folder for `penstock pack` contains: tables, shards, or files that form samples.

In:  a folder, or the names in one.
Out: the kind of the contents, and the names that are left out; samples, each made of the files whose names are equal up
     to the first dot.
Runs in: command line, pack's workers.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.data.pack.manifest import JOURNAL, MANIFEST
from penstock.data.parquet.dataset import SUFFIXES as PARQUET_SUFFIXES
from penstock.data.tar.index import KEY
from penstock.errors import ConfigError, DataError

SUFFIXES = {"parquet": PARQUET_SUFFIXES, "tar": (".tar",), "arrow": (".arrow",)}
"""Kind -> the ends of its file names."""
_CALLED = {
    "parquet": ("Parquet file", "Parquet files"),
    "tar": ("tar shard", "tar shards"),
    "arrow": ("Arrow file", "Arrow files"),
    "files": ("file that may be part of a sample", "files that may be parts of samples"),
}
"""Kind -> its name in singular and plural."""
_UNPACKED_BY = {
    ".tar.gz": "gunzip -k", ".tgz": "gunzip -k", ".tar.bz2": "bunzip2 -k", ".tar.xz": "unxz -k", ".tar.zst": "unzstd",
}  # fmt: skip
_NOTES = re.compile(r"(readme|license)(\..*)?|.*\.md|dataset_info\.json|dataset_dict\.json|state\.json", re.IGNORECASE)
"""Files that describe the shards and tables beside them."""
_OWN = re.compile(rf"{re.escape(MANIFEST)}|{re.escape(JOURNAL)}|.*\.penstock-index")


def kind_of_name(name: str) -> str | None:
    return next((kind for kind, suffixes in SUFFIXES.items() if name.lower().endswith(suffixes)), None)


def refuse_compressed(path: str) -> None:
    """Raise ConfigError for a compressed shard, or a glob of them, with the command that unpacks it."""
    for suffix, command in _UNPACKED_BY.items():
        if path.lower().endswith(suffix):
            is_pattern = any(mark in path for mark in "*?[")
            raise ConfigError(
                f"{path} is compressed, so no sample can be read without decompressing all samples before it. Unpack "
                f"it first: {command} {path if is_pattern else shlex.quote(path)}"
            )


def kind_in(folder: str, names: Iterable[str]) -> tuple[str, list[str]]:
    """The kind of source that the files ``names`` of a folder form, and which of them are left out.

    Raises ConfigError for several kinds: packing one would silently drop the others.
    """
    found: dict[str, list[str]] = {}
    left_out: list[str] = []
    for name in names:
        parts = name.split("/")
        kind = kind_of_name(name)
        if _OWN.fullmatch(parts[-1]):
            continue
        if kind is None:
            is_data = is_sample_name(name) and not _NOTES.fullmatch(parts[-1])
        else:
            # As in datasets, files whose names begin with a dot or with _ are unfinished, or not data.
            is_data = not any(part.startswith((".", "_")) for part in parts)
        if is_data:
            found.setdefault(kind or "files", []).append(name)
        else:
            left_out.append(name)
    if len(found) > 1:
        raise _undecided(folder, found)
    kind = next(iter(found), "files")
    if kind == "files" and found and all(name.lower().endswith(tuple(_UNPACKED_BY)) for name in found[kind]):
        first = found[kind][0]
        suffix = next(suffix for suffix in _UNPACKED_BY if first.lower().endswith(suffix))
        refuse_compressed(f"{folder.rstrip('/')}/*{suffix}")
    return kind, left_out


def _undecided(folder: str, found: dict[str, list[str]]) -> ConfigError:
    counts = [
        f"{len(names):,} {_CALLED[kind][len(names) > 1]}, such as {names[0]}"
        for kind, names in sorted(found.items(), key=lambda item: list(_CALLED).index(item[0]))
    ]
    kind = next(kind for kind in SUFFIXES if kind in found)
    here, first = folder.rstrip("/"), found[kind][0]
    where = f"{here}/{first.rpartition('/')[0]}".rstrip("/")
    pattern = shlex.quote(f"{where}/*{first[first.rindex('.') :]}")
    return ConfigError(
        f"{folder} holds {'; '.join(counts[:-1])}; and {counts[-1]}: which of them is the dataset? Name the "
        f"{_CALLED[kind][0]} ({shlex.quote(f'{here}/{first}')}), or a glob ({pattern}), or give a folder without "
        f"{'it' if len(found[kind]) == 1 else 'them'}"
    )


def is_sample_name(name: str) -> bool:
    """Whether a file of this name belongs to a sample: it needs an extension, which names its part of the sample."""
    stem, _, extension = name.rpartition("/")[2].partition(".")
    return bool(stem and extension) and extension.lower() != KEY and not re.match(r"__[^/]*__(/|$)", name)


def walk(folder: Path) -> tuple[list[str], list[str]]:
    """All files at any depth, and the folders that are left out: hidden ones, and links, which may form circles.

    Both are sorted names relative to the folder."""
    files: list[str] = []
    passed: list[str] = []
    for where, folders, names in os.walk(folder, onerror=_refuse):
        below = Path(where).relative_to(folder)
        for name in list(folders):
            if name.startswith(".") or Path(where, name).is_symlink():
                folders.remove(name)
                passed.append(f"{(below / name).as_posix()}/")
        files += ((below / name).as_posix() for name in names)
    return sorted(files), sorted(passed)


def _refuse(problem: OSError) -> None:
    raise DataError(f"{problem.filename} cannot be listed: {problem.strerror}") from problem


class FolderFiles:
    """Samples made of files. Files whose paths are equal up to the first dot of their names form one sample: their
    bytes by extension."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        names, passed = walk(folder)
        self.skipped = list(passed)
        groups: dict[str, list[tuple[str, int]]] = {}
        taken = hashlib.blake2b(str(folder.resolve()).encode("utf-8", "surrogateescape"), digest_size=16)
        for name in names:
            path = folder / name
            if not is_sample_name(name) or not path.is_file():
                self.skipped.append(name)
                continue
            head, slash, tail = name.rpartition("/")
            stem, _, extension = tail.partition(".")
            about = path.stat()
            group = groups.setdefault(f"{head}{slash}{stem}", [])
            if any(extension.lower() == other.lower() for other, _ in group):
                raise DataError(f"{path} and another file differ only in capitals, which readers of shards ignore")
            group.append((extension, about.st_size))
            taken.update(f"{name}\0{about.st_size}-{about.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
        if not groups:
            left_out = f"; left out: {', '.join(passed[:3])}" if passed else ""
            raise DataError(f"there is no file with an extension in {folder}, so there is nothing to pack{left_out}")
        self.skipped.sort()
        self._keys = sorted(groups)
        self._groups = groups
        self.fingerprint = taken.hexdigest()

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> dict[str, Any]:
        key = self._keys[index]
        sample: dict[str, Any] = {KEY: key}
        for extension, size_bytes in self._groups[key]:
            path = self._folder / f"{key}.{extension}"
            try:
                data = path.read_bytes()
            except OSError as problem:
                raise DataError(f"{path} cannot be read: {problem.strerror}") from problem
            if len(data) != size_bytes:
                raise DataError(f"{path} has {len(data)} bytes; it had {size_bytes} when packing began")
            sample[extension] = data
        return sample
