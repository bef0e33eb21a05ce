"""libdsec: isolated, stateful sandboxes for RL training jobs.

    import libdsec
    with libdsec.Sandbox.create("debian-dev") as sandbox:
        result = sandbox.exec("echo hello")

`AsyncSandbox` is the same for asyncio. DSEC_ENDPOINT and DSEC_API_KEY say where the gateway is. Names are loaded when
first used, so importing this package is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from libdsec.client import AsyncClient as AsyncClient
    from libdsec.errors import CapacityError as CapacityError
    from libdsec.errors import DeadlineExceeded as DeadlineExceeded
    from libdsec.errors import DeniedError as DeniedError
    from libdsec.errors import DsecError as DsecError
    from libdsec.errors import NotFoundError as NotFoundError
    from libdsec.errors import NotSupported as NotSupported
    from libdsec.errors import PlatformError as PlatformError
    from libdsec.errors import ProtocolError as ProtocolError
    from libdsec.errors import StateError as StateError
    from libdsec.errors import UsageError as UsageError
    from libdsec.files import AsyncFiles as AsyncFiles
    from libdsec.fncall import AsyncFnCall as AsyncFnCall
    from libdsec.fncall_results import FnOutcome as FnOutcome
    from libdsec.fncall_results import FnResult as FnResult
    from libdsec.fncall_results import FnSubmission as FnSubmission
    from libdsec.group import AsyncSandboxGroup as AsyncSandboxGroup
    from libdsec.network import AsyncNetwork as AsyncNetwork
    from libdsec.process import AsyncProcess as AsyncProcess
    from libdsec.results import CommandFailed as CommandFailed
    from libdsec.results import ExecResult as ExecResult
    from libdsec.results import Output as Output
    from libdsec.sandbox import AsyncSandbox as AsyncSandbox
    from libdsec.secret import SecretRef as SecretRef
    from libdsec.sync import Client as Client
    from libdsec.sync import Files as Files
    from libdsec.sync import FnCall as FnCall
    from libdsec.sync import Network as Network
    from libdsec.sync import Process as Process
    from libdsec.sync import Sandbox as Sandbox
    from libdsec.sync import SandboxGroup as SandboxGroup
    from libdsec.wire_fncall import Checker as Checker
    from libdsec.wire_fncall import FnLimits as FnLimits
    from libdsec.wire_fncall import FnTest as FnTest

__version__ = "0.1.0"

_HOMES = {
    "client": ("AsyncClient",),
    "errors": (
        "CapacityError",
        "DeadlineExceeded",
        "DeniedError",
        "DsecError",
        "NotFoundError",
        "NotSupported",
        "PlatformError",
        "ProtocolError",
        "StateError",
        "UsageError",
    ),
    "files": ("AsyncFiles",),
    "fncall": ("AsyncFnCall",),
    "fncall_results": ("FnOutcome", "FnResult", "FnSubmission"),
    "network": ("AsyncNetwork",),
    "process": ("AsyncProcess",),
    "results": ("CommandFailed", "ExecResult", "Output"),
    "group": ("AsyncSandboxGroup",),
    "secret": ("SecretRef",),
    "sandbox": ("AsyncSandbox",),
    "sync": ("Client", "Files", "FnCall", "Network", "Process", "Sandbox", "SandboxGroup"),
    "wire_fncall": ("Checker", "FnLimits", "FnTest"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted([*_HOME_OF, "__version__"])


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
