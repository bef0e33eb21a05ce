"""ids, errors on the wire, decoding with named fields."""

from __future__ import annotations

import pickle

import msgspec
import pytest
from libdsec import errors, wire

from nomad_dsec import ids
from nomad_dsec.httpd import decode_json


def test_ids_carry_their_node() -> None:
    made = {ids.new_sandbox_id("node-a-1") for _ in range(100)}
    assert len(made) == 100
    assert {ids.node_of(one) for one in made} == {"node-a-1"}


@pytest.mark.parametrize(
    "text", ["", "sb-", "sb-x", "sb-a-ABCDEFGHIJKLMNOP", "sb-a-abcdefghijklmno1", "../x", "sb-a-abcdefghijklmnop\n"]
)
def test_bad_ids(text: str) -> None:
    with pytest.raises(errors.UsageError) as caught:
        ids.node_of(text)
    assert caught.value.field == "sandbox"


@pytest.mark.parametrize("text", ["", "-a", "a-", "A", "a" * 33, "a.b", "a/b"])
def test_bad_node_ids(text: str) -> None:
    with pytest.raises(errors.UsageError):
        ids.check_node(text)


@pytest.mark.parametrize("kind", list(errors._BY_KIND.values()))
def test_errors_survive_the_wire_and_pickle(kind: type[errors.DsecError]) -> None:
    error = kind("some_code", "it broke", hint="mend it", field="image", retry_after_s=2.0, details={"n": 1})
    over = errors.error_from_body(msgspec.json.decode(msgspec.json.encode(error.to_body()), type=errors.ErrorBody))
    again = pickle.loads(pickle.dumps(error))
    for copy in (over, again):
        assert type(copy) is kind
        assert copy.to_body() == error.to_body()


def test_an_unknown_kind_is_a_platform_error() -> None:
    body = errors.ErrorBody(kind="os.system", code="x", message="y")
    assert type(errors.error_from_body(body)) is errors.PlatformError


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"image": "x", "cpu": 1}', "cpu"),
        ("{}", "image"),
        ('{"image": "x", "cpus": "two"}', "cpus"),
        ('{"image": "x", "cpus": 0}', "cpus"),
        ('{"image": "x", "memory_mib": 1}', "memory_mib"),
        ('{"image": "x", "timeout_s": -1}', "timeout_s"),
        ('{"image": "x", "backend": "lxc"}', "backend"),
        ('{"image": "x", "count": 0}', "count"),
        ('{"image": "x", "env": {"A": 1}}', "env"),
        ("[", ""),
        ("\xff", ""),
        ('{"policy":' * 5000, ""),
    ],
)
def test_decode_names_the_field(text: str, field: str) -> None:
    with pytest.raises(errors.UsageError) as caught:
        decode_json(text.encode("latin-1"), wire.CreateRequest)
    assert caught.value.field.startswith(field)
    assert caught.value.message


def test_replies_ignore_unknown_fields() -> None:
    assert msgspec.json.decode(b'{"ok": true, "new": 1}', type=wire.Ok).ok


def test_an_error_about_a_name_that_is_not_utf8_can_be_told() -> None:
    name = b"/tmp/\xff".decode("utf-8", "surrogateescape")
    error = errors.NotFoundError("not_found", f"{name} is not there", field=name, details={name: [name], "n": 1})
    told = msgspec.json.decode(msgspec.json.encode(error.to_body()))
    spelt = "/tmp/\\xff"
    assert (told["message"], told["field"], told["details"]) == (
        f"{spelt} is not there",
        spelt,
        {spelt: [spelt], "n": 1},
    )
    assert errors.UsageError("x", "\ud800").to_body().message == "\\ud800"
