"""The error tree: everything penstock raises on purpose has one root.

In:  nothing.
Out: exception classes for every room.
Runs in: trainer, worker, command line.

Each class is also the built-in exception a torch user already catches in the same situation, so that a
drop-in replacement does not slip past an existing ``except RuntimeError``.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Root of every error penstock raises on purpose."""


class ConfigError(PenstockError, ValueError, TypeError):
    """An argument, a settings file or a size that cannot be what the user meant."""


class BudgetError(PenstockError, RuntimeError, MemoryError):
    """Memory that was asked for does not exist here, said before anything was reserved."""


class WorkerError(PenstockError, RuntimeError):
    """A worker died, hung or could not start, with what it had in hand."""


class CacheError(PenstockError, RuntimeError, OSError):
    """A cache that cannot be opened, shared or trusted."""


class DataError(PenstockError, RuntimeError, ValueError, OSError):
    """A data file that is missing, damaged or not what its name says."""
