"""ONNX files as frozen models: the graph read, its head found, its features made an output."""

from caster.models.onnx.model import OnnxModel

__all__ = ["OnnxModel"]
