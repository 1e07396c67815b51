import gzip
from pathlib import Path

import pytest

from criteo_reference import make_lines
from dlrm.criteo_input import Block, LineReader, check_input
from dlrm.criteo_lines import MAX_LINE_BYTES

TEXT = b"\n".join(make_lines(120)) + b"\n"
BLOCK = MAX_LINE_BYTES + 5


def blocks_of(path: Path, offset: int = 0) -> tuple[list[Block], str | None]:
    blocks = []
    with LineReader(path, offset, BLOCK) as reader:
        while (block := reader.next_block()) is not None:
            assert reader.offset == block.end
            blocks.append(block)
        return blocks, reader.damage


@pytest.mark.parametrize("text", [TEXT, TEXT[:-1], b"\n", TEXT[:BLOCK], TEXT[: BLOCK - 1]])
@pytest.mark.parametrize("packed", [False, True])
def test_whole_lines_from_any_block_on(text: bytes, packed: bool, tmp_path: Path) -> None:
    path = tmp_path / "train"
    path.write_bytes(gzip.compress(text) if packed else text)
    blocks, damage = blocks_of(path)
    assert b"".join(block.data for block in blocks) == text
    assert damage is None
    assert all(len(block.data) <= BLOCK for block in blocks)
    assert all(block.data.endswith(b"\n") for block in blocks[:-1])
    for index, block in enumerate(blocks):
        assert blocks_of(path, block.end)[0] == blocks[index + 1 :]


@pytest.mark.parametrize("behind", [b"", b"\n", b"\n" + TEXT])
def test_a_line_without_end_takes_a_block_and_no_more(behind: bytes, tmp_path: Path) -> None:
    path = tmp_path / "train"
    path.write_bytes(TEXT + 5 * BLOCK * b"x" + behind)
    blocks, _ = blocks_of(path)
    lines = b"".join(block.data for block in blocks).split(b"\n")
    assert [line for line in lines if not line.startswith(b"x")] == (TEXT + behind[1:]).split(b"\n")
    (long,) = (line for line in lines if line.startswith(b"x"))
    assert MAX_LINE_BYTES < len(long) <= BLOCK
    assert blocks[-1].end == path.stat().st_size
    for index, block in enumerate(blocks):
        assert blocks_of(path, block.end)[0] == blocks[index + 1 :]


def test_a_gzip_file_is_read_to_where_it_breaks_off(tmp_path: Path) -> None:
    path = tmp_path / "train"
    packed = gzip.compress(TEXT)
    for size in (len(packed) - 9, len(packed) - 1, len(packed) // 2, 600):
        path.write_bytes(packed[:size])
        blocks, damage = blocks_of(path)
        assert "ended before" in damage
        text = b"".join(block.data + (block.cut or b"") for block in blocks)
        assert TEXT.startswith(text)
        assert len(text) > 0.8 * len(TEXT) * size / len(packed) - 1000
        assert all(block.data.endswith(b"\n") for block in blocks if block.data)
        assert blocks_of(path, blocks[-1].end) == ([], damage)


def test_a_gzip_file_with_other_bytes_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "train"
    packed = bytearray(gzip.compress(TEXT))
    packed[-6] ^= 1
    path.write_bytes(packed)
    assert "CRC" in blocks_of(path)[1]
    path.write_bytes(gzip.compress(TEXT) + b"garbage")
    assert "Not a gzipped file" in blocks_of(path)[1]
    path.write_bytes(gzip.compress(TEXT[:5000]) + gzip.compress(TEXT[5000:]))
    blocks, damage = blocks_of(path)
    assert (b"".join(block.data for block in blocks), damage) == (TEXT, None)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the file is empty"),
        (b"train.txt".ljust(257, b"\0") + b"ustar" + bytes(300), r"a tar archive; unpack it \(tar xf\)"),
        (b"PK\x03\x04" + bytes(300), "a zip archive"),
    ],
)
def test_what_is_no_text_is_refused_with_a_remedy(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"data\.path=.*{problem}"):
        check_input(path)
    if content:
        path.write_bytes(gzip.compress(content))
        with pytest.raises(ValueError, match=rf"data\.path=.*{problem}"):
            check_input(path)
    with pytest.raises(FileNotFoundError, match=r"data\.path=.*there is no such file.*train\.txt of Criteo"):
        check_input(tmp_path / "nowhere")
