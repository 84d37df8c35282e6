"""The error tree: one root, each error also the built-in that users catch, each fit to cross processes."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

import penstock
from penstock import errors

TREE = {
    errors.PenstockError: (Exception,),
    errors.ConfigError: (ValueError, TypeError),
    errors.BudgetError: (RuntimeError, MemoryError),
    errors.WorkerError: (RuntimeError,),
    errors.CacheError: (RuntimeError, OSError),
    errors.DataError: (RuntimeError, ValueError, OSError),
}
"""Error -> the built-in exceptions that existing code catches in its place."""

MESSAGE = "batch 812 needs 412 MB, the budget has 96 MB free; raise memory="


def test_the_table_above_names_every_error_there_is() -> None:
    defined = {cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__}
    assert defined == set(TREE)


@pytest.mark.parametrize("error", TREE)
def test_every_error_has_one_root_and_is_the_builtin_that_users_catch(error: type[Exception]) -> None:
    assert issubclass(error, penstock.PenstockError)
    for builtin in TREE[error]:
        with pytest.raises(builtin, match="412 MB"):
            raise error(MESSAGE)


@pytest.mark.parametrize("error", TREE)
def test_every_error_survives_the_trip_from_a_worker(error: type[Exception]) -> None:
    original = error(MESSAGE)
    for copied in (pickle.loads(pickle.dumps(original)), copy.copy(original)):
        assert type(copied) is error
        assert str(copied) == MESSAGE
        assert copied.args == (MESSAGE,)


@pytest.mark.parametrize("error", TREE)
def test_every_error_is_a_public_name_with_a_docstring(error: type[Exception]) -> None:
    assert getattr(penstock, error.__name__) is error
    assert error.__name__ in penstock.__all__
    assert error.__doc__
