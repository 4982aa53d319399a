"""Torch networks with random weights as ONNX graphs, by both of torch's exporters."""

from __future__ import annotations

import io
import logging
import warnings

import onnx
import onnxruntime
import torch
from onnxruntime.quantization import CalibrationDataReader
from torch import nn
from torch.nn import functional

from caster import wrap
from caster.models.sites import find_sites, first_tensor, has_running_statistics

EXPORTERS = ("dynamo", "folded", "unfolded")  # the last two: TorchScript, with and without folding


def seeded(make) -> nn.Module:
    """A network in evaluation mode whose normalisations and layer scales all matter."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = make().eval()
        for module in net.modules():
            if has_running_statistics(module):
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 2)
                module.weight.data.uniform_(0.5, 1.5)
                module.bias.data.normal_(0, 0.2)
            if isinstance(getattr(module, "gamma", None), nn.Parameter):
                module.gamma.data.uniform_(0.1, 0.5)
    return net


def images(size: int, count: int = 3) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def exported(net: nn.Module, batch: torch.Tensor, exporter: str = "folded", **options):
    """A network as an ONNX model that takes any number of images."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        if exporter == "dynamo":
            rows = ({0: torch.export.Dim("batch", min=1, max=64)},)
            program = torch.onnx.export(
                net, (batch,), dynamo=True, dynamic_shapes=rows, verbose=False
            )
            return program.model_proto
        if exporter == "unfolded":
            keep = torch.onnx.TrainingMode.PRESERVE
            options |= {"do_constant_folding": False, "training": keep}
        options.setdefault("dynamic_axes", {"x": {0: "rows"}})
        file = io.BytesIO()
        torch.onnx.export(net, (batch,), file, dynamo=False, input_names=["x"], **options)
    return onnx.load_model_from_string(file.getvalue())


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def values_at(model: onnx.ModelProto, tensors: list[str], batch: torch.Tensor):
    """What a graph computes at these tensors."""
    tapped = onnx.ModelProto()
    tapped.CopyFrom(model)
    del tapped.graph.output[:]
    for name in tensors:
        tapped.graph.output.add(name=name)
    runs = session(tapped)
    return runs.run(tensors, {runs.get_inputs()[0].name: batch.numpy()})


def torch_sites(net: nn.Module, batch: torch.Tensor):
    """Torch's sites, with the values there; those of a BatchNorm are before its activation."""
    found: dict = {}

    def hear(site):
        def normalised(layer, args):
            moments = layer.running_mean, layer.running_var
            weights = layer.weight, layer.bias
            found[site] = functional.batch_norm(args[0], *moments, *weights, eps=layer.eps)

        def read(layer, args):
            found[site] = first_tensor(args).clone()

        def returned(layer, args, output):
            found[site] = first_tensor(output).clone()

        layer = net.get_submodule(site.module)
        if has_running_statistics(layer):
            return layer.register_forward_pre_hook(normalised)
        if site.side == "in":
            return layer.register_forward_pre_hook(read)
        return layer.register_forward_hook(returned)

    sites = find_sites(wrap(net), batch)
    hooks = [hear(site) for site in sites]
    with torch.inference_mode():
        net(batch)
    for hook in hooks:
        hook.remove()
    return [(site, found[site].numpy()) for site in sites]


class Calibration(CalibrationDataReader):
    """One batch, for `quantize_static`."""

    def __init__(self, batch):
        self.batches = iter([{"x": batch.numpy()}])

    def get_next(self):
        return next(self.batches, None)
