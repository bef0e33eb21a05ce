"""The gateway's own API on fake nodes: creates, listings, namespaces, keys, quotas, bad input."""

import asyncio
import io
import sqlite3

import pytest
from libdsec import wire
from libdsec.errors import CapacityError

from tests.kit.fakenode import DIGEST, FakeNode
from tests.kit.gateways import CREATE, calling, running_gateway, tenant_key


@pytest.fixture
async def node():
    async with FakeNode("n1") as node:
        yield node


@pytest.fixture
async def gateway(tmp_path, node):
    async with running_gateway(tmp_path / "gw", node) as gateway:
        yield gateway


@pytest.fixture
async def admin(gateway):
    async with calling(gateway) as caller:
        yield caller


async def test_a_create_runs_on_the_node_that_its_id_names(admin, node):
    (made,) = await admin.create(cpus=2, labels={"a": "b"})
    assert made["id"].startswith("sb-n1-")
    assert node.sandboxes[made["id"]].digest == DIGEST
    assert node.sandboxes[made["id"]].namespace == "admin"
    assert (await admin.ok("GET", f"/v1/sandboxes/{made['id']}"))["state"] == "running"


async def test_exec_and_kill_pass_through(admin, node):
    (made,) = await admin.create()
    reply = await admin.ok("POST", f"/v1/sandboxes/{made['id']}/execs", {"cmd": ["true"], "exec_id": "one"})
    assert (reply["exec_id"], reply["exit_code"]) == ("one", 0)
    killed = await admin.ok("DELETE", f"/v1/sandboxes/{made['id']}")
    assert killed["reason"] == "killed"
    assert (await admin.ok("DELETE", f"/v1/sandboxes/{made['id']}"))["state"] == "exited"
    assert node.live == {}


async def test_a_listing_filters_by_state_and_labels(admin):
    (one,) = await admin.create(labels={"run": "1"})
    await admin.create(labels={"run": "2"})
    listed = await admin.ok("GET", "/v1/sandboxes?label=run=1&state=running")
    assert [info["id"] for info in listed["sandboxes"]] == [one["id"]]
    assert (await admin.ok("GET", "/v1/sandboxes?state=paused"))["sandboxes"] == []


async def test_a_key_sees_only_its_namespace(admin, gateway):
    key_a, key_b = await tenant_key(admin, "team-a"), await tenant_key(admin, "team-b")
    async with calling(gateway, key_a) as a, calling(gateway, key_b) as b:
        (mine,) = await a.create()
        path = f"/v1/sandboxes/{mine['id']}"
        assert mine["namespace"] == "team-a"
        absent = f"/v1/sandboxes/sb-n1-{'a' * 16}"
        for method, suffix, body in (
            ("GET", "", None),
            ("DELETE", "", None),
            ("POST", "/execs", {"cmd": ["id"]}),
            ("GET", "/files?path=/x", None),
            ("PUT", "/lease", {"lease_s": 5}),
        ):
            hidden, missing = await b.error(method, path + suffix, body), await b.error(method, absent + suffix, body)
            assert hidden.code == missing.code == "sandbox_not_found"
            assert hidden.message.replace(mine["id"], "") == missing.message.replace(f"sb-n1-{'a' * 16}", "")
        assert (await b.ok("GET", "/v1/sandboxes"))["sandboxes"] == []
        assert (await b.error("GET", "/v1/sandboxes?namespace=team-a")).kind == "denied"
        assert len((await a.ok("GET", "/v1/sandboxes"))["sandboxes"]) == 1
        assert len((await admin.ok("GET", "/v1/sandboxes?namespace=*"))["sandboxes"]) == 1
        assert (await a.ok("POST", path + "/execs", {"cmd": ["id"]}))["exit_code"] == 0  # the positive twin


async def test_isolation_holds_for_sandboxes_the_gateway_never_saw(tmp_path, node, admin, gateway):
    async with calling(gateway, await tenant_key(admin, "team-a")) as a:
        (mine,) = await a.create()
    async with running_gateway(tmp_path / "two", node) as second, calling(second) as other_admin:
        async with calling(second, await tenant_key(other_admin, "team-b")) as b:
            assert (await b.error("GET", f"/v1/sandboxes/{mine['id']}")).code == "sandbox_not_found"
        async with calling(second, await tenant_key(other_admin, "team-a")) as a:
            assert (await a.ok("GET", f"/v1/sandboxes/{mine['id']}"))["id"] == mine["id"]


async def test_unknown_missing_and_revoked_keys_are_401_and_rights_are_403(admin, gateway):
    async with calling(gateway, "dsk_nobody_aaaaaaaaaaaaaaaa") as nobody:
        assert (await nobody("GET", "/v1/whoami"))[0] == 401
    status, value = await admin("GET", "/v1/whoami", headers={"Authorization": ""})
    assert (status, value["error"]["code"]) == (401, "no_credentials")
    made = await admin.ok("POST", "/v1/keys", {"namespace": "team-a"})
    async with calling(gateway, made["key"]) as tenant:
        assert (await tenant.ok("GET", "/v1/whoami"))["namespace"] == "team-a"
        for method, path in (("GET", "/v1/nodes"), ("GET", "/v1/keys"), ("POST", "/v1/nodes/n1/drain")):
            assert (await tenant(method, path, {}))[0] == 403
        await admin.ok("DELETE", f"/v1/keys/{made['id']}")
        assert (await tenant("GET", "/v1/whoami"))[0] == 401
    rows = (await admin.ok("GET", "/v1/keys"))["keys"]
    assert [row["id"] for row in rows if row.get("revoked_at")] == [made["id"]]
    assert all("key" not in row for row in rows)


async def test_keys_and_quotas_outlive_the_gateway_and_secrets_are_not_in_its_files(tmp_path, node):
    async with running_gateway(tmp_path / "gw", node) as gateway, calling(gateway) as admin:
        key = await tenant_key(admin, "team-a")
        await admin.ok("PUT", "/v1/namespaces/team-a/quota", {"sandboxes": 1})
    async with running_gateway(tmp_path / "gw", node) as gateway, calling(gateway, key) as tenant:
        assert (await tenant.ok("GET", "/v1/whoami"))["quota"] == {"sandboxes": 1}
    for file in (tmp_path / "gw").iterdir():
        assert key.rpartition("_")[2].encode() not in file.read_bytes()


async def test_quotas_of_an_older_gateway_are_kept_and_get_the_bounds_that_came_later(tmp_path, node):
    (tmp_path / "gw").mkdir()
    old = sqlite3.connect(tmp_path / "gw/gateway.db")
    old.execute("CREATE TABLE quotas (namespace TEXT PRIMARY KEY, sandboxes INTEGER, cpus REAL, memory_mib INTEGER)")
    old.execute("INSERT INTO quotas VALUES ('team-a', 7, NULL, 100)")
    old.commit()
    old.close()
    async with running_gateway(tmp_path / "gw", node) as gateway, calling(gateway) as admin:
        path = "/v1/namespaces/team-a/quota"
        assert await admin.ok("GET", path) == {"sandboxes": 7, "memory_mib": 100}
        await admin.ok("PUT", path, {"disk_mib": 5})
        assert await admin.ok("GET", path) == {"disk_mib": 5}


async def test_quota_refusals_carry_the_numbers_and_pass_when_sandboxes_end(admin, gateway, node):
    async with calling(gateway, await tenant_key(admin, "team-a")) as tenant:
        await admin.ok("PUT", "/v1/namespaces/team-a/quota", {"sandboxes": 3, "cpus": 8, "memory_mib": 4096})
        made = await tenant.create(count=3)
        over = await tenant.error("POST", "/v1/sandboxes", CREATE)
        assert (over.kind, over.code, over.field) == ("capacity", "quota_exceeded", "sandboxes")
        assert over.details == {"resource": "sandboxes", "limit": 3, "used": 3, "wanted": 1, "namespace": "team-a"}
        never = await tenant.error("POST", "/v1/sandboxes", CREATE | {"cpus": 9})
        assert (never.kind, never.field) == ("denied", "cpus")
        used = await tenant.ok("GET", "/v1/whoami")
        await admin.ok("PUT", "/v1/namespaces/team-a/quota", {"sandboxes": 4, "disk_mib": used["disk_mib"] + 64})
        full = await tenant.error("POST", "/v1/sandboxes", CREATE | {"disk_mib": 65})
        assert (full.kind, full.field, full.details["limit"]) == ("capacity", "disk_mib", used["disk_mib"] + 64)
        await admin.ok("PUT", "/v1/namespaces/team-a/quota", {"sandboxes": 3, "cpus": 8, "memory_mib": 4096})
        name = made[0]["id"]  # ends by itself: no call of ours tells the gateway
        node.sandboxes[name] = wire.SandboxInfo(**{**_fields(node.sandboxes[name]), "state": "exited"})
        deadline = asyncio.get_running_loop().time() + 5
        while (await tenant("POST", "/v1/sandboxes", CREATE))[0] != 200:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.05)
        assert len(node.live) == 3


async def test_creates_side_by_side_never_pass_a_quota(admin, gateway, node):
    node.create_s = 0.05
    async with calling(gateway, await tenant_key(admin, "team-a")) as tenant:
        await admin.ok("PUT", "/v1/namespaces/team-a/quota", {"sandboxes": 5})
        replies = await asyncio.gather(*(tenant("POST", "/v1/sandboxes", CREATE) for _ in range(12)))
        assert sorted(status for status, _ in replies) == [200] * 5 + [503] * 7
        assert len(node.live) == 5


async def test_more_creates_than_allowed_at_once_are_told_that_it_is_busy(tmp_path, node):
    node.create_s = 0.3
    async with running_gateway(tmp_path / "gw", node, create_inflight_max=2) as gateway, calling(gateway) as admin:
        replies = await asyncio.gather(*(admin("POST", "/v1/sandboxes", CREATE) for _ in range(5)))
        busy = [value["error"] for status, value in replies if status != 200]
        assert [error["code"] for error in busy] == ["busy"] * 3
        assert all(error["retry_after_s"] > 0 for error in busy)


BAD = {
    "image": ["", 7],
    "backend": ["lxc"],
    "cpus": [0, "2"],
    "memory_mib": [1, 512.5],
    "disk_mib": [0],
    "pids": [1],
    "timeout_s": [0, 1e9],
    "lease_s": [-1],
    "env": [{"": "x"}, []],
    "cwd": ["x" * 5000],
    "user": ["u" * 300],
    "hostname": ["h" * 64],
    "qos": ["best"],
    "policy": [3],
    "labels": [{"a": 1}],
    "secrets": [{"a": 1}],
    "idempotency_key": ["k" * 257],
    "count": [0, 10_001],
    "all_or_none": ["yes"],
    "wait_s": [-1],
    "colour": ["red"],
}
BAD_CREATES = [(field, value) for field, values in BAD.items() for value in values]


@pytest.mark.parametrize(("field", "value"), BAD_CREATES)
async def test_bad_input_names_the_field_and_leaves_nothing(admin, node, field, value):
    error = await admin.error("POST", "/v1/sandboxes", CREATE | {field: value})
    assert (error.kind, error.code) == ("usage", "bad_request")
    assert error.field.split("[")[0].split(".")[0] == field
    assert error.hint
    assert node.calls["POST /v1/sandboxes"] == 0


@pytest.mark.parametrize(
    ("method", "path", "body", "field"),
    [
        ("GET", "/v1/sandboxes/nonsense", None, "sandbox"),
        ("GET", "/v1/sandboxes/sb-n1-short", None, "sandbox"),
        ("POST", "/v1/sandboxes/..%2f..%2fv1%2fnode/execs", {"cmd": "x"}, "sandbox"),
        ("GET", "/v1/sandboxes?state=happy", None, "state"),
        ("GET", "/v1/sandboxes?label=nopair", None, "label"),
        ("POST", "/v1/keys", {"namespace": "Not Good"}, "namespace"),
        ("POST", "/v1/keys", {"namespace": "x", "scope": 1}, "scope"),
        ("PUT", "/v1/namespaces/UPPER/quota", {}, "namespace"),
        ("PUT", "/v1/namespaces/a/quota", {"sandboxes": -1}, "sandboxes"),
        ("DELETE", "/v1/keys/none", None, "key"),
        ("POST", "/v1/nodes/n9/drain", {"on": True}, "node"),
        ("POST", "/v1/nodes/n1/drain", {"on": 3}, "on"),
    ],
)
async def test_bad_input_elsewhere_names_the_field(admin, method, path, body, field):
    error = await admin.error(method, path, body)
    assert error.kind in ("usage", "not_found")
    assert error.field == field


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff\xfe", b"null", b'{"image": "\\ud800"}', b"[" * 100_000])
async def test_what_is_not_json_of_the_type_is_a_usage_error(admin, raw):
    status, value = await admin("POST", "/v1/sandboxes", data=raw)
    assert (status, value["error"]["code"]) == (400, "bad_request")


async def test_bodies_are_bounded(admin):
    (made,) = await admin.create()
    status, value = await admin("POST", "/v1/sandboxes", data=io.BytesIO(b"x" * (4 * 1024 * 1024 + 1)))
    assert (status, value["error"]["code"]) == (400, "body_too_large")

    async def endless():
        for _ in range(wire.MAX_JSON_BYTES // 1_000_000 + 2):
            yield b" " * 1_000_000

    status, value = await admin("POST", f"/v1/sandboxes/{made['id']}/execs", data=endless())
    assert (status, value["error"]["code"]) == (400, "body_too_large")


async def test_an_unknown_image_is_named_with_the_nearest(admin):
    error = await admin.error("POST", "/v1/sandboxes", {"image": "debian:13"})
    assert (error.kind, error.code, error.field) == ("not_found", "image_not_found", "image")
    assert "debian:12" in error.hint


async def test_an_image_imported_a_moment_ago_is_found(admin, node):
    node.images.append(wire.ImageInfo(digest="sha256:new", names=["fresh:1"], created_at=2.0))
    (made,) = await admin.create(image="fresh:1")
    assert made["digest"] == "sha256:new"


async def test_drain_keeps_new_sandboxes_away_at_once(admin):
    assert (await admin.ok("POST", "/v1/nodes/n1/drain", {"on": True}))["draining"] is True
    error = await admin.error("POST", "/v1/sandboxes", CREATE)
    assert (error.code, error.details["refusals"]) == ("draining", {"draining": 1})
    await admin.ok("POST", "/v1/nodes/n1/drain", {"on": False})
    await admin.create()


async def test_a_refusal_of_the_only_node_counts_it(admin, node):
    node.refuse = CapacityError("disk", "no disk left")
    error = await admin.error("POST", "/v1/sandboxes", CREATE)
    assert (error.kind, error.details["refusals"]) == ("capacity", {"disk": 1})


async def test_health_and_readiness(admin, node):
    assert (await admin("GET", "/healthz"))[0] == 200
    assert (await admin("GET", "/readyz"))[0] == 200
    await node.stop()
    await asyncio.sleep(0.6)
    assert (await admin("GET", "/readyz"))[0] == 503
    assert (await admin("GET", "/healthz"))[0] == 200


async def test_metrics_count_requests_and_creates(admin):
    await admin.create()
    await admin.error("POST", "/v1/sandboxes", {"image": "nowhere"})
    async with admin.session.get("/metrics") as reply:
        text = await reply.text()
    assert 'dsec_gateway_requests_total{route="create",status="200"} 1.0' in text
    assert 'dsec_gateway_creates_total{outcome="image_not_found"} 1.0' in text
    assert 'dsec_gateway_nodes{standing="live"} 1.0' in text


def _fields(info):
    return {name: getattr(info, name) for name in info.__struct_fields__}
