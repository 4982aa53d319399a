"""Serve adapted streams with the Open Inference Protocol (KServe v2), over REST and gRPC."""

from caster.errors import CasterError

try:
    from caster.serve.server import Replicas, serve
    from caster.serve.service import ServeOptions
except ModuleNotFoundError as missing:
    if str(missing.name).startswith("caster"):
        raise
    raise CasterError(
        f"serving needs {missing.name}: install it with `pip install 'caster-tta[serve]'`"
    ) from None

__all__ = ["Replicas", "ServeOptions", "serve"]
