"""Run in a child: installs the filter read from stdin (or none), makes the calls of argv[1] (JSON), prints errnos.

argv[1] is a list of [name, number, [args]]; an argument that is a text becomes a pointer to it. The answer is one JSON
object a line, so that a call that kills the process leaves what came before.
"""

import ctypes
import json
import mmap
import struct
import sys

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def install(program: bytes) -> None:
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("<H6xQ", len(program) // 8, ctypes.addressof(code)), 16)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.syscall(317, 1, 0, header) == 0, ctypes.get_errno()


def through_int_0x80() -> int:
    """getpid of the i386 table: mov eax, 20; int 0x80; ret."""
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return int(ctypes.CFUNCTYPE(ctypes.c_int)(address)())


def attempt(number: int, args: list[int | str]) -> int:
    """The errno of one call, 0 for success."""
    if number == -80:
        return 0 if through_int_0x80() > 0 else 1
    words = [ctypes.c_char_p(a.encode()) if isinstance(a, str) else ctypes.c_ulong(a % (1 << 64)) for a in args]
    ctypes.set_errno(0)
    return ctypes.get_errno() if libc.syscall(ctypes.c_long(number), *words) < 0 else 0


def main() -> None:
    program = sys.stdin.buffer.read()
    if program:
        install(program)
    for name, number, args in json.loads(sys.argv[1]):
        sys.stdout.write(json.dumps({"name": name, "errno": attempt(number, args)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
