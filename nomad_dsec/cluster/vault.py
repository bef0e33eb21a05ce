"""Vault's KV v2, typed, over hvac: the only importer of that library. Token, AppRole, or a JWT such as Nomad's.

Works with OpenBao as well, whose HTTP is the same for all that is asked here.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import hvac
import requests
from hvac import exceptions as faults
from libdsec.errors import DeniedError, DsecError, NotFoundError, PlatformError, ProtocolError, UsageError

from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nomad_dsec.cluster.settings import Endpoint

log = get_log(__name__)
T = TypeVar("T")
RETRY_S = 10.0  # until a renewal that failed is tried again
RENEW_AT = 2 / 3  # of a token's life: two failures can pass before it ends
LOOK_S = 3600.0  # how often a token that does not expire is looked at again


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """How to prove who we are: one of token, token_file, AppRole (role_id, secret_id), or a JWT (role, jwt_file).

    The files are read at each login: Nomad and Vault's agent write them anew.
    """

    token: str = field(default="", repr=False)
    token_file: Path | None = None
    role_id: str = ""
    secret_id: str = field(default="", repr=False)
    approle_mount: str = "approle"
    role: str = ""
    jwt_file: Path | None = None
    jwt_mount: str = "jwt-nomad"

    @property
    def field(self) -> str:
        """The setting that an error about it names."""
        if self.role_id:
            return "vault.role_id"
        return "vault.jwt_file" if self.jwt_file is not None else "vault.token"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFacts:
    """What Vault says of our token. ttl_s 0: it does not expire."""

    ttl_s: float
    renewable: bool


class VaultClient:
    """One server. Logs in when first needed, and once more when the token has expired."""

    def __init__(self, endpoint: Endpoint, login: Login, *, timeout_s: float = 10.0) -> None:
        tls = endpoint.tls
        ways = [bool(login.token), login.token_file is not None, bool(login.role_id), login.jwt_file is not None]
        if sum(ways) > 1:
            raise UsageError(
                "bad_config", "more than one way to log in to Vault is configured", field=login.field, hint="keep one"
            )
        session = requests.Session()
        session.trust_env = False  # no proxy, .netrc or bundle of the environment between us and Vault
        session.verify, session.cert = tls.trust, tls.client_pair
        self._login = login
        self._api = hvac.Client(
            url=endpoint.url,
            token="",  # without it hvac would take VAULT_TOKEN or ~/.vault-token
            namespace=endpoint.namespace or None,
            verify=tls.trust,
            cert=tls.client_pair,
            timeout=timeout_s,
            allow_redirects=False,  # a redirect would carry the token to another host
            session=session,
        )
        self._entry = threading.Lock()
        self._entered = False

    async def read(self, mount: str, path: str) -> dict[str, str]:
        """The newest version of a secret; NotFoundError, DeniedError or PlatformError. Values must be text."""
        return await asyncio.to_thread(self._read, mount, path)

    async def lookup(self) -> TokenFacts:
        """Our own token, logging in if need be; DeniedError when it is no longer good."""
        return await asyncio.to_thread(self._told, lambda: self._api.auth.token.lookup_self(), "data", "ttl")

    async def renew(self) -> TokenFacts:
        """Give our token its whole life again, as far as Vault lets it; DeniedError when it can't be renewed."""
        return await asyncio.to_thread(self._told, lambda: self._api.auth.token.renew_self(), "auth", "lease_duration")

    async def keep_token(self) -> None:
        """For ever: renew the token well before it ends, or log in anew where it can't be renewed. Never raises."""
        while True:
            try:
                pause_s = await self._keep_once()
            except DsecError as error:
                log.warning("Vault's token could not be kept; it is tried again", error=str(error))
                pause_s = RETRY_S
            await asyncio.sleep(pause_s)

    async def _keep_once(self) -> float:
        """Seconds until the next look."""
        facts = await self.lookup()
        if facts.ttl_s and facts.renewable:
            facts = await self.renew()
        if not facts.ttl_s:
            return LOOK_S
        if facts.ttl_s <= 2 * RETRY_S and not self._login.token:
            self._entered = False  # renewing gives no more (token_max_ttl, batch tokens): the next request logs in
            return RETRY_S
        return max(1.0, facts.ttl_s * RENEW_AT)

    def _read(self, mount: str, path: str) -> dict[str, str]:
        where = f"{mount}/{path}"

        def ask() -> Any:
            return self._api.secrets.kv.v2.read_secret_version(
                path=path, mount_point=mount, raise_on_deleted_version=True
            )

        try:
            answer = self._ask(ask, f"to read {where}")
        except faults.InvalidPath as error:
            raise NotFoundError("no_such_secret", f"Vault has no secret {where}", field="secret") from error
        return _values(answer, where)

    def _told(self, ask: Callable[[], Any], part: str, ttl: str) -> TokenFacts:
        try:
            found = self._ask(ask, "a look at our own token")[part]
            return TokenFacts(ttl_s=float(found[ttl]), renewable=bool(found["renewable"]))
        except faults.InvalidPath as error:
            raise ProtocolError("bad_vault_reply", "there is no Vault at this address") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError("bad_vault_reply", "what Vault says of our token can't be read") from error

    def _ask(self, ask: Callable[[], T], what: str) -> T:
        """Ask, logged in; once more after a new login when the token is refused. InvalidPath is the caller's."""
        for attempt in (1, 2):
            self._enter()
            try:
                answer = ask()
            except faults.InvalidPath:
                raise
            except (faults.Forbidden, faults.Unauthorized) as error:
                self._entered = False
                if attempt == 2 or self._login.token:
                    hint = "see policies/acl/ for the rules that each component needs"
                    raise DeniedError("vault_denied", f"Vault refused {what}", hint=hint) from error
            except (faults.VaultError, requests.RequestException, OSError) as error:
                raise _unreachable(error) from error
            else:
                if isinstance(answer, requests.Response):  # not 200: hvac leaves these to us
                    raise _not_ok(answer)
                return answer
        raise AssertionError

    def _enter(self) -> None:
        login = self._login
        with self._entry:
            if self._entered:
                return
            try:
                self._api.token = self._log_in(login)
            except (faults.InvalidRequest, faults.InvalidPath, faults.Forbidden, faults.Unauthorized) as error:
                raise DeniedError("vault_denied", "Vault refused the login", field=login.field) from error
            except (faults.VaultError, requests.RequestException) as error:
                raise _unreachable(error) from error
            self._entered = True

    def _log_in(self, login: Login) -> str:
        if login.token:
            return login.token
        if login.token_file is not None:
            return _credential(login.token_file, "vault.token")
        self._api.token = ""  # an expired one must not spoil the login
        if login.role_id:
            answer = self._api.auth.approle.login(
                role_id=login.role_id,
                secret_id=login.secret_id or None,
                mount_point=login.approle_mount,
                use_token=False,
            )
        elif login.jwt_file is not None:
            jwt = _credential(login.jwt_file, "vault.jwt_file")
            answer = self._api.auth.jwt.jwt_login(role=login.role, jwt=jwt, path=login.jwt_mount, use_token=False)
        else:
            raise DeniedError("vault_no_login", "no way to log in to Vault is configured", field="vault.token")
        return _token_of(answer)

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.to_thread(self._api.adapter.close)


def _credential(file: Path, where: str) -> str:
    """A token or a JWT; UsageError names the setting, and quotes nothing of it."""
    try:
        text = file.read_text("ascii").strip()
    except OSError as error:
        raise UsageError("bad_secret_file", f"{file} can't be read: {error.strerror}", field=where) from error
    except UnicodeDecodeError:
        text = ""
    if not text or any(char.isspace() for char in text):
        raise UsageError("bad_secret_file", f"{file} holds no token", field=where)
    return text


def _token_of(answer: Any) -> str:
    if isinstance(answer, requests.Response):
        raise _not_ok(answer)
    try:
        token = answer["auth"]["client_token"]
    except (KeyError, TypeError):
        token = None
    if not isinstance(token, str) or not token:
        raise ProtocolError("bad_vault_reply", "Vault's answer to our login has no token")
    return token


def _unreachable(error: Exception) -> PlatformError:
    # the text of a VaultError may quote the request: the kind of fault is enough
    if isinstance(error, requests.exceptions.SSLError):
        return PlatformError(
            "vault_untrusted",
            "no TLS connection to Vault could be made: one side does not trust the other's certificate",
            field="vault.ca_file",
            hint="set vault.ca_file to the authority of Vault's certificate, vault.cert_file to ours where it is asked",
        )
    if isinstance(error, faults.VaultDown):
        return PlatformError("vault_sealed", "Vault is sealed", hint="unseal it", retry_after_s=5.0)
    return PlatformError("vault_unreachable", f"Vault did not answer: {type(error).__name__}", retry_after_s=1.0)


def _not_ok(answer: requests.Response) -> PlatformError:
    if answer.is_redirect:
        hint = "give the address of the active server, or of a balancer before it"
        return PlatformError(
            "vault_redirect", "Vault sends us to another host, which is not followed", field="vault.address", hint=hint
        )
    return PlatformError("vault_unreachable", f"Vault answered {answer.status_code}", retry_after_s=1.0)


def _values(answer: dict[str, Any], where: str) -> dict[str, str]:
    try:
        data = answer["data"]["data"]
        found = {str(key): value for key, value in data.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ProtocolError("bad_vault_reply", f"what Vault sent for {where} is no KV v2 secret") from error
    if not all(isinstance(value, str) for value in found.values()):
        raise ProtocolError("bad_vault_reply", f"a value of {where} is not text")
    return found
