"""Sizes and durations mean what people mean by them, and nonsense is an error with a fix."""

from __future__ import annotations

import math
from contextlib import suppress
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import ConfigError
from stepwell.units import Amount, format_duration, format_size, parse_amount, parse_duration, parse_size

BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64GiB", 64 << 30),
        ("10G", 10 << 30),
        ("80m", 80 << 20),
        ("10GB", 10**10),
        ("1.5 TB", 1_500_000_000_000),
        (" 512 kib ", 512 << 10),
        ("4096", 4096),
        ("0100", 100),
        ("7b", 7),
        (4096, 4096),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10m", 600), ("60s", 60), ("250ms", 0.25), ("1.5h", 5400), ("2d", 172800), ("5", 5), (0, 0), (0.5, 0.5)],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


def kind(value: object) -> str:
    return type(value).__name__


BAD = ["", "  ", "GiB", "-1", "1e9", "nan", "inf", "1 000", "1,5G", "3x", "٣G", "9" * 5000, True, None, math.nan, b"1"]


@pytest.mark.parametrize("value", [*BAD, 0, "0", "0GiB", -5, 1.5, "8192PiB", 1 << 63, 10**5000], ids=kind)
def test_what_is_no_size(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(value)  # type: ignore[arg-type]
    assert caught.value.code == "SW-102"
    assert "64GiB" in caught.value.fix
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", [*BAD, -1, -0.1, math.inf, "1GiB", "101y", "40000d", 10**5000], ids=kind)
def test_what_is_no_duration(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_duration(value)  # type: ignore[arg-type]
    assert caught.value.code == "SW-102"
    assert "10m" in caught.value.fix


@given(st.integers(1, 1023), st.sampled_from(sorted(BINARY)))
def test_whole_units_are_written_and_read_exactly(number: int, unit: str) -> None:
    size = number * BINARY[unit]
    assert format_size(size) == f"{number}{unit}"
    assert parse_size(format_size(size)) == size


@given(st.integers(1, 1 << 59))
def test_a_written_size_is_close_and_short(size: int) -> None:
    text = format_size(size)
    assert abs(parse_size(text) - size) <= size * 0.005 + 1
    assert len(text) <= len("1023.99GiB")
    assert not text.startswith("1024")


@given(st.floats(1e-6, 86400 * 999))
def test_a_written_duration_is_close_and_short(seconds: float) -> None:
    text = format_duration(seconds)
    assert parse_duration(text) == pytest.approx(seconds, rel=0.005)
    assert len(text) <= len("999.99ms")


def test_a_value_just_below_a_unit_is_written_in_that_unit() -> None:
    assert format_size((1 << 20) - 1) == "1MiB"
    assert format_duration(59.999) == "1m"
    assert format_duration(0) == "0s"
    assert format_size(0) == "0B"


@given(st.text() | st.integers() | st.floats() | st.none() | st.booleans())
def test_nothing_but_a_config_error_is_raised(value: object) -> None:
    for parse in (parse_size, parse_duration):
        with suppress(ConfigError):
            assert parse(value) >= 0  # type: ignore[operator]
    with suppress(ConfigError):
        assert parse_amount(value).of(1 << 40) >= 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "of_1000", "written"),
    [
        ("25%", 250, "25%"),
        ("100 %", 1000, "100%"),
        ("33.30%", 333, "33.3%"),
        ("0.05%", 0, "0.05%"),
        ("10.0%", 100, "10%"),
        ("64GiB", 64 << 30, "64GiB"),
        (1234567, 1234567, "1234567"),
        ("1.5G", 3 << 29, "1.5GiB"),
    ],
)
def test_amounts(text: str | int, of_1000: int, written: str) -> None:
    amount = parse_amount(text)
    assert (amount.of(1000), str(amount)) == (of_1000, written)
    assert parse_amount(str(amount)) == parse_amount(amount) == amount


@given(st.integers(1, (1 << 63) - 1))
def test_a_written_amount_is_read_exactly(size: int) -> None:
    assert parse_amount(str(Amount(size=size))) == Amount(size=size)
    assert Amount(percent=Decimal(100)).of(size) == size
    assert Amount(percent=Decimal("0.000000001")).of(size) == size // 10**11


@pytest.mark.parametrize(
    "value", [*BAD, "%", "0%", "100.1%", "-5%", "5%%", "1e1%", "1/2%", "9999999%", 0, 1.5], ids=kind
)
def test_what_is_no_amount(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_amount(value)  # type: ignore[arg-type]
    assert caught.value.code == "SW-102"
    assert "25%" in caught.value.fix or "64GiB" in caught.value.fix
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("parts", [{}, {"size": 1, "percent": Decimal(1)}, {"size": -1}, {"percent": Decimal(101)}])
def test_an_amount_is_a_size_or_a_per_cent(parts: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="amount"):
        Amount(**parts)  # type: ignore[arg-type]
