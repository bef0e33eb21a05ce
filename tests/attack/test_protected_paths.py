"""Overwriting /bin/bash, the paper's case, in every way that leaves another program at that path.

Layer: a read-only bind mount of the file (EROFS, EBUSY) and pinned names on the way to it (EPERM): without the second,
/bin, a link, is replaced by a directory. As the sandbox's root, who holds CAP_DAC_OVERRIDE and CAP_FOWNER.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from libdsec.errors import NotFoundError, UsageError

from tests.attack.marks import IN_SANDBOX

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.kit.sandbox import Box, Machine

pytestmark = IN_SANDBOX
PROTECTED = ["/bin/bash", "/opt/tool/run"]
EVIL = "#!/usr/bin/attack ids\n"

#: Each is run by an ordinary sh whose builtins suffice once bash is gone: (name, commands).
ATTEMPTS = {
    "write in place": "printf evil > /usr/bin/bash",
    "append": "printf evil >> /bin/bash",
    "write through /proc/self/root": "printf evil > /proc/self/root/usr/bin/bash",
    "truncate by dd": "dd if=/evil of=/usr/bin/bash conv=notrunc",
    "unlink": "rm -f /usr/bin/bash && cp /evil /usr/bin/bash",
    "rename over": "cp /evil /usr/bin/bash.new; mv -f /usr/bin/bash.new /usr/bin/bash",
    "move away": "mv /usr/bin/bash /usr/bin/bash.old && cp /evil /usr/bin/bash",
    "replace the link /bin": "rm /bin && mkdir /bin && cp /evil /bin/bash",
    "rename the link /bin": "mv /bin /bin.old; mkdir -p /fake; cp /evil /fake/bash; ln -s /fake /bin",
    "replace the link by a rename": "mkdir -p /fake; cp /evil /fake/bash; ln -s /fake /next; mv -T /next /bin",
    "rename the directory": "mv /usr/bin /usr/bin.old; mkdir /usr/bin; cp /evil /usr/bin/bash",
    "rename the directory above": "mv /usr /usr.old; mkdir -p /usr/bin; cp /evil /usr/bin/bash",
    "hard link, then write": "ln /usr/bin/bash /work/link && printf evil > /work/link",
    "link over": "ln -f /evil /usr/bin/bash",
    "chmod": "chmod 0777 /usr/bin/bash && printf evil > /usr/bin/bash",
    "chmod the directory, then unlink": "chmod 0777 /usr/bin /usr / ; rm -f /usr/bin/bash && cp /evil /usr/bin/bash",
    "chown the directory, then rename": (
        "attack sys 92 @/usr/bin 0 0; attack sys 92 @/usr 0 0; "
        "mv /usr/bin /usr/b2; mkdir /usr/bin; cp /evil /usr/bin/bash"
    ),
}
#: The same for a program that is reached by a link to a link: /opt/tool/run -> /usr/bin/bash.
LINKED = {
    "replace the last link": "rm -f /opt/tool/run && cp /evil /opt/tool/run",
    "rename over the last link": "cp /evil /opt/tool/new; mv -f /opt/tool/new /opt/tool/run",
    "rename its directory": "mv /opt/tool /opt/old; mkdir /opt/tool; cp /evil /opt/tool/run",
}
#: Tools are still found when their directory was moved away.
SCRIPT = f"PATH=$PATH:/usr/bin.old:/usr/b2; printf '{EVIL}' > /evil; attack sys 90 @/evil 493; cd /work; "


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guarded(machine: Machine, image: str) -> AsyncIterator[Box]:
    """A sandbox in which the paths are protected."""
    async with machine.sandbox(image, {"protected_paths": PROTECTED}) as running:
        yield running


async def contents(box: Box, path: str) -> str:
    """What a program started by this path would be: hashed outside, read by dsec-init, not by tools of the image."""
    hashed = hashlib.sha256()
    try:
        async for chunk in box.channel.read_file(path):
            hashed.update(chunk)
    except NotFoundError:
        return "gone"
    return hashed.hexdigest()


@pytest.mark.parametrize("user", ["", "1000"])
@pytest.mark.parametrize("name", ATTEMPTS)
async def test_a_protected_path_keeps_its_program(guarded: Box, name: str, user: str) -> None:
    before = await contents(guarded, "/bin/bash")
    await guarded.run("/bin/sh", "-c", SCRIPT + ATTEMPTS[name], user=user)
    assert await contents(guarded, "/bin/bash") == before
    assert await contents(guarded, "/usr/bin/bash") == before


@pytest.mark.parametrize("name", LINKED)
async def test_a_protected_link_keeps_leading_there(guarded: Box, name: str) -> None:
    before = await contents(guarded, "/opt/tool/run")
    await guarded.run("/bin/sh", "-c", SCRIPT + LINKED[name])
    assert await contents(guarded, "/opt/tool/run") == before


@pytest.mark.parametrize("name", {**ATTEMPTS, **LINKED})
async def test_twin_without_protection_the_program_changes(machine: Machine, image: str, name: str) -> None:
    path = "/opt/tool/run" if name in LINKED else "/bin/bash"
    async with machine.sandbox(image) as box:
        before = await contents(box, path)
        await box.run("/bin/sh", "-c", SCRIPT + {**ATTEMPTS, **LINKED}[name])
        assert await contents(box, path) != before


async def test_the_layers_answer_with_their_own_errors(guarded: Box) -> None:
    """EROFS 30 and EBUSY 16 from the mount, EPERM 1 from the pinned names."""
    got = await guarded.attack(
        "many", "open", "w", "/usr/bin/bash", "--", "sys", 87, "@/usr/bin/bash", "--", "sys", 87, "@/bin", "--",
        "sys", 82, "@/usr/bin", "@/usr/b2", "--", "sys", 82, "@/usr", "@/usr2",
    )  # fmt: skip
    assert got == {"0./usr/bin/bash": 30, "1.errno": 16, "2.errno": 1, "3.errno": 1, "4.errno": 1}


async def test_the_rest_of_the_tree_stays_writable(guarded: Box) -> None:
    """Installing software beside a protected program works: that is why the root is not simply read-only."""
    script = (
        "cp /usr/bin/cat /usr/bin/newtool && mv /usr/bin/newtool /usr/bin/tool2 && rm /usr/bin/tool2 && "
        "mkdir /usr/newdir /newdir && printf x > /etc/new && rm -r /usr/newdir /newdir && echo done"
    )
    assert await guarded.shell(script) == "done"


async def test_a_path_that_is_not_there_refuses_the_create(machine: Machine, image: str) -> None:
    with pytest.raises(UsageError) as caught:
        async with machine.sandbox(image, {"protected_paths": ["/bin/zsh"]}):
            pass
    assert caught.value.field == "policy.protected_paths"
