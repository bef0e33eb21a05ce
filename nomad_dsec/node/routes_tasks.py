"""Paths for the cluster's driver plugins, on the daemon's Unix socket only: /v1/tasks, /v1/grants and /v1/calls."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

from aiohttp import web
from libdsec.errors import StateError, UsageError
from libdsec.wire import MAX_JSON_BYTES, Ok, SignalRequest
from libdsec.wire_fncall import MAX_CALL_BYTES
from libdsec.wire_tasks import CallTaskRequest, GrantRequest, StopTaskRequest, TaskRequest

from nomad_dsec.httpd import json_reply, query_float, query_int, read_json
from nomad_dsec.node.tasks_rows import task_info

if TYPE_CHECKING:
    from nomad_dsec.node.grants import Grants
    from nomad_dsec.node.task_calls import CallTasks
    from nomad_dsec.node.task_events import EventRing
    from nomad_dsec.node.tasks import Tasks

POLL_MAX_S = 600.0


class TaskRoutes:
    """Handlers over the tasks, grants and calls of one node."""

    def __init__(self, tasks: Tasks, grants: Grants, calls: CallTasks) -> None:
        self._tasks = tasks
        self._grants = grants
        self._calls = calls

    def table(self) -> list[web.RouteDef]:
        """The fixed names come before the keys."""
        task, grant, call = "/v1/tasks/{key}", "/v1/grants/{key}", "/v1/calls/{key}"
        return [
            web.get("/v1/tasks/events", self.task_events),
            web.put(task, self.task_start),
            web.get(task, self.task_get),
            web.get(f"{task}/wait", self.task_wait),
            web.post(f"{task}/stop", self.task_stop),
            web.post(f"{task}/signal", self.task_signal),
            web.get(f"{task}/stats", self.task_stats),
            web.delete(task, self.task_destroy),
            web.get("/v1/grants", self.grant_list),
            web.get("/v1/grants/events", self.grant_events),
            web.put(grant, self.grant_put),
            web.get(grant, self.grant_get),
            web.get(f"{grant}/wait", self.grant_wait),
            web.post(f"{grant}/stop", self.grant_stop),
            web.delete(grant, self.grant_destroy),
            web.get("/v1/calls/events", self.call_events),
            web.put(call, self.call_start),
            web.get(call, self.call_get),
            web.get(f"{call}/wait", self.call_wait),
            web.get(f"{call}/stats", self.call_stats),
            web.post(f"{call}/stop", self.call_stop),
            web.delete(call, self.call_destroy),
        ]

    async def task_start(self, request: web.Request) -> web.Response:
        """PUT a task: idempotent; returns when it runs."""
        wanted = await read_json(request, TaskRequest, max_bytes=MAX_JSON_BYTES)
        _still_asked(request)
        return json_reply(await self._tasks.start(_key(request), wanted))

    async def task_get(self, request: web.Request) -> web.Response:
        """GET one."""
        return json_reply(task_info(self._tasks.get(_key(request)).row))

    async def task_wait(self, request: web.Request) -> web.Response:
        """GET wait: a long poll for the end."""
        return json_reply(await self._tasks.wait(_key(request), _timeout(request)))

    async def task_stop(self, request: web.Request) -> web.Response:
        """POST stop: signal, wait, kill."""
        wanted = await read_json(request, StopTaskRequest)
        return json_reply(await self._tasks.stop(_key(request), wanted))

    async def task_signal(self, request: web.Request) -> web.Response:
        """POST a signal to the command's main process."""
        wanted = await read_json(request, SignalRequest)
        await self._tasks.signal(_key(request), wanted.signal)
        return json_reply(Ok())

    async def task_stats(self, request: web.Request) -> web.Response:
        """GET use now."""
        return json_reply(await self._tasks.stats(_key(request)))

    async def task_destroy(self, request: web.Request) -> web.Response:
        """DELETE: forget it, with force=1 kill it first."""
        await self._tasks.destroy(_key(request), force=_force(request))
        return json_reply(Ok())

    async def task_events(self, request: web.Request) -> web.Response:
        """GET events since a number."""
        return await _events(request, self._tasks.events)

    async def grant_list(self, _request: web.Request) -> web.Response:
        """GET all grants."""
        return json_reply(self._grants.ls())

    async def grant_put(self, request: web.Request) -> web.Response:
        """PUT a grant, or its new size."""
        wanted = await read_json(request, GrantRequest)
        return json_reply(await self._grants.put(_key(request), wanted))

    async def grant_get(self, request: web.Request) -> web.Response:
        """GET one, as a task."""
        return json_reply(self._grants.info(_key(request)))

    async def grant_wait(self, request: web.Request) -> web.Response:
        """GET wait: a long poll for the withdrawal."""
        return json_reply(await self._grants.wait(_key(request), _timeout(request)))

    async def grant_stop(self, request: web.Request) -> web.Response:
        """POST stop: withdraw."""
        wanted = await read_json(request, StopTaskRequest)
        return json_reply(await self._grants.stop(_key(request), wanted))

    async def grant_destroy(self, request: web.Request) -> web.Response:
        """DELETE: forget it, with force=1 withdraw it first."""
        await self._grants.destroy(_key(request), force=_force(request))
        return json_reply(Ok())

    async def grant_events(self, request: web.Request) -> web.Response:
        """GET events since a number."""
        return await _events(request, self._grants.events)

    async def call_start(self, request: web.Request) -> web.Response:
        """PUT a call: idempotent; returns when it has begun."""
        wanted = await read_json(request, CallTaskRequest, max_bytes=MAX_CALL_BYTES)
        _still_asked(request)
        return json_reply(await self._calls.start(_key(request), wanted))

    async def call_get(self, request: web.Request) -> web.Response:
        """GET one, as a task."""
        return json_reply(self._calls.info(_key(request)))

    async def call_wait(self, request: web.Request) -> web.Response:
        """GET wait: a long poll for the end."""
        return json_reply(await self._calls.wait(_key(request), _timeout(request)))

    async def call_stats(self, request: web.Request) -> web.Response:
        """GET use now: refused in words."""
        return json_reply(self._calls.stats(_key(request)))

    async def call_stop(self, request: web.Request) -> web.Response:
        """POST stop: wait, then end it."""
        wanted = await read_json(request, StopTaskRequest)
        return json_reply(await self._calls.stop(_key(request), wanted))

    async def call_destroy(self, request: web.Request) -> web.Response:
        """DELETE: forget it, with force=1 end it first."""
        await self._calls.destroy(_key(request), force=_force(request))
        return json_reply(Ok())

    async def call_events(self, request: web.Request) -> web.Response:
        """GET events since a number."""
        return await _events(request, self._calls.events)


def _still_asked(request: web.Request) -> None:
    """StateError given_up: the asker hung up while this daemon could not read (stopped, or the machine too busy).

    It has told its cluster that the start failed and nobody would own what is started now. The socket knows at once;
    the event loop learns it only later, from a read.
    """
    sock = None if request.transport is None else request.transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:
        gone = True
    else:
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLRDHUP)
        gone = bool(poll.poll(0))
    if gone:
        raise StateError("given_up", "whoever asked for this start has hung up", hint="ask again")


def _key(request: web.Request) -> str:
    return request.match_info["key"]


def _force(request: web.Request) -> bool:
    return request.query.get("force", "") == "1"


def _timeout(request: web.Request) -> float:
    timeout_s = query_float(request, "timeout_s", 0.0) or 0.0
    if not 0 <= timeout_s <= POLL_MAX_S:
        raise UsageError("bad_query", f"{timeout_s} is not in 0..{POLL_MAX_S:g}", field="timeout_s")
    return timeout_s


async def _events(request: web.Request, ring: EventRing) -> web.Response:
    since = query_int(request, "since", -1)
    return json_reply(await ring.since(-1 if since is None else since, timeout_s=_timeout(request)))
