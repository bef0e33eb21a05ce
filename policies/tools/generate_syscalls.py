"""Writes the committed syscall tables of dsec_policies from this system's kernel headers.

Run by hand when the headers grow: ``python policies/tools/generate_syscalls.py`` (needs a C preprocessor).
Numbers that the installed headers do not know yet are listed here; from 424 on they are the same on
every architecture, which is what makes that list safe.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

OUTPUT = Path(__file__).resolve().parent.parent / "dsec_policies"

#: Linux 6.5 .. 6.17, include/uapi/asm-generic/unistd.h.
NEWER = {
    "cachestat": 451,
    "fchmodat2": 452,
    "map_shadow_stack": 453,
    "futex_wake": 454,
    "futex_wait": 455,
    "futex_requeue": 456,
    "statmount": 457,
    "listmount": 458,
    "lsm_get_self_attr": 459,
    "lsm_set_self_attr": 460,
    "lsm_list_modules": 461,
    "mseal": 462,
    "setxattrat": 463,
    "getxattrat": 464,
    "listxattrat": 465,
    "removexattrat": 466,
    "open_tree_attr": 467,
    "file_getattr": 468,
    "file_setattr": 469,
}

#: What arch/arm64/include/uapi/asm/unistd.h defines before it includes the generic table.
ARM64_PREAMBLE = (
    "__BITS_PER_LONG 64",
    "__ARCH_WANT_RENAMEAT",
    "__ARCH_WANT_NEW_STAT",
    "__ARCH_WANT_SET_GET_RLIMIT",
    "__ARCH_WANT_TIME32_SYSCALLS",
    "__ARCH_WANT_SYS_CLONE3",
    "__ARCH_WANT_MEMFD_SECRET",
)


def macros_of(source: str) -> dict[str, str]:
    """Returns every object-like macro that the preprocessor knows after reading ``source``."""
    run = subprocess.run(
        ["cc", "-E", "-dM", "-x", "c", "-"], input=source, capture_output=True, text=True, check=True, timeout=60
    )
    pairs = re.findall(r"^#define (\w+) (\S+)$", run.stdout, flags=re.MULTILINE)
    return dict(pairs)


def numbers_of(macros: dict[str, str]) -> dict[str, int]:
    """Resolves each __NR_ macro through its aliases to a number; the ones that are no calls are left out."""
    found: dict[str, int] = {}
    for name, value in macros.items():
        if not name.startswith("__NR_") or name in {"__NR_syscalls", "__NR_arch_specific_syscall"}:
            continue
        seen = value
        while seen in macros:
            seen = macros[seen]
        if seen.isdigit():
            found[name.removeprefix("__NR_")] = int(seen)
    for name, number in NEWER.items():
        if found.setdefault(name, number) != number:
            raise SystemExit(f"{name}: the headers say {found[name]}, the list here says {number}")
    return dict(sorted(found.items(), key=lambda item: (item[1], item[0])))


def render(arch: str, origin: str, table: dict[str, int]) -> str:
    """Renders one table as a module that ruff leaves alone."""
    rows = "".join(f'    "{name}": {number},\n' for name, number in table.items())
    return (
        f'"""Syscall numbers of {arch}, by name. Generated from {origin} by policies/tools/generate_syscalls.py."""\n\n'
        f"from types import MappingProxyType\n\nNUMBERS = MappingProxyType({{\n{rows}}})\n"
    )


def main() -> int:
    """Writes both tables; returns the exit status."""
    arm64 = "".join(f"#define {line}\n" for line in ARM64_PREAMBLE) + "#include <asm-generic/unistd.h>\n"
    sources = {
        "x86_64": ("asm/unistd_64.h", "#include <asm/unistd_64.h>\n"),
        "aarch64": ("asm-generic/unistd.h", arm64),
    }
    for arch, (origin, source) in sources.items():
        path = OUTPUT / f"syscalls_{arch}.py"
        path.write_text(render(arch, origin, numbers_of(macros_of(source))))
        subprocess.run(["ruff", "format", "-q", str(path)], check=False, timeout=60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
