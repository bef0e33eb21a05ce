"""Plans: the order that makes them safe, what depends on the policy, and that nothing secret is printed."""

from __future__ import annotations

import json
from pathlib import Path

from nomad_dsec.backends.container.plan import ATTR_RDONLY, plan_container
from nomad_dsec.backends.container.spec import DirUpper, HostMount
from tests.unit.container.samples import container

V1 = ("cpu", "memory", "pids")


def plan(policy=None, **changes):
    return plan_container(container(policy, **changes), controllers=V1, unified=True)


def names(made):
    return [op.name for op in made.ops]


def test_order_of_what_must_precede_what():
    made = plan({"protected_paths": ["/bin/bash"]}, secrets={"a": "b"})
    order = names(made)
    proc = [op.step for op in made.ops].index("mount proc")
    first = {name: order.index(name) for name in order}
    last = {name: len(order) - 1 - order[::-1].index(name) for name in order}
    # joined before anything is made, so that all of it is charged; the namespace's root is then the sandbox's cgroup
    assert last["cgroup"] < first["unshare"] < first["tmpfs_upper"]
    # written, pinned and sealed while a link of the image can't lead into procfs, and before the root is taken
    assert last["file"] < first["pin"] < first["readonly"] < proc < first["mask"] < first["root"]
    assert last["mask"] < first["root"] < first["enter_userns"]
    # limits on namespaces are written inside, rights go afterwards, the filter is last but for serving
    assert first["enter_userns"] < first["sysctl"] <= last["sysctl"] < first["no_new_privs"]
    assert order[-3:] == ["caps", "seccomp", "serve"]
    assert first["landlock"] < first["no_new_privs"] < first["landlock_self"] < first["caps"]


def test_without_no_new_privs_the_filter_is_installed_while_it_may_be():
    order = names(plan({"no_new_privs": False}))
    assert "no_new_privs" not in order
    assert order[-3:] == ["seccomp", "caps", "serve"]
    serve = plan({"no_new_privs": False}).ops[-1]
    assert serve.values[2] & 1 == 0
    assert plan().ops[-1].values[2] & 1 == 1


def test_every_mask_and_sealed_path_of_the_policy_is_in_it():
    spec = container()
    made = plan_container(spec, controllers=V1, unified=True)
    assert [op.values[0] for op in made.ops if op.name == "mask"] == list(spec.policy.masked_paths)
    sealed = [op.values[0] for op in made.ops if op.name == "readonly"]
    assert sealed == [path for path in spec.policy.read_only_paths if path != "/sys"]
    (sysfs,) = [op for op in made.ops if op.name == "mount" and op.values[0] == "sysfs"]
    assert sysfs.values[3] & ATTR_RDONLY


def test_a_protected_path_is_pinned_and_must_exist():
    made = plan({"protected_paths": ["/bin/bash"]})
    (pin,) = [op for op in made.ops if op.name == "pin"]
    assert pin.values == ("/bin/bash",)
    assert ("/bin/bash", 1, ATTR_RDONLY) in [op.values for op in made.ops if op.name == "readonly"]


def test_descriptors_follow_the_spec():
    assert plan().fds == ("listen", "oom", "unified", "netns", "rootfs", "procs:cpu", "procs:memory", "procs:pids")
    disk = DirUpper(path=Path("/u"))
    made = plan(upper=disk, mounts=(HostMount(source=Path("/srv/x"), target="/x"),))
    assert made.fds[-2:] == ("layer", "mount:0")
    assert "tmpfs_upper" not in names(made)
    pure_v2 = plan_container(container(), controllers=(), unified=True)
    assert pure_v2.fds == ("listen", "oom", "unified", "netns", "rootfs")
    pure_v1 = plan_container(container(), controllers=V1, unified=False)
    assert "unified" not in pure_v1.fds
    assert pure_v1.ops[1].values[1] == ""


def test_host_mounts_are_read_only_unless_asked():
    mounts = (
        HostMount(source=Path("/srv/a"), target="/a"),
        HostMount(source=Path("/srv/b"), target="/b", read_only=False),
    )
    binds = [op for op in plan(mounts=mounts).ops if op.name == "bind"]
    assert [bool(op.values[2] & ATTR_RDONLY) for op in binds] == [True, False]


def test_the_fixed_parts_are_packed_once_for_a_policy():
    one, other = plan(uid_base=1 << 28), plan(uid_base=2 << 28, hostname="other")
    assert one.tail is other.tail
    assert one.fixed is other.fixed
    assert one.packed != other.packed


def test_what_is_printed_is_json_and_holds_no_secret():
    text = json.dumps(plan(secrets={"token": "hunter2hunter2"}).to_json())
    assert "hunter2" not in text
    assert "/run/secrets/token" in text
