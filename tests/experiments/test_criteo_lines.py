from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from criteo_reference import make_lines, read_row
from dlrm.criteo_blocks import Rows, parse_block
from dlrm.criteo_lines import FIELD_NAMES, MAX_LINE_BYTES, LineProblem, parse_line

REAL_SAMPLE = Path("/work/shared/data/criteo/kaggle_raw_999.tsv")
GOOD = make_lines(40)

integers = st.one_of(st.just(""), st.integers(-3, 10**9).map(str), st.integers(-(10**18) + 1, 10**18 - 1).map(str))
categories = st.one_of(
    st.just(""),
    st.integers(0, 2**32 - 1).map("{:08x}".format),
    st.text("0123456789abcdefABCDEF", min_size=1, max_size=8),
)
good_lines = st.tuples(
    st.sampled_from("01"), st.tuples(*[integers] * 13), st.tuples(*[categories] * 26)
).map(lambda parts: "\t".join([parts[0], *parts[1], *parts[2]]).encode())  # fmt: skip


@st.composite
def spoiled_lines(draw: st.DrawFn) -> bytes:
    """A line of which some bytes were replaced, cut out or put in: many are bad, some are still good."""
    line = bytearray(draw(st.sampled_from(GOOD)))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(line)))
        new = draw(
            st.sampled_from([b"", b"\t", b"\t\t", b"-", b"0", b"g", b"F", b" ", b"\r", b"\0", b"\xff", b"99999999"])
        )
        line[place : place + draw(st.integers(0, 2))] = new
    return bytes(line)


def assert_same(rows: Rows, lines: list[bytes], first_line: int = 1) -> None:
    """Hold a block against its lines one by one."""
    expected, bad = [], []
    for number, line in enumerate(lines, start=first_line):
        try:
            expected.append(parse_line(line, number))
        except LineProblem as problem:
            bad.append((number, str(problem), line))
    assert [(line.number, line.problem, line.text) for line in rows.bad] == bad
    assert rows.lines == len(lines)
    actual = zip(rows.label.tolist(), rows.integers.tolist(), rows.values.tolist(), rows.missing.tolist(), strict=True)
    assert list(actual) == expected


@settings(deadline=None, max_examples=40)
@given(good_lines)
def test_a_good_line_reads_as_python_reads_it(line: bytes) -> None:
    label, numbers, values, missing = parse_line(line)
    expected = read_row(line)
    assert (label, numbers) == expected[:2]
    assert [None if missing >> column & 1 else value for column, value in enumerate(values)] == expected[2]


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.one_of(st.sampled_from(GOOD), good_lines, spoiled_lines(), st.binary(max_size=50)), max_size=12),
    st.booleans(),
)
def test_a_block_reads_as_its_lines_do(lines: list[bytes], ends_with_newline: bool) -> None:
    lines = [part for line in lines for part in line.split(b"\n")]
    block = b"\n".join(lines) + (b"\n" if ends_with_newline else b"")
    expected = block.split(b"\n")
    assert_same(parse_block(block, 7), expected[:-1] if not expected[-1] else expected, 7)


@pytest.mark.parametrize("place", [0, 5, 300])
def test_one_odd_line_among_many(place: int) -> None:
    lines = make_lines(301)
    for odd in (b"", b"x", lines[3].upper(), lines[3] + b"\r", lines[3].rsplit(b"\t", 1)[0]):
        assert_same(
            parse_block(b"\n".join([*lines[:place], odd, *lines[place:]]) + b"\n"),
            [*lines[:place], odd, *lines[place:]],
        )


def fields_with(name: str, text: bytes) -> bytes:
    fields = GOOD[0].split(b"\t")
    fields[FIELD_NAMES.index(name)] = text
    return b"\t".join(fields)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"", "the line is empty"),
        (GOOD[0] + b"\t", "41 fields in place of 40, tab separated: the line goes on after field C26"),
        (b"\t".join(GOOD[0].split(b"\t")[:20]), "20 fields in place of 40, tab separated: the line ends with field C6"),
        (GOOD[0].replace(b"\t", b" "), "1 fields in place of 40"),
        (GOOD[0].split(b"\t", 1)[1], "39 fields in place of 40: no field label, as in Kaggle's test file"),
        (GOOD[0] + b"\r", "field C26 ends in a carriage return: Windows line ends"),
        (b"\t".join(name.encode() for name in FIELD_NAMES), r"field label is 'label', not 0 or 1 \(a header line\?"),
        (b"\xef\xbb\xbf" + GOOD[0], "field label starts with a byte order mark"),
        (fields_with("label", b""), "field label is '', not 0 or 1"),
        (fields_with("label", b"2"), "field label is '2', not 0 or 1"),
        (fields_with("I1", b"1.5"), "field I1 is '1.5', not an integer"),
        (fields_with("I2", b"--2"), "field I2 is '--2', not an integer"),
        (fields_with("I3", b"-"), "field I3 is '-', not an integer"),
        (fields_with("I4", b" 1"), "field I4 is ' 1', not an integer"),
        (fields_with("I5", b"1_0"), "field I5 is '1_0', not an integer"),
        (fields_with("I6", b"1" * 19), "field I6 is '1+', not an integer of at most 18 digits"),
        (fields_with("I13", "٣".encode()), "field I13 is .*, not an integer"),
        (fields_with("I7", b"1\0"), r"field I7 holds a NUL byte: '1\\x00'"),
        (fields_with("C1", b"0123\x00567"), "field C1 holds a NUL byte"),
        (fields_with("C2", b"0123\xff567"), "field C2 is not UTF-8 text"),
        (fields_with("C3", b"0123456g"), "field C3 is '0123456g', not a hexadecimal number"),
        (fields_with("C26", b"012345678"), "field C26 is '012345678', not a hexadecimal number of at most 8 digits"),
        (fields_with("C5", b"0x123456"), "field C5 is '0x123456'"),
        (fields_with("C6", b" 1234567"), "field C6 is ' 1234567'"),
        (fields_with("C7", b"z" * 100), r"field C7 is 'z{40}'\.\.\."),
        (fields_with("C8", b"z" * MAX_LINE_BYTES), f"longer than {MAX_LINE_BYTES} bytes"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_field(line: bytes, problem: str) -> None:
    with pytest.raises(LineProblem, match=problem):
        parse_line(line)
    rows = parse_block(line + b"\n" + GOOD[1] + b"\n")
    assert_same(rows, [line, GOOD[1]])
    assert len(rows.bad) == 1


def test_a_line_may_have_lost_its_empty_last_fields_and_no_others() -> None:
    fields = GOOD[0].split(b"\t")
    fields[34:] = [b"0000000a"] * 6
    for last in range(36, 40):
        line = b"\t".join(fields[:last])
        rows = parse_block(line + b"\n" + GOOD[1] + b"\n")
        assert_same(rows, [line, GOOD[1]])
        assert rows.stripped == len(rows.label) - 1 == (last in (37, 38))
    with pytest.raises(LineProblem, match="38 fields in place of 40"):
        parse_line(b"\t".join([*fields[:37], b""]))
    label, _, values, missing = parse_line(b"\t".join(fields[:38]))
    assert (label, values[23:], missing >> 23) == (int(fields[0]), [10, 0, 0], 0b110)


def test_lines_without_a_label_are_no_rows_even_when_stripped() -> None:
    fields = fields_with("C1", b"12345678").split(b"\t")[1:]
    fields[0] = b"1"
    for line in (fields, [*fields[:36], b"0a"], [*fields[:36], b"0000000a"]):
        with pytest.raises(LineProblem, match="label"):
            parse_line(b"\t".join(line))
        assert_same(parse_block(b"\t".join(line) + b"\n"), [b"\t".join(line)])


@pytest.mark.skipif(not REAL_SAMPLE.exists(), reason="no sample of Criteo's file")
def test_the_real_sample() -> None:
    content = REAL_SAMPLE.read_bytes()
    rows = parse_block(content)
    assert (len(rows.label), rows.lines, rows.bad) == (1000, 1000, [])
    for index, line in enumerate(content.split(b"\n")):
        label, numbers, values = read_row(line)
        assert label == rows.label[index]
        assert numbers == rows.integers[index].tolist()
        assert [value or 0 for value in values] == rows.values[index].tolist()
        assert [value is None for value in values] == [bool(rows.missing[index] >> c & 1) for c in range(26)]
    assert rows.integers.min() == -2
    assert rows.values.dtype == np.uint32
