"""The doctor command on fake machines made of files: every finding, and the exit status of every answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from penstock import ConfigError
from penstock.advice import machine as facts_module
from penstock.advice.machine import CHECKS
from penstock.cli.app import run
from penstock.meter import Roots
from support.machines.healthy import GIB, FakeFilesystem, FakeMachine

MIB = 1 << 20


class FakeNvml(ModuleType):
    """pynvml on a machine with this many GPUs; a negative number is a machine without a driver."""

    class NVMLError(Exception):
        pass

    nvmlMemory_v2 = 2

    def __init__(self, count: int) -> None:
        super().__init__("pynvml")
        self.count = count

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)

        def unanswered(*_: object) -> NoReturn:
            raise self.NVMLError("Not Supported")

        return unanswered

    def nvmlInit(self) -> None:
        if self.count < 0:
            raise self.NVMLError("NVML Shared Library Not Found")

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, device: int) -> str:
        return f"NVIDIA H200 number {device}"

    def nvmlDeviceGetMemoryInfo(self, device: int, version: int = 1) -> Any:
        return SimpleNamespace(total=141 * GIB, used=GIB)


@pytest.fixture(autouse=True)
def _one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(1))


def limit_memory(machine: FakeMachine) -> None:
    machine.in_box("memory.max", f"{GIB}\n")
    machine.in_box("memory.current", f"{GIB // 2}\n")
    machine.in_box("memory.stat", "inactive_file 0\n")


def fill_memory(machine: FakeMachine) -> None:
    machine.set_meminfo(MemAvailable=3 << 20)


def stall(machine: FakeMachine) -> None:
    machine.set_stalls(35.0)


def kill_once(machine: FakeMachine) -> None:
    machine.in_box("memory.events", "low 0\nhigh 0\nmax 9\noom 1\noom_kill 1\n")


def kill_once_within_a_limit(machine: FakeMachine) -> None:
    limit_memory(machine)
    kill_once(machine)


def swap_out(machine: FakeMachine) -> None:
    machine.set_meminfo(SwapFree=6 << 20)


def lose_shm(machine: FakeMachine) -> None:
    machine.has_shm = False


def shrink_shm(machine: FakeMachine) -> None:
    machine.shm = FakeFilesystem(size_bytes=64 * MIB, used_bytes=0)


def shorten_shm(machine: FakeMachine) -> None:
    machine.shm = FakeFilesystem(size_bytes=512 * MIB, used_bytes=0)


def fill_shm(machine: FakeMachine) -> None:
    machine.shm = FakeFilesystem(size_bytes=32 * GIB, used_bytes=31 * GIB)


def halve_a_core(machine: FakeMachine) -> None:
    machine.in_box("cpu.max", "50000 100000\n")


def quota_four(machine: FakeMachine) -> None:
    machine.in_box("cpu.max", "400000 100000\n")


def pin_to_four(machine: FakeMachine) -> None:
    machine.write(machine.proc / "self" / "status", "Cpus_allowed_list:\t0-3\n")


def default_open_files(machine: FakeMachine) -> None:
    machine.set_open_files("1024", "1048576")


PROVOKED: list[tuple[str, str, Callable[[FakeMachine], None]]] = [
    ("memory-limit", "warning", limit_memory),
    ("memory-full", "hurts", fill_memory),
    ("memory-pressure", "hurts", stall),
    ("oom-kills", "info", kill_once),
    ("oom-kills", "warning", kill_once_within_a_limit),
    ("swap-used", "warning", swap_out),
    ("shm-missing", "hurts", lose_shm),
    ("shm-small", "hurts", shrink_shm),
    ("shm-small", "warning", shorten_shm),
    ("shm-full", "hurts", fill_shm),
    ("cpu-quota", "hurts", halve_a_core),
    ("cpu-quota", "warning", quota_four),
    ("cpu-affinity", "info", pin_to_four),
    ("open-files", "warning", default_open_files),
]

NO_GPU: list[tuple[str, FakeNvml | None, str]] = [
    ("gpu-library", None, "not installed"),
    ("gpu-none", FakeNvml(-1), "no GPU: there is no NVIDIA driver on this machine"),
    ("gpu-none", FakeNvml(0), "no GPU"),
]


def ask(roots: Roots, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = run(["doctor", "--json"], roots=roots)
    output = capsys.readouterr()
    assert output.err == ""
    return status, json.loads(output.out)


@pytest.mark.parametrize(("finding_id", "severity", "change"), PROVOKED)
def test_each_finding_is_provoked_by_files_alone(
    machine: FakeMachine,
    capsys: pytest.CaptureFixture[str],
    finding_id: str,
    severity: str,
    change: Callable[[FakeMachine], None],
) -> None:
    change(machine)
    status, answer = ask(machine.roots, capsys)
    found = {finding["id"]: finding for finding in answer["findings"]}
    assert found[finding_id]["severity"] == severity
    others = {"memory-limit"} if change is kill_once_within_a_limit else set()
    assert set(found) == {finding_id} | others
    assert status == (0 if severity == "info" else 1)


@pytest.mark.parametrize(("finding_id", "nvml", "reason"), NO_GPU)
def test_no_gpu_is_information_not_a_failure(
    machine: FakeMachine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    finding_id: str,
    nvml: FakeNvml | None,
    reason: str,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    status, answer = ask(machine.roots, capsys)
    assert status == 0
    (found,) = answer["findings"]
    assert (found["id"], found["severity"]) == (finding_id, "info")
    assert reason in found["what"]
    assert "NVML" not in found["what"], "a name that only its vendor uses"


def test_a_gpu_library_that_cannot_reach_its_driver_is_a_finding_of_its_own(
    machine: FakeMachine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.write(machine.proc / "driver" / "nvidia" / "version", "NVRM version: 580.1\n")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(-1))
    _, answer = ask(machine.roots, capsys)
    assert [finding["id"] for finding in answer["findings"]] == ["gpu-library"]


def test_every_finding_of_the_machine_is_covered_above() -> None:
    assert {finding_id for finding_id, _, _ in [*PROVOKED, *NO_GPU]} == set(CHECKS)


def test_a_healthy_machine_is_status_0(machine: FakeMachine, capsys: pytest.CaptureFixture[str]) -> None:
    status, answer = ask(machine.roots, capsys)
    assert status == 0
    assert answer["findings"] == []
    assert answer["unknown"] == []
    assert answer["memory"] == {
        "limit_bytes": 64 * GIB,
        "limit_source": "host",
        "host_bytes": 64 * GIB,
        "available_bytes": 48 * GIB,
        "working_set_bytes": 16 * GIB,
    }
    assert answer["swap"] == {"total_bytes": 8 * GIB, "used_bytes": 0}
    assert answer["shm"] == {"size_bytes": 32 * GIB, "used_bytes": 0}
    assert answer["open_files"] == {"soft": 65536, "hard": 1048576, "used": 0}
    assert answer["cpu"] == {"count": 16, "affinity": 16, "quota": None, "usable": 16.0}
    assert answer["cgroup"] == "v2"
    assert answer["gpu"]["gpus"][0]["name"] == "NVIDIA H200 number 0"
    assert answer["pressure"]["oom_kills"] == 0


def test_a_limit_shows_with_its_headroom(machine: FakeMachine, capsys: pytest.CaptureFixture[str]) -> None:
    limit_memory(machine)
    _, answer = ask(machine.roots, capsys)
    assert answer["memory"]["limit_bytes"] == GIB
    assert answer["memory"]["available_bytes"] == GIB // 2
    assert answer["memory"]["limit_source"].endswith("memory.max")


def test_the_page_has_the_same_status_as_the_json(machine: FakeMachine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"], roots=machine.roots) == 0
    assert "Nothing here will hurt" in capsys.readouterr().out
    shrink_shm(machine)
    assert run(["doctor"], roots=machine.roots) == 1
    assert "1 thing here will hurt" in capsys.readouterr().out


def test_a_machine_with_unreadable_files_gets_a_page(machine: FakeMachine, capsys: pytest.CaptureFixture[str]) -> None:
    roots = machine.roots
    nowhere = machine.proc / "nowhere"
    blind = Roots(proc=nowhere, cgroup=nowhere, cpu=nowhere, dev_shm=nowhere, platform="linux", statvfs=roots.statvfs)
    status, answer = ask(blind, capsys)
    assert status in {0, 1}
    assert answer["memory"]["limit_bytes"] > 0
    assert answer["unknown"]
    assert run(["doctor"], roots=blind) == status
    assert "unknown" in capsys.readouterr().out


def test_a_platform_without_proc_gets_a_page(machine: FakeMachine, capsys: pytest.CaptureFixture[str]) -> None:
    _, answer = ask(Roots(platform="darwin", proc=machine.proc / "nowhere"), capsys)
    assert answer["memory"]["limit_bytes"] > 0
    assert "shm-missing" not in {finding["id"] for finding in answer["findings"]}
    assert any(line.startswith("shm_size_bytes:") for line in answer["unknown"])


def test_a_penstock_error_is_one_line_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*, roots: Roots) -> NoReturn:
        raise ConfigError("the budget is 3 MB, a batch is 8 MB; raise memory=")

    monkeypatch.setattr(facts_module.meter, "gpu_status", fail)
    assert run(["doctor"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "penstock: the budget is 3 MB, a batch is 8 MB; raise memory=\n"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, EOFError])
def test_ctrl_c_is_status_130_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stop: type[BaseException]
) -> None:
    def interrupted(*, roots: Roots) -> NoReturn:
        raise stop

    monkeypatch.setattr(facts_module.meter, "gpu_status", interrupted)
    monkeypatch.setattr("penstock.cli.app._drop_output", lambda: None)
    assert run(["doctor"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_an_operating_system_error_is_not_reported_as_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*, roots: Roots) -> NoReturn:
        raise PermissionError(13, "Permission denied", "/somewhere")

    monkeypatch.setattr(facts_module.meter, "gpu_status", broken)
    with pytest.raises(PermissionError):
        run(["doctor"])
