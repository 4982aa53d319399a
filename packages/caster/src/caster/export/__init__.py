"""Adaptation compiled into an ONNX graph, for ONNX Runtime anywhere."""

from caster.export.compile import compile_model

__all__ = ["compile_model"]
