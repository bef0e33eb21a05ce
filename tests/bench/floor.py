"""What starting a program costs on this machine without us: bare posix_spawn and wait, in CPU time.

A program of glibc asks the processor what it can do, some 75 CPUID instructions (sysdeps/x86/cpu-features.c and
dl-cacheinfo.h). In a virtual machine each one traps into the hypervisor, so that they may be most of what `true` costs.
"""

from __future__ import annotations

import os
import resource
import subprocess
from typing import TYPE_CHECKING

from nomad_dsec.guest.build import compiler

if TYPE_CHECKING:
    from pathlib import Path

# a program that ends at once, without a C library: what the kernel alone takes for a process
_NOTHING = """
void _start(void)
{
#if defined(__x86_64__)
	__asm__ volatile("syscall" : : "a"(231), "D"(0));
#elif defined(__aarch64__)
	register long code __asm__("x0") = 0, number __asm__("x8") = 94;
	__asm__ volatile("svc 0" : : "r"(code), "r"(number));
#else
#error "exit_group(2) of this processor is missing here"
#endif
	for (;;)
		;
}
"""
_BUILD_TIMEOUT_S = 60.0


def build_nothing(directory: Path) -> Path:
    """A static program that ends with 0 at its first instruction. CalledProcessError when it can't be built."""
    source, output = directory / "nothing.c", directory / "nothing"
    source.write_text(_NOTHING)
    argv = [compiler(), "-O2", "-static", "-nostdlib", "-fno-stack-protector", "-o", str(output), str(source)]
    subprocess.run(argv, check=True, timeout=_BUILD_TIMEOUT_S)
    return output


def start_cpu_ms(program: str, count: int) -> float:
    """CPU milliseconds of one start and end of `program`, ours and its own together."""
    before = _cpu_s()
    for _ in range(count):
        pid = os.posix_spawn(program, [program], {})  # vfork inside: nothing of this process is copied
        _, status = os.waitpid(pid, 0)
        assert status == 0
    return round((_cpu_s() - before) * 1000 / count, 3)


def _cpu_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
