"""Hostile submissions: each is judged right, says by its own errno which layer stopped it, and leaves nothing behind.

The positive twins are in the same programs: what is refused beyond a limit works below it.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from libdsec.wire_fncall import Checker, FnTest

from tests.attack.fncall.lanes import assert_clean, settled
from tests.kit.abilities import needs

if TYPE_CHECKING:
    from tests.kit.calls import CallHost

pytestmark = [
    needs("root", "erofs", "cgroup", "filters", "debootstrap", "debian-packages"),
    pytest.mark.leaks_ok,
    pytest.mark.timeout(300),
]


async def test_killing_what_is_near(calls: CallHost) -> None:
    """Layer: the pid namespace (nothing else can be named) and ids (EPERM for its PID 1)."""
    code = (
        "import os\n"
        "def attempt(name, pid, sig=9):\n"
        "    try: os.kill(pid, sig); print(name, 0)\n"
        "    except OSError as e: print(name, e.errno)\n"
        "print('ppid', os.getppid())\n"
        "attempt('init', 1)\n"
        "attempt('all', -1)\n"
        "attempt('next', os.getpid() + 1)\n"
        "print('pids', sorted(int(n) for n in os.listdir('/proc') if n.isdigit()) == [1, os.getpid()])\n"
    )
    for clean in (False, True):
        result = await calls.python(code, clean=clean)
        got = dict(line.split() for line in result.stdout.decode().splitlines())
        assert got == {
            "ppid": "0", "init": str(errno.EPERM), "all": str(errno.ESRCH), "next": str(errno.ESRCH), "pids": "True",
        }, result  # fmt: skip
    group = await calls.python("import os; os.kill(0, 9)")
    assert (group.verdict, group.signal) == ("runtime_error", 9)
    await assert_clean(calls)


async def test_the_zygotes_memory(calls: CallHost) -> None:
    """Layers: the pid namespace hides it, seccomp refuses ptrace and process_vm_writev, its descriptors are closed."""
    code = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def errno(result): return ctypes.get_errno() if result == -1 else 0\n"
        "print('fds', sorted(map(int, os.listdir('/proc/self/fd')))[:3], len(os.listdir('/proc/self/fd')))\n"
        "for pid in range(1, 40):\n"
        "    for name in ('mem', 'maps', 'environ', 'root', 'cwd', 'fd'):\n"
        "        if pid == os.getpid(): continue\n"
        "        path = f'/proc/{pid}/{name}'\n"
        "        try: os.listdir(path) if name in ('root', 'cwd', 'fd') else open(path, 'rb+')\n"
        "        except OSError: continue\n"
        "        print('opened', pid, name)\n"
        "print('ptrace', errno(libc.ptrace(16, 1, 0, 0)))\n"
        "print('vm', errno(libc.syscall(311, 1, 0, 0, 0, 0, 0)))\n"
        "print('socket', errno(libc.send(3, b'x', 1, 0)))\n"
    )
    result = await calls.python(code)
    lines = result.stdout.decode().splitlines()
    assert lines == [
        "fds [0, 1, 2] 4", f"ptrace {errno.EPERM}", f"vm {errno.EPERM}", f"socket {errno.EBADF}",
    ], result  # fmt: skip
    await assert_clean(calls)


async def test_rights_that_no_call_has(calls: CallHost) -> None:
    """Layers: capabilities (mount, setns), sysctl max_user_namespaces (ENOSPC), no_new_privs, network namespace."""
    code = (
        "import ctypes, os, socket\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def errno(result): return ctypes.get_errno() if result == -1 else 0\n"
        "print('mount', errno(libc.mount(b'x', b'/tmp', b'tmpfs', 0, None)))\n"
        "print('umount', errno(libc.umount2(b'/tmp', 2)))\n"
        "print('remount', errno(libc.mount(None, b'/', None, 32 | 4096, None)))\n"
        "print('unshare', errno(libc.unshare(0x10000000)))\n"
        "args = (ctypes.c_uint64 * 8)(0x10000000, 0, 0, 0, 17)\n"
        "print('userns', errno(libc.syscall(435, args, 64)))\n"
        "print('setns', errno(libc.setns(os.open('/proc/self/ns/pid', 0), 0)))\n"
        "print('setuid', errno(libc.setuid(0)))\n"
        "print('chroot', errno(libc.chroot(b'/tmp')))\n"
        "print('caps', [l.split()[1] for l in open('/proc/self/status') if l.startswith('Cap')] == ['0' * 16] * 5)\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "for name, where in (('loopback', '127.0.0.1'), ('outside', '1.1.1.1')):\n"
        "    print(name, s.connect_ex((where, 53)))\n"
        "print('links', open('/proc/self/net/dev').read().count(':') if os.path.exists('/proc/self/net/dev') else 1)\n"
    )
    for clean in (False, True):
        result = await calls.python(code, clean=clean)
        got = dict(line.split() for line in result.stdout.decode().splitlines())
        assert got == {
            "mount": str(errno.EPERM), "umount": str(errno.EPERM), "remount": str(errno.EPERM),
            "unshare": str(errno.EPERM), "userns": str(errno.ENOSPC), "setns": str(errno.EPERM),
            "setuid": str(errno.EPERM), "chroot": str(errno.EPERM), "caps": "True",
            "loopback": str(errno.ENETUNREACH), "outside": str(errno.ENETUNREACH), "links": "1",
        }, result  # fmt: skip
    await assert_clean(calls)


PLANT = """
import ctypes, mmap, os, socket, subprocess, time
libc = ctypes.CDLL(None, use_errno=True)
for where in ('/tmp', '/tmp/work', '/dev/shm'):
    open(where + '/planted', 'w').write('secret')
print('shm', libc.shmget(0x4242, 4096, 0o1666) != -1)
print('msg', libc.msgget(0x4242, 0o1666) != -1)
print('sem', libc.semget(0x4242, 1, 0o1666) != -1)
print('mq', libc.syscall(240, b'planted', 0o102, 0o666, None) != -1)
os.environ['PLANTED'] = '1'
s = socket.socket(socket.AF_UNIX); s.bind('\\0planted'); s.listen()
u = socket.socket(socket.AF_INET); u.bind(('0.0.0.0', 4242)); u.listen()
import json; json.planted = 1
if os.fork() == 0: os.setsid(); time.sleep(1000)
"""
LOOK = """
import ctypes, json, os, socket
libc = ctypes.CDLL(None, use_errno=True)
found = [w for w in ('/tmp', '/tmp/work', '/dev/shm') if os.path.exists(w + '/planted')]
if libc.shmget(0x4242, 4096, 0) != -1: found.append('shm')
if libc.msgget(0x4242, 0) != -1: found.append('msg')
if libc.semget(0x4242, 1, 0) != -1: found.append('sem')
if libc.syscall(240, b'planted', 0, 0, None) != -1: found.append('mq')
if 'PLANTED' in os.environ: found.append('env')
if hasattr(json, 'planted'): found.append('module')
s = socket.socket(socket.AF_UNIX)
if s.connect_ex('\\0planted') == 0: found.append('abstract')
u = socket.socket(socket.AF_INET)
try: u.bind(('0.0.0.0', 4242))
except OSError: found.append('port')
if len([n for n in os.listdir('/proc') if n.isdigit()]) != 2: found.append('process')
print(found)
"""


async def test_nothing_of_a_call_is_there_for_the_next(calls: CallHost) -> None:
    """Same lane, next call: files, shared memory, IPC, sockets, ports, environment, modules, processes are gone."""
    await calls.python("print(1)")
    before = {lane.name: lane.calls for _, lane in await settled(calls)}
    planted = await calls.python(PLANT)
    assert planted.stdout.split() == [b"shm", b"True", b"msg", b"True", b"sem", b"True", b"mq", b"True"], planted
    seen = await calls.python(LOOK)
    assert seen.stdout == b"[]\n", seen
    used = [lane.name for _, lane in await settled(calls) if lane.calls - before.get(lane.name, 0) == 2]
    assert len(used) == 1, "the two ran in different lanes"
    # The twin: inside one call the same look finds it all.
    both = await calls.python(PLANT + LOOK)
    assert both.stdout.splitlines()[-1] == (
        b"['/tmp', '/tmp/work', '/dev/shm', 'shm', 'msg', 'sem', 'mq', 'env', 'module', 'abstract', 'port', 'process']"
    ), both
    await assert_clean(calls)


async def test_the_expected_output_is_not_to_be_found(calls: CallHost) -> None:
    """It never enters the submission's lane: no file, variable or memory has it."""
    secret = os.urandom(8).hex()
    code = (
        "import os\n"
        f"needle = bytes.fromhex('{secret}').hex().encode()\n"
        "hits = []\n"
        "for top in ('/tmp', '/dev/shm', '/run', '/var/tmp', '/proc/self'):\n"
        "    for d, _, names in os.walk(top):\n"
        "        for n in names:\n"
        "            p = os.path.join(d, n)\n"
        "            if n.endswith(('.py', 'mem', 'cmdline', 'pagemap', 'kmsg')): continue\n"
        "            try:\n"
        "                fd = os.open(p, os.O_NONBLOCK); data = os.read(fd, 1 << 16); os.close(fd)\n"
        "            except OSError: continue\n"
        "            if needle in data: hits.append(p)\n"
        "print(hits)\n"
    )
    checks = f"import sys; sys.exit(open(sys.argv[3]).read() != {secret!r})"
    checker = Checker(kind="program", language="python", code=checks)
    for how in (Checker(), checker):
        test = FnTest(expected=secret.encode())
        judged = await calls.submit([test], language="python", code=code, checker=how)
        assert judged.tests[0].stdout == b"[]\n", judged


async def test_a_submission_can_not_reach_its_checker(calls: CallHost) -> None:
    """Checkers have lanes of their own, in which no submission ever ran; what a submission plants is not there."""
    plant = PLANT + "\nfor n in ('input', 'expected', 'sitecustomize.py', 'json.py'):\n    open(n, 'w').write('evil')\n"
    look = LOOK.replace("print(found)", "print(found, sorted(os.listdir('.')))") + "import sys; sys.exit(1)"
    checker = Checker(kind="program", language="python", code=look)
    judged = await calls.submit([FnTest(expected=b"x")], language="python", code=plant, checker=checker)
    assert judged.tests[0].message == "[] ['expected', 'input', 'main.py', 'output']", judged
    kinds = {kind.purpose for kind, _ in await settled(calls)}
    assert kinds == {"", "checker"}


async def test_a_compiler_is_confined_like_a_program(calls: CallHost) -> None:
    """What a source includes at compile time is the call's own world; a compile bomb is a compile error in time."""
    include = await calls.run(language="c", code='#include "/proc/1/environ"\nint main(void) { return 0; }')
    assert include.verdict == "compile_error"
    bomb = "int main(void) { return 0; }\n#define A(x) x x x x x x x x\n" + "A(" * 12 + "int a;" + ")" * 12
    result = await calls.run(
        language="c", code=bomb, compile_limits={"cpu_s": 2.0, "wall_s": 4.0, "memory_mib": 256, "disk_mib": 32}
    )
    assert result.verdict == "compile_error", result
    await assert_clean(calls)


async def test_many_calls_leave_the_host_as_it_was(calls: CallHost) -> None:
    """Descriptors, cgroups, mounts and lanes are flat."""
    await calls.python("print(1)")
    await settled(calls)

    def census() -> tuple[int, int, int]:
        lanes = calls.lanes.pool.lanes
        data = str(calls.backend.host.config.data.parent)
        mounts = sum(data in line for line in Path("/proc/self/mounts").read_text().splitlines())
        return len(os.listdir("/proc/self/fd")), lanes, mounts

    before = census()
    for _ in range(20):
        results = await asyncio.gather(*(calls.python("print(1)") for _ in range(10)))
        assert {result.verdict for result in results} == {"accepted"}
    await settled(calls)
    after = census()
    assert after[1:] == before[1:]
    assert after[0] - before[0] <= 2
    await assert_clean(calls)


async def test_words_of_a_call_are_in_no_later_calls_memory(calls: CallHost) -> None:
    """The zygote, of whose memory each call has a copy, never reads a call's environment, arguments or code."""
    secret = os.urandom(12).hex()
    told = await calls.python(f"x = 'code-{secret}'", env={"TOKEN": f"env-{secret}"}, args=[f"arg-{secret}"])
    assert told.verdict == "accepted"
    look = (
        "import hashlib, re\n"
        "hits = set()\n"
        "mem = open('/proc/self/mem', 'rb', buffering=0)\n"
        "for line in open('/proc/self/maps'):\n"
        "    span, perms = line.split()[:2]\n"
        "    if 'r' not in perms or '[v' in line: continue\n"
        "    a, b = (int(x, 16) for x in span.split('-'))\n"
        "    try: mem.seek(a); data = mem.read(b - a)\n"
        "    except OSError: continue\n"
        "    for found in re.finditer(rb'(code|env|arg)-([0-9a-f]{24})', data):\n"
        f"        if hashlib.sha256(found[2]).hexdigest() == '{hashlib.sha256(secret.encode()).hexdigest()}':\n"
        "            hits.add(found[1].decode())\n"
        "print(sorted(hits))\n"
    )
    seen = await calls.python(look)
    assert seen.stdout == b"[]\n", seen
    own = await calls.python(look, env={"TOKEN": f"env-{secret}"}, args=[f"arg-{secret}"])
    assert own.stdout == b"['arg', 'env']\n", "the twin: in its own call it is found"
