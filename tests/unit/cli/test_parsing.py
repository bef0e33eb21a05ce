"""Flags and errors of `dsec`: short, on stderr, naming the flag; stdout stays data."""

from __future__ import annotations

import argparse
import io
import json

import pytest
from libdsec.errors import CapacityError, DeniedError, PlatformError, UsageError
from libdsec.results import ExecResult
from rich.console import Console

from nomad_dsec.cli import main as cli
from nomad_dsec.cli import output, progress, sandbox_exec
from nomad_dsec.cli.image import import_source
from nomad_dsec.cli.sandbox import pairs
from nomad_dsec.cli.sandbox_cp import split
from nomad_dsec.cli.sandbox_exec import exit_code_of


@pytest.mark.parametrize("noun", cli.NOUNS)
def test_every_noun_parses_and_explains_itself(noun, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([noun, "--help"])
    assert caught.value.code == 0
    assert noun in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["sandbox", "create", "i", "--cpus", "many"], "--cpus"),
        (["sandbox", "create"], "image"),
        (["sandbox", "exec", "x"], "COMMAND"),
        (["sandbox", "creat", "i"], "creat"),
        (["nope"], "nope"),
        (["dev", "run", "--prot", "1"], "--prot"),
    ],
)
def test_a_usage_error_is_two_lines_and_exit_2(argv, names, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert names in shown.err
    assert len(shown.err.strip().splitlines()) == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("u", "wrong", field="--x"), 2),
        (CapacityError("c", "full", details={"refusals": {"memory": 3}}), 3),
        (DeniedError("d", "no"), 4),
        (PlatformError("p", "broken"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_exit_codes(error, code, monkeypatch, capsys):
    def fails(_args: argparse.Namespace) -> int:
        raise error

    parser = argparse.ArgumentParser()
    parser.set_defaults(run=fails)
    monkeypatch.setattr(cli, "build_parser", lambda _nouns: parser)
    assert cli.main([]) == code
    assert capsys.readouterr().out == ""


def test_an_error_under_a_task_group_is_a_sentence_too(monkeypatch, capsys):
    def run(_args):
        raise ExceptionGroup("tasks", [ExceptionGroup("inner", [UsageError("command_not_found", "no such program")])])

    monkeypatch.setattr(sandbox_exec, "run_exec", run)
    assert cli.main(["sandbox", "exec", "sb-n-aaaaaaaaaaaaaaaa", "nosuch"]) == 127
    assert capsys.readouterr().err == "dsec: no such program\n"


def test_a_bug_under_a_task_group_is_not_hidden(monkeypatch):
    def run(_args):
        raise ExceptionGroup("tasks", [ValueError("a bug")])

    monkeypatch.setattr(sandbox_exec, "run_exec", run)
    with pytest.raises(ExceptionGroup):
        cli.main(["sandbox", "exec", "sb-n-aaaaaaaaaaaaaaaa", "nosuch"])


@pytest.mark.parametrize(
    ("argv", "prog", "near"),
    [
        (["snadbox"], "dsec:", "'sandbox'"),
        (["sandbox", "creat", "i"], "dsec sandbox:", "'create'"),
        (["dev", "stp"], "dsec dev:", "'stop'"),
        (["sandbox", "ls", "extra"], "dsec sandbox ls:", ""),
        (["image", "import", "--nmae", "x"], "dsec image import:", ""),
    ],
)
def test_the_verb_that_was_reached_says_what_is_wrong(argv, prog, near, capsys):
    with pytest.raises(SystemExit):
        cli.main(argv)
    told = capsys.readouterr().err
    assert told.startswith(prog)
    assert near in told
    assert ("did you mean" in told) == bool(near)


def test_every_flag_explains_itself():
    silent = [
        f"{path} {name}" for path, name, text in _arguments(cli.build_parser(list(cli.NOUNS)), "dsec") if not text
    ]
    assert silent == []


def _arguments(parser, path):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from _arguments(child, f"{path} {name}")
        else:
            yield path, action.option_strings or action.dest, action.help


@pytest.mark.parametrize(
    ("argv", "source"),
    [
        (["debootstrap:bookworm", "debian-dev"], "debootstrap:bookworm"),
        (["debootstrap:bookworm", "debian-dev", "--include", "python3"], "debootstrap:bookworm?include=python3"),
        (
            ["debootstrap:bookworm?mirror=http://m/", "d", "--include", "a,b"],
            "debootstrap:bookworm?mirror=http://m/&include=a,b",
        ),
        (["--debootstrap", "bookworm", "--include", "g++", "--name", "d"], "debootstrap:bookworm?include=g++"),
        (["docker://python:3.12", "--name", "p"], "docker://python:3.12"),
    ],
)
def test_sources_of_an_import(argv, source):
    args = cli.build_parser(["image"]).parse_args(["image", "import", *argv])
    assert import_source(args) == source


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        ([], "SOURCE"),
        (["dir:/x", "--debootstrap", "bookworm"], "--debootstrap"),
        (["dir:/x", "--include", "python3"], "--include"),
        (["dir:/x", "one", "--name", "other"], "--name"),
    ],
)
def test_imports_that_contradict_themselves(argv, field):
    args = cli.build_parser(["image"]).parse_args(["image", "import", *argv])
    with pytest.raises(UsageError) as caught:
        import_source(args)
    assert caught.value.field == field


@pytest.mark.parametrize("argv", [["team"], ["team", "--unlimited", "--cpus", "2"]])
def test_a_quota_is_bounds_or_none(argv, capsys):
    assert cli.main(["quota", "set", *argv]) == 2
    assert "--unlimited" in capsys.readouterr().err


def test_refusals_are_counted_for_people(capsys):
    cli.say_error(CapacityError("c", "full", hint="wait", details={"refusals": {"memory": 3, "draining": 1}}))
    assert capsys.readouterr().err.splitlines() == ["dsec: full", "  refusals: memory=3, draining=1", "  wait"]


def test_config_show_says_where_a_value_came_from(monkeypatch, capsys):
    monkeypatch.setenv("DSEC_GATEWAY_PORT", "9999")
    monkeypatch.setenv("DSEC_GATEWAY_ADMIN_KEY", "very secret")
    monkeypatch.setenv("DSEC_NODE_TOKEN", "env:WHERE")
    monkeypatch.setenv("DSEC_GATEWAY_NODES", "unix:/n.sock,http://h:1#very secret,http://h:2#vault:secret/n#t")
    monkeypatch.setenv("DSEC_REGISTRY_LOGINS", "ghcr.io=vault:secret/r#login")
    assert cli.main(["config", "show", "--json"]) == 0
    text = capsys.readouterr().out
    rows = {row["key"]: row for row in json.loads(text)}
    assert rows["gateway.port"]["value"] == 9999
    assert rows["gateway.port"]["origin"] == "DSEC_GATEWAY_PORT"
    assert rows["gateway.host"]["origin"] == "default"
    assert "very secret" not in text
    assert rows["gateway.admin_key"]["value"] == "(set)"
    assert rows["node.token"]["value"] == "env:WHERE"  # where it is, is none
    assert rows["gateway.nodes"]["value"] == ["unix:/n.sock", "http://h:1#(set)", "http://h:2#vault:secret/n#t"]
    assert rows["registry.logins"]["value"] == ["ghcr.io=vault:secret/r#login"]


def test_without_a_gateway_the_error_says_what_to_do(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("DSEC_ENDPOINT", raising=False)
    assert cli.main(["sandbox", "ls", "--data", str(tmp_path)]) == 2
    assert "dsec dev" in capsys.readouterr().err


def test_pairs():
    assert pairs(["a=b=c", "d="], "--env") == {"a": "b=c", "d": ""}
    with pytest.raises(UsageError, match="--env"):
        pairs(["novalue"], "--env")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("sb-n1-abcdefghijklmnop:/x", ("sb-n1-abcdefghijklmnop", "/x")),
        ("sb-n1-abcdefghijklmnop:", ("sb-n1-abcdefghijklmnop", "/")),
        ("C:/x", ("", "C:/x")),
        ("-", ("", "-")),
    ],
)
def test_sides_of_a_copy(text, parts):
    assert split(text) == parts


@pytest.mark.parametrize(
    ("fields", "code"),
    [({"exit_code": 3}, 3), ({"exit_code": 255}, 255), ({"signal": 9}, 137), ({"signal": 9, "timed_out": True}, 124)],
)
def test_the_programs_end_is_ours(fields, code):
    assert exit_code_of(ExecResult(exec_id="x", **fields)) == code


def test_sizes_and_spans():
    assert [output.size(n) for n in (0, 1023, 1536, 5 << 30)] == ["0 B", "1023 B", "1.5 KiB", "5.0 GiB"]
    assert [output.span(n) for n in (0, 59.6, 3661, 90_000)] == ["0s", "1m00", "1h01", "1d01"]
    assert output.age(None) == "-"


def test_a_table_has_aligned_columns(capsys):
    output.print_table(("id", "n"), [["long-name", 1], ["x", 22]])
    assert capsys.readouterr().out == "ID         N\nlong-name  1\nx          22\n"


def test_two_directories_are_two_nodes(tmp_path):
    from nomad_dsec.cli.dev import default_node
    from nomad_dsec.dev.layout import Layout
    from nomad_dsec.ids import check_node

    first, second = default_node(Layout(tmp_path / "a")), default_node(Layout(tmp_path / "b"))
    assert first != second, "each node sweeps the kernel objects that bear its name"
    assert first == check_node(default_node(Layout(tmp_path / "a")))


@pytest.mark.parametrize("noun", ["node", "gateway"])
def test_daemons_parse_their_own_flags(noun, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([noun, "run", "--help"])
    assert caught.value.code == 0
    assert "--port" in capsys.readouterr().out
    assert cli.main([noun, "run", "--port", "70000"]) == 2
    assert "--port" in capsys.readouterr().err


@pytest.mark.parametrize("width", [80, 140])
def test_a_long_note_squeezes_no_title(width):
    console = Console(width=width, file=io.StringIO())
    titles = ("latency: creates and execs", "judging: submissions in several languages")
    with progress.bars(console) as shown:
        for title, note in zip(titles, ("160 / 160", "25 / 25: " + "accepted 7, " * 20), strict=True):
            shown.update(shown.add_task(title, total=1, note=note), completed=1)
    lines = console.file.getvalue()
    assert all(text in lines for text in (*titles, "160 / 160", "25 / 25"))


@pytest.mark.parametrize("verb", [["ls"], ["inspect", "x"], ["verify", "x"], ["rm", "x"], ["gc"]])
def test_looking_at_a_store_that_is_not_there_makes_none(tmp_path, verb, capsys):
    assert cli.main(["image", *verb, "--store", str(tmp_path / "none")]) == 2
    assert "--store" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
