"""Adaptation compiled into an ONNX graph, for ONNX Runtime anywhere."""
