"""The node's doors: a Unix socket for root on this machine, and TCP for those who show the node's token."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from aiohttp import web
from libdsec.errors import DeniedError
from libdsec.wire import MAX_JSON_BYTES

from nomad_dsec.httpd import Running, bearer, error_middleware, listen_tcp, listen_unix, same_secret
from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from nomad_dsec.node.routes import Routes

log = get_log(__name__)
OPEN_PATHS = ("/healthz", "/readyz")
SUN_PATH_MAX = 107  # unix(7)


def build_app(routes: Routes, token: str | None, local: Sequence[web.RouteDef] = ()) -> web.Application:
    """An application over the routes; with a token each request must show it, but for the health checks.

    local: routes for programs on this machine only.
    """

    @web.middleware
    async def authenticate(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path not in OPEN_PATHS and not same_secret(bearer(request), token or ""):
            raise DeniedError("bad_token", "this is not the node's token", hint="see <data>/token on the node")
        return await handler(request)

    middlewares = [error_middleware] if token is None else [error_middleware, authenticate]
    app = web.Application(middlewares=middlewares, client_max_size=MAX_JSON_BYTES)
    app.router.add_routes([*routes.table(), *local])
    return app


async def listen(
    routes: Routes, *, local: Sequence[web.RouteDef], data: Path, host: str, port: int, token: str
) -> list[Running]:
    """Open both doors. A data directory with too long a path has TCP only."""
    doors = []
    path = data / "node.sock"
    if len(str(path).encode()) <= SUN_PATH_MAX:
        doors.append(await listen_unix(build_app(routes, None, local), path))
    else:
        log.warning("no unix socket: the path of the data directory is too long", path=str(path))
    try:
        doors.append(await listen_tcp(build_app(routes, token), host, port))
    except BaseException:
        for door in doors:
            await door.close()
        raise
    return doors


def load_token(data: Path, given: str) -> str:
    """The token of the settings, or the one kept in <data>/token, made at the first start."""
    if given:
        return given
    path = data / "token"
    if not path.exists() or not path.read_text().strip():
        fresh = path.with_suffix(".new")
        fresh.touch(mode=0o600)
        fresh.write_text(secrets.token_urlsafe(32))
        fresh.replace(path)
    return path.read_text().strip()
