"""A journal file that was cut, damaged or never begun."""

import pytest

from scheduler_svc.errors import StartupError
from scheduler_svc.journal.frames import MAGIC, FrameReader, FrameWriter, frame

CONTENTS = [b"", b"one", b"two" * 1000, b"\0"]


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "journal"
    writer = FrameWriter(made)
    writer.append(b"".join(frame(content) for content in CONTENTS[:2]))
    for content in CONTENTS[2:]:
        writer.append(frame(content))
    assert writer.num_bytes == made.stat().st_size
    writer.close()
    return made


def test_what_was_written_is_read(path):
    reader = FrameReader(path)
    assert list(reader.read()) == CONTENTS
    assert (reader.num_torn_bytes, reader.num_unread_bytes, reader.damaged_at) == (0, 0, None)


def test_a_tail_cut_anywhere_costs_only_the_frame_it_cuts(path):
    data = path.read_bytes()
    ends = [len(MAGIC)]
    for content in CONTENTS:
        ends.append(ends[-1] + len(frame(content)))
    for size in (*range(len(MAGIC), ends[2] + 12), *range(ends[3] - 3, len(data) + 1)):
        path.write_bytes(data[:size])
        reader = FrameReader(path)
        whole = max(i for i, end in enumerate(ends) if end <= size)
        assert list(reader.read()) == CONTENTS[:whole]
        assert (reader.num_torn_bytes, reader.damaged_at) == (size - ends[whole], None)


ONE, TWO = len(MAGIC) + 8, len(MAGIC) + 8 + 11  # where the frames of "one" and of "two" begin


@pytest.mark.parametrize(
    ("place", "begins"),
    [
        *((ONE + i, ONE) for i in range(11)),  # length, checksum and content
        (ONE + 3, ONE),  # a length that is far beyond the end
        (TWO + 100, TWO),  # in a long frame, before a short one
        (-1, -9),  # in the last one, which is all there
    ],
)
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_is_damage_and_ends_what_is_read(path, place, begins, bit):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    begins %= len(data)
    path.write_bytes(data)
    reader = FrameReader(path)
    assert list(reader.read()) == CONTENTS[: {ONE: 1, TWO: 2}.get(begins, 3)]
    assert (reader.damaged_at, reader.num_unread_bytes, reader.num_torn_bytes) == (begins, len(data) - begins, 0)


@pytest.mark.parametrize("content", [b"", b"something else", MAGIC[:-1]])
def test_what_is_no_journal_is_refused(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(StartupError, match="is not a journal"):
        FrameReader(path)
    with pytest.raises(StartupError, match="cannot read the journal"):
        FrameReader(tmp_path / "nothing")


def test_a_full_disk_is_an_error(tmp_path):
    with pytest.raises(OSError, match=r"(?i)space|full"):
        FrameWriter(tmp_path.joinpath("/dev/full"))
