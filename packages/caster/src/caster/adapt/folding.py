"""Fold constant maps into the weights of a torch module, for resting streams.

While a stream rests, its maps are constant and alignment costs next to nothing: a diagonal map of a
BatchNorm's input is folded into the layer's statistics, and a full map into the weights of the
preceding convolution. Hooks apply all other maps, in place if nothing else reads the values.
Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from caster.adapt.layer_passes import Answer
from caster.core.channels import Site
from caster.models.activation_statistics import hook_on, is_batchnorm
from caster.models.cuda import GraphRunner, is_launch_bound
from caster.models.protocol import runs_on_gpu
from caster.models.sites import convolutions_before
from caster.models.torch import TorchModel
from caster.models.torch_channels import map_channels, mapped_full

Map = tuple[Tensor, Tensor]  # (c,) or (c, c), and (c,): x -> scale x + shift, or A x + shift
RECORDED = 256  # batches from which a CUDA graph pays off
# Exactly these: a subclass may normalise its weight.
PLAIN_FORWARD = [kind.forward for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)]


def _outputs(features: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    return features, logits


class FoldedModule:
    """A twin of a torch module with constant maps at its sites; all other weights are shared.

    Tensors that a map changes are copied once and then written in place, so that a CUDA graph or a
    compiled module sees the new values. A compiled module is compiled again, with the defaults of
    torch.compile.

    >>> site = Site("0", "in", 1)
    >>> net = nn.Sequential(nn.BatchNorm1d(1, eps=0.0, affine=False), nn.Linear(1, 1)).eval()
    >>> folded = FoldedModule(TorchModel(net), {site: None})
    >>> folded.fold({site: (torch.tensor([2.0]), torch.tensor([1.0]))})
    >>> folded(torch.tensor([[3.0]]))[0]
    tensor([[7.]])
    """

    def __init__(
        self,
        model: TorchModel,
        sites: Mapping[Site, str | None],  # with the convolution to fold full maps into, if any
    ) -> None:
        self._model, self._twin = model, model.twin()
        module = self._twin.module
        self._maps = {site: SiteMap(module, site, name) for site, name in sites.items()}
        self._twin.compiles = model.compiles
        self._can_record = runs_on_gpu(model)
        self._can_record_network = True
        self._records = False  # whether this rest replays a CUDA graph
        self._undecided = False  # whether that graph includes the network
        self._runner: GraphRunner | None = None

    def fold(self, maps: Mapping[Site, Map], batches: int = 1) -> None:
        """Use these maps, for about this many batches."""
        before = self._tensors
        with torch.inference_mode(False), torch.no_grad():
            for site, (scale, shift) in maps.items():
                self._maps[site].set(scale, shift)
        if self._tensors != before:
            self._twin.recompile()  # the compiled copy still has the old tensors
        self._records = self._can_record and batches >= RECORDED
        network = self._records and self._can_record_network
        self._twin.cuda_graph = network and self._model.cuda_graph
        # Replaying a CUDA graph would not call the user's hooks.
        self._undecided = network and not self._model.cuda_graph and not self._model.has_hooks

    def map_in_place(self, placed: Tensor) -> bool:
        """Let hooks map in place from now on, if the outputs for a batch stay bit for bit the same.

        They do unless the network reads the same values elsewhere. In place, a map is one kernel,
        its values are still in the cache, and prefix tokens need no copy. A compiled module fuses
        maps anyway, and the user's hooks may keep the values.
        """
        if self._twin.compiles or self._model.has_hooks:
            return False
        expected = self._run(placed)
        with torch.inference_mode():  # only inference tensors are overwritten
            given = placed.clone()
        self._set_in_place(True)
        try:
            found = [*self._run(given), given]
            same = all(map(torch.equal, found, (*expected, placed)))
        except RuntimeError:  # values that share memory cannot be written in place
            same = False
        self._set_in_place(same)
        return same

    def _set_in_place(self, in_place: bool) -> None:
        for found in self._maps.values():
            found.in_place = in_place

    def __call__(self, placed: Tensor, answer: Answer = _outputs) -> tuple[Tensor, ...]:
        """Run a batch from `TorchModel.placed`, and apply `answer` to its features and logits.

        On a GPU a long rest records `answer` as a CUDA graph. It includes the network if the model
        is to be recorded, or if the GPU would wait for its launches. Otherwise a graph of the
        network gains little, and it reserves as much memory as a pass needs.
        """
        if not self._records:
            return answer(*self._run(placed))
        if self._undecided:
            self._undecided = False
            run = partial(self._twin.run_placed, placed)
            self._twin.cuda_graph = is_launch_bound(run, placed.device)
        whole = self._twin.cuda_graph
        if self._runner is None or self._runner.multiplies != whole:
            self._runner = GraphRunner(placed.device, multiplies=whole)
        if whole and not self._runner.is_used:
            torch.cuda.empty_cache()  # the graph cannot reuse the memory of earlier passes
        first = (lambda: (placed,)) if whole else partial(self._twin.run_placed, placed)
        work = partial(self._answer_batch if whole else self._answer_outputs, answer)
        try:
            found, _ = self._runner.run(first, work, answer)
        except RuntimeError:  # the module synchronises, which a CUDA graph cannot
            self.release()
            if whole:
                self._can_record_network = self._twin.cuda_graph = False
            else:
                self._can_record = self._records = False
            return self(placed, answer)
        return tuple(found)

    def release(self) -> None:
        """Free the CUDA graph."""
        if self._runner is not None:
            self._runner.release()

    @property
    def _tensors(self) -> int:
        """Number of tensors that maps have created so far."""
        return sum(found.tensors for found in self._maps.values())

    def _run(self, placed: Tensor) -> tuple[Tensor, Tensor]:
        features, logits = self._twin.run_placed(placed)
        return features.float(), logits.float()

    def _answer_batch(self, answer: Answer, placed: Tensor) -> tuple[list[Tensor], object]:
        """Compute what a CUDA graph records; also return the tensors it reads."""
        return [*answer(*self._run(placed))], (self._twin.values(), self._maps, answer)

    def _answer_outputs(
        self, answer: Answer, features: Tensor, logits: Tensor
    ) -> tuple[list[Tensor], object]:
        """The same, for a graph without the network."""
        return [*answer(features.float(), logits.float())], answer


class SiteMap:
    """Constant map of one site: in a BatchNorm, in the convolution before it, or in a hook."""

    def __init__(self, module: nn.Module, site: Site, convolution: str | None) -> None:
        self._module, self._site = module, site
        layer = module.get_submodule(site.module)
        self._batchnorm: Any = layer if is_batchnorm(module, site) else None
        self._convolution: Any = convolution and module.get_submodule(convolution)
        self._frozen: dict[str, Tensor] = {}  # the model's own tensors that were replaced
        self._hook: Map | None = None
        self.in_place = False
        self.tensors = 0  # created so far

    def set(self, scale: Tensor, shift: Tensor) -> None:  # (c,) or (c, c), (c,)
        """Set the map x -> scale x + shift, or A x + shift."""
        if self._batchnorm is None:
            self._set_hook(scale, shift)
        elif scale.ndim == 1:
            self._set_statistics(scale, shift)
            self._set_full(None, shift)
        else:
            offset = self._set_full(scale, shift)
            self._set_statistics(torch.ones_like(shift), offset)

    def _set_statistics(self, scale: Tensor, shift: Tensor) -> None:
        """Make the BatchNorm normalise x as it would scale x + shift."""
        layer = self._batchnorm
        mean, variance = (
            self._own(layer._buffers, name).to(shift) for name in ("running_mean", "running_var")
        )
        layer.running_mean.copy_((mean - shift) / scale)
        layer.running_var.copy_((variance + layer.eps) / scale**2 - layer.eps)

    def _set_full(self, A: Tensor | None, shift: Tensor) -> Tensor:  # (c, c), (c,) -> (c,)
        """Fold A into the convolution, or remove it; return the shift still to be applied."""
        layer = self._convolution
        if layer is None:
            if A is not None:
                self._set_hook(A, shift)
            elif self._hook is not None:
                self._set_hook(torch.ones_like(shift), torch.zeros_like(shift))
            return torch.zeros_like(shift)
        if A is None:
            if "weight" in self._frozen:
                layer.weight.copy_(self._frozen["weight"])
            return shift
        own = self._own(layer._parameters, "weight")
        layer.weight.copy_(torch.tensordot(A, own.to(A), 1))
        if layer.bias is None:
            return shift
        bias: Tensor = layer.bias.to(shift)  # the convolution adds it unmapped
        return shift + A @ bias - bias

    def _set_hook(self, scale: Tensor, shift: Tensor) -> None:
        if self._hook is None:
            self.tensors += 1
            hook_on(self._module, self._site, self._apply, "fit again")
        if self._hook is None or self._hook[0].shape != scale.shape:
            self._hook = torch.empty_like(scale), torch.empty_like(shift)
            self.tensors += 1
        for held, new in zip(self._hook, (scale, shift), strict=True):
            held.copy_(new)

    def _apply(self, layer: nn.Module, values: Tensor) -> Tensor:
        assert self._hook is not None
        scale, shift = self._hook
        site = self._site
        if scale.ndim == 2:
            mapped = mapped_full(site.patch_values(values), scale, shift, site.axis)
            if not site.prefix_tokens:
                return mapped
            return torch.cat((values[:, : site.prefix_tokens], mapped), 1)
        # Never in place on a weight, the batch, or a view of either.
        in_place = self.in_place and values.is_inference()
        mapped = values if in_place else torch.empty_like(values)
        map_channels(values, scale, shift, site, out=mapped)
        return mapped

    def _own(self, held: dict[str, Any], name: str) -> Tensor:
        """Replace a tensor of a layer by a copy, once; return the model's own tensor."""
        if name not in self._frozen:
            self._frozen[name] = held[name]
            copy = held[name].detach().clone(memory_format=torch.preserve_format)
            held[name] = nn.Parameter(copy, False) if name == "weight" else copy
            self.tensors += 1
        return self._frozen[name]


def foldable_convolutions(twin: TorchModel, batch: Tensor) -> dict[Site, str]:
    """Names of the convolutions before BatchNorms that a full map can be folded into."""
    found = convolutions_before(twin, batch)
    get = twin.module.get_submodule
    return {site: name for site, name in found.items() if _takes_full_map(get(name))}


def _takes_full_map(layer: Any) -> bool:
    """Whether a full map of the output channels can be folded into the weight of a layer."""
    if type(layer).forward not in PLAIN_FORWARD:
        return False
    hooks = layer._forward_hooks or layer._forward_pre_hooks  # such as weight_norm's
    return layer.groups == 1 and "weight" in layer._parameters and not hooks
