"""Languages beyond those of the development image, and what a compiler is given once an image.

The first part needs an image that takes two minutes to make and 1 GB to fetch, so it runs where somebody made it:
    dsec image import debootstrap:bookworm?include=python3,gcc,g++,rustc,golang-go,openjdk-17-jdk-headless,...
with nodejs and node-typescript too, under the name `debian-languages`, in a store that DSEC_TEST_LANGUAGES names.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from libdsec.errors import UsageError
from libdsec.wire_fncall import FnTest

from nomad_dsec.backends.fncall import languages
from nomad_dsec.backends.fncall.languages import Language, find_language
from tests.kit.abilities import needs
from tests.kit.calls import open_call_host

if TYPE_CHECKING:
    from tests.kit.calls import CallHost

pytestmark = [
    needs("root", "erofs", "cgroup", "filters", "debootstrap", "debian-packages"),
    pytest.mark.leaks_ok,
    pytest.mark.timeout(300),
]
DOUBLE = {
    "c": '#include <stdio.h>\nint main(void) { int n; scanf("%d", &n); printf("%d\\n", 2 * n); return 0; }',
    "cpp": "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << 2 * n; }",
    "rust": (
        "use std::io::*;\nfn main() { let mut s = String::new(); stdin().read_to_string(&mut s).unwrap();\n"
        'println!("{}", 2 * s.trim().parse::<i64>().unwrap()); }'
    ),
    "go": 'package main\nimport "fmt"\nfunc main() { var n int; fmt.Scan(&n); fmt.Println(2 * n) }',
    "java": (
        "import java.util.*;\npublic class Main { public static void main(String[] a) {"
        " System.out.println(2 * new Scanner(System.in).nextInt()); } }"
    ),
    "javascript": 'console.log(2 * parseInt(require("fs").readFileSync(0, "utf8")))',
    "typescript": (
        'declare var require: any;\nconst n: number = parseInt(require("fs").readFileSync(0, "utf8"));\n'
        "console.log(2 * n);"
    ),
    "python": "print(2 * int(input()))",
    "bash": "read n; echo $((2 * n))",
    "sh": "read n; echo $((2 * n))",
}
WRONG = {
    "rust": "fn main() { let n: i32 = true; }",
    "go": "package main\nfunc main() { var unused int }",
    "java": "public class Main { int f() { return true; } }",
    "typescript": "const n: number = true;",
}


@needs("language-image")
async def test_every_language_of_the_table(tmp_path: Path) -> None:
    """Each doubles a number, is judged by tests, says when it does not compile, and is compiled once."""
    assert set(DOUBLE) == {row.name for row in languages.TABLE}
    store = Path(os.environ["DSEC_TEST_LANGUAGES"])
    async with open_call_host(tmp_path, images=store, image="debian-languages") as host:
        listed = await host.lanes.languages(host.image, namespace="test", digest="")
        assert [info.name for info in listed.languages if not info.available] == []
        tests = [FnTest(stdin=str(n).encode(), expected=str(2 * n).encode()) for n in (4, 21)]
        for name, code in DOUBLE.items():
            judged = await host.submit(tests, language=name, code=code)
            assert (judged.verdict, judged.passed) == ("accepted", 2), (name, judged)
            again = await host.run(language=name, code=code, stdin=b"5", expected=b"11")
            assert again.verdict == "wrong_answer", (name, again)
            assert again.compile is None or again.compile.cached
        for name, code in WRONG.items():
            broken = await host.run(language=name, code=code)
            assert (broken.verdict, broken.stdout) == ("compile_error", b""), (name, broken)
            assert broken.message


KEPT = Language(
    name="kept",
    source="main.kept",
    warm=("sh", "-c", 'mkdir /tmp/kept && date +%N > /tmp/kept/made && tar -cf "$0" -C /tmp kept', "{binary}"),
    # "Compiles" to a script that prints what the compiler was given, and tries to change that for the next.
    compile=(
        "sh",
        "-c",
        'made=$(cat /tmp/kept/made) || exit 3; echo spoilt > /tmp/kept/made; echo "echo $made" > main.sh',
    ),
    run=("sh", "main.sh"),
    artefacts=("main.sh",),
    probe=("sh", "-c", "true"),
)


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch):
    """Puts a row into the table for one test."""

    def offer(row: Language) -> None:
        monkeypatch.setitem(languages._BY_NAME, row.name, row)

    return offer


async def test_what_a_compiler_is_given_is_made_once_an_image(calls: CallHost, offered) -> None:
    """Two sources are compiled, each with what the first one's image made; no compilation changes it for another."""
    offered(KEPT)
    first = await calls.run(language="kept", code="one")
    second = await calls.run(language="kept", code="two")
    assert (first.verdict, second.verdict) == ("accepted", "accepted"), first
    assert first.stdout.strip().isdigit()
    assert first.stdout == second.stdout
    assert not second.compile.cached  # it was compiled anew, behind the same gift
    # A request's environment has no part in it.
    third = await calls.run(language="kept", code="three", env={"PATH": "/nowhere:/bin:/usr/bin", "HOME": "/dev"})
    assert third.stdout == first.stdout


async def test_a_compiler_that_can_not_be_warmed_up_compiles_all_the_same(calls: CallHost, offered) -> None:
    """The warm-up is an economy and no condition; one that failed is not tried for every compilation."""
    cold = replace(
        KEPT,
        name="cold",
        warm=("sh", "-c", "exit 1", "{binary}"),
        compile=("sh", "-c", "echo 'echo cold' > main.sh"),
    )
    offered(cold)
    for code in ("one", "two"):
        result = await calls.run(language="cold", code=code)
        assert (result.verdict, result.stdout) == ("accepted", b"cold\n"), result


async def test_a_missing_compiler_is_told_before_it_is_warmed_up(calls: CallHost) -> None:
    """As of every language: the image lacks it, which is no compile_error."""
    assert find_language("go").warm
    with pytest.raises(UsageError) as missing:
        await calls.run(language="go", code=DOUBLE["go"])
    assert (missing.value.code, missing.value.field) == ("language_unavailable", "language")
