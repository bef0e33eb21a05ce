"""Consul and Nomad as this machine sees them: reachable, new enough, allowed what we need, our drivers offered.

Looks only: nothing is registered or written, rights are asked for and not tried out.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dsec_plugins import install
from libdsec.errors import DeniedError, DsecError

from nomad_dsec.cluster.configured import endpoint_of, open_secrets
from nomad_dsec.cluster.rights import RIGHTS
from nomad_dsec.doctor.row import Check

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nomad_dsec.cluster.consul import ConsulClient
    from nomad_dsec.cluster.nomad import AgentFacts, NomadClient
    from nomad_dsec.cluster.settings import Endpoint
    from nomad_dsec.config import Settings

TIMEOUT_S: Final = 5.0
MIN_CONSUL: Final = (1, 2)  # alias checks
MIN_NOMAD: Final = (1, 6)
_CONSUL_FIX: Final = "check consul.address, consul.token and the TLS files; `consul members` on the machine"
_NOMAD_FIX: Final = "check nomad.address, nomad.token and the TLS files; `nomad node status` on the machine"
_RAW_EXEC_FIX: Final = 'plugin "raw_exec" { config { enabled = true no_cgroups = true } }: see jobspecs/node.nomad.hcl'


def check_consul(settings: Settings) -> list[Check]:
    """Rows of Consul; none where it is not configured."""
    return asyncio.run(_consul(settings)) if settings["consul.address"] else []


def check_nomad(settings: Settings) -> list[Check]:
    """Rows of Nomad; none where it is not configured."""
    return asyncio.run(_nomad(settings)) if settings["nomad.address"] else []


@asynccontextmanager
async def _endpoint(settings: Settings, section: str) -> AsyncIterator[Endpoint]:
    source = await open_secrets(settings)
    try:
        endpoint = await endpoint_of(settings, section, source)
        assert endpoint is not None
        yield endpoint
    finally:
        await source.close()


async def _consul(settings: Settings) -> list[Check]:
    from nomad_dsec.cluster.consul import ConsulClient

    try:
        async with _endpoint(settings, "consul") as endpoint:
            client = ConsulClient(endpoint, timeout_s=TIMEOUT_S)
            try:
                return [await _consul_reached(client), await _consul_token(client)]
            finally:
                await client.close()
    except DsecError as error:
        return [Check(name="consul", ok=False, reason=str(error), fix=error.hint or _CONSUL_FIX)]


async def _consul_reached(client: ConsulClient) -> Check:
    where = client.endpoint.url
    leader = await client.leader()
    if not leader:
        return Check(name="consul", ok=False, reason=f"{where} answers, but has no leader", fix="start its servers")
    try:
        version = await client.version()
    except DeniedError:  # agent:read is more than any of our components needs
        return Check(name="consul", ok=True, reason=f"{where} answers; its version is not ours to read")
    new = _numbers(version) >= MIN_CONSUL
    fix = "" if new else "use Consul 1.2 or newer"
    return Check(name="consul", ok=new, reason=f"{version} at {where}, led by {leader}", fix=fix)


async def _consul_token(client: ConsulClient) -> Check:
    wanted = sorted({right for rights in RIGHTS.values() for right in rights}, key=str)
    given = await client.may(wanted)
    if given is None:
        return Check(name="consul token", ok=True, reason="ACLs are off: everybody may do everything")
    lacking = {name: [str(right) for right in rights if not given[right]] for name, rights in RIGHTS.items()}
    enough = [name for name, missing in lacking.items() if not missing]
    if enough:
        return Check(name="consul token", ok=True, reason=f"enough for: {', '.join(enough)}")
    told = "; ".join(f"{name} lacks {', '.join(missing)}" for name, missing in lacking.items())
    return Check(name="consul token", ok=False, reason=told, fix="use the policies of policies/acl/*.consul.hcl")


async def _nomad(settings: Settings) -> list[Check]:
    from nomad_dsec.cluster.nomad import NomadClient

    try:
        async with _endpoint(settings, "nomad") as endpoint:
            client = NomadClient(endpoint, timeout_s=TIMEOUT_S)
            try:
                facts = await client.agent()
                rows = [_nomad_version(facts, endpoint.url), *_plugin_dir(facts)]
                return rows + await _drivers(client, facts)
            finally:
                await client.close()
    except DsecError as error:
        return [Check(name="nomad", ok=False, reason=str(error), fix=error.hint or _NOMAD_FIX)]


def _nomad_version(facts: AgentFacts, where: str) -> Check:
    new = _numbers(facts.version) >= MIN_NOMAD
    fix = "" if new else "use Nomad 1.6 or newer"
    return Check(name="nomad", ok=new, reason=f"{facts.version} at {where}", fix=fix)


def _plugin_dir(facts: AgentFacts) -> list[Check]:
    if not facts.client:
        return [Check(name="nomad client", ok=False, reason="this agent is no client", fix="ask a client's agent")]
    path = Path(facts.plugin_dir)
    if not path.is_dir():
        reason = f"{path} is not on this machine, or not to be read"
        return [Check(name="nomad plugin_dir", ok=False, reason=reason, fix="run the doctor on the client, as root")]
    found = [name for name in install.NAMES if shutil.which(str(path / name))]
    missing = [name for name in install.NAMES if name not in found]
    problems = install.problems_in(path)
    told = [f"{path}: {', '.join(found) or 'none of ours'}", *problems]
    if missing:
        told.append(f"without {', '.join(missing)}")
    fix = f"dsec nomad install-plugins --plugin-dir {path}" if missing else "see the reason" if problems else ""
    return [Check(name="nomad plugin_dir", ok=not fix, reason="; ".join(told), fix=fix)]


async def _drivers(client: NomadClient, facts: AgentFacts) -> list[Check]:
    if not facts.client:
        return []
    node = await client.node(facts.client)
    rows = []
    for name in install.NAMES:
        detected, healthy, text = node.drivers.get(name, (False, False, ""))
        state = "healthy" if healthy else "unhealthy" if detected else "not offered by the agent"
        fix = f'name it in the agent\'s config (plugin "{name}" {{ … }}), restart the agent, and see its log'
        if detected and not healthy:
            fix = "start the node daemon that its node_socket names"
        reason = f"{state}: {text}" if text else state
        rows.append(Check(name=f"nomad driver {name}", ok=healthy, reason=reason, fix="" if healthy else fix))
    version = node.attributes.get("unique.cgroup.version") or node.attributes.get("os.cgroups.version", "")
    if version:
        modern = version.strip("v") == "2"
        reason = f"cgroups {version}" + ("" if modern else ": raw_exec kills what the node daemon started with it")
        rows.append(Check(name="nomad cgroups", ok=modern, reason=reason, fix="" if modern else _RAW_EXEC_FIX))
    return rows


def _numbers(version: str) -> tuple[int, ...]:
    """(1, 18) of "1.18.0-beta1+ent"."""
    return tuple(int(part) for part in version.split("-")[0].split("+")[0].split(".")[:2] if part.isdecimal())
