"""Requests of the kernel, read and answered: names, attributes, opens, the directory. READ itself is in reads.py."""

from __future__ import annotations

import errno
import fcntl
import os
from struct import Struct
from typing import TYPE_CHECKING

from dsec_imagefs.blobd import fuse_wire as wire
from dsec_imagefs.blobd.reads import send_answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsec_imagefs.blobd.fuse_wire import Negotiated
    from dsec_imagefs.blobd.metrics import Counters
    from dsec_imagefs.blobd.reads import Reads
    from dsec_imagefs.blobd.shared import SharedState
    from dsec_imagefs.blobd.table import Node, Table

FUSE_DEV_IOC_BACKING_OPEN = 0x4010E501  # Linux 6.9
FUSE_DEV_IOC_BACKING_CLOSE = 0x4004E502
_BACKING_MAP = Struct("=iIQ")  # fd, flags, padding
_VALID_S = 3600  # blobs never change
_NAME_VALID_S = 0  # but may be detached
_GONE = (errno.ENODEV, errno.EBADF, errno.ECONNABORTED, errno.EPERM)
_AGAIN = (errno.EINTR, errno.EAGAIN, errno.ENOENT)  # ENOENT: the request was interrupted before we took it


class Session:
    """Answers one connection's requests, in as many threads as call `run`."""

    def __init__(
        self, fd: int, negotiated: Negotiated, table: Table, reads: Reads, shared: SharedState, counters: Counters,
        *, passthrough: bool,
    ) -> None:  # fmt: skip
        self._fd = fd
        self._table = table
        self._reads = reads
        self._shared = shared
        self._counters = counters
        self._passthrough = passthrough and negotiated.passthrough
        self._handlers: dict[int, Callable[[int, int, memoryview], bytes | int]] = {
            wire.LOOKUP: self._lookup,
            wire.GETATTR: self._getattr,
            wire.OPEN: self._open,
            wire.RELEASE: self._release,
            wire.OPENDIR: self._opendir,
            wire.READDIR: self._readdir,
            wire.RELEASEDIR: self._nothing,
            wire.STATFS: self._statfs,
            wire.ACCESS: self._access,
            wire.DESTROY: self._nothing,
            wire.INTERRUPT: self._interrupt,
        }

    def run(self) -> None:
        """Take and answer requests until the connection ends."""
        request = bytearray(wire.REQUEST_BYTES)
        answer = bytearray(wire.ANSWER_BYTES + wire.MAX_READ_BYTES)
        view = memoryview(answer)
        body = memoryview(request)
        fd, nodes, counters, serve = self._fd, self._table.nodes, self._counters, self._reads.serve
        into = [request]
        while True:
            try:
                length = os.readv(fd, into)
            except OSError as err:
                if err.errno in _AGAIN:
                    continue
                if err.errno in _GONE:
                    return
                raise
            _, opcode, unique, nodeid, *_ = wire.IN_HEADER.unpack_from(request)
            counters.requests += 1
            if opcode == wire.READ:
                node = nodes.get(nodeid)
                if node is not None:
                    _, offset, size = wire.READ_IN.unpack_from(request, wire.IN_HEADER.size)
                    serve(node, unique, offset, size, answer, view)
                    continue
                send_answer(fd, [wire.answer_error(unique, errno.EIO)])
            elif opcode not in wire.SILENT:
                self._answer(opcode, unique, nodeid, body[wire.IN_HEADER.size : length])

    def _answer(self, opcode: int, unique: int, nodeid: int, body: memoryview) -> None:
        handler = self._handlers.get(opcode)
        if handler is None:
            send_answer(self._fd, [wire.answer_error(unique, wire.refusal(opcode))])
            return
        try:
            result = handler(unique, nodeid, body)
        except OSError as err:
            result = err.errno or errno.EIO
        if isinstance(result, bytes):
            send_answer(self._fd, [wire.answer(unique, result)])
        elif result >= 0:
            send_answer(self._fd, [wire.answer_error(unique, result)])

    def _node(self, nodeid: int) -> Node:
        node = self._table.nodes.get(nodeid)
        if node is None:
            raise OSError(errno.ESTALE, "detached")
        return node

    def _lookup(self, unique: int, nodeid: int, body: memoryview) -> bytes | int:
        del unique
        if nodeid != wire.ROOT_ID:
            return errno.ENOTDIR
        node = self._table.names.get(bytes(body).rstrip(b"\0"))
        if node is None:
            return errno.ENOENT
        return wire.entry_out(node.nodeid, node.size, name_valid_s=_NAME_VALID_S, attr_valid_s=_VALID_S)

    def _getattr(self, unique: int, nodeid: int, body: memoryview) -> bytes | int:
        del unique, body
        size = 0 if nodeid == wire.ROOT_ID else self._node(nodeid).size
        return wire.attr_out(nodeid, size, valid_s=_NAME_VALID_S if nodeid == wire.ROOT_ID else _VALID_S)

    def _open(self, unique: int, nodeid: int, body: memoryview) -> bytes | int:
        flags, _ = wire.OPEN_IN.unpack_from(body)
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            return errno.EROFS
        with self._table.change:  # detaching asks who has it open
            node = self._node(nodeid)
            if node.attached.blob is None:
                return errno.EIO
            handle = unique & ~wire.UNIQUE_RESEND
            backing = self._backing(node)
            if not self._shared.opens.put(handle, nodeid << 1 | bool(backing)):
                return errno.ENFILE
        if backing:
            self._counters.passthrough_opens += 1
            return wire.open_out(handle, wire.FOPEN_PASSTHROUGH, backing)
        return wire.open_out(handle, wire.FOPEN_KEEP_CACHE if node.mapped else wire.FOPEN_DIRECT_IO)

    def _backing(self, node: Node) -> int:
        """The backing id by which the kernel reads a complete blob itself; 0 when it shall ask us.

        An inode has one id as long as it is open, and is open in one way only: so the first open decides, except that
        direct opens (`.d`) may be joined by such ones.
        """
        opens = [value & 1 for value in self._shared.opens.values.values() if value >> 1 == node.nodeid]
        known = self._shared.backings.values.get(node.nodeid, 0)
        if any(opens):
            return known
        blob, recorder = node.attached.blob, node.attached.recorder
        if not self._passthrough or blob is None or not blob.complete or node.size != blob.index.blob_size:
            return 0
        if (opens and node.mapped) or (recorder is not None and not recorder.is_over):
            return 0
        if known:
            return known
        try:
            # a bytearray, or Python would not tell what the ioctl returns: the id
            made = fcntl.ioctl(self._fd, FUSE_DEV_IOC_BACKING_OPEN, bytearray(_BACKING_MAP.pack(blob.fd, 0, 0)))
        except OSError:
            # the cache lies on a stacked file system, or we lack CAP_SYS_ADMIN: requests do as well
            self._passthrough = False
            return 0
        return int(made) if self._shared.backings.put(node.nodeid, int(made)) else 0

    def _release(self, unique: int, nodeid: int, body: memoryview) -> bytes | int:
        del unique, nodeid
        handle, *_ = wire.RELEASE_IN.unpack_from(body)
        with self._table.change:
            self._shared.opens.remove(handle)
        return b""

    def is_open(self, node: Node) -> bool:
        """Whether the kernel has the file open. Called with `table.change`."""
        return any(value >> 1 == node.nodeid for value in self._shared.opens.values.values())

    def close_backing(self, node: Node) -> None:
        """Give the backing id of a file back that is not open. Called with `table.change`."""
        known = self._shared.backings.remove(node.nodeid)
        if known:
            fcntl.ioctl(self._fd, FUSE_DEV_IOC_BACKING_CLOSE, known.to_bytes(4, "little"))

    def _opendir(self, unique: int, nodeid: int, body: memoryview) -> bytes | int:
        del unique, body
        return wire.open_out(0, 0) if nodeid == wire.ROOT_ID else errno.ENOTDIR

    def _readdir(self, unique: int, nodeid: int, body: memoryview) -> bytes | int:
        del unique
        if nodeid != wire.ROOT_ID:
            return errno.ENOTDIR
        _, offset, size = wire.READ_IN.unpack_from(body)
        names = [(wire.ROOT_ID, b".", True), (wire.ROOT_ID, b"..", True)]
        names += [(node.nodeid, name, False) for name, node in sorted(self._table.names.items())]
        return wire.dirents(names, offset, min(size, wire.MAX_READ_BYTES))

    def _statfs(self, unique: int, nodeid: int, body: memoryview) -> bytes | int:
        del unique, nodeid, body
        return wire.statfs_out(len(self._table.names))

    def _access(self, unique: int, nodeid: int, body: memoryview) -> bytes | int:
        del unique, nodeid
        return errno.EROFS if int.from_bytes(body[:4], "little") & os.W_OK else b""

    def _interrupt(self, unique: int, nodeid: int, body: memoryview) -> bytes | int:
        del unique, nodeid
        (of,) = wire.INTERRUPT_IN.unpack_from(body)
        self._reads.interrupt(of)
        return -1  # needs no answer

    def _nothing(self, unique: int, nodeid: int, body: memoryview) -> bytes | int:
        del unique, nodeid, body
        return b""
