"""What a sandbox lets through: attempts that must not work, tried under each profile, and limits that are results."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from libdsec.errors import DsecError
from libdsec.sandbox import AsyncSandbox

if TYPE_CHECKING:
    from collections.abc import Callable

    from libdsec.client import AsyncClient

PROFILES = ("default", "debug")
_ATTEMPTS = Path(__file__).parent / "task" / "attempts.py"
_ENDS = (
    ("exit 7", "exit 7", None),
    ("kill -9 of itself", "kill -9 $$", None),
    ("sleep past its timeout, with a child that ignores SIGTERM", "sh -c 'trap \"\" TERM; sleep 60' & sleep 60", 1.0),
    ("allocate 2 GiB of 256 MiB", "python3 -c \"x = b'x' * (2 << 30)\"", None),
    ("write 64 MiB of output", "head -c 67108864 /dev/zero", None),
)


@dataclass(slots=True, kw_only=True)
class Isolation:
    """outcomes: attempt -> profile -> errno name or "allowed". ends: what a command did -> how the result tells it."""

    outcomes: dict[str, dict[str, str]] = field(default_factory=dict)
    ends: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def denied(self, profile: str) -> int:
        """How many attempts a profile stopped."""
        return sum(1 for found in self.outcomes.values() if found.get(profile, "allowed") != "allowed")


async def probe(client: AsyncClient, image: str, moved: Callable[[], None]) -> Isolation:
    """Try everything; a profile that this host can't enforce is noted with the reason."""
    found = Isolation()
    for profile in PROFILES:
        try:
            await _attempts(client, image, profile, found)
        except DsecError as error:
            found.notes.append(f"profile {profile}: {error}")
        moved()
    async with await AsyncSandbox.create(image, client=client, memory_mib=256, labels={"demo": "ends"}) as sandbox:
        for what, command, timeout_s in _ENDS:
            result = await sandbox.exec(command, timeout_s=timeout_s or 30.0)
            kept = f", output cut to head and tail of {result.total_bytes:,} bytes" if result.truncated else ""
            found.ends.append((what, result.describe() + kept))
        after = await sandbox.exec("echo still here")
        found.ends.append(("and then `echo still here`", after.stdout.strip() or after.describe()))
        moved()
    return found


async def _attempts(client: AsyncClient, image: str, profile: str, found: Isolation) -> None:
    options = {"memory_mib": 256, "disk_mib": 64, "pids": 64, "policy": profile, "labels": {"demo": "isolation"}}
    async with await AsyncSandbox.create(image, client=client, **options) as sandbox:  # type: ignore[arg-type]
        await sandbox.files.write("/tmp/attempts.py", _ATTEMPTS)
        result = (await sandbox.exec(["python3", "/tmp/attempts.py"], timeout_s=60)).check()
        for name, outcome in json.loads(result.stdout):
            found.outcomes.setdefault(name, {})[profile] = outcome
