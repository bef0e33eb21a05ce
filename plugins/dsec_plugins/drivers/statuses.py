"""From our errors to the gRPC statuses that a Nomad client understands: in words, and retryable only when it helps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
from google.protobuf import any_pb2
from google.rpc import status_pb2
from libdsec.errors import CapacityError, DeadlineExceeded, DsecError, NotFoundError, PlatformError, UsageError

from dsec_plugins.drivers.schema import ConfigError
from dsec_plugins.proto import structs_pb2

if TYPE_CHECKING:
    from typing import NoReturn

    from grpc.aio import ServicerContext

_TYPE_URL = "type.googleapis.com/hashicorp.nomad.plugins.shared.structs.RecoverableError"
_DETAILS = "grpc-status-details-bin"


def is_retryable(error: Exception) -> bool:
    """Whether the task's restart policy may try again: no room or no answer now, not a wrong job."""
    if isinstance(error, CapacityError | DeadlineExceeded):
        return True
    return isinstance(error, PlatformError) and error.retry_after_s is not None


def code_of(error: Exception) -> grpc.StatusCode:
    """The status for errors of every call but StartTask."""
    if isinstance(error, NotFoundError):
        return grpc.StatusCode.NOT_FOUND
    if isinstance(error, UsageError | ConfigError):
        return grpc.StatusCode.INVALID_ARGUMENT
    if isinstance(error, DeadlineExceeded):
        return grpc.StatusCode.DEADLINE_EXCEEDED
    if isinstance(error, PlatformError):
        return grpc.StatusCode.UNAVAILABLE if error.code == "node_unreachable" else grpc.StatusCode.INTERNAL
    return grpc.StatusCode.FAILED_PRECONDITION


def text_of(error: Exception) -> str:
    """What the job's owner reads."""
    return str(error) if isinstance(error, DsecError | ConfigError) else f"{type(error).__name__}: {error}"


async def abort(context: ServicerContext, error: Exception) -> NoReturn:
    """End the call with the error's status."""
    await context.abort(code_of(error), text_of(error))
    raise AssertionError


async def abort_start(context: ServicerContext, error: Exception) -> NoReturn:
    """End StartTask: FAILED_PRECONDITION with a RecoverableError as first detail is what makes Nomad retry."""
    if not is_retryable(error):
        await abort(context, error)
    packed = structs_pb2.RecoverableError(recoverable=True).SerializeToString()
    status = status_pb2.Status(
        code=grpc.StatusCode.FAILED_PRECONDITION.value[0],
        message=text_of(error),
        details=[any_pb2.Any(type_url=_TYPE_URL, value=packed)],
    )
    trailer = ((_DETAILS, status.SerializeToString()),)
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text_of(error), trailing_metadata=trailer)
    raise AssertionError
