"""The error tree: all errors that penstock raises on purpose have one base class.

In:  nothing.
Out: exception classes for every room.
Runs in: trainer, worker, command line.

Each class is also the built-in exception that torch users catch in the same situation, so that an existing ``except
RuntimeError`` still works.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base class of every error that penstock raises on purpose."""


class ConfigError(PenstockError, ValueError, TypeError):
    """An argument, a settings file or a size that is not valid."""


class BudgetError(PenstockError, RuntimeError, MemoryError):
    """The requested memory is more than this machine or container has. Raised before any memory is reserved."""


class WorkerError(PenstockError, RuntimeError):
    """A worker crashed, hung or could not start. The message names the sample that the worker was making."""


class CacheError(PenstockError, RuntimeError, OSError):
    """A cache cannot be opened or shared, or is damaged."""


class DataError(PenstockError, RuntimeError, ValueError, OSError):
    """A data file is missing or damaged, or its content does not match its name."""
