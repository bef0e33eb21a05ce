"""P37: what an agent would trip over in its plugin_dir is never written, and what lies there is told."""

from __future__ import annotations

import os
import stat

import pytest
from dsec_plugins import install


@pytest.fixture(autouse=True)
def _no_subprocess(monkeypatch):
    monkeypatch.setattr(install, "check_interpreter", lambda interpreter: None)


def test_entries_are_whole_executable_and_alone(tmp_path):
    (tmp_path / ".dsec-pool.new").write_text("left by a crash")
    for _ in range(2):
        paths = install.install(tmp_path, interpreter="/usr/bin/python3")
    assert sorted(os.listdir(tmp_path)) == sorted(install.NAMES)
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == 0o755
        assert path.read_text().splitlines()[0] == "#!/usr/bin/python3 -IBu"
        assert path.name in path.read_text()
    assert install.problems_in(tmp_path) == []


def test_dangers_are_told(tmp_path):
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    (tmp_path / ".x").write_text("")
    (tmp_path / ".x").chmod(0o755)
    found = install.problems_in(tmp_path)
    assert len(found) == 2
    assert "link to nowhere" in " ".join(found)


@pytest.mark.parametrize("interpreter", ["/a b/python", "/" + "x" * 300])
def test_an_interpreter_that_no_shebang_holds_is_refused(tmp_path, interpreter):
    with pytest.raises(install.InstallError, match="first line"):
        install.install(tmp_path, interpreter=interpreter)
    assert os.listdir(tmp_path) == []


def test_an_unknown_driver_is_refused(tmp_path):
    with pytest.raises(install.InstallError, match="dsec-nothing"):
        install.install(tmp_path, names=("dsec-nothing",))
