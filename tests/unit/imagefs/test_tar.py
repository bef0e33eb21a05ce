"""The tar reader: every dialect, I1's sparse and damaged archives, and agreement with Python's tarfile."""

from __future__ import annotations

import io
import tarfile

import pytest
from dsec_imagefs.blob import BlobContent
from dsec_imagefs.errors import ImageError
from dsec_imagefs.tar import pax
from dsec_imagefs.tar.header import TarError
from dsec_imagefs.tar.reader import DIR, LINK, REG, read_members
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit import tarbytes as t

PIECES = [(0, b"head"), (1_000_000, b"x" * 512), (3_000_000, b"tail")]


def members(data: bytes):
    with t.blob_of(data) as blob:
        return list(read_members(blob))


def bodies(data: bytes) -> dict[bytes, bytes]:
    found = {}
    with t.blob_of(data) as blob:
        for m in read_members(blob):
            body = bytearray(m.size)
            reader = BlobContent(blob=blob, offset=m.offset, size=m.size, extents=m.extents).open()
            reader.readinto(memoryview(body), 0)
            found[m.name] = bytes(body)
    return found


def expected(pieces, size):
    body = bytearray(size)
    for at, data in pieces:
        body[at : at + len(data)] = data
    return bytes(body)


@pytest.mark.parametrize("dialect", ["gnu", "0.0", "0.1", "1.0"])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 60])
def test_sparse_members_have_their_content(dialect, count):
    pieces = [(n * 8192, b"%d" % n * 100) for n in range(count)]
    size = count * 8192 + 100_000
    made = t.gnu_sparse(b"f", pieces, size) if dialect == "gnu" else t.pax_sparse(b"f", pieces, size, dialect)
    found = bodies(made + t.file(b"after", b"next") + t.END)
    assert found == {b"f": expected(pieces, size), b"after": b"next"}


@pytest.mark.parametrize("dialect", ["gnu", "0.1", "1.0"])
def test_sparse_maps_that_lie_are_refused(dialect):
    def make(pieces, size):
        return t.gnu_sparse(b"f", pieces, size) if dialect == "gnu" else t.pax_sparse(b"f", pieces, size, dialect)

    for pieces, size in (
        ([(4096, b"b"), (0, b"a")], 9000),  # backwards
        ([(0, b"a" * 600), (512, b"b" * 100)], 9000),  # overlapping
        ([(8999, b"abc")], 9000),  # beyond the end
    ):
        with pytest.raises(ImageError, match="sparse map"):
            members(make(pieces, size) + t.END)


def test_no_bytes_and_no_closing_blocks_are_layers():
    assert members(b"") == []
    assert [m.name for m in members(t.file(b"a", b"1"))] == [b"a"]
    assert [m.name for m in members(t.header(b"a", size=1) + b"1")] == [b"a"]  # not even padded
    assert members(t.END) == []


WHOLE = t.file(b"a", b"1" * 600) + t.pax([(b"path", b"long" * 50)]) + t.file(b"b", b"2" * 700) + t.END


@pytest.mark.parametrize("cut", [1, 100, 511, 513, 1000, 1536 + 1, 1536 + 512, 1536 + 600, 1536 + 1024 + 100, 3200])
def test_a_cut_archive_is_an_error(cut):
    with pytest.raises(ImageError, match=r"cut short|extension header") as caught:
        members(WHOLE[:cut])
    assert caught.value.code == "bad_image"
    assert "layer" in caught.value.message


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_damage_is_an_error_or_leaves_both_members(at, flip):
    damaged = bytearray(WHOLE)
    damaged[at] ^= flip
    try:
        found = members(bytes(damaged))
    except ImageError as err:
        assert err.code == "bad_image"
    else:
        assert [m.name[:1] for m in found] == [b"a", b"l"] or at >= 1536


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=3000))
def test_noise_is_an_error_never_a_crash(noise):
    try:
        members(noise)
    except ImageError as err:
        assert err.code == "bad_image"


def test_a_lone_zero_block_with_data_after_it_is_damage():
    with pytest.raises(ImageError, match="zero block"):
        members(t.file(b"a") + bytes(512) + t.file(b"b") + t.END)


def test_any_byte_in_names_by_every_way_to_say_long_names():
    odd = bytes(b for b in range(1, 256) if b != 0x2F)
    by_gnu = t.header(b"././@LongLink", b"L", size=len(odd) + 1) + t.padded(odd + b"\0") + t.file(b"cut", b"1")
    by_pax = t.pax([(b"path", odd[::-1])]) + t.file(b"cut", b"2")
    by_prefix = t.header(b"name", size=0, tail=b"\xff\n dir")
    assert [m.name for m in members(by_gnu + by_pax + by_prefix + t.END)] == [odd, odd[::-1], b"\xff\n dir/name"]


def test_pax_numbers_times_and_attributes():
    records = [
        (b"uid", b"4294967294"), (b"gid", b"2147483648"), (b"mtime", b"-1.25"),
        (b"SCHILY.xattr.user.raw", b"a\n\0=b"), (b"SCHILY.xattr.user.empty", b""),
        (b"LIBARCHIVE.xattr.user.b%2564", b"AP8"), (b"RHT.security.selinux", b"ctx\0"),
        (b"SCHILY.xattr.user.big", b"v" * 64_000),
    ]  # fmt: skip
    (m,) = members(t.pax(records) + t.file(b"f", b"body") + t.END)
    assert (m.uid, m.gid, m.mtime_s, m.mtime_ns) == (4294967294, 2147483648, -2, 750_000_000)
    assert m.xattrs == {
        b"user.raw": b"a\n\0=b", b"user.empty": b"", b"user.b%64": b"\0\xff", b"security.selinux": b"ctx\0",
        b"user.big": b"v" * 64_000,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "time"),
    [
        (b"1700000000.5", (1700000000, 500_000_000)),
        (b"-1.25", (-2, 750_000_000)),
        (b"-315619200", (-315619200, 0)),
        (b"0.123456789123", (0, 123456789)),
        (b"-0.5", (-1, 500_000_000)),
    ],
)
def test_times_are_exact(text, time):
    assert pax.parse_time(text) == time


@pytest.mark.parametrize("text", [b"", b".", b"1e5", b"nan", b"1.2.3", b"--1"])
def test_times_that_are_none_are_refused(text):
    with pytest.raises(TarError):
        pax.parse_time(text)


def test_global_headers_hold_until_taken_back():
    data = t.pax([(b"uid", b"7")], b"g") + t.file(b"a") + t.pax([(b"uid", b"")], b"g") + t.file(b"b", uid=3) + t.END
    assert [m.uid for m in members(data)] == [7, 3]


def test_kinds():
    data = (
        t.header(b"old/", b"\0") + t.header(b"new/", b"0") + t.header(b"seven", b"7")
        + t.header(b"l", b"1", link=b"seven", size=99) + t.header(b"dump/", b"D", size=3) + t.padded(b"Yx\0")
        + t.header(b"label", b"V") + t.END
    )  # fmt: skip
    kinds = [(m.name, m.kind, m.size) for m in members(data)]
    assert kinds == [
        (b"old/", DIR, 0), (b"new/", DIR, 0), (b"seven", REG, 0), (b"l", LINK, 0), (b"dump/", DIR, 0)
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [b"M", b"N", b"A", b"z"])
def test_unknown_types_are_refused_by_name(kind):
    with pytest.raises(ImageError, match="strange is of unknown type"):
        members(t.header(b"strange", kind) + t.END)


entries = st.lists(
    st.tuples(
        st.text(
            st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="/\0"), min_size=1, max_size=150
        ),
        st.binary(max_size=1500),
        st.integers(0, 1 << 40),
        st.integers(0, 4294967294),
    ),
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(entries, st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_agrees_with_what_tarfile_writes(rows, form):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name, data, mtime, uid in rows:
            info = tarfile.TarInfo("d/" + name)
            info.size, info.mtime, info.uid = len(data), mtime, uid
            archive.addfile(info, io.BytesIO(data))
    wanted = [(b"d/" + name.encode(), len(data), mtime, uid) for name, data, mtime, uid in rows]
    assert [(m.name, m.size, m.mtime_s, m.uid) for m in members(out.getvalue())] == wanted


def test_a_map_of_very_many_runs_is_read_in_good_time():
    pieces = [(n * 8192, b"%04d" % (n % 10_000)) for n in range(50_000)]
    size = 50_000 * 8192
    with t.blob_of(t.pax_sparse(b"f", pieces, size) + t.END) as blob:
        (m,) = read_members(blob)
        reader = BlobContent(blob=blob, offset=m.offset, size=m.size, extents=m.extents).open()
        view = memoryview(bytearray(1 << 20))
        for at in range(0, size - len(view), 1 << 20):  # walking the map from its start each time would take minutes
            reader.readinto(view, at)
            assert view[:4] == b"%04d" % (at // 8192 % 10_000)
