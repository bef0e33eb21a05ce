"""Requests read, packed and unpacked; replies turned into results. No kernel."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libdsec.errors import PlatformError, UsageError
from libdsec.wire_fncall import FnLimits, FnRequest

from nomad_dsec import guest
from nomad_dsec.backends.fncall import lane_wire as wire
from nomad_dsec.backends.fncall import zygote
from nomad_dsec.backends.fncall.artefacts import key_of
from nomad_dsec.backends.fncall.outcome import check_started, result_of
from nomad_dsec.backends.fncall.program import environment, plan_compile, plan_run, read_program, sources

HEADER = (Path(guest.__file__).parent / "c" / "call.h").read_text()
CALL = wire.LaneCall(argv=[b"a"])


def reply(**changes: object) -> wire.LaneReply:
    values = {
        "flags": 0, "id": 1, "step": "", "error": 0, "status": 0, "wall_us": 2000, "cpu_us": 1000, "maxrss_kib": 2048,
        "oom_kills": 0, "memory_bytes": 0, "major_faults": 0, "held_bytes": 0, "stdout": b"out",
        "stderr": b"err", "files": {}, "unfetched": {},
    }  # fmt: skip
    return wire.LaneReply(**(values | changes))  # type: ignore[arg-type]


def c_struct(name: str) -> int:
    """Size of a packed-by-nature struct of call.h, from its text."""
    body = re.search(rf"struct {name} {{(.*?)}};", HEADER, re.DOTALL)
    assert body
    text = re.sub(r"/\*.*?\*/", "", body[1], flags=re.DOTALL)
    size = 0
    for kind, names in re.findall(r"(uint32_t|uint64_t) ([^;]+);", text):
        size += len(names.split(",")) * (4 if kind == "uint32_t" else 8)
    return size


def test_structs_and_numbers_are_those_of_the_header() -> None:
    assert c_struct("call_request") == wire.REQUEST.size == zygote.HEADER.size
    assert c_struct("call_reply") == wire.REPLY.size
    assert c_struct("call_file") == wire.FILE.size
    assert c_struct("zygote_report") == zygote.REPORT.size
    numbers = {name: int(value) for name, value in re.findall(r"#define CALL_([A-Z_]+) (\d+)u", HEADER)}
    for name, value in numbers.items():
        if name not in ("INLINE_MAX", "WORDS_MAX", "FILES_MAX", "NAME_ROOM"):
            assert getattr(wire, name) == value, name
    steps = re.search(r"enum call_step {(.*?)}", HEADER, re.DOTALL)
    assert steps
    names = [name.strip().removeprefix("STEP_").lower() for name in steps[1].split(",")]
    assert tuple(names[1:]) == wire.STEPS[1:]
    assert wire.STEPS[zygote.STEP_FORK] == "fork"
    assert wire.STEPS[zygote.STEP_USER] == "user"


@given(
    st.lists(st.binary(max_size=20).filter(lambda word: b"\0" not in word), min_size=1, max_size=5),
    st.binary(max_size=50),
    st.dictionaries(st.text(min_size=1, max_size=8), st.binary(max_size=30), max_size=4),
)
def test_a_payload_holds_its_parts_in_order(argv: list[bytes], stdin: bytes, files: dict[str, bytes]) -> None:
    call = wire.LaneCall(argv=argv, stdin=stdin, files={name: (0o644, data) for name, data in files.items()})
    payload = wire.pack_payload(call)
    at = sum(len(word) + 1 for word in argv)
    assert payload[:at].split(b"\0")[:-1] == argv
    assert payload[at : at + len(stdin)] == stdin
    unpacked, _ = wire._unpack_files(_as_reply(payload[at + len(stdin) :], len(files)), len(files))
    assert unpacked == files


def _as_reply(raw: bytes, count: int) -> bytes:
    """The same records with an errno of 0 in place of the mode."""
    parts, at = [], 0
    for _ in range(count):
        name, _, size = wire.FILE.unpack_from(raw, at)
        end = at + wire.FILE.size + name + size
        parts.append(wire.FILE.pack(name, 0, size) + raw[at + wire.FILE.size : end])
        at = end
    return b"".join(parts)


def test_a_short_or_strange_reply_is_a_fault() -> None:
    with pytest.raises(PlatformError):
        wire.unpack_header(b"x" * 10)
    with pytest.raises(PlatformError):
        wire.unpack_header(bytes(wire.REPLY.size))
    whole = wire.REPLY.pack(wire.MAGIC, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0)
    with pytest.raises(PlatformError):
        wire.unpack_reply(whole, b"1234")
    assert wire.unpack_reply(whole, b"12345").stdout == b"12345"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "language"),
        ({"language": "c", "argv": ["x"]}, "argv"),
        ({"argv": ["x"], "code": "y"}, "code"),
        ({"language": "cobol"}, "language"),
        ({"language": "python", "files": {"a/../b": b""}}, "files.a/../b"),
        ({"language": "python", "files": {"*": b""}}, "files.*"),
        ({"language": "python", "fetch_files": [".."]}, "fetch_files..."),
        ({"language": "python", "code": "x", "files": {"main.py": b""}}, "files.main.py"),
        ({"language": "python", "env": {"A=B": "1"}}, "env"),
        ({"argv": ["a\0b"]}, "argv"),
    ],
)
def test_bad_requests_name_the_field(fields: dict, field: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_program(FnRequest(image="i", **fields))
    assert caught.value.field == field


def test_what_runs() -> None:
    python = read_program(FnRequest(image="i", language="py", code="x", args=["1"]))
    assert python.zygote == "python3"
    call = plan_run(python, [], stdin=b"in", files=sources(python))
    assert (call.argv, call.flags, call.files) == ((b"main.py", b"1"), wire.ZYGOTE, {"main.py": (0o644, b"x")})
    clean = read_program(FnRequest(image="i", language="py", code="x", clean=True))
    assert not clean.zygote
    seeded = read_program(FnRequest(image="i", language="python", code="", env={"PYTHONHASHSEED": "7"}))
    assert not seeded.zygote  # a child of a running interpreter could only ignore it
    assert read_program(FnRequest(image="i", language="python", code="", env={"SEED": "7"})).zygote
    assert plan_run(clean, [], stdin=b"", files={}).argv == (b"python3", b"-B", b"main.py")
    program = read_program(FnRequest(image="i", language="c", code="x"))
    assert program.runs_binary
    compiling = plan_compile(program, [])
    assert compiling.argv[0] == b"gcc"
    assert list(compiling.fetch) == ["main.bin"]
    java = read_program(FnRequest(image="i", language="java", code="x"))
    assert java.is_compiled
    assert not java.runs_binary


def test_the_requests_environment_wins() -> None:
    program = read_program(FnRequest(image="i", language="py", env={"LANG": "de", "A": "1"}))
    words = environment(program, {"PATH": "/image", "A": "0"})
    assert {b"PATH=/image", b"LANG=de", b"A=1", b"HOME=/tmp"} <= set(words)


def test_results() -> None:
    limits = FnLimits(cpu_s=1, wall_s=2, memory_mib=64)
    fine = result_of(reply(status=3 << 8), limits, queue_s=0.5)
    assert (fine.verdict, fine.exit_code, fine.signal, fine.queue_s, fine.max_rss_mib) == (
        "runtime_error", 3, None, 0.5, 2.0,
    )  # fmt: skip
    assert (fine.cpu_s, fine.wall_s) == (0.001, 0.002)
    late = result_of(reply(status=9, flags=wire.WALL_OVER), limits, queue_s=0)
    assert (late.verdict, late.exit_code) == ("wall_time_limit", None)
    flood = result_of(reply(status=9, flags=wire.OUT_OVER), limits, queue_s=0)
    assert (flood.verdict, flood.stdout_truncated, flood.stderr_truncated) == ("output_limit", True, False)
    lost = result_of(reply(flags=wire.NOT_STARTED, step="enter", error=1), limits, queue_s=0)
    assert (lost.verdict, lost.exit_code, lost.signal) == ("internal_error", None, None)
    fat = result_of(reply(flags=wire.NOT_STARTED | wire.BROKEN, step="zygote", oom_kills=1), limits, queue_s=0)
    assert fat.verdict == "memory_limit"
    assert result_of(wire.lost_to_oom(2), limits, queue_s=0).verdict == "memory_limit"


@pytest.mark.parametrize(
    ("step", "number", "language", "code"),
    [
        ("exec", errno.ENOENT, "", "command_not_found"),
        ("exec", errno.ENOENT, "go", "language_unavailable"),
        ("files", errno.ENOSPC, "", "files_too_large"),
        ("files", errno.EISDIR, "", "bad_file_name"),
        ("exec", errno.E2BIG, "", "command_invalid"),
    ],
)
def test_what_the_request_is_to_blame_for(step: str, number: int, language: str, code: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_started(reply(flags=wire.NOT_STARTED, step=step, error=number), b"x", language=language)
    assert caught.value.code == code
    check_started(reply(flags=wire.NOT_STARTED, step="slot", error=number), b"x", language=language)


def test_keys_tell_parts_apart() -> None:
    keys = {key_of(parts) for parts in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"abc", b""], [])}
    assert len(keys) == 5


@pytest.mark.parametrize(
    ("faults", "held", "cpu_s", "is_memory"),
    [
        (50_000, 99 << 20, 6, True),
        (1000, 100 << 20, 1, True),
        (50_000, 80 << 20, 6, False),
        (200, 100 << 20, 0, False),
        (500, 100 << 20, 10, False),
    ],
)
def test_time_lost_for_want_of_memory_is_told_from_time_lost(
    faults: int, held: int, cpu_s: int, is_memory: bool
) -> None:
    """Only full memory and many reads of mapped pages together; one that ended in time is never asked (held 0)."""
    ended = reply(flags=wire.WALL_OVER, status=9, major_faults=faults, held_bytes=held, cpu_us=cpu_s * 10**6)
    assert wire.has_thrashed(ended, 100 << 20) is is_memory
    assert not wire.has_thrashed(reply(major_faults=faults), 100 << 20)
