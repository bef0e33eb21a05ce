"""How a layer's own facts are written into its metadata: extended attributes of a private name space.

Layer metadata is a file system of its own, of the layer's entries at their places, with these marks:

- ``trusted.dsec.whiteout`` on a character device 0:0: lower layers' entry of this name is hidden.
- ``trusted.dsec.replaces`` on any entry: the same, and this entry stands in its place.
- ``trusted.dsec.opaque`` on a directory: what lower layers have in it is hidden.
- ``trusted.dsec.implicit`` on a directory: no entry describes it, it is a parent only. A lower directory keeps its
  attributes, a lower link of this name is followed.
- ``trusted.dsec.link`` on an empty file: a hard link; the value is its target's path, looked up when layers merge.
- ``trusted.dsec.path`` on what lies in `ASIDE`: an entry or mark that has no place of its own (an archive names it
  twice, or puts it below a link or a file of the same layer); the value is its path.

Values of the first three are the mark's position among the layer's marks, in ASCII. ``i_ino`` is the entry's position
among the entries, from 1. So the order of the archive is kept: applying a layer from its metadata and from its archive
is the same. None of these attributes is in a merged image, and none is taken over from a source.
"""

from __future__ import annotations

PREFIX = b"trusted.dsec."
WHITEOUT = b"trusted.dsec.whiteout"
REPLACES = b"trusted.dsec.replaces"
OPAQUE = b"trusted.dsec.opaque"
IMPLICIT = b"trusted.dsec.implicit"
LINK = b"trusted.dsec.link"
PATH = b"trusted.dsec.path"

ASIDE = b".wh..dsec"
"""A directory in the root of layer metadata; to OCI every name like it is a mark, so no archive has an entry there."""
