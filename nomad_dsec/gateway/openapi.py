"""The OpenAPI 3.1 document, generated from the route table and the wire types."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import msgspec
from libdsec.errors import ErrorBody  # noqa: TC002 - msgspec reads the annotation

from nomad_dsec.gateway.api import ROUTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nomad_dsec.gateway.api import Route

_PARAMETER = re.compile(r"\{(\w+)\}")


class ErrorReply(msgspec.Struct):
    """What every status of 400 and above carries."""

    error: ErrorBody


def render_openapi(routes: Iterable[Route] = ROUTES) -> dict[str, Any]:
    """The document as plain data."""
    routes = list(routes)
    bodies = [body for route in routes for body in (route.request, route.reply)]
    types = [body for body in bodies if body is not None and not isinstance(body, str)] + [ErrorReply]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = {repr(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "nomad-dsec gateway", "version": _version(), "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "an API key: dsk_..."}},
        },
        "security": [{"key": []}],
    }


def _version() -> str:
    try:
        return version("nomad-dsec")
    except PackageNotFoundError:  # run from a source tree
        return "0"


def _operation(route: Route, schema_of: dict[str, Any]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(route.path)
    ]
    parameters += [
        {
            "name": query.name,
            "in": "query",
            "required": query.required,
            "description": query.help,
            "schema": {"type": query.schema},
        }
        for query in route.query
    ]
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "responses": {
            **_success(route, schema_of),
            "default": {"description": "an error", "content": _content(ErrorReply, schema_of)},
        },
    }
    if parameters:
        operation["parameters"] = parameters
    if route.request is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.request, schema_of)}
    if route.kind == "public":
        operation["security"] = []
    if route.admin:
        operation["description"] = "Needs an admin key."
    return operation


def _success(route: Route, schema_of: dict[str, Any]) -> dict[str, Any]:
    if route.kind == "websocket":
        return {"101": {"description": route.messages}}
    return {"200": {"description": "done", "content": _content(route.reply, schema_of)}}


def _content(kind: Any, schema_of: dict[str, Any]) -> dict[str, Any]:
    if isinstance(kind, str):
        return {kind: {"schema": {"type": "string"}}}
    return {"application/json": {"schema": schema_of[repr(kind)]}}
