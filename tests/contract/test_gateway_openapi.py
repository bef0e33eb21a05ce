"""The served OpenAPI document is valid, holds each route that the server has, and no other."""

import re

import msgspec
from openapi_spec_validator import validate

from nomad_dsec.gateway.api import ROUTES
from nomad_dsec.gateway.openapi import render_openapi
from tests.kit.gateways import calling, running_gateway


def test_the_document_is_valid_openapi():
    validate(msgspec.to_builtins(render_openapi()))


def test_operation_ids_are_unique():
    names = [route.name for route in ROUTES]
    assert len(set(names)) == len(names)


async def test_it_is_served_and_holds_every_route_of_the_server(tmp_path):
    async with running_gateway(tmp_path / "gw") as gateway, calling(gateway, "no-key-needed") as caller:
        document = await caller.ok("GET", "/openapi.json")
        app = gateway.running._runner.app
        served = {
            (route.method.lower(), re.sub(r"\{(\w+):.*?\}(?=/|$)", r"{\1}", route.resource.canonical))
            for route in app.router.routes()
            if route.method != "HEAD"
        }
    described = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert served == described


def test_every_field_limit_of_a_create_is_in_the_schema():
    schema = render_openapi()["components"]["schemas"]["CreateRequest"]
    assert schema["properties"]["memory_mib"]["minimum"] == 16
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["image"]
