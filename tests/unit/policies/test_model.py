"""Reading a policy: what is accepted, and that each refusal names the field and the way out."""

import re

import pytest
from dsec_policies.errors import PolicyError
from dsec_policies.model import Policy, parse_policy
from hypothesis import given
from hypothesis import strategies as st


def refusal(mapping: object) -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        parse_policy(mapping)  # type: ignore[arg-type]
    assert caught.value.code == "policy_invalid"
    assert caught.value.message
    assert caught.value.hint
    return caught.value


def test_nothing_asked_is_the_default() -> None:
    assert parse_policy(None) == parse_policy({}) == parse_policy("default") == Policy()
    assert Policy().network == "none"
    assert Policy().no_new_privs


def test_a_name_is_a_profile() -> None:
    assert parse_policy("debug").profile == "debug"


POLICIES = st.builds(
    Policy,
    profile=st.sampled_from(["default", "debug"]),
    network=st.sampled_from(["none", "open"]),
    protected_paths=st.lists(
        st.from_regex(r"/(usr|opt)(/[a-zé]{1,8}){1,3}", fullmatch=True), max_size=4, unique=True
    ).map(tuple),
    advisory=st.frozensets(st.sampled_from(["protected_paths", "signals", "abstract_sockets"])),
    no_new_privs=st.booleans(),
    nofile=st.none() | st.integers(64, 65536),
)


@given(POLICIES)
def test_round_trip(policy: Policy) -> None:
    assert parse_policy(policy.to_json()) == policy


@pytest.mark.parametrize(
    ("mapping", "field", "hint"),
    [
        ({"profil": "debug"}, "profil", "profile"),
        ({"netwrok": "open"}, "netwrok", "network"),
        ({"xyz": 1}, "xyz", "protected_paths"),
        ({"profile": "debugg"}, "profile", "'debug'"),
        ({"profile": 3}, "profile", "default"),
        ({"network": "opn"}, "network", "'open'"),
        ({"network": None}, "network", "none"),
        ({"protected_paths": "/bin/bash"}, "protected_paths", "list"),
        ({"protected_paths": [1]}, "protected_paths", "texts"),
        ({"protected_paths": ["bin/bash"]}, "protected_paths", "'/bin/bash'"),
        ({"protected_paths": ["/bin/../etc"]}, "protected_paths", "'..'"),
        ({"protected_paths": ["/bin/"]}, "protected_paths", "trailing"),
        ({"protected_paths": ["/"]}, "protected_paths", "slashes"),
        ({"protected_paths": ["/bin/\0"]}, "protected_paths", "zero bytes"),
        ({"protected_paths": ["/" + "a" * 4096]}, "protected_paths", "4096"),
        ({"protected_paths": ["/proc/version"]}, "protected_paths", "/proc"),
        ({"protected_paths": [f"/f{n}" for n in range(65)]}, "protected_paths", "64"),
        ({"advisory": ["protected_path"]}, "advisory", "'protected_paths'"),
        ({"advisory": ["system_calls"]}, "advisory", "without it"),
        ({"advisory": ["network_none"]}, "advisory", "without it"),
        ({"no_new_privs": 1}, "no_new_privs", "true or false"),
        ({"nofile": 0}, "nofile", "64"),
        ({"nofile": True}, "nofile", "65536"),
        ({"nofile": "many"}, "nofile", "65536"),
        (["default"], "policy", "table"),
        (7, "policy", "table"),
    ],
)
def test_refusals_name_the_field_and_the_way_out(mapping: object, field: str, hint: str) -> None:
    error = refusal(mapping)
    assert error.field == field
    assert hint in error.hint
    assert field in str(error)


@pytest.mark.parametrize(
    "mapping", [{"allow": ["pypi.org"]}, {"allowed_domains": []}, {"network": {"allow": ["pypi.org"]}}]
)
def test_domain_lists_are_refused_not_ignored(mapping: dict[str, object]) -> None:
    error = refusal(mapping)
    assert "not in this version" in error.message
    assert re.search("'none'.*'open'", error.hint)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.floats(allow_nan=False),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["profile", "network", "protected_paths", "advisory", "nofile", "no_new_privs", "x"]), inner
        ),
        max_leaves=6,
    )
)
def test_any_data_gives_a_policy_or_a_named_field(data: object) -> None:
    try:
        policy = parse_policy(data)  # type: ignore[arg-type]
    except PolicyError as error:
        assert error.field
        assert error.hint
    else:
        assert parse_policy(policy.to_json()) == policy
