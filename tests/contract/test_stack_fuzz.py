"""Requests made from the served OpenAPI document, through the real gateway and node daemon.

No crash, no hang, each error with its reason, each reply as described, and all goes on after it.
"""

from __future__ import annotations

import os
import random

import aiohttp
import pytest
from libdsec.client import AsyncClient
from libdsec.sandbox import AsyncSandbox

from tests.kit.abilities import needs
from tests.kit.devstack import DevStack, image_store
from tests.kit.leaks import clean_after
from tests.kit.openapi_fuzz import Fuzzer
from tests.kit.sizes import sized

# the stack refills its pools as it likes: what it must not leave is checked once it has stopped
pytestmark = [pytest.mark.timeout(300), pytest.mark.leaks_ok]
IMAGE = "debian-dev"
_REAL = pytest.param("container", marks=needs("root", "erofs", "cgroup", "filters", "debootstrap", "debian-packages"))


@pytest.fixture(params=["fake", _REAL])
def stack(request, tmp_path):
    made = DevStack(tmp_path / "d")
    flags = ["--node-id", f"fz-{request.param}-{os.getpid()}", "--backends", request.param]
    flags += ["--images", str(image_store())] if request.param == "container" else []
    with clean_after():
        made.start(*flags)
        yield made
        made.stop()


async def test_no_request_breaks_it_and_every_error_explains_itself(stack):
    headers = {"Authorization": f"Bearer {stack.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as http, http.get(f"{stack.endpoint}/openapi.json") as reply:
        document = await reply.json()
    async with AsyncClient(stack.endpoint, stack.api_key) as client:
        for seed in range(sized(10, 2)):
            targets = await AsyncSandbox.create_many(8, IMAGE, client=client, cpus=0.1, memory_mib=64)
            fuzzer = Fuzzer(
                base=stack.endpoint,
                key=stack.api_key,
                document=document,
                random=random.Random(seed),
                known={"sandbox": tuple(target.id for target in targets)},
                words=(IMAGE,),
            )
            assert await fuzzer.run(sized(3000, 500)) == []
            assert {200, 400, 404} <= set(fuzzer.statuses)
        async with await AsyncSandbox.create(IMAGE, client=client) as after:
            assert (await after.exec(["true"])).exit_code == 0
