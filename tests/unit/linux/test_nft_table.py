"""The rules as text: what they name, and that junk can't become a rule."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

import pytest
from libdsec.errors import UsageError

from nomad_dsec.linux.nft_table import SPECIAL_ADDRESSES, link_prefix, remove_table, render_table, table_name

if TYPE_CHECKING:
    from pathlib import Path


def test_names_stay_distinct_and_fit() -> None:
    assert table_name("a-b") == "dsec_a_b"
    assert link_prefix("node-1") != link_prefix("node-2")
    assert len(link_prefix("n") + "ffff") <= 15


@pytest.mark.parametrize(
    "address",
    ["10.1.1.1", "127.0.0.1", "169.254.169.254", "172.31.0.1", "192.168.1.1", "100.64.1.1", "224.0.0.1", "0.0.0.0"],
)
def test_special_addresses_are_covered(address: str) -> None:
    assert any(ipaddress.ip_address(address) in ipaddress.ip_network(net) for net in SPECIAL_ADDRESSES)


@pytest.mark.parametrize("address", ["1.1.1.1", "8.8.8.8", "140.82.112.3", "198.17.255.255", "172.32.0.1"])
def test_the_internet_is_not(address: str) -> None:
    assert not any(ipaddress.ip_address(address) in ipaddress.ip_network(net) for net in SPECIAL_ADDRESSES)


def test_replacement_is_one_transaction() -> None:
    lines = render_table("n1").splitlines()
    assert lines[:3] == ["add table inet dsec_n1", "delete table inet dsec_n1", "table inet dsec_n1 {"]


def test_own_subnet_is_always_special() -> None:
    assert "20.0.0.0/16 }" in render_table("n1", subnet="20.0.0.0/16")


def test_resolvers_open_port_53_only() -> None:
    script = render_table("n1", resolvers=("10.0.0.2", "10.0.0.3"))
    hole = next(line for line in script.splitlines() if "10.0.0.2" in line)
    assert "ip daddr { 10.0.0.2, 10.0.0.3 } meta l4proto { tcp, udp } th dport 53 accept" in hole
    assert script.index(hole) < script.index("@special")
    assert "dport 53" not in render_table("n1")


@pytest.mark.parametrize("junk", ["10.0.0.2; flush ruleset", "::1", "", "10.0.0"])
def test_junk_resolver(junk: str) -> None:
    with pytest.raises(UsageError) as bad:
        render_table("n1", resolvers=(junk,))
    assert bad.value.field == "resolvers"


async def test_a_host_without_nft_has_no_table_to_remove(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A node there, which had no open networks, could not be closed."""
    monkeypatch.setenv("PATH", str(tmp_path))
    await remove_table("n1")
