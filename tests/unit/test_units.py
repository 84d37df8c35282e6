"""Sizes: every form a user may write, every mistake they may make, and what is printed back."""

from __future__ import annotations

from fractions import Fraction

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.units import GIB, KIB, LARGEST_BYTES, MIB, TIB, Size, format_bytes, parse_bytes, parse_size

SCALES = {
    "": 1, "B": 1,
    "K": 10**3, "KB": 10**3, "KiB": KIB,
    "M": 10**6, "MB": 10**6, "MiB": MIB,
    "G": 10**9, "GB": 10**9, "GiB": GIB,
    "T": 10**12, "TB": 10**12, "TiB": TIB,
}  # fmt: skip


@pytest.mark.parametrize(
    ("written", "expected_bytes"),
    [
        ("8GB", 8 * 10**9),
        ("8gb", 8 * 10**9),
        ("8 G", 8 * 10**9),
        ("512MiB", 512 * MIB),
        ("512 mib", 512 * MIB),
        ("1.5GiB", 3 * GIB // 2),
        (".5KiB", 512),
        ("1_000_000", 1_000_000),
        ("4096", 4096),
        ("  64KB  ", 64_000),
        ("1e9", 10**9),
        ("2e3B", 2000),
        ("1e3MB", 10**9),
        ("1 B", 1),
        (1, 1),
        (1048576, MIB),
        (numpy.int64(4096), 4096),
        (4096.0, 4096),
        ("1024TiB", LARGEST_BYTES),
    ],
)
def test_absolute_sizes_are_read_as_written(written: object, expected_bytes: int) -> None:
    assert parse_size(written) == Size(fixed_bytes=expected_bytes)
    assert parse_bytes(written) == expected_bytes


@pytest.mark.parametrize(
    ("written", "fraction"),
    [
        (0.5, 0.5),
        (1.0, 1.0),
        ("0.25", 0.25),
        ("1.0", 1.0),
        ("50%", 0.5),
        ("12.5 %", 0.125),
        ("100%", 1.0),
        (numpy.float32(0.5), 0.5),
        (Fraction(1, 4), 0.25),
    ],
)
def test_fractions_are_shares_of_what_is_available(written: object, fraction: float) -> None:
    size = parse_size(written)
    assert size.fraction == pytest.approx(fraction)
    assert size.resolve(1000, auto_fraction=0.1) == int(1000 * fraction)


@pytest.mark.parametrize("written", ["auto", "AUTO", " auto "])
def test_auto_leaves_the_choice_to_the_caller(written: str) -> None:
    size = parse_size(written)
    assert size.is_auto
    assert size.resolve(1000, auto_fraction=0.25) == 250


def test_one_is_a_byte_and_one_point_zero_is_everything() -> None:
    assert parse_size(1).fixed_bytes == 1
    assert parse_size(1.0).fraction == 1.0
    assert parse_size("1").fixed_bytes == 1
    assert parse_size("1.0").fraction == 1.0


def test_a_parsed_size_passes_through_the_parser_unchanged() -> None:
    size = parse_size("8GB")
    assert parse_size(size) is size


def test_a_fixed_size_ignores_what_is_available() -> None:
    assert parse_size("8GB").resolve(1, auto_fraction=0.5) == 8 * 10**9


def test_a_share_of_almost_nothing_is_still_a_byte() -> None:
    assert parse_size(0.001).resolve(10, auto_fraction=0.5) == 1


@pytest.mark.parametrize(
    "written",
    [
        "", " ", "8XB", "8GiBs", "eight", "GB", "8G B", "8,5GB", "0x10", "--8GB", "1__0", "8GB 8GB",
        "-1", "-8GB", "−8GB", -1, -0.5, "-50%",
        0, 0.0, "0", "0GB", "0%", "0.0",
        "101%", "150%", 1.5, "1.5", 2.0, "2.0", 1023.0,
        "99999999TB", 10**18, "1e40", 1e300, "1e999GB", LARGEST_BYTES + 1, "1025TiB",
        "0.1B", float("nan"), float("inf"), -float("inf"), "nan", "inf",
        True, False, None, [], {}, b"8GB", object(), 1j,
    ],
)  # fmt: skip
def test_input_that_cannot_be_meant_is_refused_with_the_accepted_forms(written: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(written, name="--memory")
    message = str(caught.value)
    assert message.startswith("--memory=")
    for form in ('"8GB"', '"512MiB"', "bytes", "0.5", '"50%"', '"auto"'):
        assert form in message
    assert "\n" not in message


def test_a_refusal_is_both_a_value_error_and_a_type_error() -> None:
    with pytest.raises(ValueError):
        parse_size("lots")
    with pytest.raises(TypeError):
        parse_size(None)


@pytest.mark.parametrize("written", ["9" * 100_000, 10**5000, "x" * 100_000], ids=["text", "integer", "word"])
def test_an_enormous_input_is_quoted_in_short(written: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(written)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("written", [0.5, "50%"])
def test_a_fraction_is_refused_where_only_bytes_make_sense(written: object) -> None:
    with pytest.raises(ConfigError, match="fraction"):
        parse_bytes(written, name="--above")


def test_auto_is_refused_where_only_bytes_make_sense() -> None:
    with pytest.raises(ConfigError, match="--above='auto'"):
        parse_bytes("auto", name="--above")


@pytest.mark.parametrize(
    ("count", "printed"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536 * MIB, "1.50 GiB"),
        (10 * MIB - 1, "10.0 MiB"),
        (100 * MIB - 1, "100 MiB"),
        (1024 * MIB - 1, "1.00 GiB"),
        (GIB, "1.00 GiB"),
        (5 * TIB, "5.00 TiB"),
        (5000 * TIB, "5000 TiB"),
        (-3 * MIB, "-3.00 MiB"),
        (0.4, "0 B"),
    ],
)
def test_sizes_are_printed_with_three_digits_in_binary_units(count: float, printed: str) -> None:
    assert format_bytes(count) == printed


@given(count=st.integers(1, LARGEST_BYTES))
def test_whole_numbers_of_bytes_survive_every_spelling(count: int) -> None:
    assert parse_bytes(count) == parse_bytes(str(count)) == parse_bytes(f"{count} B") == count


@given(number=st.integers(1, 1023), unit=st.sampled_from(sorted(SCALES)), spaces=st.sampled_from(["", " "]))
def test_number_and_unit_mean_their_product_in_any_case(number: int, unit: str, spaces: str) -> None:
    for spelling in (unit, unit.lower(), unit.upper()):
        assert parse_bytes(f"{number}{spaces}{spelling}") == number * SCALES[unit]


@given(count=st.integers(1, LARGEST_BYTES))
def test_what_is_printed_reads_back_to_within_half_a_per_cent(count: int) -> None:
    assert abs(parse_bytes(format_bytes(count)) - count) <= 0.005 * count + 1, "and a byte, of which there are no parts"


@given(fraction=st.floats(0, 1, exclude_min=True), available_bytes=st.integers(1, LARGEST_BYTES))
def test_a_fraction_never_resolves_to_more_than_there_is(fraction: float, available_bytes: int) -> None:
    assert 1 <= parse_size(fraction).resolve(available_bytes, auto_fraction=0.5) <= available_bytes


@given(text=st.text(max_size=30))
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    try:
        size = parse_size(text)
    except ConfigError as refused:
        assert "memory=" in str(refused)
    else:
        assert size.is_auto or size.resolve(GIB, auto_fraction=0.5) >= 1


@given(count=st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_number_is_printable(count: float) -> None:
    assert format_bytes(count).endswith("B")
