"""Images as EROFS layers: import, stack, push and pull them, mount each image once a host. Knows no sandboxes.

Public API (everything is synchronous; run it in a thread from asyncio code):

- `ImageStore(root)`: `import_image(source, name, progress=, refresh=, limits=, authfile=)`, `resolve(ref)`, `ls()`,
  `inspect(ref)`, `open_root(ref) -> ErofsReader`, `tag(ref, name)`, `rm(ref, force=)`, `gc(cache=)`, `verify(ref)`,
  `layers(image)`, `publish(...)`; `composing.compose(store, parts, name)` stacks layers into a new image.
- `MountTable(store, mount_dir)`: `acquire(digest, user) -> Path`, `release(digest, user)`, `users(digest)`,
  `retain_only(users)`, `retain(user, digests)`, `mounted()`, `unmount_unused()`, `close()`.
- `remote.Remote(store=, url=)`: `push`, `pull` (metadata; data comes when it is read), `fetch_whole`.
- `prefetch.Prefetcher(store)`: traces of first accesses, recorded and replayed.
- `Image`, `ImageConfig`, `Limits`, `Collected`: frozen records.
- `ImageError(code, message, hint, field)` and its `SyscallError`: the only exceptions raised on purpose.
"""

from dsec_imagefs.errors import ImageError, SyscallError
from dsec_imagefs.image import Image, ImageConfig
from dsec_imagefs.mounts import MountTable
from dsec_imagefs.sources.base import Limits
from dsec_imagefs.store import Collected, ImageStore

__all__ = [
    "Collected",
    "Image",
    "ImageConfig",
    "ImageError",
    "ImageStore",
    "Limits",
    "MountTable",
    "SyscallError",
]
