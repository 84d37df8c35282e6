"""Whatever a kernel file holds, reading it gives an answer and no exception."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.meter import headroom_bytes, limits, memory, pressure
from penstock.meter.kernel_files import find_counter, parse_count, parse_counters
from penstock.meter.limits.cgroup_paths import parse_membership, parse_mounts
from penstock.meter.limits.cpu import parse_cpu_list, parse_cpu_max
from penstock.meter.limits.machine import parse_open_file_limits
from penstock.meter.pressure import parse_stalls
from penstock.meter.processes.process import parse_rollup, parse_stat, parse_statm
from support.machines import layouts as machines
from support.machines.layouts import build

WORDS = st.sampled_from(
    [
        *(
            "max",
            "-1",
            "0",
            "9223372036854771712",
            "9" * 30,
            "kB",
            "avg10=nan",
            "avg10=1e999",
            "some",
            "full",
        ),
        *("Rss:", "Pss:", "MemTotal:", "Max open files", "cgroup2", "cgroup", "rw,memory", "\\040", "\\777"),
        *("0::/", "4:memory:/x", ":", ",", "0-", "-3", "5-2", "0-99999999999", "/", "/../..", "-", "(", ")"),
        *("\x00", "\udc80", "٣", "\u2028"),
    ]
)
CONTENT = st.one_of(
    st.text(max_size=200),
    st.lists(WORDS, max_size=40).map(" ".join),
    st.lists(st.lists(WORDS, max_size=12).map(" ".join), max_size=8).map("\n".join),
)


@given(CONTENT)
def test_no_parser_raises(text: str) -> None:
    parse_membership(text)
    parse_mounts(text)
    parse_cpu_max(text)
    parse_open_file_limits(text)
    parse_stat(text)
    parse_statm(text)
    parse_rollup(text)
    assert all(number >= 0 for number in parse_cpu_list(text))
    assert all(value >= 0 for value in parse_counters(text).values())
    stalls = parse_stalls(text)
    for percent in (stalls.some_avg10, stalls.full_avg10):
        assert percent is None or 0 <= percent <= 100


@given(st.integers(min_value=0, max_value=2**64 - 1), st.sampled_from(["", "\n", " \n"]))
def test_every_number_the_kernel_can_write_is_read(number: int, ending: str) -> None:
    assert parse_count(f"{number}{ending}") == number


@given(
    st.dictionaries(
        st.from_regex(r"[A-Za-z_]{1,12}", fullmatch=True),
        st.integers(min_value=0, max_value=2**63),
        min_size=1,
    )
)
def test_looking_up_one_counter_agrees_with_reading_all(counters: dict[str, int]) -> None:
    text = "".join(f"{key} {value}\n" for key, value in counters.items())
    assert parse_counters(text) == counters
    assert {key: find_counter(text, f"{key} ") for key in counters} == counters


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_machine_with_any_one_file_ruined_still_answers(data: st.DataObject) -> None:
    layouts = [machines.v1_host, machines.v2_host, machines.hybrid_host, machines.kubernetes_burstable_v1]
    files = data.draw(st.sampled_from(layouts))() | machines.process(50, 1, anon=1 << 20, pss=1 << 20, children="50")
    ruined = data.draw(st.sampled_from(sorted(files)))
    content = data.draw(CONTENT)
    with tempfile.TemporaryDirectory() as directory:
        roots = build(Path(directory), files)
        (Path(directory) / ruined).write_bytes(content.encode("utf-8", "surrogatepass"))
        found = limits(roots=roots)
        assert found.memory_limit_bytes >= 0
        assert found.memory_available_bytes >= 0
        assert found.cpu_usable > 0
        assert headroom_bytes(roots=roots) >= 0
        pressure(roots=roots)
        memory(50, roots=roots)
