"""Adaptation compiled into an ONNX graph, for ONNX Runtime on a CPU or in WebAssembly."""

from caster.export.compiler import compile_model

__all__ = ["compile_model"]
