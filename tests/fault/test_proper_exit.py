"""However a training ends, it ends at once, says one thing at most, and leaves nothing behind.

Each training is a process of its own; who fails, how, and with which loader is a matrix after torch's own idea.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator

import pytest

from support.faults.trainings import End, Nursery, nursery

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
    pytest.mark.xdist_group("proper exit"),
]


@pytest.fixture(scope="module")
def nest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nursery(tmp_path_factory.mktemp("nest")) as made:
        yield made


def assert_clean(end: End, *, status: int, says: str | None) -> None:
    """The exit status is right, standard error is one traceback that ends so (or empty), and nothing lived on."""
    assert end.status == status, end.err
    if says is None:
        assert end.err == ""
    else:
        assert end.err.count("Traceback (most recent call last)") >= 1, end.err
        assert end.err.rstrip().splitlines()[-1].find(says) >= 0 or says in end.err, end.err
        assert "Exception ignored" not in end.err, end.err
    assert not end.left, "it lives on"


MATRIX = """
kind, who, how, persistent, pin = {kind!r}, {who!r}, {how!r}, {persistent}, {pin}
at = 37 if who == "worker" else -1
dataset = {{
    ("map", "error"): lambda: Failing(4000, at, values=2000),
    ("map", "kill"): lambda: Deadly(4000, at, values=2000),
    ("iterable", "error"): lambda: FailingStream(4000, at, values=2000),
    ("iterable", "kill"): lambda: DeadlyStream(4000, at, values=2000),
}}[kind, how]()
loader = penstock.DataLoader(dataset, batch_size=4, num_workers=2, pin_memory=pin, persistent_workers=persistent)
iterator = iter(loader)
for number, batch in enumerate(iterator):
    if who == "loader" and number == 5:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("the training failed")
print("whole epoch")
"""
ENDS = {
    ("loader", "error"): (1, "the training failed"),
    ("loader", "kill"): (-signal.SIGKILL, None),
    ("worker", "error"): (1, "sample 37 is broken"),
    ("worker", "kill"): (1, "SIGKILL"),
}


@pytest.mark.parametrize("pin", [False, True], ids=["", "pinned"])
@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
@pytest.mark.parametrize("how", ["error", "kill"])
@pytest.mark.parametrize("who", ["loader", "worker"])
@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_a_training_ends_cleanly_and_promptly(
    nest: Nursery, kind: str, who: str, how: str, persistent: bool, pin: bool
) -> None:
    end = nest.run(MATRIX.format(kind=kind, who=who, how=how, persistent=persistent, pin=pin))
    status, says = ENDS[who, how]
    assert_clean(end, status=status, says=says)
    assert "whole epoch" not in end.out


LOOP = """
loader = penstock.DataLoader(Noisy(100000, values=2000, sample_s=0.002), batch_size=4, num_workers=2,
                             multiprocessing_context={method!r}, persistent_workers={persistent})
iterator = iter(loader)
said = False
for number, batch in enumerate(iterator):
    # A spawned worker that is still importing is another matter.
    if not said and number >= {least} and all(w.doing != "starting" for w in workers_now(loader)):
        said = True
        print("going", flush=True)
"""


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_ctrl_c_ends_a_training_with_one_traceback(nest: Nursery, method: str, persistent: bool) -> None:
    training = nest.start(LOOP.format(method=method, persistent=persistent, least=5))
    training.wait_for("going")
    training.signal(signal.SIGINT, group=True)
    end = training.end()
    assert end.status == -signal.SIGINT, end.err
    assert end.err.count("Traceback") == 1, end.err
    assert end.err.rstrip().endswith("KeyboardInterrupt"), end.err
    assert not end.left, "it lives on"


@pytest.mark.parametrize(
    ("method", "after_s"),
    [("fork", s) for s in (0.0, 0.01, 0.03, 0.06, 0.1, 0.2, 0.4)] + [("spawn", s) for s in (0.3, 1.0)],
)
def test_ctrl_c_while_a_training_starts_ends_it_with_one_traceback(nest: Nursery, method: str, after_s: float) -> None:
    training = nest.start('print("here", flush=True)\n' + LOOP.format(method=method, persistent=False, least=5))
    training.wait_for("here")
    time.sleep(after_s)
    training.signal(signal.SIGINT, group=True)
    end = training.end()
    assert end.err.count("KeyboardInterrupt") == 1, end.err
    assert "Exception ignored" not in end.err, end.err
    assert not end.left, "it lives on"


def test_a_training_can_catch_ctrl_c_and_continue(nest: Nursery) -> None:
    code = """
loader = penstock.DataLoader(Noisy(400, sample_s=0.002), batch_size=4, num_workers=2)
iterator = iter(loader)
came = []
while True:
    try:
        batch = next(iterator)
        came.append(plain(batch)[0][0])
        if len(came) == 5:
            print("going", flush=True)
    except KeyboardInterrupt:
        continue
    except StopIteration:
        break
print(came == [float(n) for n in range(0, 400, 4)], loader.stats().worker_restarts > 0)
"""
    training = nest.start(code)
    training.wait_for("going")
    training.signal(signal.SIGINT, group=True)
    end = training.end()
    assert (end.status, end.err) == (0, "")
    assert "True" in end.out.splitlines()[-1].split()[0], end.out


@pytest.mark.parametrize(
    ("leave", "status"), [("os._exit(7)", 7), ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM)]
)
def test_os_exit_and_sigterm_in_the_loop_leave_nothing(nest: Nursery, leave: str, status: int) -> None:
    code = f"""
loader = penstock.DataLoader(Noisy(4000, values=2000), batch_size=4, num_workers=3)
for number, batch in enumerate(loader):
    if number == 5:
        {leave}
"""
    assert_clean(nest.run(code), status=status, says=None)


def test_an_exception_that_keeps_its_frame_does_not_keep_the_interpreter_running(nest: Nursery) -> None:
    code = """
import sys
def train():
    loader = penstock.DataLoader(Noisy(4000, values=2000), batch_size=4, num_workers=3)
    iterator = iter(loader)
    for number, batch in enumerate(iterator):
        1 / (number - 5)
try:
    train()
except ZeroDivisionError as error:
    kept = error
print(len(workers()))
"""
    end = nest.run(code)
    assert_clean(end, status=0, says=None)
    assert end.out.strip() == "3"


def test_a_daemonic_parent_gets_torchs_error(nest: Nursery) -> None:
    code = """
import multiprocessing
def train(kind):
    try:
        list(kind(Noisy(8), num_workers=2))
    except BaseException as error:
        print(type(error).__name__, error, flush=True)
for kind in (torch.utils.data.DataLoader, penstock.DataLoader):
    process = multiprocessing.get_context("fork").Process(target=train, args=(kind,), daemon=True)
    process.start()
    process.join(20)
    print(process.exitcode, flush=True)
"""
    end = nest.run(code)
    assert_clean(end, status=0, says=None)
    theirs, _, ours, exitcode = end.out.splitlines()
    assert theirs == ours == "AssertionError daemonic processes are not allowed to have children"
    assert exitcode == "0"


def test_a_daemonic_parent_may_load_without_workers_and_with_threads(nest: Nursery) -> None:
    code = """
import multiprocessing
def train():
    print(len(list(penstock.DataLoader(Noisy(8)))), flush=True)
    print(len(list(penstock.DataLoader(Noisy(8), num_workers=2, backend="thread"))), flush=True)
process = multiprocessing.get_context("fork").Process(target=train, daemon=True)
process.start()
process.join(20)
"""
    end = nest.run(code)
    assert_clean(end, status=0, says=None)
    assert end.out.split() == ["8", "8"]


NESTED = """
class Outer(Noisy):
    def __init__(self, kind, inner_workers):
        super().__init__(6)
        self.kind, self.inner_workers = kind, inner_workers
    def __getitem__(self, index):
        inner = self.kind(Noisy(8), batch_size=2, num_workers=self.inner_workers)
        return torch.stack([batch[:, 0] for batch in inner])
def first_error(kind, inner_workers):
    try:
        return str(len(list(kind(Outer(kind, inner_workers), num_workers=2))))
    except BaseException as error:
        return type(error).__name__ + " " + str(error).splitlines()[-1]
"""


def test_a_dataset_may_iterate_a_loader_without_workers(nest: Nursery) -> None:
    end = nest.run(NESTED + "print(first_error(penstock.DataLoader, 0))")
    assert_clean(end, status=0, says=None)
    assert end.out.strip() == "6"


def test_a_dataset_that_iterates_a_loader_with_workers_gets_torchs_error(nest: Nursery) -> None:
    end = nest.run(
        NESTED + "print(first_error(torch.utils.data.DataLoader, 2)); print(first_error(penstock.DataLoader, 2))"
    )
    assert_clean(end, status=0, says=None)
    theirs, ours = end.out.splitlines()
    assert theirs == ours
    assert "daemonic processes are not allowed to have children" in ours


THREADS = """
results = {{}}
def train(number):
    try:
        for _ in range(3):
            loader = penstock.DataLoader(Noisy(60, values=600), batch_size=4, num_workers=2, timeout=20,
                                         backend={backend!r})
            came = [plain(batch[:, 0]) for batch in loader]
            assert came == [[float(4 * b + r) for r in range(4)] for b in range(15)], came
        results[number] = "fine"
    except BaseException as error:
        results[number] = repr(error)
threads = [threading.Thread(target=train, args=(n,)) for n in range(4)]
for thread in threads: thread.start()
if {kills}:
    chance = random.Random(1)
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.1)
        living = workers()
        if living:
            kill(chance.choice(living))
for thread in threads: thread.join()
print(set(results.values()), len(workers()))
"""


@pytest.mark.parametrize(("backend", "kills"), [("process", False), ("process", True), ("thread", False)])
def test_several_loaders_in_threads_do_not_disturb_each_other(nest: Nursery, backend: str, kills: bool) -> None:
    end = nest.run(THREADS.format(backend=backend, kills=kills))
    assert (end.status, end.err) == (0, "")
    assert end.out.strip() == "{'fine'} 0"
    assert not end.left, "it lives on"


def test_a_loader_begun_in_one_thread_and_left_in_another_leaves_nothing(nest: Nursery) -> None:
    code = """
made = {}
def begin():
    made["iterator"] = iter(penstock.DataLoader(Noisy(60), batch_size=4, num_workers=2))
    made["first"] = next(made["iterator"])
thread = threading.Thread(target=begin)
thread.start()
thread.join()
time.sleep(0.3)
print(1 + sum(1 for _ in made.pop("iterator")), len(workers()))
"""
    end = nest.run(code)
    assert_clean(end, status=0, says=None)
    assert end.out.strip() == "15 0"


def test_a_whole_epoch_and_the_end_of_the_program_are_silent(nest: Nursery) -> None:
    code = """
for persistent in (False, True):
    loader = penstock.DataLoader(Noisy(60), batch_size=4, num_workers=2, persistent_workers=persistent)
    print(len(list(loader)))
"""
    end = nest.run(code)
    assert_clean(end, status=0, says=None)
    assert end.out.split() == ["15", "15"]
