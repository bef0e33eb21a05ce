"""Hypothesis strategies: trees with any names, owners, times, attributes, links and kinds of file."""

from __future__ import annotations

import stat

from dsec_imagefs.tree import BytesContent, Node
from hypothesis import strategies as st

from tests.kit import tarbytes as t

names = (
    st.binary(min_size=1, max_size=12)
    .map(lambda raw: raw.replace(b"/", b"-").replace(b"\0", b"~"))
    .filter(lambda name: name not in (b".", b".."))
) | st.sampled_from([b"a" * 255, b"-", b".hidden", b"...", b"\xff\xfe", b" ", b"\n"])
ids = st.integers(0, 4294967294)
xattr_names = st.builds(
    lambda prefix, rest: prefix + rest,
    st.sampled_from([b"user.", b"trusted."]),
    st.binary(min_size=1, max_size=8).filter(lambda raw: b"\0" not in raw),
).filter(lambda name: not name.startswith(b"trusted.dsec."))  # layers keep their own facts there; no image has any


@st.composite
def contents(draw):
    size = draw(st.sampled_from([0, 1, 4095, 4096, 4097, 70_000]))
    seed = draw(st.binary(min_size=1, max_size=8))
    if draw(st.booleans()):
        return BytesContent((seed * (size // len(seed) + 1))[:size])
    # data at both ends and a hole in between, wide enough to be kept as a hole
    data = seed + bytes(200_000 + size) + seed
    return BytesContent(data, extents=((0, len(seed)), (len(data) - len(seed), len(seed))))


@st.composite
def leaves(draw):
    fmt = draw(
        st.sampled_from([stat.S_IFREG, stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK])
    )  # fmt: skip
    node = draw(plain(fmt))
    if fmt == stat.S_IFREG:
        node.content = draw(contents())
    elif fmt == stat.S_IFLNK:
        node.mode = 0o777
        node.target = draw(
            st.binary(min_size=1, max_size=40).filter(lambda raw: b"\0" not in raw) | st.just(b"t" * 4090)
        )
    elif fmt in (stat.S_IFCHR, stat.S_IFBLK):
        node.device = (draw(st.integers(0, 4095)), draw(st.integers(0, (1 << 20) - 1)))
    return node


def plain(fmt):
    # The kernel lets only files and directories have user attributes.
    allowed = xattr_names if fmt in (stat.S_IFREG, stat.S_IFDIR) else xattr_names.filter(lambda n: n[:8] == b"trusted.")
    return st.builds(
        Node,
        fmt=st.just(fmt),
        mode=st.integers(0, 0o7777),
        uid=ids,
        gid=ids,
        mtime_s=st.integers(-(1 << 35), 1 << 35),
        mtime_ns=st.integers(0, 10**9 - 1),
        xattrs=st.dictionaries(allowed, st.binary(max_size=60) | st.just(b"v" * 5000), max_size=3),
    )


@st.composite
def trees(draw, depth=3):
    root = draw(plain(stat.S_IFDIR))
    children = draw(st.dictionaries(names, leaves() if depth == 0 else leaves() | trees(depth=depth - 1), max_size=5))
    root.children = dict(children)
    files = [node for node in children.values() if not node.is_dir]
    if files and draw(st.booleans()):  # a hard link beside it, or below a directory
        homes = [root, *(node for node in children.values() if node.is_dir)]
        draw(st.sampled_from(homes)).children[b"zz-link"] = draw(st.sampled_from(files))
    return root


# A few names, so that entries of one stack meet: below links, below each other, twice in a layer.
_parts = st.sampled_from([b"a", b"b", b"lib", b"usr"])
_paths = st.lists(_parts, min_size=1, max_size=3).map(b"/".join)
_targets = st.sampled_from(
    [b"a", b"b", b"usr/lib", b"/usr", b"../b", b"usr/../a", b"b/../lib", b"/", b"..", b"lib", b"nowhere/x"]
)


@st.composite
def members(draw):
    """One tar member, lawful or odd."""
    path = draw(_paths)
    parent, _, name = path.rpartition(b"/")
    below = parent + b"/" if parent else b""
    kind = draw(st.sampled_from(["file", "file", "dir", "dir", "link", "hard", "hide", "opaque", "device", "pool"]))
    stamp = draw(st.integers(1, 9))
    if kind == "file":
        return t.file(path, b"%d" % stamp * draw(st.sampled_from([0, 1, 5000])), mtime=stamp)
    if kind == "dir":
        return t.directory(draw(st.sampled_from([path, path, b"./"])), mode=0o700 + stamp, mtime=stamp)
    if kind == "link":
        return t.symlink(path, draw(_targets))
    if kind == "hard":
        return t.hardlink(path, draw(_paths | st.just(b".wh..wh.plnk/1")))
    if kind == "hide":
        return t.file(below + b".wh." + name)
    if kind == "opaque":
        return t.file(below + b".wh..wh..opq")
    if kind == "device":
        return t.header(path, b"3", mode=0o600 + stamp)
    return t.file(b".wh..wh.plnk/1", b"pool%d" % stamp)


layer_stacks = st.lists(st.lists(members(), max_size=8).map(b"".join), min_size=1, max_size=4)
"""Uncompressed layer tars, lowest first. Many of them are errors: a file as a parent, a link to nothing."""
