"""What each component needs of Consul's ACLs: policies/acl/<component>.consul.hcl as data, to be asked for. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """One access to one name, in Consul's words."""

    resource: str
    access: str
    segment: str

    def __str__(self) -> str:
        return f"{self.access} {self.resource} {self.segment}".rstrip()


def _right(text: str) -> Right:
    access, resource, segment = text.split(" ")
    return Right(resource=resource, access=access, segment=segment)


# "any" stands for the agent's own name, which a policy may have as its prefix
RIGHTS: dict[str, tuple[Right, ...]] = {
    "node": tuple(
        map(
            _right,
            (
                "write service dsec-node",
                "write service dsec-sandbox-any",
                "write session any",
                "read session any",
                "write key dsec/nodes/any",
                "read node any",
            ),
        )
    ),
    "gateway": tuple(
        map(
            _right, ("write service dsec-gateway", "read service dsec-node", "read node any", "read key dsec/nodes/any")
        )
    ),
}
