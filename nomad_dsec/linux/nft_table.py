"""The one nftables table of a node: NAT for open sandboxes, and the refusal of every address that is not the Internet.

`render_table` is pure; `apply_table` gives it to nft(8) as one transaction, so there is never a moment without rules.
Rules match by the prefix of the host's links, so a sandbox's coming and going changes nothing here.
"""

from __future__ import annotations

import hashlib
import ipaddress
from typing import TYPE_CHECKING, Final

from libdsec.errors import PlatformError, UsageError

from nomad_dsec import proc

if TYPE_CHECKING:
    from collections.abc import Sequence

SANDBOX_SUBNET: Final = "198.18.0.0/15"  # RFC 2544's test range: never routed on the Internet, rarely used inside

# RFC 6890 and successors; cloud metadata (169.254.169.254, 168.63.129.16) and CGNAT included.
SPECIAL_ADDRESSES: Final = (
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "168.63.129.16/32",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.88.99.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/3",
)


def table_name(node: str) -> str:
    """Identifiers of nft have no hyphen; node ids have no underscore, so the names stay distinct."""
    return f"dsec_{node.replace('-', '_')}"


def link_prefix(node: str) -> str:
    """What the names of this node's host-side links begin with: 10 of the 15 characters that a link name may have."""
    return f"ds-{hashlib.sha256(node.encode()).hexdigest()[:6]}."


def render_table(node: str, *, subnet: str = SANDBOX_SUBNET, resolvers: Sequence[str] = ()) -> str:
    """The nft script that replaces the node's table.

    subnet: addresses of the sandboxes. resolvers: IPv4 addresses that open sandboxes may ask on port 53 even if they
    are special, as host resolvers mostly are; each is a hole that the effective policy lists. UsageError for junk.
    """
    name, mine = table_name(node), f'"{link_prefix(node)}*"'
    net = str(ipaddress.IPv4Network(subnet))
    special = ", ".join(SPECIAL_ADDRESSES if _covered(net) else (*SPECIAL_ADDRESSES, net))
    dns = [_resolver(text) for text in resolvers]
    holes = [
        f"    iifname {mine} ip daddr {{ {', '.join(dns)} }} meta l4proto {{ tcp, udp }} th dport 53 accept"
        for _ in dns[:1]
    ]
    return "\n".join(
        [
            f"add table inet {name}",
            f"delete table inet {name}",
            f"table inet {name} {{",
            "  set special { type ipv4_addr; flags interval; elements = { " + special + " } }",
            "  chain input {",
            "    type filter hook input priority -10; policy accept;",
            # A reset first: the kernel limits how many ICMP errors it sends, and a refusal that is not told hangs.
            f"    iifname {mine} meta l4proto tcp counter reject with tcp reset",
            f'    iifname {mine} counter reject with icmpx admin-prohibited comment "the host itself"',
            "  }",
            "  chain forward {",
            "    type filter hook forward priority -10; policy accept;",
            f"    iifname {mine} oifname {mine} meta l4proto tcp counter reject with tcp reset",
            f'    iifname {mine} oifname {mine} counter reject with icmpx admin-prohibited comment "other sandboxes"',
            f"    oifname {mine} ct state established,related accept",
            f'    oifname {mine} counter drop comment "nobody calls in"',
            f"    iifname {mine} meta nfproto ipv6 counter drop",
            f'    iifname {mine} ip saddr != {net} counter drop comment "forged source"',
            *holes,
            f"    iifname {mine} ip daddr @special meta l4proto tcp counter reject with tcp reset",
            f"    iifname {mine} ip daddr @special counter reject with icmpx admin-prohibited",
            "  }",
            "  chain postrouting {",
            "    type nat hook postrouting priority 100; policy accept;",
            f"    ip saddr {net} oifname != {mine} masquerade",
            "  }",
            "}",
            "",
        ]
    )


def _covered(net: str) -> bool:
    wanted = ipaddress.IPv4Network(net)
    return any(wanted.subnet_of(ipaddress.IPv4Network(special)) for special in SPECIAL_ADDRESSES)


def _resolver(text: str) -> str:
    try:
        return str(ipaddress.IPv4Address(text))
    except ValueError:
        raise UsageError(
            "bad_resolver", f"{text[:60]!r} is not an IPv4 address", field="resolvers", hint="write it like 192.0.2.53"
        ) from None


def parse_resolvers(resolv_conf: str) -> list[str]:
    """The IPv4 name servers of a resolv.conf (man 5) that a sandbox could reach: loopback ones are left out."""
    found = []
    for line in resolv_conf.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver":
            try:
                address = ipaddress.IPv4Address(words[1])
            except ValueError:
                continue
            if not address.is_loopback:
                found.append(str(address))
    return found


async def apply_table(script: str) -> None:
    """Load a rendered script. PlatformError tool_missing or tool_failed with nft's own words."""
    (await proc.run_async(["nft", "-f", "-"], stdin=script.encode(), timeout_s=20)).check()


async def remove_table(node: str) -> None:
    """Take the node's table away. Idempotent; without nft there is none, so nothing is to be done."""
    name = table_name(node)
    try:
        await apply_table(f"add table inet {name}\ndelete table inet {name}\n")
    except PlatformError as error:
        if error.code != "tool_missing":
            raise
