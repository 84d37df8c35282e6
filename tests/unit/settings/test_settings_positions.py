"""Our readers give the values that other parsers give, each with its position in the text."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

pytest.importorskip("yaml")

import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock.settings.document import Leaf, ListValue, flatten
from penstock.settings.toml_reader import read_toml
from penstock.settings.yaml_reader import read_yaml

_KEYS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=6).filter(lambda key: key != "<<")
_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
_NESTED = st.dictionaries(
    _KEYS,
    st.recursive(_SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4)),
    min_size=1, max_size=5,
)  # fmt: skip


def values(leaves: list[Leaf]) -> dict[tuple[str, ...], Any]:
    return {leaf.path: leaf.value for leaf in leaves}


@given(nested=_NESTED, flow=st.sampled_from([None, True, False]), newline=st.sampled_from(["\n", "\r\n"]))
def test_yaml_values_are_those_of_pyyaml_each_at_its_position(nested: Any, flow: bool | None, newline: str) -> None:
    text = yaml.safe_dump(nested, default_flow_style=flow, allow_unicode=True, line_break=newline, width=1000)
    leaves, homes = read_yaml(text, "a.yaml")
    # Not the dumped values themselves: PyYAML reads some line separators inside a text back as spaces.
    assert values(leaves) == values(flatten(yaml.safe_load(text), "a"))
    for leaf in leaves:
        assert leaf.span is not None and leaf.line is not None
        written = text[leaf.span.value_start : leaf.span.value_end]
        if not isinstance(leaf.value, ListValue | str):
            assert yaml.safe_load(written) == leaf.value
    assert homes.keys() <= {leaf.path[:-1] for leaf in leaves}


def _toml(nested: dict[str, Any]) -> str:
    """TOML with quoted keys and with tables in braces below the first level."""
    quoted = {key: "".join(f"\\U{ord(each):08x}" for each in key) for key in nested}
    plain = [f'"{quoted[key]}" = {_toml_value(value)}' for key, value in nested.items() if not isinstance(value, dict)]
    tables = []
    for key, value in nested.items():
        if isinstance(value, dict):
            pairs = [f'"x{number}".y = {_toml_value(each)}' for number, each in enumerate(value.values())]
            tables.append(f'[ "{quoted[key]}" ] # [no]\n' + "\n".join(pairs))
    return "\r\n# a = 1\n".join([*plain, *tables]) + "\n"


def _toml_value(value: Any) -> str:
    match value:
        case None:
            return "'''#\n]}'''"
        case bool():
            return str(value).lower()
        case int():
            return str(value % 2**62)
        case float():
            return repr(float(f"{value:.3e}")).replace("e+", "e") if abs(value) < 1e300 else "inf"
        case str():
            return '"' + "".join(f"\\U{ord(each):08x}" for each in value) + '"'
        case list():
            return "[ # ]\n" + ",\n".join(map(_toml_value, value)) + "]"
        case _:
            return (
                "{" + ", ".join(f"z{number} = {_toml_value(each)}" for number, each in enumerate(value.values())) + "}"
            )


@given(nested=_NESTED)
def test_the_toml_scanner_finds_every_value_at_its_position(nested: Any) -> None:
    text = _toml(nested)
    expected = tomllib.loads(text)
    if not expected:
        return
    leaves, _ = read_toml(text, "a.toml")
    for leaf in leaves:
        assert leaf.span is not None, leaf.path
        written = tomllib.loads(f"k = {text[leaf.span.value_start : leaf.span.value_end]}")["k"]
        assert isinstance(written, list) if isinstance(leaf.value, ListValue) else written == leaf.value
        assert leaf.line == text.count("\n", 0, leaf.span.key_start) + 1


@given(text=st.text(max_size=60) | st.text("{}[]:,-&*!?|>'\"#%@` \n\tab1<", max_size=60))
def test_any_text_gives_settings_or_a_one_line_error(text: str) -> None:
    from penstock.errors import ConfigError
    from penstock.settings.files import read_text

    for kind in ("yaml", "toml", "json"):
        try:
            found = read_text(text, name="a", kind=kind)
        except ConfigError as refused:
            assert "\n" not in str(refused)
        else:
            assert all(leaf.path for leaf in found.leaves)


@pytest.mark.parametrize("missing", ["", "x"])
def test_yaml_without_pyyaml_names_the_extra_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from penstock.errors import ConfigError

    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r'pip install "penstock\[settings\]"'):
        read_yaml(f"a: 1{missing}", "a.yaml")
