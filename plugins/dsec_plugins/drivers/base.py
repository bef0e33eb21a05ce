"""What every Nomad plugin serves: who it is, and its configuration. No side effects: three of it run at a start."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dsec_plugins.drivers.configs import PluginConfig
from dsec_plugins.drivers.nodeapi import NodeApi
from dsec_plugins.drivers.schema import ConfigError, decode, spec_of
from dsec_plugins.drivers.statuses import abort
from dsec_plugins.proto import base_pb2, base_pb2_grpc

if TYPE_CHECKING:
    from dsec_plugins.drivers.kinds import DriverKind

VERSION = "0.1.0"
API_VERSION = "v0.1.0"


class Shared:
    """What the two servicers of one plugin process share: its configuration, and the connection to the node daemon."""

    def __init__(self) -> None:
        self.config = PluginConfig()
        self.node = NodeApi(self.config.node_socket)
        self.changed = asyncio.Event()

    async def configure(self, config: PluginConfig) -> None:
        """Take a new configuration; calls that run keep their connection."""
        if config.node_socket != self.node.socket_path:
            self.node = NodeApi(config.node_socket)
        self.config = config
        self.changed.set()


class BasePlugin(base_pb2_grpc.BasePluginServicer):
    """PluginInfo, ConfigSchema, SetConfig."""

    def __init__(self, kind: DriverKind, shared: Shared) -> None:
        self._kind = kind
        self._shared = shared

    async def PluginInfo(self, request: Any, context: Any) -> Any:
        """Type, versions, and the name that jobs write into `driver =`."""
        return base_pb2.PluginInfoResponse(
            type=base_pb2.DRIVER, plugin_api_versions=[API_VERSION], plugin_version=VERSION, name=self._kind.name
        )

    async def ConfigSchema(self, request: Any, context: Any) -> Any:
        """The schema of `plugin "..." { config {} }`."""
        return base_pb2.ConfigSchemaResponse(spec=spec_of(PluginConfig))

    async def SetConfig(self, request: Any, context: Any) -> Any:
        """Called more than once, at first without nomad_config."""
        try:
            config = decode(PluginConfig, request.msgpack_config)
            if not config.node_socket.startswith("/"):
                raise ConfigError(f"config.node_socket: {config.node_socket!r} is not an absolute path")
            await self._shared.configure(config)
        except ConfigError as error:
            await abort(context, error)
        return base_pb2.SetConfigResponse()
