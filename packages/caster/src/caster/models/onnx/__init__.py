"""Frozen models from ONNX files: read the graph, find the classifier, expose its input."""

from caster.models.onnx.model import OnnxModel

__all__ = ["OnnxModel"]
