"""Reading apt's source files and choosing archives; tidying a fresh Debian root."""

from __future__ import annotations

import stat

from dsec_imagefs.sources.apt import Archive, choose_archives, parse_deb822, parse_one_line, read_archives
from dsec_imagefs.sources.debootstrap import tidy
from dsec_imagefs.tree import BytesContent, Node, Tree, split_path

DEB822 = """\
Types: deb
# a comment
URIs: http://mirror.test/debian
Suites: bookworm bookworm-updates
Components: main
 contrib

Types: deb
URIs: http://mirror.test/debian-security
Suites: bookworm-security
Components: main

Types: deb-src
URIs: http://mirror.test/sources
Suites: bookworm
Components: main

Types: deb
Enabled: no
URIs: http://mirror.test/off
Suites: bookworm
Components: main
"""


def test_both_formats_are_read(tmp_path):
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text("# x\ndeb [arch=amd64 signed-by=/k] http://m.test/debian sid main # y\n")
    (tmp_path / "sources.list.d" / "debian.sources").write_text(DEB822)
    found = read_archives(tmp_path)
    assert found[0] == Archive(uri="http://m.test/debian", suite="sid", components=("main",))
    assert [a.suite for a in found] == ["sid", "bookworm", "bookworm-updates", "bookworm-security"]
    assert found[1].components == ("main", "contrib")
    assert read_archives(tmp_path / "none") == []


def test_base_first_then_updates_and_security():
    chosen = choose_archives("bookworm", parse_deb822(DEB822))
    assert [(a.uri.rpartition("/")[2], a.suite) for a in chosen] == [
        ("debian", "bookworm"), ("debian", "bookworm-updates"), ("debian-security", "bookworm-security"),
    ]  # fmt: skip


def test_another_release_borrows_the_mirror_and_foreign_archives_are_left_alone():
    archives = parse_deb822(DEB822) + parse_one_line("deb http://vendor.test/tool trixie main")
    assert choose_archives("noble", archives)[0].uri == "http://mirror.test/debian"
    assert choose_archives("bookworm", parse_one_line("deb http://vendor.test/tool any main")) == []


def test_credentials_stay_out_of_images():
    line = Archive(uri="https://user:secret@mirror.test/debian", suite="bookworm", components=("main",)).line()
    assert line == "deb https://mirror.test/debian bookworm main\n"


def test_tidy_removes_what_belongs_to_this_host():
    tree = Tree()
    for path in (
        "var/cache/apt/archives/x.deb",
        "var/lib/apt/lists/l",
        "etc/resolv.conf",
        "var/log/dpkg.log",
        "bin/sh",
    ):
        *parents, name = split_path(path.encode())
        tree.directory(parents, make=True).children[name] = Node(
            fmt=stat.S_IFREG, mode=0o600, content=BytesContent(b"host")
        )
    tidy(tree.root, [Archive(uri="http://u:p@m.test/debian", suite="s", components=("main",))])
    assert tree.lookup(split_path(b"var/cache/apt/archives")).children == {}
    assert tree.lookup(split_path(b"var/lib/apt/lists")).children == {}
    assert tree.lookup(split_path(b"var/log/dpkg.log")) is None
    assert tree.lookup(split_path(b"etc/resolv.conf")).content.data == b""
    assert tree.lookup(split_path(b"etc/apt/sources.list")).content.data == b"deb http://m.test/debian s main\n"
    assert tree.lookup(split_path(b"bin/sh")).content.data == b"host"
