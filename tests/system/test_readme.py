"""The README's commands and snippets are run, in its order, against a `dsec dev` of their own: what it shows works."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nomad_dsec.cli.demo import PACKAGES
from tests.kit.abilities import needs
from tests.kit.devstack import REPO, DevStack, image_store
from tests.kit.documents import DSEC, blocks, dsec_calls

pytestmark = [pytest.mark.timeout(300), needs("root", "erofs", "filters", "debootstrap", "debian-packages")]
# What the test does in another way: it has its environment, and its image from the store that tests share.
ELSEWHERE = ("make ", "pip install", f"{DSEC} image import")
FILES = {
    "solution.py": "a, b = map(int, input().split())\nprint(a + b)\n",
    "solution.cpp": "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b << '\\n'; }\n",
    "input.txt": "1 2\n",
    "tests/1.in": "1 2\n",
    "tests/1.out": "3\n",
}
SAID = {
    "exec $SANDBOX -- python3": "42\n",
    "top --once": "1 sandbox on 1 node",
    "fncall run solution.cpp": "3\n",
    "fncall judge solution.py": "accepted",
    "libdsec.Sandbox.create": "0 hello from ",
    "FnCall.run(": "accepted cba",
    "FnCall.submit(": "\naccepted\n",
    "run_many(": "\n99 accepted",
}


def test_the_image_it_builds_holds_what_it_runs() -> None:
    (line,) = [argv for argv in dsec_calls("README.md") if argv[:2] == ["image", "import"] and len(argv) > 2]
    given = set(line[line.index("--include") + 1].split(","))
    assert {"python3", "g++"} <= given
    assert given <= set(PACKAGES.split(",")), "the image of the tests stands for it"


def test_all_that_it_shows_runs(tmp_path) -> None:
    stack = DevStack(tmp_path / "d")
    place = tmp_path / "place"
    for name, text in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    script = _script(place, image_store())
    env = {key: value for key, value in os.environ.items() if not key.startswith("DSEC_")}
    env |= {"DSEC_DATA": str(stack.data), "PYTHONPATH": f"{REPO}:{REPO / 'sdk'}"}
    try:
        done = subprocess.run(
            ["/bin/bash", "-euxo", "pipefail", str(script)],
            cwd=place,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:] + stack.logs()
    finally:
        stack.stop()
    shown = script.read_text()
    for command, said in SAID.items():
        assert command in shown, "the README no longer shows it: change this table"
        assert said in done.stdout, (command, done.stdout)
    assert stack.pids() == []


def _script(place, store):
    """Console blocks as they are, Python blocks by files; `dev stop` comes last, since later blocks need a gateway."""
    lines: list[str] = []
    for number, block in enumerate(blocks("README.md")):
        if block.language == "python":
            snippet = place / f"snippet{number}.py"
            snippet.write_text(block.text)
            lines.append(f"{sys.executable} {snippet}  # {_words(block.text)}")
        lines += [line for line in block.commands if not line.startswith(ELSEWHERE)]
    start = [line for line in lines if f"{DSEC} dev --detach" in line]
    env = [line for line in lines if line.startswith("eval ")]
    stop = [line for line in lines if line == f"{DSEC} dev stop"]
    assert (len(start), len(env), len(stop)) == (1, 1, 1)
    middle = [line for line in lines if line not in (*start, *env, *stop)]
    text = "\n".join([f"{start[0]} --images {store}", *env, *middle, *stop, ""])
    script = place / "readme.sh"
    script.write_text(text.replace(DSEC, f"{sys.executable} -m nomad_dsec.cli"))
    return script


def _words(text: str) -> str:
    return " ".join(word for word in SAID if word in text)
