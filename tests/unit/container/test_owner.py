"""Whose secrets are: a name is looked up in the image, whose links lead nowhere else."""

import pytest

from nomad_dsec.backends.container.owner import find_uid, owner_uid

PASSWD = b"root:x:0:0::/root:/bin/sh\nagent:x:1234:100::/home/agent:/bin/sh\nhuge:x:70000:1::/:\nbroken:x:12\n"


@pytest.mark.parametrize(
    ("user", "uid"),
    [
        ("", 0), ("0", 0), ("root", 0), ("1000", 1000), ("1000:1000", 1000), ("agent", 1234), ("agent:users", 1234),
        ("nobody-knows", 0), ("70000", 0), ("huge", 0), ("broken", 0), ("-1", 0), ("１", 0),
    ],
)  # fmt: skip
def test_numbers_and_names(tmp_path, user, uid):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_bytes(PASSWD)
    assert owner_uid(tmp_path, user) == uid


def test_a_link_of_the_image_does_not_lead_to_the_host(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "passwd"
    (root / "etc").mkdir(parents=True)
    outside.write_bytes(PASSWD)
    (root / "etc/passwd").symlink_to(outside)
    assert owner_uid(root, "agent") == 0
    (root / "passwd").write_bytes(PASSWD)
    (root / "etc/passwd").unlink()
    (root / "etc/passwd").symlink_to("../../../passwd")  # the kernel keeps it inside
    assert owner_uid(root, "agent") == 1234


def test_no_passwd_is_no_error(tmp_path):
    assert owner_uid(tmp_path, "agent") == 0
    assert find_uid(b"", "agent") == 0
