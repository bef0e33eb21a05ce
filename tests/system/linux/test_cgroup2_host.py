"""Case E10's other half: the same tests on a machine that has only cgroup2, and whose ext4 has project quotas.

Runs where DSEC_TEST_KERNEL names a kernel (see tests/kit/vm/machine.py); takes about a minute under emulation.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.abilities import needs
from tests.kit.vm.machine import call_parts, kernel, run_in_machine

OPTIONS = ("-q", "-p", "no:cacheprovider", "--color=no", "--tb=short", "--timeout=200", "--basetemp=/tmp/bt")


@needs("qemu-system-x86_64", "cc", "test-kernel")
@pytest.mark.timeout(500)
def test_cgroups_and_writable_layers_on_a_cgroup2_host(tmp_path: Path) -> None:
    image = kernel()
    assert image is not None
    files = ["tests/system/linux/test_cgroup.py", "tests/system/linux/test_upper.py"]
    said = run_in_machine(tmp_path, image, ["-m", "pytest", *OPTIONS, *files], timeout_s=450)
    assert "exit status 0" in said, said[-6000:]
    assert "ext4-prjquota" not in said, said[-6000:]


@needs("qemu-system-x86_64", "cc", "test-kernel")
@pytest.mark.timeout(500)
def test_limits_of_calls_on_a_cgroup2_host(tmp_path: Path) -> None:
    image = kernel()
    assert image is not None
    command = ["-m", "pytest", *OPTIONS, "tests/system/linux/test_call_limits.py"]
    said = run_in_machine(tmp_path, image, command, timeout_s=450, also=call_parts(tmp_path))
    assert "exit status 0" in said, said[-6000:]
    assert "skipped" not in said, said[-6000:]
