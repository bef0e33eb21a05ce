"""Arguments are checked before anything is sent, and the error names the argument."""

from __future__ import annotations

import pickle

import pytest
from libdsec._requests import create_request, exec_request
from libdsec._settings import load_settings
from libdsec.errors import NotSupported, UsageError
from libdsec.results import CommandFailed, ExecResult


def _create(**options):
    return create_request("debian", snapshot=None, count=1, all_or_none=True, options=options)


def test_a_create_has_a_key_of_its_own():
    assert _create().idempotency_key != _create().idempotency_key
    assert _create(idempotency_key="mine").idempotency_key == "mine"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cpus": -1}, "cpus"),
        ({"memory_mib": "much"}, "memory_mib"),
        ({"memmory_mib": 512}, "memmory_mib"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"qos": "best"}, "qos"),
        ({"env": {"A": 7}}, "env"),
    ],
)
def test_a_bad_option_is_named(options, field):
    with pytest.raises(UsageError) as caught:
        _create(**options)
    assert caught.value.field.split("[")[0].split(".")[0] == field


def test_count_is_called_n_for_the_user():
    with pytest.raises(UsageError) as caught:
        create_request("debian", snapshot=None, count=0, all_or_none=True, options={})
    assert caught.value.field == "n"


def test_no_image_and_snapshots():
    with pytest.raises(UsageError, match="field image"):
        create_request("", snapshot=None, count=1, all_or_none=True, options={})
    with pytest.raises(NotSupported):
        create_request("debian", snapshot="s", count=1, all_or_none=True, options={})


@pytest.mark.parametrize("cmd", ["", [], [""], ["a\0b"], "a\0b", [7]])
def test_a_bad_command_is_named(cmd):
    with pytest.raises(UsageError) as caught:
        exec_request(cmd)
    assert caught.value.field.startswith("cmd")


def test_settings_come_from_arguments_then_environment(monkeypatch):
    monkeypatch.setenv("DSEC_ENDPOINT", "http://there:1/")
    monkeypatch.setenv("DSEC_API_KEY", "dsk_env")
    assert load_settings().endpoint == "http://there:1"
    assert load_settings("unix:/x", "k").api_key == "k"
    assert "dsk_env" not in repr(load_settings())
    monkeypatch.delenv("DSEC_ENDPOINT")
    with pytest.raises(UsageError, match="DSEC_ENDPOINT"):
        load_settings()
    with pytest.raises(UsageError, match="endpoint"):
        load_settings("localhost:80")
    with pytest.raises(UsageError, match="api_key"):
        load_settings("http://x", "a\r\nb")


def test_results_are_told_apart():
    ends = [
        ExecResult(exec_id="x", exit_code=255),
        ExecResult(exec_id="x", signal=9),
        ExecResult(exec_id="x", signal=9, timed_out=True),
        ExecResult(exec_id="x", signal=9, oom_killed=True),
    ]
    assert len({end.describe() for end in ends}) == 4
    assert not any(end.ok for end in ends)
    assert ExecResult(exec_id="x", exit_code=0).check().ok


def test_text_is_decoded_whole_and_never_fails():
    result = ExecResult(exec_id="x", exit_code=1, stdout_bytes="ä".encode() + b"\xff")
    assert result.stdout == "ä\ufffd"
    with pytest.raises(CommandFailed) as caught:
        result.check()
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.result == result
