"""Environment variables: the ranks that a launcher set and the folders of this user. No other file reads
``os.environ``.

In:  the environment of this process.
Out: counts, paths and texts; a variable that is empty counts as unset.
Runs in: trainer, worker, command line. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from penstock.errors import ConfigError, PenstockError

ENVIRONMENT: Mapping[str, str] = os.environ
"""The current variables: a default for arguments that tests replace, and the environment of programs that penstock
starts."""

_NODE_COUNTS = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "NNODES", "NUM_NODES")
"""Variables that hold the number of nodes of a training."""

DASH_TOKEN_VARIABLE = "PENSTOCK_DASH_TOKEN"


def global_rank() -> int:
    """The rank of this process in the training; 0 without a launcher."""
    return _count("RANK", 0)


def world_size() -> int:
    """The number of processes of the training on all nodes; 1 without a launcher."""
    return _count("WORLD_SIZE", 1)


def local_ranks(default: int | None = None, *, world: int | None = None, rank: int | None = None) -> int:
    """The number of processes of the training on this node; without a launcher it is ``default``, or 1.

    torchrun and MPI set this number. Lightning does not: it sets the rank of a process on its node, the number of all
    processes, and the rank of the node. ``world`` and ``rank`` are the figures of torch.distributed if it is
    initialized. If there could be several nodes and no variable holds their number, all processes count as being on
    this node.
    """
    for variable in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        if found := _count(variable, 0):
            return max(1, found)
    if "SLURM_LOCALID" in os.environ and (tasks := _number("SLURM_STEP_NUM_TASKS") or 1) > 1:
        return -(-tasks // (_number("SLURM_STEP_NUM_NODES") or 1))
    local = _number("LOCAL_RANK")
    if local is None:
        return max(1, default or 1)
    world = world or _number("WORLD_SIZE") or 1
    rank = _number("RANK") if rank is None else rank
    node = _number("NODE_RANK") or _number("GROUP_RANK") or 0
    if node and rank is not None and rank > local and (rank - local) % node == 0:
        return (rank - local) // node
    nodes = next((found for name in _NODE_COUNTS if (found := _number(name))), 1)
    return max(1, default or 1, local + 1, -(-world // nodes))


def is_one_node() -> bool:
    """Whether the processes of the training connect to an address that no other machine can reach."""
    return os.environ.get("MASTER_ADDR", "") in ("localhost", "127.0.0.1", "::1")


def launcher_ranks() -> dict[str, int]:
    """The ranks that a launcher set, for the record of a run. Variables that hold no number are left out."""
    names = {"rank": "RANK", "local_rank": "LOCAL_RANK", "world_size": "WORLD_SIZE"}
    found = {name: os.environ.get(variable, "") for name, variable in names.items()}
    return {name: int(text) for name, text in found.items() if text.isdecimal()}


def user_cache_folder(part: str) -> Path:
    """Folder for files that penstock can make again: ``$XDG_CACHE_HOME/penstock/part``, or below ``~/.cache``.

    Raises PenstockError, as ``state_folder`` does."""
    return _user_folder("XDG_CACHE_HOME", ".cache") / part


def temporary_folder() -> Path:
    """Folder for large files that are deleted when the program ends: ``$TMPDIR``, or ``/var/tmp`` if that is unset,
    because ``/tmp`` is often in memory."""
    on_disk = Path("/var/tmp")
    chosen = any(os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    return on_disk if not chosen and os.access(on_disk, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def state_folder() -> Path:
    """Folder for records: ``$PENSTOCK_HOME``, or ``$XDG_STATE_HOME/penstock``, or ``~/.local/state/penstock``.

    Raises PenstockError if there is no home and other users can enter the folder below the temporary folder."""
    own = os.environ.get("PENSTOCK_HOME", "")
    if not own:
        folder = _user_folder("XDG_STATE_HOME", ".local/state")
        with contextlib.suppress(OSError):
            _close_to_others(folder)
        return folder
    try:
        # The path is made absolute now, because a training may change its working directory.
        return Path(own).expanduser().absolute()
    except (RuntimeError, OSError) as problem:
        raise ConfigError(f"PENSTOCK_HOME={own!r} is not a folder: {problem}") from None


def runtime_folder() -> Path | None:
    """``$XDG_RUNTIME_DIR``, or None where it is unset, belongs to another user or cannot be written.

    Inside containers and under sudo the variable may name a folder that does not exist.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if not base.startswith("/") or not os.access(base, os.W_OK | os.X_OK) or Path(base).stat().st_uid != user_id():
        return None
    return Path(base)


def own_temporary_folder() -> Path:
    """``penstock-UID`` in the temporary folder, made and checked, because any user can make a file or folder of that
    name.

    Raises PenstockError."""
    return private_folder(Path(tempfile.gettempdir()) / f"penstock-{user_id()}", is_in_public=True)


def private_folder(path: Path, *, is_in_public: bool = False) -> Path:
    """Make a folder that only this user can enter, and make each missing folder above it in the same way.

    If the folder exists and the umask let other users read it, it is closed to them. ``is_in_public`` means that other
    users can write to the folder above, so the folder must belong to this user. Raises PenstockError.
    """
    try:
        for folder in reversed([path, *path.parents]):
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        is_own = found.st_uid == user_id()
        if is_in_public and not (stat.S_ISDIR(found.st_mode) and is_own and not found.st_mode & 0o022):
            owner = f"belongs to user {found.st_uid}" if not is_own else "can be written by other users"
            raise PenstockError(
                f"{path} must be a folder of yours that no other user can enter, but it {owner}. Remove it, or set "
                "TMPDIR or XDG_RUNTIME_DIR to a folder of yours."
            )
        _close_to_others(path)
    except OSError as problem:
        raise PenstockError(
            f"The folder {path} cannot be made: {problem.strerror or problem}. Set TMPDIR, XDG_RUNTIME_DIR or "
            "PENSTOCK_HOME to folders that you can write to."
        ) from problem
    return path


def _close_to_others(folder: Path) -> None:
    """Close a folder of this user to other users. Raises OSError."""
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == user_id() and found.st_mode & 0o077:
        folder.chmod(0o700)


def user_id() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def dash_token() -> str:
    """The access token that the user chose for the live page; "" if the user chose none."""
    return os.environ.get(DASH_TOKEN_VARIABLE, "").strip()


def chooses_arrow_pool() -> bool:
    """Whether the user set the memory pool that pyarrow allocates from."""
    return "ARROW_DEFAULT_MEMORY_POOL" in os.environ


def _user_folder(variable: str, below_home: str) -> Path:
    """The user's folder for penstock, which is below the temporary folder if this user has no home."""
    root = os.environ.get(variable, "")
    # The XDG specification asks programs to ignore a relative path.
    if root.startswith("/"):
        return Path(root) / "penstock"
    try:
        return Path.home() / below_home / "penstock"
    except RuntimeError:
        return own_temporary_folder() / below_home.rpartition("/")[2].lstrip(".")


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None


def _count(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ConfigError(f"{variable}={text!r} is not a whole number; unset it or start with torchrun") from None
