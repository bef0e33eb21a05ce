"""SandboxFusion's request and reply as pure translation: words, codes, limits, files."""

from __future__ import annotations

import base64

import msgspec
import pytest
from libdsec.errors import UsageError
from libdsec.wire_fncall import VERDICTS, CompileResult, FnResult

from nomad_dsec.backends.fncall.languages import find_language
from nomad_dsec.gateway.doors.sandboxfusion import (
    LANGUAGES,
    UNSERVED,
    RunCodeRequest,
    is_unserved,
    to_call,
    to_reply,
)

# What SandboxFusion's own schema lists.
THEIRS = (
    "python cpp nodejs go go_test java php csharp bash typescript sql rust cuda lua R perl D_ut ruby scala julia "
    "pytest junit kotlin_script jest verilog python_gpu lean swift racket"
).split()


def _ask(**fields) -> RunCodeRequest:
    return msgspec.convert({"code": "print(1)", "language": "python"} | fields, RunCodeRequest)


def _reply(verdict: str, asked: RunCodeRequest | None = None, **fields):
    result = FnResult(verdict=verdict, wall_s=0.5, stdout=b"out\xff", stderr=b"err", **fields)
    return to_reply(asked or _ask(), result, node="n1")


def test_each_of_its_languages_is_served_or_known_not_to_be():
    for name in THEIRS:
        if is_unserved(name):
            with pytest.raises(UsageError):
                to_call(_ask(language=name), image="i")
        else:
            call = to_call(_ask(language=name), image="i")
            assert bool(call.argv) != bool(call.language)
    assert not UNSERVED & set(LANGUAGES)


def test_the_languages_we_name_are_in_our_table():
    for ours in LANGUAGES.values():
        assert find_language(ours).name == ours


def test_limits_are_its_timeouts_and_ours_where_it_has_none():
    call = to_call(_ask(run_timeout=3, compile_timeout=7, memory_limit_MB=-1), image="i")
    assert (call.limits.wall_s, call.compile_limits.wall_s, call.limits.memory_mib) == (3, 7, 1024)
    assert call.limits.cpu_s == 6
    assert to_call(_ask(memory_limit_MB=64), image="i").limits.memory_mib == 64
    assert to_call(_ask(memory_limit_MB=1), image="i").limits.memory_mib == 4
    assert to_call(_ask(run_timeout=1e9), image="i").limits.wall_s == 3500
    for bad in (0, -1, float("nan")):
        with pytest.raises(UsageError) as caught:
            to_call(_ask(run_timeout=bad), image="i")
        assert caught.value.field == "run_timeout"


def test_every_call_it_makes_is_within_the_bounds_of_the_wire():
    from libdsec.wire_fncall import FnRequest

    for compile_timeout in (1e-3, 1e9):
        call = to_call(_ask(run_timeout=1e9, compile_timeout=compile_timeout, memory_limit_MB=10**9), image="i")
        msgspec.json.decode(msgspec.json.encode(call), type=FnRequest)


def test_a_client_hears_from_us_before_it_gives_up():
    for language in LANGUAGES:
        call = to_call(_ask(language=language, compile_timeout=5, run_timeout=3), image="i")
        compiles = find_language(LANGUAGES[language]).compile != ()
        waits_s = call.queue_timeout_s * (2 if compiles else 1)  # its compiler waits for a place of its own
        assert waits_s + (5 if compiles else 0) + 3 < 5 + 3 + 10
        assert compiles or call.queue_timeout_s > 10, "its compile time is there to wait in"


def test_files_go_in_by_name_and_come_back_as_they_were_asked_for():
    asked = _ask(files={"a/b.txt": base64.b64encode(b"\0x").decode(), "skip": None}, fetch_files=["./out.txt", "gone"])
    call = to_call(asked, image="i")
    assert call.files == {"a/b.txt": b"\0x"}
    assert call.fetch_files == ["out.txt", "gone"]
    reply = _reply("accepted", asked, exit_code=0, files={"out.txt": b"hi"})
    assert {name: base64.b64decode(text) for name, text in reply.files.items()} == {"./out.txt": b"hi"}


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "..", "", "x\0y", "y" * 300])
def test_a_name_that_leads_out_is_refused(name):
    for fields in ({"files": {name: ""}}, {"fetch_files": [name]}):
        with pytest.raises(UsageError) as caught:
            to_call(_ask(**fields), image="i")
        assert caught.value.field in fields


def test_what_is_not_base64_is_refused():
    with pytest.raises(UsageError, match="base64"):
        to_call(_ask(files={"a": "x"}), image="i")


@pytest.mark.parametrize("verdict", VERDICTS)
def test_every_verdict_has_its_words(verdict):
    reply = _reply(verdict, exit_code=0 if verdict == "accepted" else None)
    expected = {"accepted": "Success", "internal_error": "SandboxError"}.get(verdict, "Failed")
    assert reply.status == expected
    assert reply.dsec is not None
    assert reply.dsec.verdict == verdict
    if verdict in ("cpu_time_limit", "wall_time_limit"):
        assert (reply.run_result.status, reply.run_result.return_code) == ("TimeLimitExceeded", None)
    elif expected == "Failed" and verdict != "compile_error":
        assert reply.run_result.status == "Finished"
        assert reply.run_result.return_code != 0, "its clients take Failed with code 0 for an unknown state"


def test_ends_have_the_codes_of_a_child_process():
    assert _reply("runtime_error", exit_code=3).run_result.return_code == 3
    assert _reply("runtime_error", signal=11).run_result.return_code == -11
    assert _reply("memory_limit", signal=9).run_result.return_code == -9
    assert _reply("memory_limit", exit_code=0).run_result.return_code == -9
    assert _reply("accepted", exit_code=0).run_result.stdout == "out\ufffd"


def test_a_failed_compile_has_no_run():
    failed = CompileResult(ok=False, exit_code=1, stderr=b"no", wall_s=0.2)
    reply = _reply("compile_error", compile=failed)
    assert reply.run_result is None
    assert (reply.compile_result.status, reply.compile_result.return_code) == ("Finished", 1)
    slow = _reply("compile_error", compile=CompileResult(ok=False))
    assert (slow.compile_result.status, slow.compile_result.return_code) == ("TimeLimitExceeded", None)
    fine = _reply("accepted", exit_code=0, compile=CompileResult(ok=True, cached=True))
    assert (fine.compile_result.status, fine.compile_result.return_code) == ("Finished", 0)


def test_unknown_fields_are_ignored_and_wrong_types_are_not():
    _ask(of_a_later_version=1)
    with pytest.raises(msgspec.ValidationError, match="run_timeout"):
        _ask(run_timeout="soon")
