"""Settings: precedence, and errors that name the setting, its origin and the fix."""

from __future__ import annotations

import pytest
from libdsec.errors import UsageError

from nomad_dsec import config


def test_precedence_and_origins(tmp_path) -> None:
    file = tmp_path / "dsec.toml"
    file.write_text("[node]\nport = 1\ncpus = 3\nbackends = ['container']\n[log]\njson = false\n")
    settings = config.load(file=file, env={"DSEC_NODE_PORT": "2", "DSEC_NODE_CPUS": "4"}, flags={"node.port": "3"})
    assert settings["node.port"] == 3
    assert settings.origins["node.port"] == "flag"
    assert settings["node.cpus"] == 4.0
    assert settings.origins["node.cpus"] == "DSEC_NODE_CPUS"
    assert settings["log.json"] is False
    assert settings.origins["node.queue_max"] == "default"
    assert settings.section("log") == {"level": "info", "json": False}


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ("[node]\nprot = 1\n", "node.prot", "did you mean node.port"),
        ("[nodes]\nport = 1\n", "nodes.port", "unknown setting"),
        ("port = 1\n", "port", "unknown setting"),
        ("[node]\nport = 'x'\n", "node.port", "not a whole number"),
        ("[node]\nport = 1.5\n", "node.port", "not a whole number"),
        ("[node]\nport = true\n", "node.port", "not a whole number"),
        ("[node]\nport = 70000\n", "node.port", "above 65535"),
        ("[node]\nport = -1\n", "node.port", "below 0"),
        ("[node]\ncpus = nan\n", "node.cpus", "not a number"),
        ("[node]\nbackends = [1]\n", "node.backends", "not a list of strings"),
        ("[node]\nid = 3\n", "node.id", "not a string"),
        ("[log]\njson = 'maybe'\n", "log.json", "not true or false"),
        ("[log]\nlevel = 'loud'\n", "log.level", "none of debug"),
        ("[node\n", "config", "is not TOML"),
    ],
)
def test_bad_file(tmp_path, text: str, field: str, said: str) -> None:
    file = tmp_path / "dsec.toml"
    file.write_text(text)
    if "did you mean" in said:
        with pytest.raises(UsageError, match="unknown setting") as caught:
            config.load(file=file, env={})
        assert said in caught.value.hint
    else:
        with pytest.raises(UsageError, match=said) as caught:
            config.load(file=file, env={})
    assert caught.value.field == field


def test_bad_environment_and_flag_are_named_as_given() -> None:
    with pytest.raises(UsageError, match="DSEC_NODE_PORT"):
        config.load(env={"DSEC_NODE_PORT": "x"})
    with pytest.raises(UsageError, match="--starting-max"):
        config.load(env={}, flags={"node.starting_max": "many"})


def test_missing_file(tmp_path) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        config.load(file=tmp_path / "no.toml", env={})


def test_table_is_sane() -> None:
    assert len(config.BY_KEY) == len(config.TABLE)
    config.load(env={})
    for row in config.TABLE:
        assert row.help
        assert isinstance(row.default, row.kind)
