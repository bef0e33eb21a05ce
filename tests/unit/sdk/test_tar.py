"""Unpacking a tree that an attacker wrote touches nothing outside the target; packing names what it leaves out."""

from __future__ import annotations

import io
import os
import tarfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from libdsec._tar import SKIPPED_MEMBER, Unpacker, _stays_inside, pack_tree
from libdsec.errors import PlatformError, UsageError


def member(name, body=b"", kind=tarfile.REGTYPE, link="", mode=0o644):
    """A tar member and its content."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.size = kind, link, mode, len(body)
    return info, body


def symlink(name, link):
    """A symbolic link."""
    return member(name, kind=tarfile.SYMTYPE, link=link)


def stream(*members, trailer=b'[["dev/null", "character device"]]'):
    """A tree stream as the node sends it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, body in [*members, *([member(SKIPPED_MEMBER, trailer)] if trailer is not None else [])]:
            tar.addfile(info, io.BytesIO(body))
    out.seek(0)
    return out


def unpack(target, *members, **more):
    """Unpack into target."""
    return Unpacker(target, **more).run(stream(*members))


def test_a_plain_tree_arrives_whole(tmp_path):
    result = unpack(
        tmp_path / "t",
        member("d", kind=tarfile.DIRTYPE, mode=0o500),
        member("d/x", b"hello", mode=0o4755),
        member("d/l", kind=tarfile.SYMTYPE, link="x"),
        member("d/h", kind=tarfile.LNKTYPE, link="d/x"),
        member(b"odd\xff".decode("utf-8", "surrogateescape"), b"1"),
    )
    assert (tmp_path / "t/d/l").read_bytes() == b"hello"
    assert (tmp_path / "t/d/h").read_bytes() == b"hello"
    assert (tmp_path / "t/d/x").stat().st_mode & 0o7777 == 0o755, "no set-user-id bit comes over"
    assert (tmp_path / "t/d").stat().st_mode & 0o777 == 0o700, "our own directories stay usable"
    assert os.path.exists(os.fsencode(tmp_path) + b"/t/odd\xff")
    assert result.skipped == [("dev/null", "character device")]
    assert not (tmp_path / "t" / SKIPPED_MEMBER).exists()


@pytest.mark.parametrize(
    "evil",
    [
        [member("../out", b"x")],
        [member("a/../../out", b"x")],
        [member("l", kind=tarfile.SYMTYPE, link=".."), member("l/out", b"x")],
        [member("l", kind=tarfile.SYMTYPE, link="/tmp"), member("l/out", b"x")],
        [symlink("s", "."), symlink("l", "s/s/../.."), member("l/out")],
        [member("l", kind=tarfile.SYMTYPE, link="a"), member("a", kind=tarfile.SYMTYPE, link="../x"), member("l/out")],
        [member("h", kind=tarfile.LNKTYPE, link="../secret")],
        [member("h", kind=tarfile.LNKTYPE, link="/etc/passwd")],
        [member("l", kind=tarfile.SYMTYPE, link="../secret"), member("l", b"overwritten")],
        [member("d", kind=tarfile.CHRTYPE), member("f", kind=tarfile.FIFOTYPE)],
    ],
)
def test_nothing_outside_is_touched_or_reachable(tmp_path, evil):
    (tmp_path / "secret").write_text("untouched")
    target = tmp_path / "t"
    unpack(target, *evil)
    assert sorted(os.listdir(tmp_path)) == ["secret", "t"]
    assert (tmp_path / "secret").read_text() == "untouched"
    root = os.path.realpath(target)
    for here, directories, files in os.walk(target):
        for name in [*directories, *files]:
            real = os.path.realpath(os.path.join(here, name))
            assert real == root or real.startswith(root + "/"), f"{name} leads to {real}"
            assert not os.path.ismount(real)


def test_an_absolute_name_lands_inside(tmp_path):
    unpack(tmp_path / "t", member("/etc/motd", b"x"))
    assert (tmp_path / "t/etc/motd").read_bytes() == b"x"


def test_left_out_things_are_named(tmp_path):
    result = unpack(
        tmp_path / "t", member("pipe", kind=tarfile.FIFOTYPE), member("l", kind=tarfile.SYMTYPE, link="/etc/passwd")
    )
    assert [name for name, _ in result.skipped] == ["pipe", "l", "dev/null"]
    assert os.listdir(tmp_path / "t") == []


def test_a_users_file_of_the_trailers_name_survives(tmp_path):
    unpack(tmp_path / "t", member(SKIPPED_MEMBER, b"mine"), member("z", b"z"))
    assert (tmp_path / "t" / SKIPPED_MEMBER).read_bytes() == b"mine"


@pytest.mark.parametrize("size", [0, 100, 512, 1024, 1500, 10240])
def test_a_cut_stream_is_an_error(tmp_path, size):
    whole = stream(member("a", b"a" * 700), member("b", b"b" * 700)).getvalue()
    with pytest.raises(PlatformError, match="short_tree"):
        Unpacker(tmp_path / "t").run(io.BytesIO(whole[:size] if size < 10240 else stream(trailer=None).getvalue()))


def test_a_tree_over_the_limit_is_refused(tmp_path):
    with pytest.raises(UsageError, match="max_bytes"):
        unpack(tmp_path / "t", member("a", b"x" * 600), member("b", b"x" * 600), max_bytes=1000)


def test_a_second_unpack_replaces_files_and_links(tmp_path):
    target = tmp_path / "t"
    target.mkdir()
    (tmp_path / "victim").write_text("untouched")
    (target / "x").symlink_to(tmp_path / "victim")
    (target / "d").symlink_to(tmp_path)
    unpack(target, member("x", b"new"), member("d/victim", b"new"))
    assert (tmp_path / "victim").read_text() == "untouched"
    assert (target / "x").read_text() == "new"
    assert (target / "d/victim").read_text() == "new"
    assert not (target / "d").is_symlink()


def test_pack_names_special_files_and_keeps_links(tmp_path):
    source = tmp_path / "s"
    (source / "d").mkdir(parents=True)
    (source / "d/x").write_bytes(b"x" * 100_000)
    (source / "l").symlink_to("d/x")
    os.mkfifo(source / "pipe")
    out = io.BytesIO()
    result = pack_tree(source, out)
    assert result.skipped == [("pipe", "special file")]
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        names = tar.getnames()
        assert names == ["d", "d/x", "l"]
        assert tar.getmember("l").linkname == "d/x"
        assert tar.getmember("d/x").uname == ""


def where_it_leads(path):
    """What the kernel finds there, or nothing (a dangling link, a loop)."""
    try:
        fd = os.open(path, os.O_PATH)
    except OSError:
        return ""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


_kinds = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
_names = st.lists(st.sampled_from(["a", "b", "..", ".", "", "c"]), min_size=1, max_size=4).map("/".join)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    members=st.lists(
        st.tuples(_names, _kinds, _names),
        max_size=8,
    )
)
def test_no_mix_of_members_leads_outside(tmp_path_factory, members):
    home = tmp_path_factory.mktemp("mix")
    for outside in ("a", "b", "c"):
        (home / outside).write_text("untouched")  # what a link that leads out would find
    target = home / "t"
    try:
        unpack(target, *(member(name, kind=kind, link=link) for name, kind, link in members))
    except (OSError, PlatformError):
        pass  # names that clash end the transfer; what counts is where it wrote
    assert set(os.listdir(home)) <= {"a", "b", "c", "t"}
    assert {(home / name).read_text() for name in "abc"} == {"untouched"}
    root = os.path.realpath(target)
    for here, directories, files in os.walk(target):
        for name in [*directories, *files]:
            real = where_it_leads(os.path.join(here, name))
            assert real in {"", root} or real.startswith(root + "/")


@pytest.mark.parametrize(
    ("parts", "link", "inside"),
    [
        (("l",), "x", True),
        (("d", "l"), "../x", True),
        (("l",), "../x", False),
        (("d", "l"), "../../x", False),
        (("l",), "a/../b", False),
        (("l",), "/x", False),
        (("l",), "", True),
    ],
)
def test_links_that_stay_inside(parts, link, inside):
    assert _stays_inside(parts, link) is inside
