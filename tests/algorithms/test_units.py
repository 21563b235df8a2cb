import ast
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rotor.units import LARGEST_BYTES, exact_bytes, format_bytes, format_seconds, parse_bytes, to_ns

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (np.int32(77), 77),
        (np.uint64(1 << 40), 1 << 40),
        (7e8, 700_000_000),
        (np.float32(512.0), 512),
        (Fraction(12, 4), 3),
        (LARGEST_BYTES, LARGEST_BYTES),
        ("500", 500),
        ("500 B", 500),
        ("8 GB", 8_000_000_000),
        ("8gb", 8_000_000_000),
        ("  700MiB ", 700 << 20),
        ("700 mIb", 700 << 20),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("2TB", 2_000_000_000_000),
        ("2 TiB", 2 << 40),
        ("1.5GiB", 3 << 29),
        (".5 KiB", 512),
        ("3. MB", 3_000_000),
        ("0.0014 KB", 1),
        ("0.0015 KB", 2),
        ("1.000000000000000001 GB", 1_000_000_000),
    ],
)
def test_bytes_are_read(value, expected):
    parsed = parse_bytes(value)
    assert parsed == expected
    assert type(parsed) is int


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        0.0,
        -4096.0,
        0.5,
        1024.5,
        float("nan"),
        float("inf"),
        float("-inf"),
        np.float64("nan"),
        LARGEST_BYTES + 1,
        10**400,
        1e30,
        "",
        " ",
        "GB",
        "0",
        "0.5",
        "1e3.5",
        "1024.5 B",
        "0 GB",
        "-1 GB",
        "1e",
        "1e-9",
        "1e999",
        "1,5 GB",
        "1.5.5 GB",
        ".",
        "1 G B",
        "12 Gb/s",
        "1 PB",
        "nan",
        "inf",
        "0x10",
        "1_000",
        "5000000 TiB",
        "١ GB",  # digits, but not ASCII ones
    ],
)
def test_what_is_not_a_positive_number_of_bytes_is_refused(value):
    with pytest.raises(ValueError, match=r"^budget = .*expected"):
        parse_bytes(value, name="budget")


@pytest.mark.parametrize("value", [True, False, np.True_, None, b"1GB", [1], 1j, object()])
def test_other_types_are_refused(value):
    with pytest.raises(TypeError, match=r"^mem_limit must be a number or text"):
        parse_bytes(value)


@pytest.mark.parametrize(
    ("text", "count"),
    [("1e9", 10**9), ("1.5E3 MiB", 1500 << 20), ("2e+0KB", 2000), ("5e0g", 5 << 30)],
)
def test_powers_of_ten_are_read(text, count):
    assert parse_bytes(text) == count


@given(st.integers(1, LARGEST_BYTES))
def test_every_whole_number_is_read_as_text(n):
    assert parse_bytes(n) == parse_bytes(str(n)) == parse_bytes(f"{n} b") == n


@given(st.integers(1, 10**9), st.sampled_from(["KB", "MB", "GB", "KiB", "MiB", "GiB"]))
def test_decimal_text_is_rounded_as_fractions_are(thousandths, unit):
    scale = {"K": 1, "M": 2, "G": 3}[unit[0]]
    factor = (1024 if "i" in unit else 1000) ** scale
    exact = Fraction(thousandths, 1000) * factor
    text = f"{thousandths // 1000}.{thousandths % 1000:03d}{unit}"
    assert parse_bytes(text) == int(exact + Fraction(1, 2))


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (-1023, "-1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (700 << 20, "700 MiB"),
        ((1 << 20) - 1, "1 MiB"),
        (-(3 << 29), "-1.5 GiB"),
        (10_000, "9.77 KiB"),
        (12_345_678, "11.8 MiB"),
        (1 << 52, "4096 TiB"),
    ],
)
def test_bytes_are_written(n, text):
    assert format_bytes(n) == text


@given(st.integers(1, LARGEST_BYTES))
def test_written_bytes_are_near_and_readable(n):
    assert abs(parse_bytes(format_bytes(n)) - n) <= n * 0.006


@pytest.mark.parametrize(
    ("s", "text"),
    [
        (0, "0 ns"),
        (3e-9, "3.00 ns"),
        (12.3456e-6, "12.3 us"),
        (0.9999e-3, "1.00 ms"),
        (0.01234, "12.3 ms"),
        (0.4567, "457 ms"),
        (1.0, "1.00 s"),
        (99.96, "100 s"),
        (-2.5, "-2.50 s"),
        (150.0, "2.5 min"),
    ],
)
def test_seconds_are_written(s, text):
    assert format_seconds(s) == text


@pytest.mark.parametrize(
    ("seconds", "ns"),
    [(0, 0), (1, 10**9), (1.4e-9, 1), (1.6e-9, 2), (0.1, 10**8), (np.float64(2.5e-9), 2)],
)
def test_seconds_become_the_nearest_nanoseconds(seconds, ns):
    assert to_ns(seconds) == ns


@pytest.mark.parametrize("seconds", [float("nan"), -1e-9, -1, float("inf"), 1e10, 10**400])
def test_times_that_do_not_fit_are_refused(seconds):
    with pytest.raises(ValueError, match="seconds"):
        to_ns(seconds)


@pytest.mark.parametrize("seconds", [True, "1", None])
def test_times_that_are_no_numbers_are_refused(seconds):
    with pytest.raises(TypeError, match="number of seconds"):
        to_ns(seconds)


def test_units_need_no_torch():
    code = "import sys, rotor.units; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "size, text",
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (20796608, "19.8 MiB (20796608 bytes)"),
        (20 << 20, "20 MiB (20971520 bytes)"),
        (-2048, "-2 KiB (-2048 bytes)"),
    ],
)
def test_messages_have_bytes_for_people_and_exactly(size, text):
    assert exact_bytes(size) == text


def test_every_message_has_its_bytes_in_both_forms():
    """No message has a number of bytes alone, unless it names the argument of a log or a table."""
    found = []
    for path in (ROOT / "rotor").rglob("*.py"):
        if path.parent.name in ("simrd", "experiments") or path.name == "units.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and raises(node)):
                continue
            for text in ast.walk(node):
                if isinstance(text, ast.JoinedStr):
                    found += [f"{path.name}:{text.lineno}" for _ in bare_bytes(text)]
    assert found == []


def raises(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return name in ("InfeasibleError", "BudgetError", "warn", "warn_caller")


def bare_bytes(text: ast.JoinedStr):
    """Numbers of bytes in a message without `exact_bytes`, "give at least" aside."""
    for before, value, after in zip(text.values, text.values[1:], text.values[2:], strict=False):
        is_value = isinstance(value, ast.FormattedValue) and isinstance(after, ast.Constant)
        is_cure = isinstance(before, ast.Constant) and "at least" in str(before.value)
        if is_value and not is_cure and str(after.value).startswith(" bytes"):
            yield value
