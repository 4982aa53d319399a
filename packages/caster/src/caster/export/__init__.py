"""Adaptation compiled into ONNX graphs."""
