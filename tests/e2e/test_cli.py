"""The installed program, run as people and scripts run it: real processes, real pipes, real signals."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock import __version__
from penstock.cli.app import COMMANDS
from penstock.lab.demo import DemoSettings
from support.ready_python import ReadyPython

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
ANSI = "\x1b["


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "NO_COLOR", "TERM"}}
    return kept | changes


def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PENSTOCK, *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        env=environment(**changes),
    )


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], *([name, "--help"] for name in COMMANDS)])
def test_every_command_has_help_that_fits_80_columns(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "Usage: penstock" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_help_lists_every_command_and_the_exit_statuses() -> None:
    help_text = run("--help").stdout
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", help_text, re.MULTILINE)
    assert "0 done, 1 found a problem or failed, 2 wrong usage" in help_text


def test_a_misspelt_command_gets_a_suggestion() -> None:
    done = run("pln")
    assert done.returncode == 2 and "No such command 'pln'. Did you mean 'plan'?" in done.stderr
    assert "Did you mean" not in run("nonsense").stderr


def test_python_dash_m_is_the_same_program() -> None:
    command = [sys.executable, "-m", "penstock", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout == run("--version").stdout == f"penstock, version {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["--nonsense"], ["doctor", "--nonsense"], ["doctor", "x"]])
def test_wrong_usage_is_status_2_with_its_message_on_stderr(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Usage: penstock" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_doctor_and_every_help_do_not_import_torch() -> None:
    for arguments in (["--help"], ["doctor"], ["doctor", "--json"], ["demo", "--help"]):
        done = run_python(
            f"import sys; from penstock.cli.app import run; run({arguments!r});"
            "sys.exit(3 if {'torch', 'numpy'} & set(sys.modules) else 0)"
        )
        assert done.returncode == 0, (arguments, done.stderr[-500:])


def test_help_imports_no_command_and_no_page() -> None:
    done = run_python(
        "import sys; from penstock.cli.app import run; run(['--help']);"
        "sys.exit(3 if {'penstock.cli.demo', 'penstock.cli.doctor.command', 'rich'} & set(sys.modules) else 0)"
    )
    assert done.returncode == 0


def test_an_answer_takes_less_than_half_the_time_of_importing_torch() -> None:
    def time_s(command: list[str]) -> float:
        start_s = time.perf_counter()
        subprocess.run(command, capture_output=True, timeout=120)
        return time.perf_counter() - start_s

    help_s, doctor_s, torch_s = [], [], []
    for _ in range(3):
        help_s.append(time_s([PENSTOCK, "--help"]))
        doctor_s.append(time_s([PENSTOCK, "doctor"]))
        torch_s.append(time_s([sys.executable, "-c", "import torch"]))
    # The minimum of each, because other programs use this machine too.
    assert max(min(help_s), min(doctor_s)) < min(torch_s) / 2, (help_s, doctor_s, torch_s)


def test_the_doctors_json_has_the_shape_that_checks_rely_on() -> None:
    done = run("doctor", "--json")
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    assert answer["memory"]["limit_bytes"] > 0
    assert 0 <= answer["memory"]["available_bytes"] <= answer["memory"]["limit_bytes"]
    assert answer["cpu"]["usable"] > 0
    assert answer["shm"]["size_bytes"] is None or answer["shm"]["size_bytes"] > 0
    for finding in answer["findings"]:
        assert set(finding) == {"id", "severity", "what", "fix"}
        assert finding["severity"] in {"hurts", "warning", "info"}
    assert done.returncode == int(any(finding["severity"] != "info" for finding in answer["findings"]))


@pytest.mark.parametrize("columns", [0, 1, 40, 80, 200])
def test_the_doctors_page_fits_any_width_without_colour(columns: int) -> None:
    done = run("doctor", COLUMNS=str(columns))
    assert done.returncode in {0, 1}
    assert done.stderr == ""
    assert ANSI not in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= max(20, columns)
    assert "memory" in done.stdout


def test_a_terminal_gets_colour_and_no_color_takes_it_away() -> None:
    shown = [on_terminal(environment(TERM="xterm-256color", **extra)) for extra in ({}, {"NO_COLOR": "1"})]
    assert re.search(r"\x1b\[[0-9;]*3[0-9]", shown[0])
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", shown[1])
    assert all("memory available" in text for text in shown)


def on_terminal(variables: dict[str, str]) -> str:
    ours, theirs = pty.openpty()
    with subprocess.Popen([PENSTOCK, "doctor"], stdin=theirs, stdout=theirs, stderr=theirs, env=variables):
        os.close(theirs)
        pieces = []
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux ends a pty with EIO
                break
            if not piece:
                break
            pieces.append(piece)
    os.close(ours)
    return b"".join(pieces).decode()


@pytest.mark.parametrize(
    "variables",
    [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii"}, {"TERM": "dumb"}],
)
def test_plain_locales_and_terminals_get_the_page_too(variables: dict[str, str]) -> None:
    done = run("doctor", **variables)
    assert done.returncode in {0, 1}
    assert done.stderr == ""
    assert done.stdout.isascii()
    assert "memory available" in done.stdout


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"], ["--help"]])
def test_a_closed_pipe_ends_the_command_without_a_traceback(arguments: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as closed_pipe:
        done = subprocess.run([PENSTOCK, *arguments], stdout=closed_pipe, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == ""


@pytest.mark.parametrize("arguments", ["doctor", "doctor --json", "--help"])
def test_a_closed_stdout_does_not_crash_the_command(arguments: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f"exec {PENSTOCK} {arguments} >&-"], stderr=subprocess.PIPE, text=True, timeout=60
    )
    assert done.returncode in {0, 1}
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this platform has no /dev/full")
@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"], ["--help"]])
def test_a_full_disk_is_one_line_and_status_1(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123 - a device, not a path to work on
        done = subprocess.run([PENSTOCK, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_core_install_names_the_extra_to_install() -> None:
    hide = (
        "import sys, importlib.util as util; real = util.find_spec;"
        "util.find_spec = lambda name, *rest: None if name in {'click', 'rich'} else real(name, *rest);"
        "from penstock.cli import main; main()"
    )
    done = run_python(hide)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "click and rich" in done.stderr
    assert 'pip install "penstock[cli]"' in done.stderr


def test_ctrl_c_ends_the_demo_with_status_130_and_leaves_no_process() -> None:
    with subprocess.Popen(
        [PENSTOCK, "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment(),
    ) as demo:
        deadline_s = time.monotonic() + 60
        while len(session_pids(demo.pid)) < 3:
            assert demo.poll() is None, demo.communicate()
            assert time.monotonic() < deadline_s, "the demo has started no workers"
            time.sleep(0.05)
        # A terminal sends Ctrl-C to the whole foreground group, workers included.
        os.killpg(demo.pid, signal.SIGINT)
        output, errors = demo.communicate(timeout=120)
    assert demo.returncode == 130
    assert "Traceback" not in errors + output
    deadline_s = time.monotonic() + 120
    while session_pids(demo.pid):
        assert time.monotonic() < deadline_s, "workers outlived the demo"
        time.sleep(0.05)


def session_pids(session: int) -> list[int]:
    """Running processes of a session, without zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def test_the_demo_measures_both_loaders_and_prints_a_verdict(python: ReadyPython) -> None:
    settings = DemoSettings()
    assert 2 * settings.rounds * settings.round_s < 20, "the help promises about 20 seconds"
    brief = "import functools; from penstock.lab import demo; demo.DemoSettings = functools.partial("
    brief += "demo.DemoSettings, round_s=0.5); import sys; from penstock.cli import main; main()"
    done = python.run(brief, "demo", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    assert answer["same_samples"] is True
    assert answer["machine"]["memory"]["limit_bytes"] > 0
    for name in ("torch", "penstock"):
        result = answer["loaders"][name]
        assert result["samples_per_s"] > 0
        assert result["first_batch_s"] > 0
        assert result["peak_growth_bytes"] > answer["settings"]["sample_bytes"]
        assert len(result["rounds"]) == answer["settings"]["rounds"]
    assert "penstock" in answer["verdict"]


OWN_DATA = """
import time, torch
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, index):
        time.sleep(0.002)
        return {"x": torch.full((1000,), index), "name": str(index)}
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (torch.ones(10) for _ in range(40))
def collate(samples):
    return [sample["x"] for sample in samples]
empty = []
class Ragged(Slow):
    def __getitem__(self, index):
        return torch.zeros(1 + index)
class Failing(Slow):
    def __getitem__(self, index):
        raise ValueError(f"sample {index} is bad")
"""


@pytest.fixture
def own_data(tmp_path: Path) -> str:
    (tmp_path / "own_data.py").write_text(OWN_DATA)
    return str(tmp_path / "own_data.py")


@pytest.mark.parametrize(
    "arguments",
    [["Slow", "--shuffle"], ["Slow", "--workers", "0"], ["Slow", "--collate", "collate"], ["Stream"]],
    ids=" ".join,
)
def test_the_bench_runs_the_users_dataset_through_both_loaders(
    own_data: str, arguments: list[str], python: ReadyPython
) -> None:
    attribute, *more = arguments
    if "--collate" in more:
        more[-1] = f"{own_data}:{more[-1]}"
    done = python.run_command(
        "bench", f"{own_data}:{attribute}", "--batch-size", "8", "--workers", "2", "--seconds", "0.3",
        "--rounds", "1", "--json", *more,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["same_samples"] is None and answer["link_bytes_per_s"] is None
    for result in answer["loaders"].values():
        assert result["samples_per_s"] > 0 and result["bytes_per_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["own_data.py"], 2, "names no attribute"),
        (["own_data.py:Slow", "--memory", "plenty"], 2, "plenty"),
        (["own_data.py:Slow", "--device", "cuda:77"], 1, "batches cannot be delivered to 'cuda:77'"),
        (["own_data.py:empty"], 1, "the dataset is empty: it has no sample to load"),
        (["own_data.py:Failing"], 1, "Failing failed while it was read: ValueError: sample 0 is bad"),
        (["own_data.py:Failing", "--workers", "0"], 1, "Failing failed while it was read: ValueError: sample 0 is bad"),
        (["own_data.py:Slow", "--settings", "none.yaml"], 1, "none.yaml cannot be read"),
    ],
    ids=["no attribute", "memory", "device", "empty", "failing", "failing here", "settings"],
)
def test_the_bench_reports_errors_in_one_line(
    own_data: str, arguments: list[str], status: int, said: str, python: ReadyPython
) -> None:
    target, *more = arguments
    done = python.run_command("bench", str(Path(own_data).parent / target), "--workers", "1", "--seconds", "0.2", *more)
    assert done.returncode == status
    assert said in done.stderr
    assert status == 2 or done.stderr.count("\n") == 1


def test_the_bench_suggests_a_collate_function(own_data: str, python: ReadyPython) -> None:
    done = python.run_command("bench", f"{own_data}:Ragged", "--workers", "1", "--seconds", "0.2")
    assert done.returncode == 1
    assert "equal size" in done.stderr and "--collate file.py:function" in done.stderr


def test_the_bench_takes_missing_options_from_a_settings_file(
    own_data: str, tmp_path: Path, python: ReadyPython
) -> None:
    (tmp_path / "team.toml").write_text(
        "[train]\nbatch_size = 6\nnum_workers = 1\nprefetch_factor = 3\nmemory = '64MB'\n[eval]\nbatch_size = 5\n"
    )
    done = python.run_command(
        "bench", f"{own_data}:Slow", "--settings", str(tmp_path / "team.toml"), "--section", "eval", "--memory", "80MB",
        "--seconds", "0.2", "--rounds", "1", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    settings = json.loads(done.stdout)["settings"]
    assert (settings["batch_size"], settings["workers"], settings["prefetch_factor"]) == (5, 1, 3)
    assert settings["memory"] == "80MB"
