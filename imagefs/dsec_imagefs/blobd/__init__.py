"""The blob server: every attached blob is one file of a FUSE mount, fetched by verified blocks when it is read.

One server a store root. `<root>/blobs.mnt/<hex>.d` is read directly (for EROFS ``device=``), `<hex>.m` is cached and
mappable (for VMs; its size is padded to 2 MiB). A supervisor holds the descriptors of /dev/fuse and of the control
socket; a worker does the work. Either may be killed: readers wait and get right bytes. Both killed: EIO, never zeros.

Public API (synchronous):

- `ensure_server(root, ...) -> BlobClient`: find the running server of a store root, or start one that outlives us.
- `BlobClient(root)`: `attach`, `detach`, `hold`, `drop`, `prefetch`, `evict`, `verify`, `record`, `trace`, `stats`,
  `status`, `stop`.
- `BlobSpec`: what a blob is and where its bytes come from. `Settings`: bounds and deadlines.
"""

from dsec_imagefs.blobd.client import BlobClient, BlobdError, ensure_server
from dsec_imagefs.blobd.settings import Settings
from dsec_imagefs.blobd.spec import BlobSpec

__all__ = ["BlobClient", "BlobSpec", "BlobdError", "Settings", "ensure_server"]
