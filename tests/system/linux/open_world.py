"""A little world for the open network: run below `unshare -n`, it is the host, with an "Internet" beside it.

Prints one JSON object of what was seen; test_netns.py judges it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import threading
from pathlib import Path

from nomad_dsec.linux import netns
from nomad_dsec.linux.netns_pool import NetnsPool, NetSlot
from nomad_dsec.linux.nft_table import link_prefix
from nomad_dsec.linux.veth import Links

INTERNET, HOST_PUBLIC = "20.1.1.1", "20.1.1.0"
PRIVATE, METADATA = "10.9.9.9", "169.254.169.254"
PORT = 8080


def run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, timeout=10)


def serve(address: str, port: int, seen: list[str]) -> socket.socket:
    """An echo of who called, for ever."""
    listener = socket.create_server((address, port))

    def loop() -> None:
        while True:
            try:
                peer, (caller, _) = listener.accept()
            except OSError:
                return
            seen.append(caller)
            peer.sendall(caller.encode())
            peer.close()

    threading.Thread(target=loop, daemon=True).start()
    return listener


def call(slot: NetSlot, address: str, port: int = PORT) -> str:
    """What a program inside gets: the answer, or the name of the errno."""
    with netns.inside(slot.fd), socket.socket() as client:
        client.settimeout(2)
        try:
            client.connect((address, port))
            return client.recv(100).decode() or "closed"
        except TimeoutError:
            return "timeout"
        except OSError as error:
            return os.strerror(error.errno or 0)


def internet(seen: list[str]) -> int:
    """A namespace with a public, a private and a metadata address, on the host's only uplink."""
    fd = netns.make_closed()
    links = Links()
    links.make_pair("up0", fd, gateway=HOST_PUBLIC)
    links.close()
    run("ip", "link", "set", "lo", "up")
    run("ip", "route", "add", "default", "via", INTERNET)
    netns.configure_link(fd, address=INTERNET, gateway=HOST_PUBLIC)
    with netns.inside(fd):
        for address in (PRIVATE, METADATA):
            run("ip", "addr", "add", f"{address}/32", "dev", "lo")
        serve("0.0.0.0", PORT, seen)
        serve("0.0.0.0", 53, seen)
    return fd


async def main(fd: int, seen: list[str]) -> None:
    node, report = "world", {}
    serve("0.0.0.0", PORT, seen)  # the host's own service
    report["host to private"] = socket.create_connection((PRIVATE, PORT), timeout=2).recv(100).decode()
    # the last pair of a /24 and the first of the next: addresses that a /24 has a special use for
    pool = NetnsPool(node, closed_size=1, open_size=2, resolvers=(PRIVATE,), first_pair=127)
    await pool.start()
    await pool.fill()
    one, two = await pool.take("open"), await pool.take("open")
    with netns.inside(two.fd):
        serve("0.0.0.0", PORT, seen)
        report["ipv6"] = Path("/proc/thread-self/net/if_inet6").read_text()
    report |= {
        "internet": await asyncio.to_thread(call, one, INTERNET),
        "private": await asyncio.to_thread(call, one, PRIVATE),
        "resolver": await asyncio.to_thread(call, one, PRIVATE, 53),
        "metadata": await asyncio.to_thread(call, one, METADATA),
        "host by gateway": await asyncio.to_thread(call, one, one.gateway),
        "host by public address": await asyncio.to_thread(call, one, HOST_PUBLIC),
        "neighbour": await asyncio.to_thread(call, one, two.address),
        "own": await asyncio.to_thread(call, two, two.address),
    }
    with netns.inside(fd):
        run("ip", "route", "add", "198.18.0.0/15", "via", HOST_PUBLIC)
    outside = NetSlot(kind="open", fd=fd)
    report["called from the Internet"] = await asyncio.to_thread(call, outside, two.address)
    subprocess.run(["nft", "delete", "table", "inet", "dsec_world"], check=True, timeout=10)
    report["unfenced: neighbour"] = await asyncio.to_thread(call, one, two.address)
    report["unfenced: called from the Internet"] = await asyncio.to_thread(call, outside, two.address)
    report["unfenced: host"] = await asyncio.to_thread(call, one, HOST_PUBLIC)
    with netns.inside(one.fd), socket.socket() as low:
        low.bind(("127.0.0.1", 80))
    await pool.give_back(one)
    third = await pool.take("open")
    report["address moves on"] = third.address not in (one.address, two.address)
    adopted = pool.adopt(two.to_record())
    report["adopted"] = adopted.to_record() == two.to_record() and adopted.fd == -1
    run("ip", "link", "add", f"{link_prefix(node)}zz", "type", "veth", "peer", "name", "stray0")
    report["swept"] = await pool.sweep({two.link, third.link})
    for slot in (two, third):
        await pool.give_back(slot)
    await pool.close(forget_table=True)
    report["links left"] = Links.names(link_prefix(node))
    print(json.dumps(report))
    os._exit(0)  # the echo threads sit in other namespaces for ever


callers: list[str] = []
asyncio.run(main(internet(callers), callers))
