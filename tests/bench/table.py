"""Writes the numbers of bench-results/*.json into SPECIFICATION.md: `python -m tests.bench.table`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from tests.bench.live import ROOT

BEGIN, END = "<!-- numbers: begin -->", "<!-- numbers: end -->"

# bench, where in its result, what it is, what the issue asks for
ROWS: tuple[tuple[str, str, str, str], ...] = (
    ("create", "create_ms.p50", "create to ready, SDK to SDK, one caller, p50 ms", "<= 15"),
    ("create", "create_ms.p99", "the same, p99 ms", ""),
    ("create", "ratio_create_p50_to_crun", "create p50 to bare `crun run` p50 of the same run", "<= 1"),
    ("create", "create_kill_per_s_16", "create+kill a second, 16 callers", ">= 120"),
    ("create", "ratio_rate_to_crun", "that rate to bare crun with two workers", ">= 1"),
    ("create", "ratio_create_p50_to_docker", "create p50 to `docker run --rm` of `true` p50 of the same run", ""),
    ("create", "ratio_rate_to_docker", "create+kill rate to `docker run --rm` a second with two workers", ""),
    ("create", "cpu_ms_per_cycle.node", "CPU ms of the node daemon a create+kill", ""),
    ("create", "cpu_ms_per_cycle.gateway", "CPU ms of the gateway a create+kill", ""),
    ("exec", "exec_true_ms.p50", "exec `true` through SDK and gateway, p50 ms", "<= 3"),
    ("exec", "exec_true_ms.p99", "the same, p99 ms", ""),
    ("exec", "exec_per_s", "execs a second, one async client, 64 sandboxes", ">= 1000"),
    ("exec", "cpu_ms_per_exec.all", "CPU ms of one of these execs, everything", ""),
    ("exec", "cpu_ms_per_exec.sdk", "of that: the caller with the SDK", ""),
    ("exec", "cpu_ms_per_exec.gateway", "of that: the gateway", ""),
    ("exec", "cpu_ms_per_exec.node", "of that: the node daemon", ""),
    ("exec", "cpu_ms_per_exec.inside", "of that: inside, which is PID 1, fork, execve and `true` itself", ""),
    ("exec", "cpu_ms_bare_start.true", "a bare posix_spawn of the host's `true`, no sandbox, CPU ms", ""),
    ("exec", "cpu_ms_bare_start.nothing", "the same of a program without a C library", ""),
    ("exec", "exec_nothing_per_s", "execs a second of a program without a C library, 64 sandboxes", ""),
    ("exec", "cpu_ms_per_exec_nothing.all", "CPU ms of one of those, everything", ""),
    ("exec", "cpu_ms_per_exec_nothing.inside", "of that: inside", ""),
    ("idle", "kib_each", "KiB of the machine's memory an idle sandbox", "<= 1536"),
    ("idle", "at_once", "sandboxes at once, still answering execs", ">= 3200"),
    ("idle", "exec_ms_at_full.p50", "exec `echo` with all of them there, p50 ms", ""),
    ("cycles", "cycles", "create and kill cycles with the counts below flat", ">= 10000"),
    ("fncall", "python_per_s", "fncall `print(1)` in Python a second", ">= 400"),
    ("fncall", "python_ms.p50", "the same, one caller, p50 ms", "<= 8"),
    ("fncall", "cpp_cached_per_s", "fncall of compiled C++ from the cache a second", ">= 400"),
    ("fncall", "ratio_to_docker_run", "calls a second to `docker run --rm` a second", ">= 20"),
    ("fncall", "docker_run_per_s_2", "`docker run --rm` of the same a second, two workers", ""),
    ("fncall", "ratio_to_crun_run", "calls a second to bare `crun run` of `true` with two workers", ""),
    ("fncall", "cpp_cached_ms.p50", "fncall of compiled C++ from the cache, one caller, p50 ms", ""),
    ("fncall", "spinners.longest_wall_s", "2x cores of `while True`, limit 2 s: the last one judged after, s", "<= 3"),
    ("fncall", "spinners.daemon_answers_ms.max", "what the daemon answers meanwhile, max ms", "< 100"),
    (
        "consul",
        "sandboxes_1000.node_cpu_percent",
        "Consul, 1,000 sandboxes a node: CPU of the node daemon, % of a core",
        "",
    ),
    ("consul", "sandboxes_1000.agent_cpu_percent", "the same, CPU of the agent above its rest", ""),
    ("consul", "sandboxes_1000.key_writes_per_s", "the same, key writes a second", ""),
    (
        "consul",
        "sandboxes_5000.node_cpu_percent",
        "Consul, 5,000 sandboxes a node: CPU of the node daemon, % of a core",
        "",
    ),
    ("consul", "sandboxes_5000.agent_cpu_percent", "the same, CPU of the agent above its rest", ""),
    ("consul", "sandboxes_5000.key_writes_per_s", "the same, key writes a second", ""),
    ("consul", "ping.cpu_percent_5000", "asking 5,000 PID 1s every 30 s, % of a core", ""),
    ("blobd", "partial_4k.p50_us", "blob server, 4 KiB at random of a partial blob (block here), p50 us", "<= 40"),
    ("blobd", "partial_4k.server_cpu_us", "the same, CPU us of the server", ""),
    ("blobd", "complete_4k.p50_us", "of a complete blob, p50 us", "<= 10"),
    ("blobd", "complete_4k.requests", "the same, requests to the server", "0"),
    ("blobd", "warm_4k.requests", "read before, requests to the server", "0"),
    ("blobd", "cold_mb_per_s", "cold and sequential from a local directory store, MB/s", ">= 1000"),
    ("blobd", "ratio_cold_to_plain", "its time to that of reading, hashing and writing by one plain loop", ""),
    (
        "images",
        "ratio_time",
        "64 containers of 16 cold images of 1 GiB: fetch and unpack all, to data on demand",
        ">= 2",
    ),
    ("images", "ratio_disk", "the same burst: bytes written to disk, on demand to all", "<= 0.2"),
    ("images", "ratio_fetched_to_touched", "bytes fetched to bytes that tasks read", "<= 1.15"),
    ("images", "lazy.second.fetched_bytes", "second container of each image: bytes fetched", "0"),
    ("images", "lazy.second.page_cache_mib", "the same: MiB of page cache more", "0"),
    ("layers", "ratio_to_mkfs_alone", "import of a 512 MiB tar to mkfs.erofs 1.5 on its files, both synced", "<= 2"),
    ("layers", "ratio_to_unpack_and_mkfs", "the same to tar -x and mkfs.erofs", ""),
    ("layers", "import_raw.cpu_s", "the same, CPU s", ""),
    ("layers", "import_raw.peak_rss_mib", "the same, peak memory MiB", "<= 200"),
    ("layers", "import_zstd.wall_s", "the same with zstd frames for the wire, s", ""),
    ("layers", "compose.wall_s", "300 layers, 15,868 inodes merged into one image, s", "< 1"),
    ("layers", "compose.cpu_s", "the same, CPU s", ""),
    ("plugin", "handshake_ms.p99", "handshake of a driver plugin, p99 ms", "< 1000"),
    ("plugin", "handshake_busy_ms.p99", "the same with 2 busy processes a core, p99 ms", "< 1000"),
    ("plugin", "handshake_loaded_ms.max", "the same with 8 busy processes a core, max ms", "< 10000"),
    ("plugin", "handshake_ms.cpu_ms_each", "the same, CPU ms", ""),
    ("plugin", "idle.rss_kib", "an idle plugin's memory, KiB", "<= 61440"),
    ("plugin", "held.stop_ms.p99", "StopTask with 500 waits and 500 stats streams held, p99 ms", "< 200"),
    ("plugin", "nomad.container_allocs_per_s", "allocations a second through dsec-container, one client", ""),
    ("plugin", "nomad.fncall_allocs_per_s", "the same through dsec-fncall", ""),
    ("plugin", "nomad.pool_sandboxes_per_s", "sandboxes a second (create, exec, kill) in a granted pool", ""),
    ("plugin", "nomad.pool_to_container", "the pool's path to single-task allocations", ""),
    ("fncall", "calls", "calls with the counts below flat", ">= 100000"),
)


def _at(result: dict[str, Any], path: str) -> Any:
    value: Any = result
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    return value


def _flatness(title: str, result: dict[str, Any]) -> list[str]:
    rows = result.get("rows") or []
    if not rows:
        return []
    first, last = rows[0], rows[-1]
    pairs = [(key, first[key], last[key]) for key in ("rate", "mounts", "cgroups", "links", "processes")]
    for role in first["daemons"]:
        was, now = first["daemons"][role], last["daemons"][role]
        pairs += [(f"{role} {key}", was[key], now[key]) for key in ("fds", "threads", "rss_kib")]
    changes = [f"- {what}: {was} → {now}" for what, was, now in pairs]
    return ["", f"{title}, after each tenth (first → last):", "", *changes]


def render(reports: dict[str, dict[str, Any]]) -> str:
    """The section's text."""
    lines = ["| what | asked | measured | command |", "|---|---|---|---|"]
    for bench, path, what, asked in ROWS:
        report = reports.get(bench)
        value = _at(report["result"], path) if report else None
        shown = "untested" if value is None else f"{value:g}"
        if report and report["quick"] and value is not None:
            shown += " (quick run)"
        lines.append(f"| {what} | {asked} | {shown} | `python -m tests.bench.run {bench}` |")
    for bench, title in (("cycles", "Cycles"), ("fncall", "Calls")):
        if bench in reports:
            lines += _flatness(title, reports[bench]["result"])
    facts = [f"- {name}: {_machine(report['machine'])}" for name, report in sorted(reports.items())]
    return "\n".join([*lines, "", "Measured on:", "", *facts])


def _machine(facts: dict[str, Any]) -> str:
    return (
        f"{facts['at']}, revision {facts['revision']}, {facts['cpus']} × {facts['cpu']}, Linux {facts['kernel']}, "
        f"Python {facts['python']}, load {facts['load']} at the start"
    )


def main() -> int:
    """Exit 1 when SPECIFICATION.md has no markers."""
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "bench-results"
    reports = {path.stem: json.loads(path.read_text()) for path in results.glob("*.json")}
    page = ROOT / "SPECIFICATION.md"
    pattern = re.compile(re.escape(BEGIN) + ".*" + re.escape(END), re.DOTALL)
    text = page.read_text()
    if not pattern.search(text):
        sys.stderr.write(f"{page} has no {BEGIN} … {END}\n")
        return 1
    page.write_text(pattern.sub(lambda _: f"{BEGIN}\n{render(reports)}\n{END}", text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
