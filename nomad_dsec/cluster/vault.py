"""Vault's KV v2, typed, over hvac: the only importer of that library. Token, AppRole, or a JWT such as Nomad's."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import hvac
import requests
from hvac import exceptions as faults
from libdsec.errors import DeniedError, NotFoundError, PlatformError, ProtocolError

if TYPE_CHECKING:
    from pathlib import Path

    from nomad_dsec.cluster.settings import Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """How to prove who we are: one of token, AppRole (role_id, secret_id), or a JWT in a file (role, jwt_file)."""

    token: str = field(default="", repr=False)
    role_id: str = ""
    secret_id: str = field(default="", repr=False)
    role: str = ""
    jwt_file: Path | None = None
    jwt_mount: str = "jwt-nomad"


class VaultClient:
    """One server. Logs in when first needed, and once more when the token has expired."""

    def __init__(self, endpoint: Endpoint, login: Login, *, timeout_s: float = 10.0) -> None:
        tls = endpoint.tls
        self._login = login
        self._api = hvac.Client(
            url=endpoint.url,
            namespace=endpoint.namespace or None,
            verify=tls.trust,
            cert=tls.client_pair,
            timeout=timeout_s,
            allow_redirects=False,  # a redirect would carry the token to another host
        )
        self._entered = False

    async def read(self, mount: str, path: str) -> dict[str, str]:
        """The newest version of a secret; NotFoundError, DeniedError or PlatformError. Values must be text."""
        return await asyncio.to_thread(self._read, mount, path)

    def _read(self, mount: str, path: str) -> dict[str, str]:
        where = f"{mount}/{path}"
        for attempt in (1, 2):
            if not self._entered:
                self._enter()
            try:
                answer = self._api.secrets.kv.v2.read_secret_version(
                    path=path, mount_point=mount, raise_on_deleted_version=True
                )
            except faults.InvalidPath as error:
                raise NotFoundError("no_such_secret", f"Vault has no secret {where}", field="secret") from error
            except (faults.Forbidden, faults.Unauthorized) as error:
                self._entered = False
                if attempt == 2 or self._login.token:
                    raise DeniedError("vault_denied", f"Vault refused to read {where}") from error
            except (faults.VaultError, requests.RequestException) as error:
                raise _unreachable(error) from error
            else:
                return _values(answer, where)
        raise AssertionError

    def _enter(self) -> None:
        login = self._login
        try:
            if login.token:
                self._api.token = login.token
            elif login.role_id:
                self._api.auth.approle.login(role_id=login.role_id, secret_id=login.secret_id)
            elif login.jwt_file is not None:
                jwt = login.jwt_file.read_text("ascii").strip()
                self._api.auth.jwt.jwt_login(role=login.role, jwt=jwt, path=login.jwt_mount)
            else:
                raise DeniedError("vault_no_login", "no way to log in to Vault is configured", field="vault.token")
        except (faults.InvalidRequest, faults.Forbidden, faults.Unauthorized) as error:
            raise DeniedError("vault_denied", "Vault refused the login") from error
        except (faults.VaultError, requests.RequestException, OSError) as error:
            raise _unreachable(error) from error
        self._entered = True

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.to_thread(self._api.adapter.close)


def _unreachable(error: Exception) -> PlatformError:
    # the text of a VaultError may quote the request: the kind of fault is enough
    return PlatformError("vault_unreachable", f"Vault did not answer: {type(error).__name__}", retry_after_s=1.0)


def _values(answer: dict[str, Any], where: str) -> dict[str, str]:
    try:
        data = answer["data"]["data"]
        found = {str(key): value for key, value in data.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ProtocolError("bad_vault_reply", f"what Vault sent for {where} is no KV v2 secret") from error
    if not all(isinstance(value, str) for value in found.values()):
        raise ProtocolError("bad_vault_reply", f"a value of {where} is not text")
    return found
