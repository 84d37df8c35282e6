"""Settings files of every kind: formats, encodings, anchors, damaged files and hostile files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import settings
from penstock.errors import ConfigError


def short(value: str | bytes) -> str:
    """Names of tests go into the environment of all processes that they start."""
    return repr(value)[:40]


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str | bytes, name: str = "config.yaml") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def refusal(path: Any, section: str = "train") -> str:
    with pytest.raises(ConfigError) as refused:
        settings.load(path, section)
    message = str(refused.value)
    assert "\n" not in message and len(message) < 400
    return message


def test_the_three_formats_and_a_mapping_give_the_same_arguments(write: Any) -> None:
    files = [
        write("train:\n  num_workers: 4\n  pin_memory: yes\nlr: 1e-4\n", "a.yaml"),
        write("train: {num_workers: 4, pin_memory: on}\n", "a.YML"),
        write("lr = 1e-4\n[train]\nnum_workers = 4\npin_memory = true\n", "a.toml"),
        write('{"train": {"num_workers": 4, "pin_memory": true}}', "a.json"),
    ]
    for source in [*files, str(files[0]), {"train": {"num_workers": 4, "pin_memory": True}}]:
        assert settings.load(source).arguments == {"num_workers": 4, "pin_memory": True}


@pytest.mark.parametrize("name", ["a.yaml", "a.toml"])
def test_byte_order_marks_windows_line_ends_and_other_scripts_are_read(write: Any, name: str) -> None:
    pair = "{}: {}\r\n" if name == "a.yaml" else "{} = {}\r\n"
    text = "# 数据加载 😀\r\n" + pair.format('"名"', '"训练"') + pair.format("num_workers", 4)
    found = settings.load(write(b"\xef\xbb\xbf" + text.encode(), name))
    assert found.arguments == {"num_workers": 4} and found.entries[0].line == 3


def test_own_keys_take_precedence_over_merged_ones_and_a_template_does_not_count_by_itself(write: Any) -> None:
    path = write(
        "defaults: &defaults\n  num_workers: 8\n  pin_memory: true\n"
        "more: &more {pin_memory: false, prefetch_factor: 2}\n"
        "train:\n  <<: [*defaults, *more]\n  num_workers: 16\nval: *defaults\n"
        "test: {<<: *defaults, num_workers: &n 3}\nmax: *n\n"
    )
    assert settings.load(path).arguments == {"num_workers": 16, "pin_memory": True, "prefetch_factor": 2}
    assert settings.load(path, "val").arguments["num_workers"] == 8
    assert settings.load(path, "test").arguments["num_workers"] == 3


def test_a_training_section_that_others_merge_still_counts(write: Any) -> None:
    path = write("train: &train\n  num_workers: 8\nval:\n  <<: *train\n  num_workers: 2\n")
    assert settings.load(path).arguments == {"num_workers": 8}
    assert settings.load(path, "val").arguments == {"num_workers": 2}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is empty"), ("  \n\n", "is empty"), ("# only this\n", "is empty"), ("---\n", "is empty"),
        ("null", "is empty"), ("- a\n- b\n", "is a list, but keys and values are needed"),
        ("just text", "is a single value"), ("8", "is a single value"),
        ("data:\n\tnum_workers: 8\n", "cannot start any token, a tab; indent YAML"),
        ("train:\n  num_workers: 4\n  num_workers: 8\n", "line 3: the key 'num_workers' appears twice"),
        ("a: {b: 1, 'b': 2}\n", "line 1: the key 'b' appears twice"),
        ("a: [1, 2\nb: 3\n", "line 2"), ("a: *missing\n", "line 1: found undefined alias *missing"),
        ("a: &a\n  b: *a\n", "line 2: 'b' refers to the section that it is in"),
        ("a: 1\n---\nb: 2\n", "a second document begins"),
        ("a: !!python/object/apply:os.system ['touch /tmp/no']\n", "line 1: !!python/object/apply:os.system would run"),
        ("? !!python/name:os.system\n: 1\n", "would run code"), ("a: b\x00c\n", "characters are not allowed"),
        ("a: {<<: 3}\n", "<< merges sections"),
        ("num_workers: !include other.yaml\n", "num_workers='!include other.yaml'"),
        ("num_workers: 2024-01-01\n", "num_workers=datetime.date(2024, 1, 1) is a date"),
        ("num_workers: " + "9" * 5000, "num_workers="), ("{" * 100000, "more than 100 levels"),
        ("[" * 100000, "more than 100 levels"), ("a: {" * 5000, "more than 100 levels"),
    ],
    ids=short,
)  # fmt: skip
def test_an_unusable_yaml_file_gives_one_line_with_the_reason(write: Any, text: str, why: str) -> None:
    path = write(text)
    message = refusal(path)
    assert message.startswith(str(path)) and why in message


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.toml", "", "is empty"), ("a.toml", "# nothing\n", "is empty"), ("a.toml", "a = \n", "line 1"),
        ("a.toml", "a = 1\na = 2\n", "a.toml: Cannot overwrite a value"),
        ("a.toml", "a = " + "[" * 50000, "more than 100"),
        ("a.json", "", "is empty"), ("a.json", "{}", "is empty"), ("a.json", "[1]", "is a list"),
        ("a.json", "7", "is a single value"), ("a.json", '{"a": 1,}', "line 1"), ("a.json", '{"a": 1\n', "line 2"),
        ("a.json", '{"b": {"a": 1, "a": 2}}', "the key 'a' appears twice"),
        ("a.json", '{"a": ' * 5000, "a.json"), ("a.json", '{"a":' * 5000 + "1" + "}" * 5000, "more than 100"),
        ("a.json", '{"a":' * 200 + "1" + "}" * 200, "more than 100"),
        ("a.json", '{"train": {"num_workers": NaN}}', "train.num_workers=nan is not a finite number"),
        ("a.toml", "a = " + "9" * 5000, "Exceeds the limit"), ("a.json", '{"a": ' + "9" * 5000 + "}", "Exceeds the"),
        ("a.ini", "[a]\nb=1\n", "end in .yaml, .yml, .toml, .json"), ("a", "x", "end in .yaml"),
        ("a.yaml", b"\xff\xfea\x00:\x00 \x001\x00", "is UTF-16; save it as UTF-8"),
        ("a.yaml", b"a: \xe9t\xe9\n", "is not UTF-8 text (byte 3)"),
    ],
    ids=short,
)  # fmt: skip
def test_other_unusable_files_give_one_line_too(write: Any, name: str, text: Any, why: str) -> None:
    assert why in refusal(write(text, name))


def test_an_unreadable_path_gives_one_line(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refusal(tmp_path / "none.yaml")
    (tmp_path / "folder.yaml").mkdir()
    assert "cannot be read: Is a directory" in refusal(tmp_path / "folder.yaml")
    assert "cannot be read" in refusal("a\0b.yaml")
    assert "give vars(config)" in refusal(object())


def test_a_file_that_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "weights.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "1.00 TiB, so it is not a settings file" in refusal(path)


def test_a_small_file_of_anchors_does_not_expand_in_memory(write: Any) -> None:
    for first in ("{x: 1, y: 2}", "{}"):
        lines, shared = [f"a0: &a0 {first}"], {}
        for level in range(1, 60):
            lines.append(f"a{level}: &a{level} {{l: *a{level - 1}, r: *a{level - 1}}}")
            shared = {"l": shared, "r": shared}
        assert "values, so it is not a settings file" in refusal(write("\n".join(lines)))
        assert "values, so it is not a settings file" in refusal(shared)


def test_a_mapping_that_contains_itself_is_refused() -> None:
    loop: dict[str, Any] = {"num_workers": 1}
    loop["data"] = loop
    assert "contains itself" in refusal(loop)


def test_megabytes_of_other_settings_are_skipped(write: Any) -> None:
    rows = "\n".join(f"  key_{number:07}: {'value number ' * 10}{number}" for number in range(15_000))
    path = write(f"other:\n{rows}\ntrain:\n  num_workers: 4\n")
    assert path.stat().st_size > 2_000_000
    found = settings.load(path)
    assert found.arguments == {"num_workers": 4} and found.entries[0].line == 15_003


def test_tags_of_other_programs_are_ignored_outside_loading_settings(write: Any) -> None:
    assert settings.load(write("model: !net {a: !x 1}\nwhen: 2024-02-31\nnum_workers: 2\n")).arguments == {
        "num_workers": 2
    }


def test_every_kind_of_toml_value_has_its_line(write: Any) -> None:
    text = (
        'a = """x\n[no]\n"""\n"quoted key" = \'\'\'# no\n\'\'\'\nlist = [1, # one\n  {b = "]"},\n]\n'
        "when = 1979-05-27 07:32:00Z\n[[many]]\nnum = 1\n[many.train]\nx = 1\n"
        '[ data . "train" ]\nloader = { num_workers = 4, memory = "2GB" } # end\nval.batch_size = 3\n'
    )
    found = settings.load(write(text, "a.toml"))
    assert found.arguments == {"num_workers": 4, "memory": "2GB"}
    assert {entry.line for entry in found.entries} == {15}
    assert settings.load(write(text, "a.toml"), "val").entries[0].line == 16
