"""``write_like`` keeps the team's layout and changes only the requested values."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from penstock import settings
from penstock.errors import ConfigError
from penstock.units import GIB, parse_size

FILES = Path(__file__).parent / "files"


def rewrite(tmp_path: Path, text: str, arguments: dict[str, Any], name: str = "a.yaml", section: str = "train") -> str:
    """The new text, after a check that it gives the arguments."""
    source, out = tmp_path / name, tmp_path / f"out-{name}"
    source.write_bytes(text.encode())
    settings.write_like(source, out, arguments, section=section)
    assert source.read_bytes() == text.encode()
    assert not list(tmp_path.glob("*.draft"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = settings.load(out, section)
    for argument, value in arguments.items():
        got = {**found.facts, **found.arguments}.get(argument)
        assert got == value or (not got and not value) or parse_size(got) == parse_size(value)
    return out.read_bytes().decode()


def test_a_teams_file_keeps_its_keys_comments_and_order(tmp_path: Path) -> None:
    before = (FILES / "s4_usual.yaml").read_text()
    after = rewrite(tmp_path, before, {"num_workers": 4, "prefetch_factor": 2, "cache": 30 * GIB, "memory": "8GB"})
    assert after == before.replace("50.0 ", "30.0 ").replace("PREFETCH_FACTOR: 4", "PREFETCH_FACTOR: 2").replace(
        "NUM_WORKERS: 12               # for all GPUs\n", "NUM_WORKERS: 4               # for all GPUs\n  memory: 8GB\n"
    )


def test_a_batch_is_written_in_images_where_the_team_counts_images(tmp_path: Path) -> None:
    before = "sequence_length: 8\n" + (FILES / "s1_gpu.yaml").read_text()
    after = rewrite(tmp_path, before, {"batch_size": 4, "accumulation_steps": 4, "persistent_workers": False})
    assert after == before.replace("48 ", "32 ").replace("accum_steps: 6", "accum_steps: 4").replace("True", "False")


def test_windows_line_ends_byte_order_marks_and_other_scripts_stay(tmp_path: Path) -> None:
    for name, pair in (("a.yaml", "{}: {}\r\n"), ("a.toml", "{} = {}\r\n")):
        path = tmp_path / name
        text = "# 数据 😀\r\n" + pair.format("num_workers", "8  # 工") + pair.format("lr", 1e-05)
        path.write_bytes(b"\xef\xbb\xbf" + text.encode())
        settings.write_like(path, path, {"num_workers": 4, "prefetch_factor": 2})
        added = pair.format("prefetch_factor", 2)
        expected = text.replace("8  #", "4  #").replace("工\r\n", "工\r\n" + added)
        assert path.read_bytes() == b"\xef\xbb\xbf" + expected.encode()


def test_a_file_without_a_last_line_end_gets_keys_on_lines_of_their_own(tmp_path: Path) -> None:
    assert rewrite(tmp_path, "num_workers: 8", {"memory": "1GB"}) == "num_workers: 8\nmemory: 1GB"
    assert rewrite(tmp_path, "lr = 1", {"memory": "1GB"}, "a.toml") == 'lr = 1\n\n[penstock]\nmemory = "1GB"\n'


def test_zero_workers_also_unset_the_arguments_that_need_workers(tmp_path: Path) -> None:
    before = (FILES / "s3_linux.yaml").read_text()
    after = rewrite(tmp_path, before, {"num_workers": 0})
    assert after == (
        before.replace("num_workers: 8", "num_workers: 0")
        .replace("persistent_workers: true", "persistent_workers: false")
        .replace("prefetch_factor: 4", "prefetch_factor: null")
    )
    toml = "[train]\nnum_workers = 8 # w\nprefetch_factor = 4 # p\nlr = 1\n"
    assert rewrite(tmp_path, toml, {"num_workers": 0}, "a.toml") == "[train]\nnum_workers = 0 # w\nlr = 1\n"


def test_the_cache_is_switched_on_and_off_by_the_team_s_own_switch(tmp_path: Path) -> None:
    before = "DATA:\n  USE_RAM_CACHE: False\n  CACHE_SIZE_GB: 50\n"
    on = rewrite(tmp_path, before, {"cache": "2GiB"})
    assert on == "DATA:\n  USE_RAM_CACHE: True\n  CACHE_SIZE_GB: 2\n"
    assert rewrite(tmp_path, on, {"cache": None}) == "DATA:\n  USE_RAM_CACHE: False\n  CACHE_SIZE_GB: 0\n"
    with pytest.raises(ConfigError, match=r"cannot be written to DATA.CACHE_SIZE_GB"):
        rewrite(tmp_path, before, {"cache": "auto"})


def test_merged_sections_get_keys_of_their_own_and_the_template_stays(tmp_path: Path) -> None:
    before = "base: &b\n  num_workers: 8\n  pin_memory: yes\ntrain:\n  <<: *b\nval: *b\n"
    after = rewrite(tmp_path, before, {"num_workers": 2, "pin_memory": False, "memory": "1GB"})
    assert after == before.replace("<<: *b\n", "<<: *b\n  num_workers: 2\n  pin_memory: false\n  memory: 1GB\n")
    with pytest.raises(ConfigError, match=r"val.num_workers is in a section that is only an alias of another"):
        rewrite(tmp_path, before, {"num_workers": 2}, section="val")


def test_a_value_that_other_keys_refer_to_is_not_changed_for_them(tmp_path: Path) -> None:
    after = rewrite(tmp_path, "n: &n 8\ntrain: {num_workers: *n, a: 1}\n", {"num_workers": 2, "memory": "1GB"})
    assert after == "n: &n 8\ntrain: {num_workers: 2, memory: 1GB, a: 1}\n"
    with pytest.raises(ConfigError, match="threads uses the value of a key that changes"):
        rewrite(tmp_path, "train: {num_workers: &n 8}\nthreads: *n\n", {"num_workers": 2})


def test_values_in_unusual_positions_are_replaced(tmp_path: Path) -> None:
    assert rewrite(tmp_path, "train:\n  num_workers:\nx: 1\n", {"num_workers": 3}) == "train:\n  num_workers: 3\nx: 1\n"
    assert rewrite(tmp_path, "num_workers: !!int '8' # q\n", {"num_workers": 3}) == "num_workers: !!int 3 # q\n"
    assert rewrite(tmp_path, "'num_workers' : \"8\"\n", {"num_workers": 3}) == "'num_workers' : 3\n"
    assert rewrite(tmp_path, "data.train.num_workers: 8\n", {"memory": "1GB"}) == (
        "data.train.num_workers: 8\ndata.train.memory: 1GB\n"
    )
    dotted = '{"data.train.num_workers": 8, "data.val.num_workers": 2}'
    assert json.loads(rewrite(tmp_path, dotted, {"memory": "1GB"}, "a.json", "val")) == {
        "data.train.num_workers": 8, "data.val.num_workers": 2, "data.val.memory": "1GB",
    }  # fmt: skip
    toml = 'train."num_workers" = 8\nval = { num_workers = 2 }\n'
    assert rewrite(tmp_path, toml, {"memory": "1GB"}, "a.toml") == (
        'train."num_workers" = 8\ntrain.memory = "1GB"\nval = { num_workers = 2 }\n'
    )
    assert rewrite(tmp_path, toml, {"num_workers": 1, "cache": "1GB"}, "a.toml", "val").splitlines()[1] == (
        'val = { num_workers = 1, cache = "1GB" }'
    )


def test_figures_for_evaluation_do_not_change_training(tmp_path: Path) -> None:
    sectioned = "train:\n  num_workers: 8\nval:\n  batch_size: 2\n"
    assert rewrite(tmp_path, sectioned, {"num_workers": 2}, section="val") == sectioned + "  num_workers: 2\n"
    assert rewrite(tmp_path, sectioned, {"num_workers": 2}, section="test") == sectioned + "test:\n  num_workers: 2\n"
    flat = "num_workers: 8\neval_batch_size: 2\n"
    assert rewrite(tmp_path, flat, {"num_workers": 2}, section="eval") == flat + "eval_num_workers: 2\n"


def test_json_is_printed_with_its_own_indentation(tmp_path: Path) -> None:
    before = '{\r\n\t"train": {\r\n\t\t"num_workers": 8,\r\n\t\t"名": "é"\r\n\t}\r\n}\r\n'
    after = rewrite(tmp_path, before, {"num_workers": 2, "memory": "1GB"}, "a.json")
    assert after == before.replace("8,\r\n", '2,\r\n\t\t"memory": "1GB",\r\n')
    assert (
        rewrite(tmp_path, '{"num_workers":8,"a":[1,2]}', {"num_workers": 2}, "b.json") == '{"num_workers":2,"a":[1,2]}'
    )
    team = (FILES / "s2_low.json").read_text()
    assert json.loads(rewrite(tmp_path, team, {"batch_size": 16}, "c.json"))["batch_size_per_gpu"] == 16


def test_an_argument_that_cannot_be_written_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    source, out = tmp_path / "a.yaml", tmp_path / "out.yaml"
    source.write_text("num_workers: 8\n")
    for arguments, why in (
        ({"learning_rate": 1}, "learning_rate cannot be set in a settings file"),
        ({"num_workers": -1}, "num_workers=-1 is negative"),
        ({"memory": "lots"}, "is not a size"),
    ):
        with pytest.raises(ConfigError, match=why):
            settings.write_like(source, out, arguments)
    source.write_text("num_workers: 0\n")
    with pytest.raises(ConfigError, match="prefetch_factor=4 needs workers, but the file has num_workers=0"):
        settings.write_like(source, out, {"prefetch_factor": 4})
    source.write_text("lr: 1\n...\n")
    with pytest.raises(ConfigError, match="to which no key can be added"):
        settings.write_like(source, out, {"num_workers": 2})
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        source.write_text("num_workers: 8\n")
        settings.write_like(source, tmp_path / "none" / "a.yaml", {"num_workers": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["a.yaml"]


def test_an_invalid_value_can_be_replaced(tmp_path: Path) -> None:
    before = (FILES / "s3_24gb.yaml").read_text()
    assert rewrite(tmp_path, before, {"batch_size": 24}) == before.replace("16-32", "24")
    clash = "prefetch_factor: 4\ndataloader_prefetch_per_worker: 1\n"
    assert rewrite(tmp_path, clash, {"prefetch_factor": 2}) == clash.replace("4", "2").replace("1", "2")
    with pytest.raises(ConfigError, match="is a range"):
        rewrite(tmp_path, before, {"num_workers": 2})


def test_a_value_called_penstock_is_not_used_as_a_section(tmp_path: Path) -> None:
    for text, name in (('{"penstock": 1}', "a.json"), ("penstock: 1\n", "a.yaml"), ("penstock = 1\n", "a.toml")):
        with pytest.raises(ConfigError, match=r"is a value, but a section is needed|to which no key can be added"):
            rewrite(tmp_path, text, {"num_workers": 2}, name)


def test_a_key_is_added_to_braces_over_several_lines(tmp_path: Path) -> None:
    before = "%YAML 1.1\n---\ntrain: {\n  num_workers: 8, # w\n  batch_size: 4\n}\n"
    assert rewrite(tmp_path, before, {"memory": "1GB"}) == before.replace("8, #", "8, memory: 1GB, #")


def test_the_file_itself_can_be_rewritten_and_keeps_its_mode_and_its_link(tmp_path: Path) -> None:
    source, link = tmp_path / "a.yaml", tmp_path / "link.yaml"
    source.write_text("num_workers: 8\n")
    source.chmod(0o640)
    link.symlink_to(source)
    settings.write_like(link, link, {"num_workers": 2})
    assert link.is_symlink() and source.read_text() == "num_workers: 2\n" and source.stat().st_mode & 0o777 == 0o640


_ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "batch_size": st.integers(1, 4096), "num_workers": st.integers(0, 256) | st.just("auto"),
        "prefetch_factor": st.integers(1, 64), "pin_memory": st.booleans(), "persistent_workers": st.booleans(),
        "memory": st.integers(1 << 20, 1 << 45) | st.sampled_from(["8GB", "auto", "50%", 0.5]),
        "cache": st.integers(1 << 20, 1 << 45), "device": st.sampled_from(["cuda", "cuda:1", "cpu"]),
        "seeding": st.sampled_from(["batch", "worker"]), "name": st.text(min_size=1, max_size=12),
    },
)  # fmt: skip


@given(arguments=_ARGUMENTS, name=st.sampled_from(sorted(path.name for path in FILES.iterdir())))
@effort(max_examples=150)
def test_any_arguments_written_to_any_team_s_file_are_read_back(
    arguments: dict[str, Any], name: str, tmp_path_factory: Any
) -> None:
    out = tmp_path_factory.mktemp("out") / name
    if name == "s3_24gb.yaml":
        # This file has a range for a batch size, which gives no batch.
        arguments = {"batch_size": 16, **arguments}
    if name in ("s2_low.json", "s3_windows.yaml"):
        # These files have no workers, and prefetching needs some.
        arguments = {"num_workers": 2, **arguments}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings.write_like(FILES / name, out, arguments)
        found = settings.load(out).arguments
    if arguments.get("num_workers") == 0:
        arguments = {
            key: value for key, value in arguments.items() if key not in ("prefetch_factor", "persistent_workers")
        }
    assert {key: found.get(key, False if value is False else None) for key, value in arguments.items()} == arguments
