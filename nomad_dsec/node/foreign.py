"""Errors of rooms that know nothing of the wire (images, policies) as errors that a client understands. Pure."""

from __future__ import annotations

from dsec_imagefs.errors import ImageError
from dsec_policies.errors import PolicyError
from libdsec.errors import CapacityError, DsecError, NotSupported, PlatformError, UsageError


def to_dsec(error: Exception) -> DsecError:
    """The wire's form: itself when it is ours; what nobody foresaw is a PlatformError that says its type."""
    if isinstance(error, DsecError):
        return error
    if isinstance(error, PolicyError):
        return _of_policy(error)
    if isinstance(error, ImageError):
        return _of_image(error)
    return PlatformError("internal_error", f"{type(error).__name__}: {error}", hint="the node's log has the details")


def _of_policy(error: PolicyError) -> DsecError:
    cls = NotSupported if error.code == "policy_unenforceable" else UsageError
    return cls(error.code, error.message, hint=error.hint, field=f"policy.{error.field}" if error.field else "policy")


def _of_image(error: ImageError) -> DsecError:
    if error.code == "not_found":
        return CapacityError(
            "image_missing", error.message, hint=error.hint, field="image", details={"refusal": "image_missing"}
        )
    if error.code in ("bad_name", "ambiguous"):
        return UsageError(f"image_{error.code}", error.message, hint=error.hint, field="image")
    return PlatformError(f"image_{error.code}", error.message, hint=error.hint)
