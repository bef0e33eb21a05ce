"""P40: what Nomad's encoder may send for each kind of setting, and what the schema says of it."""

from __future__ import annotations

from dataclasses import dataclass

import msgpack
import pytest
from dsec_plugins.drivers.configs import FncallTask, PluginConfig, PoolTask, SandboxTask
from dsec_plugins.drivers.schema import ConfigError, decode, document, setting, spec_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    name: str = setting("a name", required=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class All:
    text: str = setting("text", "x")
    flag: bool = setting("flag", False)
    whole: int = setting("whole", 1)
    part: float | None = setting("part", None)
    many: list[str] = setting("many", [])
    pairs: dict[str, str] = setting("pairs", {})
    blocks: list[Inner] = setting("blocks", [])


def sent(**values):
    return decode(All, msgpack.packb(values))


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"part": "0.1"}, "part", 0.1),  # what no double holds comes as decimal text
        ({"part": 0.5}, "part", 0.5),
        ({"part": 2}, "part", 2.0),
        ({"whole": 7}, "whole", 7),
        ({"whole": "123456789012345678"}, "whole", 123456789012345678),
        ({"text": None}, "text", "x"),
        ({"many": ["a"]}, "many", ["a"]),
        ({"pairs": {"a": "b"}}, "pairs", {"a": "b"}),
        ({"blocks": [{"name": "n"}]}, "blocks", [Inner(name="n")]),
        ({"blocks": []}, "blocks", []),
    ],
)
def test_values_arrive(given, name, value):
    assert getattr(sent(**given), name) == value


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"text": 1}, "config.text"),
        ({"flag": "yes"}, "config.flag"),
        ({"whole": 1.5}, "config.whole"),
        ({"whole": "much"}, "config.whole"),
        ({"part": True}, "config.part"),
        ({"many": "a"}, "config.many"),
        ({"pairs": {"a": 1}}, "config.pairs"),
        ({"blocks": [{}]}, r"config.blocks\[0\].name"),
        ({"colour": "red"}, "config.colour"),
    ],
)
def test_wrong_values_name_the_field(given, said):
    with pytest.raises(ConfigError, match=said):
        sent(**given)


def test_nothing_sent_is_all_defaults():
    assert decode(All, b"") == All()


@pytest.mark.parametrize("kind", [All, PluginConfig, SandboxTask, FncallTask, PoolTask])
def test_schema_and_documentation_cover_every_field(kind):
    spec = spec_of(kind)
    names = {row[0] for row in document(kind)}
    assert set(spec.object.attributes) == names
    for name, child in spec.object.attributes.items():
        assert child.WhichOneof("block") in ("Attr", "block_list"), name
        if child.HasField("Attr"):
            assert child.Attr.name == name
            assert child.Attr.type
