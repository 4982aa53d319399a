"""Compile a model and its adaptation into one ONNX file, for a CPU or WebAssembly."""

from caster.export.compiler import compile_model

__all__ = ["compile_model"]
