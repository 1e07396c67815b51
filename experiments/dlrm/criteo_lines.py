"""One line of Criteo's Kaggle file, read slowly and exactly: what a row is, and what is wrong where it is none.

A row is a label (0 or 1), 13 integers and 26 hexadecimal numbers of 32 bits, separated by tabs; fields may be empty
but the label. Copies of the file go round whose lines were stripped at the end, so a line may also stop after C23 or
C24, as C25 and C26 are only ever missing together; no other short line is a row.
"""

from __future__ import annotations

NUM_INTEGERS = 13
NUM_CATEGORIES = 26
NUM_FIELDS = 1 + NUM_INTEGERS + NUM_CATEGORIES
FIELD_NAMES = (
    "label",
    *(f"I{column}" for column in range(1, NUM_INTEGERS + 1)),
    *(f"C{column}" for column in range(1, NUM_CATEGORIES + 1)),
)

STRIPPED_FIELDS = (NUM_FIELDS - 3, NUM_FIELDS - 2)
"""Fields of lines that have lost their empty last ones: C24 to C26, or C25 and C26."""

MAX_LINE_BYTES = 4096
"""No row comes near it (40 fields of 19 characters are 800); a file that is no text has longer ones."""

_MAX_DIGITS = 18  # Any such integer fits into 64 bits.
MAX_HEX_DIGITS = 8
LAST_INTEGER = NUM_INTEGERS  # Its place among the fields.
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SHOWN_CHARACTERS = 40


class LineProblem(ValueError):
    """What is wrong with a line, in words that name the field; whoever knows the file adds where the line is."""


def _shown(text: bytes) -> str:
    """Quote a field for a message: escaped, and cut when it is long."""
    shown = repr(text[:_SHOWN_CHARACTERS])[1:]
    return shown + "..." if len(text) > _SHOWN_CHARACTERS else shown


def _check_text(name: str, text: bytes) -> None:
    """Refuse bytes that are no text at all, with a reason of their own."""
    if b"\0" in text:
        raise LineProblem(f"field {name} holds a NUL byte: {_shown(text)}")
    try:
        text.decode()
    except UnicodeDecodeError:
        raise LineProblem(f"field {name} is not UTF-8 text: {_shown(text)}") from None


def _parse_label(text: bytes, is_first: bool) -> int:
    if text in (b"0", b"1"):
        return text[0] - ord("0")
    if text.startswith(_BYTE_ORDER_MARK):
        raise LineProblem("field label starts with a byte order mark; save the file without one")
    _check_text("label", text)
    hint = " (a header line? the file must have none)" if is_first else ""
    raise LineProblem(f"field label is {_shown(text)}, not 0 or 1{hint}")


def _parse_integer(name: str, text: bytes) -> int:
    if not text:
        return 0
    digits = text.removeprefix(b"-")
    # bytes.isdigit knows ASCII digits only; int() alone would also take spaces and underscores.
    if not digits.isdigit() or len(digits) > _MAX_DIGITS:
        _check_text(name, text)
        raise LineProblem(f"field {name} is {_shown(text)}, not an integer of at most {_MAX_DIGITS} digits")
    return int(text)


def _parse_category(name: str, text: bytes) -> int:
    if len(text) > MAX_HEX_DIGITS or text.strip(b"0123456789abcdefABCDEF"):
        _check_text(name, text)
        raise LineProblem(f"field {name} is {_shown(text)}, not a hexadecimal number of at most 8 digits")
    return int(text, 16)


def parse_line(line: bytes, number: int = 1) -> tuple[int, list[int], list[int], int]:
    """Read one line, slowly and exactly.

    Args:
        line: Its bytes, without the newline.
        number: Its number in the file, from 1.

    Returns:
        Label, 13 integers, 26 category values (missing ones 0) and the bits of the categories that are missing.

    Raises:
        LineProblem: If it is not a row; the message names the field.
    """
    if len(line) > MAX_LINE_BYTES:
        raise LineProblem(f"the line is longer than {MAX_LINE_BYTES} bytes")
    if not line:
        raise LineProblem("the line is empty")
    if line.endswith(b"\r"):
        raise LineProblem("field C26 ends in a carriage return: Windows line ends; convert the file with dos2unix")
    fields = line.split(b"\t")
    if len(fields) == NUM_FIELDS - 1:
        raise LineProblem("39 fields in place of 40: no field label, as in Kaggle's test file; give the training file")
    if len(fields) in STRIPPED_FIELDS and fields[-1]:
        if len(fields[LAST_INTEGER]) >= MAX_HEX_DIGITS:
            raise LineProblem(
                f"field I13 is {_shown(fields[LAST_INTEGER])}, too long in a line of {len(fields)} fields: "
                "C1 of a row without a label?"
            )
        fields += [b""] * (NUM_FIELDS - len(fields))
    if len(fields) != NUM_FIELDS:
        last = FIELD_NAMES[len(fields) - 1] if len(fields) < NUM_FIELDS else "C26"
        side = "ends with" if len(fields) < NUM_FIELDS else "goes on after"
        raise LineProblem(f"{len(fields)} fields in place of 40, tab separated: the line {side} field {last}")
    label = _parse_label(fields[0], is_first=number == 1)
    names = iter(zip(FIELD_NAMES[1:], fields[1:], strict=True))
    integers = [_parse_integer(*next(names)) for _ in range(NUM_INTEGERS)]
    values, missing = [], 0
    for column, (name, text) in enumerate(names):
        values.append(_parse_category(name, text) if text else 0)
        missing |= (not text) << column
    return label, integers, values, missing
