"""Requests made from a served OpenAPI document: mostly what its schemas ask for, salted with what they do not."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from jsonschema import Draft202012Validator
from yarl import URL

#: Values at the edges of types, and of no type that a field has.
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**53 + 1, 2**63, 2**64, 2**70, 1e308, "", "\x00", "a/../b", "\ud800", "é" * 50, "x" * 5000,
    "%00", "../../etc/passwd", "NaN", [], {}, [None], {"a": 1}, [[[[]]]],
)  # fmt: skip
TORN = (b"", b"{", b"\xff", b"[]", b"[" * 3000, b'{"a":NaN}', b"1" * 6000, b'"\\ud800"', b"{}" * 2)
PLAIN = ("debian:12", "a", "/bin/true", "/tmp/x", "5s", "1Gi", "x" * 64, "é", "python")
TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """One reply that breaks a rule."""

    rule: str
    request: str
    status: int | str
    reply: str


@dataclass(kw_only=True)
class Fuzzer:
    """Sends requests to one server. `known` fills path parameters by name, such as ids of live
    sandboxes; `words` are strings that mean something to it, such as an image's name.
    """

    base: str
    key: str
    document: dict[str, Any]
    random: random.Random
    known: dict[str, tuple[str, ...]] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    statuses: dict[int | str, int] = field(default_factory=dict)

    async def run(self, count: int) -> list[Wrong]:
        """That many requests, eight at a time; what was wrong, one for each rule and operation."""
        found: dict[tuple[str, str], Wrong] = {}
        left = iter(range(count))
        headers = {"Authorization": f"Bearer {self.key}"}
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:

            async def worker() -> None:
                for _ in left:
                    operation, wrong = await self._one(session)
                    for one in wrong:
                        found.setdefault((one.rule, operation), one)

            await asyncio.gather(*(worker() for _ in range(8)))
        return list(found.values())

    async def _one(self, session: aiohttp.ClientSession) -> tuple[str, list[Wrong]]:
        path, method, operation = self._operation()
        url, sent = self._url(path, operation), self._body(operation)
        headers = {"Content-Type": "text/x"} if self._rarely(0.03) else {"Content-Type": "application/json"}
        if self._rarely(0.1):
            headers["Idempotency-Key"] = self.random.choice(("k", "x" * 3000, "\u00e9"))
        request = f"{method.upper()} {url} {(sent or b'')[:300]!r}"
        try:
            async with session.request(method, URL(self.base + url, encoded=True), data=sent, headers=headers) as reply:
                status, raw = reply.status, await reply.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            self.statuses["none"] = self.statuses.get("none", 0) + 1
            return path, [Wrong(rule="no reply", request=request, status="none", reply=repr(error))]
        self.statuses[status] = self.statuses.get(status, 0) + 1
        rules = self._broken(operation, status, raw)
        return f"{method} {path}", [
            Wrong(rule=rule, request=request, status=status, reply=repr(raw[:300])) for rule in rules
        ]

    def _broken(self, operation: dict[str, Any], status: int, raw: bytes) -> list[str]:
        """The rules that a reply breaks."""
        replies = operation["responses"]
        if status >= 400:
            try:
                error = json.loads(raw)["error"]
            except (ValueError, KeyError, TypeError):
                return ["an error is JSON with its reason"]
            broken = ["no request is an internal error"] if status == 500 else []
            if not (error.get("code") and error.get("message")):
                broken.append("an error has a code and a message")
            if status == 400 and not (error.get("field") or error.get("hint")):
                broken.append("bad input names the field or the fix")
            return broken
        if str(status) not in replies:
            return ["each good status is in the document"]
        schema = replies[str(status)].get("content", {}).get("application/json", {}).get("schema")
        if schema is None:
            return []
        validator = Draft202012Validator(schema | {"components": self.document["components"]})
        return [
            f"a reply is what its schema says: {error.message[:200]}"
            for error in validator.iter_errors(json.loads(raw))
        ][:1]

    def _operation(self) -> tuple[str, str, dict[str, Any]]:
        path, methods = self.random.choice(list(self.document["paths"].items()))
        method = self.random.choice(list(methods))
        return path, method, methods[method]

    def _url(self, path: str, operation: dict[str, Any]) -> str:
        query = []
        for parameter in operation.get("parameters", ()):
            name = parameter["name"]
            if parameter["in"] == "path":
                odd = self.random.choice(("x", "%00", "..%2f..", "a" * 300, "%ff", "sb-n1-0000", "default", "\u00e9"))
                known = name in self.known and not self._rarely(0.2)
                path = path.replace(f"{{{name}}}", self.random.choice(self.known[name]) if known else odd)
            elif self._rarely(0.6):
                value = self.random.choice((*ODD, "1", "true", "/tmp/x", "5"))
                query.append(f"{name}={_quoted(value)}")
        return path + ("?" + "&".join(query) if query else "")

    def _body(self, operation: dict[str, Any]) -> bytes | None:
        content = operation.get("requestBody", {}).get("content", {})
        if "application/json" not in content:
            return b"\x00\xff" * 20 if content else None
        if self._rarely(0.08):
            return self.random.choice(TORN)
        return json.dumps(self._value(content["application/json"]["schema"])).encode()

    def _value(self, schema: dict[str, Any], depth: int = 0) -> Any:
        """Something that the schema allows, or, one time in ten, something odd."""
        while "$ref" in schema:
            schema = self.document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        if depth > 6 or self._rarely(0.1):
            return self.random.choice(ODD)
        for several in ("oneOf", "anyOf"):
            if several in schema:
                return self._value(self.random.choice(schema[several]), depth + 1)
        if "enum" in schema:
            return self.random.choice(schema["enum"])
        match schema.get("type"):
            case "object":
                return self._object(schema, depth)
            case "array":
                return [self._value(schema.get("items", {}), depth + 1) for _ in range(self.random.randrange(3))]
            case "integer":
                return self.random.choice((schema.get("minimum", 0), schema.get("maximum", 2**31), 1, 2, -1, 2**31))
            case "number":
                return self.random.choice((schema.get("minimum", 0), 0, 0.1, 1.5, -1))
            case "boolean":
                return self._rarely(0.5)
            case "string":
                return self.random.choice(PLAIN + self.words)
        return self.random.choice(ODD)

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        wanted = schema.get("required", [])
        made = {
            name: self._value(inner, depth + 1)
            for name, inner in schema.get("properties", {}).items()
            if name in wanted or self._rarely(0.3)
        }
        return made | ({"bogus": 1} if self._rarely(0.05) else {})

    def _rarely(self, chance: float) -> bool:
        return self.random.random() < chance


def _quoted(value: Any) -> str:
    raw = str(value).encode("utf-8", "surrogatepass")
    return "".join(f"%{byte:02x}" for byte in raw)
