"""A compiled stream run by ONNX Runtime, and networks to compile."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime
import torch

from caster.core.channels import ChannelMoments
from caster.core.class_moments import ClassChannelMoments
from caster.export.layer_graph import NEXT, REASONS
from caster.models.onnx.sites import find_onnx_sites


def exported(net, shape, path) -> onnx.ModelProto:
    """A network as an ONNX file with its BatchNorms, for batches of any size."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net,
            (torch.zeros(2, *shape),),
            path,
            dynamo=False,
            opset_version=18,
            input_names=["images"],
            dynamic_axes={"images": {0: "n"}},
            do_constant_folding=False,
            training=torch.onnx.TrainingMode.PRESERVE,
        )
    return onnx.load(path)


def at_outputs(net, layers, graph, head):
    """Moments at the inputs of torch's BatchNorms as those at their outputs in the graph."""
    parts, found = dict(net.named_modules()), find_onnx_sites(graph, head)
    moved = {}
    for (site, moments), output in zip(layers.items(), found, strict=True):
        layer = parts[site.module]
        gain = layer.weight / (layer.running_var + layer.eps).sqrt()
        gain, mean, bias = (
            part.detach().double().numpy() for part in (gain, layer.running_mean, layer.bias)
        )
        classes = moments.classes
        moved[output.site] = ChannelMoments(
            moments.count,
            (gain * (moments.mean - mean) + bias).astype(np.float32),
            (gain**2 * moments.variance).astype(np.float32),
            classes=ClassChannelMoments(
                classes.counts,
                gain * (classes.means - mean) + bias,
                gain**2 * classes.variances,
            ),
        )
    return moved


@dataclass
class Answer:
    probabilities: np.ndarray
    labels: np.ndarray
    accepted: bool
    ratio: float
    reason: str


class CompiledStream:
    """A stream whose state goes from run to run."""

    def __init__(self, model) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        content = model if isinstance(model, (bytes, str)) else model.SerializeToString()
        self.session = onnxruntime.InferenceSession(content, options)
        self.names = [output.name for output in self.session.get_outputs()]
        self.state = {}

    def __call__(self, images) -> Answer:
        given = self.session.run(None, {"images": images, **self.state})
        found = dict(zip(self.names, given, strict=True))
        self.state = {
            name.removeprefix(NEXT): each for name, each in found.items() if name.startswith(NEXT)
        }
        return Answer(
            found["probabilities"],
            found["labels"],
            bool(found["accepted"]),
            float(found["ratio"]),
            REASONS[int(found["reason"])],
        )
