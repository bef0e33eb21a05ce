"""Enforced or refused: what becomes of each clause on hosts that lack something."""

import json

import pytest
from dsec_policies.abilities import ABILITIES, HostAbilities
from dsec_policies.capabilities import BITS, mask_of, names_of
from dsec_policies.clauses import CLAUSES
from dsec_policies.compile import clauses_of, compile_policy
from dsec_policies.compiled import CompiledPolicy
from dsec_policies.describe import describe
from dsec_policies.errors import PolicyError
from dsec_policies.forbidden import probe_commands
from dsec_policies.landlock import compile_landlock
from dsec_policies.model import Policy, parse_policy
from dsec_policies.profiles import DEFAULT, PROFILES
from dsec_policies.syscalls_x86_64 import NUMBERS

EVERYTHING = HostAbilities.assumed()
FULL = parse_policy({"profile": "debug", "network": "open", "protected_paths": ["/bin/bash"], "nofile": 65536})


@pytest.mark.parametrize("policy", [Policy(), FULL, Policy(network="open"), Policy(no_new_privs=False)])
def test_each_clause_is_held_by_a_layer(policy: Policy) -> None:
    compiled = compile_policy(policy, EVERYTHING)
    assert [item.clause for item in compiled.enforced] == list(clauses_of(policy))
    assert all(item.layers for item in compiled.enforced)
    assert not compiled.unenforced


CONDITIONAL = [name for name, clause in CLAUSES.items() if all(layer.needs for layer in clause.layers)]


@pytest.mark.parametrize("clause", CONDITIONAL)
def test_a_clause_without_its_layers_refuses(clause: str) -> None:
    """The heart of the room: nothing is dropped in silence, and the host's own reason is part of the refusal."""
    needs = {name for layer in CLAUSES[clause].layers for name in layer.needs}
    policy = Policy(network="none" if clause == "network_none" else "open", protected_paths=("/bin/bash",))
    host = HostAbilities.assumed(without=tuple(sorted(needs)))
    with pytest.raises(PolicyError, match="assumed") as caught:
        compile_policy(policy, host)
    assert caught.value.code == "policy_unenforceable"
    assert caught.value.field in CLAUSES


@pytest.mark.parametrize("clause", [name for name in CONDITIONAL if CLAUSES[name].may_be_advisory])
def test_what_may_be_advisory_never_opens_more_than_itself(clause: str) -> None:
    """Doing without one clause leaves every other one held or refused."""
    policy = Policy(protected_paths=("/bin/bash",), advisory=frozenset({clause}))
    for layer in CLAUSES[clause].layers:
        try:
            compiled = compile_policy(policy, HostAbilities.assumed(without=layer.needs))
        except PolicyError as error:
            assert error.field != clause
        else:
            held = {item.clause for item in compiled.enforced} | {item.clause for item in compiled.unenforced}
            assert held == set(clauses_of(policy))
            assert {item.clause for item in compiled.unenforced} <= {clause}


def test_an_advisory_clause_is_reported_as_unenforced() -> None:
    host = HostAbilities.assumed(without=("pid_namespaces", "landlock_scopes"))
    with pytest.raises(PolicyError, match=r"policy\.advisory"):
        compile_policy(Policy(), host)
    compiled = compile_policy(Policy(advisory=frozenset({"signals"})), host)
    assert [item.clause for item in compiled.unenforced] == ["signals"]
    assert "signals" not in {item.clause for item in compiled.enforced}
    shown = describe(compiled)
    assert shown["unenforced"][0]["clause"] == "signals"
    assert any("no signal to a process outside" in hole for hole in shown["holes"])


def test_advisory_changes_nothing_where_the_clause_can_be_had() -> None:
    compiled = compile_policy(Policy(advisory=frozenset({"signals"})), EVERYTHING)
    assert not compiled.unenforced


def test_a_layer_less_is_still_enforced_and_shown() -> None:
    """Debian's 6.1 kernel has no Landlock scopes: the namespaces hold, and the policy says that only they do."""
    compiled = compile_policy(Policy(), HostAbilities.assumed(without=("landlock_scopes",), landlock_abi=2))
    layers = {item.clause: item.layers for item in compiled.enforced}
    assert layers["abstract_sockets"] == ("network namespace",)
    assert compiled.landlock.is_empty


@pytest.mark.parametrize("policy", [Policy(), FULL])
@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_compiled_policies_survive_json(policy: Policy, arch: str) -> None:
    compiled = compile_policy(policy, HostAbilities.assumed(arch=arch))
    text = json.dumps(compiled.to_json())
    assert CompiledPolicy.from_json(json.loads(text)) == compiled
    assert CompiledPolicy.from_json(json.loads(text)).digest == compiled.digest


def test_digests_tell_policies_apart() -> None:
    policies = [Policy(), FULL, Policy(network="open"), Policy(profile="debug"), Policy(protected_paths=("/bin/sh",))]
    assert len({compile_policy(policy, EVERYTHING).digest for policy in policies}) == len(policies)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(PolicyError, match="riscv64"):
        compile_policy(Policy(), HostAbilities.assumed(arch="riscv64"))


def test_abilities_survive_json() -> None:
    host = HostAbilities.assumed(without=("nftables",))
    assert HostAbilities.from_json(json.loads(json.dumps(host.to_json()))) == host
    with pytest.raises(KeyError):
        host.has("nftable")


def test_every_layer_names_known_abilities() -> None:
    for clause in CLAUSES.values():
        for layer in clause.layers:
            assert set(layer.needs) <= set(ABILITIES)


def test_capabilities_of_the_default_profile() -> None:
    compiled = compile_policy(Policy(), EVERYTHING)
    docker = """chown dac_override fowner fsetid kill setgid setuid setpcap net_bind_service net_raw sys_chroot mknod
    audit_write setfcap""".split()
    assert set(names_of(compiled.capabilities)) == set(docker) - {"mknod", "net_raw", "setpcap", "audit_write"}
    assert compiled.capabilities & compiled.init_capabilities == compiled.capabilities
    assert compiled.capabilities != compiled.init_capabilities, "PID 1 must hold more, or ptrace lets its users in"
    assert not compiled.init_capabilities & mask_of(["sys_admin", "sys_module", "sys_rawio", "bpf", "net_admin"])


@pytest.mark.parametrize("name", PROFILES)
def test_pid_1_holds_more_than_any_exec(name: str) -> None:
    assert PROFILES[name].capabilities < PROFILES[name].init_capabilities


def test_capability_names_and_bits() -> None:
    assert BITS["sys_admin"] == 21
    assert BITS["checkpoint_restore"] == 40
    assert mask_of(["CAP_CHOWN", "chown", "Kill"]) == 0b100001
    assert names_of(1 << 63 | 1) == ("chown", "bit63")
    with pytest.raises(KeyError):
        mask_of(["root"])


def test_kpage_files_are_masked() -> None:
    """Docker's list forgets them."""
    assert {"/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags"} <= set(DEFAULT.masked_paths)


def test_nofile_replaces_only_its_limit() -> None:
    limits = {name: (soft, hard) for name, soft, hard in compile_policy(FULL, EVERYTHING).rlimits}
    assert limits["NOFILE"] == (65536, 65536)
    assert limits["CORE"] == (0, 0)


def test_landlock_takes_scopes_only_where_the_kernel_knows_them() -> None:
    assert compile_landlock(("signal",), abi=5).is_empty
    assert compile_landlock(("signal", "abstract_unix_socket"), abi=6).scoped == 3
    assert len(compile_landlock(("signal",), abi=6).pack()) == 24


def test_probes_try_one_forbidden_thing_of_each_kind() -> None:
    attempts = {item.clause: item for item in probe_commands(compile_policy(FULL, EVERYTHING))}
    assert attempts["system_calls"].args[0] == NUMBERS["unshare"]
    assert attempts["protected_paths"].target == "/bin/bash"
    assert attempts["network_open"].target == "169.254.169.254 80"
    assert all(0 not in item.errnos for item in attempts.values()), "success is never acceptable"
    closed = {item.clause: item for item in probe_commands(compile_policy(Policy(), EVERYTHING))}
    assert closed["network_none"].target == "198.51.100.1 9"
    assert "protected_paths" not in closed


def test_holes_are_listed() -> None:
    assert len(describe(compile_policy(Policy(), EVERYTHING))["holes"]) == 1
    text = " ".join(describe(compile_policy(FULL, EVERYTHING))["holes"])
    for word in ("kernel", "reachable", "trace", "ld.so.preload"):
        assert word in text
    asked = describe(compile_policy(FULL, EVERYTHING), resolvers=["192.0.2.53"])
    assert any("192.0.2.53" in hole for hole in asked["holes"])
    closed = describe(compile_policy(Policy(), EVERYTHING), resolvers=["192.0.2.53"])
    assert not any("192.0.2.53" in hole for hole in closed["holes"])
    suid = describe(compile_policy(Policy(no_new_privs=False), EVERYTHING))
    assert any("set-uid" in hole for hole in suid["holes"])
    assert "new_privileges" not in {item["clause"] for item in suid["clauses"]}
