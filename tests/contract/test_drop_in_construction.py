"""What can be said of a loader before it is iterated: signature, attributes, refusals; torch is right."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import default_collate, default_convert

import penstock
from support.datasets.contract import Samples, Unsharded, plain
from support.loaders import MakeLoader
from support.torch_oracle import TORCH, assert_identical

EXTRAS = {
    "memory": "auto",
    "autotune": False,
    "device": None,
    "cache": None,
    "seeding": "batch",
    "backend": None,
    "name": None,
    "threads_per_worker": 1,
}
"""penstock's own arguments and their defaults; some arrive with the parts of penstock that serve them."""
ALWAYS = {"memory", "seeding", "backend", "name"}

DATA = Samples(plain, 10)


def test_the_signature_begins_with_torchs_own_arguments() -> None:
    theirs = list(inspect.signature(TORCH).parameters.values())
    ours = list(inspect.signature(penstock.DataLoader).parameters.values())[: len(theirs)]
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


def test_penstocks_own_arguments_are_keywords_with_the_documented_defaults() -> None:
    theirs = inspect.signature(TORCH).parameters
    ours = inspect.signature(penstock.DataLoader).parameters
    extras = {name: p for name, p in ours.items() if name not in theirs}
    assert extras.keys() >= ALWAYS
    assert {name: p.default for name, p in extras.items()}.items() <= EXTRAS.items()
    assert {p.kind for p in extras.values()} == {inspect.Parameter.KEYWORD_ONLY}


def test_a_loader_is_a_torch_dataloader() -> None:
    assert issubclass(penstock.DataLoader, TORCH)
    assert isinstance(penstock.DataLoader(DATA), TORCH)


def test_the_class_can_be_subscripted_and_subclassed_with_the_type_of_its_batches() -> None:
    def train(loader: penstock.DataLoader[list[torch.Tensor]]) -> None: ...

    class Mine(penstock.DataLoader[torch.Tensor]):
        pass

    assert train.__annotations__
    numbers: Any = [1, 2, 3]
    assert [batch.tolist() for batch in Mine(numbers, batch_size=2)] == [[1, 2], [3]]


def test_every_argument_is_an_attribute_that_frameworks_find_in_vars() -> None:
    loader = penstock.DataLoader(DATA, num_workers=1)
    ours = set(inspect.signature(penstock.DataLoader).parameters)
    # torch keeps no record of shuffle, and frameworks ask for the context by name.
    assert ours - {"shuffle", "multiprocessing_context"} - set(vars(loader)) == set()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "prefetch_factor": 5, "persistent_workers": True, "in_order": False},
        {"batch_size": 3, "drop_last": True, "shuffle": True, "generator": torch.Generator()},
        {"batch_size": None},
        {"batch_sampler": [[0, 1], [2]]},
        {"sampler": [3, 1], "collate_fn": list, "pin_memory": True, "pin_memory_device": "cuda"},
        {"num_workers": 1, "timeout": 2.5, "worker_init_fn": print},
    ],
)
def test_torchs_arguments_read_back_as_torch_has_them(given: dict[str, Any]) -> None:
    ours, theirs = penstock.DataLoader(DATA, **given), TORCH(DATA, **given)
    for name in inspect.signature(TORCH).parameters:
        if name == "shuffle":
            continue
        our, their = getattr(ours, name), getattr(theirs, name)
        if name in ("sampler", "batch_sampler") and not isinstance(their, list):
            assert type(our) is type(their)
        else:
            assert our == their, name


def test_penstocks_arguments_read_back_as_they_were_given() -> None:
    given: dict[str, Any] = {"memory": "64MB", "seeding": "worker", "name": "train", "backend": "process"}
    loader = penstock.DataLoader(DATA, num_workers=1, **given)
    extras = EXTRAS.keys() & inspect.signature(penstock.DataLoader).parameters.keys()
    for name in extras:
        assert getattr(loader, name) == given.get(name, EXTRAS[name]), name


def rebuild(loader: Any) -> Any:
    """A loader made anew from what another shows of itself: its public attributes and its signature."""
    shown = {name: value for name, value in vars(loader).items() if not name.startswith("_")}
    shown["multiprocessing_context"] = loader.multiprocessing_context
    parameters = inspect.signature(type(loader)).parameters
    given: dict[str, Any] = {name: shown[name] for name in parameters if name in shown}
    if given["batch_sampler"] is not None and given["batch_size"] is not None:
        del given["batch_sampler"]
    return type(loader)(**given)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_rebuilt_by_a_framework_keeps_every_argument(num_workers: int) -> None:
    given: dict[str, Any] = {
        "memory": "96MB",
        "seeding": "worker",
        "name": "train",
        "num_workers": num_workers,
    }
    if num_workers:
        given |= {"prefetch_factor": 3, "persistent_workers": True, "timeout": 60, "backend": "process"}
    first = penstock.DataLoader(DATA, batch_size=4, drop_last=True, **given)
    second = rebuild(first)
    assert type(second) is penstock.DataLoader
    for name in inspect.signature(penstock.DataLoader).parameters:
        if name not in ("shuffle", "batch_sampler"):
            assert getattr(second, name) == getattr(first, name), name
    assert_identical(list(second), list(TORCH(DATA, batch_size=4, drop_last=True)))


@pytest.mark.parametrize(
    "attribute", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_attributes_that_torch_fixes_at_construction_cannot_be_assigned(attribute: str, any_maker: MakeLoader) -> None:
    loader = any_maker(DATA)
    with pytest.raises(ValueError, match=f"{attribute} attribute should not be set after DataLoader is init"):
        setattr(loader, attribute, None)


def test_workers_and_prefetch_can_be_assigned(any_maker: MakeLoader) -> None:
    loader = any_maker(DATA, batch_size=4, num_workers=1)
    loader.num_workers = 2
    loader.prefetch_factor = 3
    assert (loader.num_workers, loader.prefetch_factor) == (2, 3)
    assert_identical(list(loader), list(TORCH(DATA, batch_size=4)))


def test_num_workers_can_be_set_to_zero_and_back(any_maker: MakeLoader) -> None:
    loader = any_maker(DATA, batch_size=4, num_workers=2)
    expected = list(TORCH(DATA, batch_size=4))
    for num_workers in (0, 1):
        loader.num_workers = num_workers
        assert_identical(list(loader), expected)


def test_prefetch_factor_reads_back_two_only_with_workers(any_maker: MakeLoader) -> None:
    assert any_maker(DATA, num_workers=1).prefetch_factor == 2
    assert any_maker(DATA, num_workers=1, prefetch_factor=7).prefetch_factor == 7
    assert any_maker(DATA).prefetch_factor is None


STREAM = Unsharded(8)

REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "negative workers": (DATA, {"num_workers": -1}),
    "negative timeout": (DATA, {"timeout": -1}),
    "prefetch without workers": (DATA, {"prefetch_factor": 2}),
    "negative prefetch": (DATA, {"prefetch_factor": -1, "num_workers": 1}),
    "persistence without workers": (DATA, {"persistent_workers": True}),
    "context without workers": (DATA, {"multiprocessing_context": "fork"}),
    "unknown context": (DATA, {"multiprocessing_context": "bad", "num_workers": 1}),
    "context of a wrong type": (DATA, {"multiprocessing_context": 3, "num_workers": 1}),
    "drop_last without batches": (DATA, {"batch_size": None, "drop_last": True}),
    "batches of zero": (DATA, {"batch_size": 0}),
    "batches of a fraction": (DATA, {"batch_size": 1.5}),
    "drop_last of a wrong type": (DATA, {"drop_last": 3}),
    "sampler and shuffle": (DATA, {"sampler": SequentialSampler(DATA), "shuffle": True}),
    "batch sampler and batch size": (DATA, {"batch_sampler": [[0]], "batch_size": 2}),
    "batch sampler and shuffle": (DATA, {"batch_sampler": [[0]], "shuffle": True}),
    "batch sampler and sampler": (DATA, {"batch_sampler": [[0]], "sampler": [0]}),
    "batch sampler and drop_last": (DATA, {"batch_sampler": [[0]], "drop_last": True}),
    "nothing to shuffle": ([], {"shuffle": True}),
    "stream and shuffle": (STREAM, {"shuffle": True}),
    "stream and sampler": (STREAM, {"sampler": [0]}),
    "stream and batch sampler": (STREAM, {"batch_sampler": [[0]]}),
    "unknown argument": (DATA, {"batchsize": 2}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_torch_refuses_are_refused_with_the_same_message(case: str) -> None:
    dataset, arguments = REFUSED[case]
    with pytest.raises(Exception) as theirs:
        TORCH(dataset, **arguments)
    with pytest.raises(type(theirs.value)) as ours:
        penstock.DataLoader(dataset, **arguments)
    assert str(ours.value).removeprefix("penstock.") == str(theirs.value)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"batch_size": 3},
        {"batch_size": 3, "drop_last": True},
        {"batch_size": None},
        {"batch_sampler": [[0, 1], [2]]},
        {"sampler": [3, 1, 2], "batch_size": 2},
    ],
)
def test_the_length_is_torchs(given: dict[str, Any]) -> None:
    assert len(penstock.DataLoader(DATA, **given)) == len(TORCH(DATA, **given))
    if not {"batch_sampler", "sampler"} & given.keys():
        assert len(penstock.DataLoader(STREAM, **given)) == len(TORCH(STREAM, **given))


def test_the_length_follows_a_dataset_that_grows(any_maker: MakeLoader) -> None:
    data = [1, 2, 3]
    loaders = [any_maker(data), any_maker(data, shuffle=True)]
    data.append(4)
    assert [len(loader) for loader in loaders] == [4, 4]


def test_a_dataset_without_a_length_has_no_length(any_maker: MakeLoader) -> None:
    class Nameless(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter([1, 2])

    loader = any_maker(Nameless())
    with pytest.raises(TypeError):
        len(loader)
    assert len(list(loader)) == 2


def test_the_default_samplers_and_collate_functions_are_torchs() -> None:
    batched, single = penstock.DataLoader(DATA, shuffle=True), penstock.DataLoader(DATA, batch_size=None)
    assert batched.collate_fn is default_collate
    assert single.collate_fn is default_convert
    assert type(batched.sampler) is RandomSampler
    assert type(batched.batch_sampler) is BatchSampler
    assert single.batch_sampler is None


def test_more_workers_than_cores_are_warned_about(any_maker: MakeLoader) -> None:
    with pytest.warns(UserWarning, match="excessive worker creation might get DataLoader running slow"):
        any_maker(DATA, num_workers=1000)


def test_construction_is_otherwise_silent(any_maker: MakeLoader) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        any_maker(DATA, batch_size=2, num_workers=1, pin_memory=True)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_can_be_copied_and_pickled(num_workers: int, any_maker: MakeLoader) -> None:
    loader = any_maker(DATA, batch_size=4, num_workers=num_workers)
    expected = list(TORCH(DATA, batch_size=4))
    for twin in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert_identical(list(twin), expected)
    assert_identical(list(loader), expected)
