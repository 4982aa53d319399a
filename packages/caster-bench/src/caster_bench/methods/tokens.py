"""A vision transformer as FOA needs it: given prompts, and heard at its class token."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from caster.adapt.network import Network
from caster.errors import CasterError
from caster.models.modules import as_rows

Block = nn.Module


class PromptedTransformer:
    """A network whose first transformer block is given prompts, after the class token.

    They are taken away after the last block. Heard are the class token in every layer and the
    classifier's input. Works for modules as timm's, torchvision's and transformers' ViT: a list of
    like blocks on (B, T, D) that begin with a LayerNorm, and a classifier on the first token.

    Attributes
    ----------
    width : of a token, D.
    fan_in : of the layer that makes tokens of patches.
    """

    def __init__(
        self,
        network: Network,  # changed for good: hooks are put on it
        batch: Tensor,
        name: str,
    ) -> None:
        self._network = network
        self._name = name
        self._prompts: Tensor | None = None
        self._heard: list[Tensor] | None = None  # while a batch is on its way
        self._given = (0, torch.float32)  # width and kind of the classifier's input
        network.model(batch)  # so that its classifier is known
        self._head_name = str(network.model.head)
        self._head = network.module.get_submodule(self._head_name)
        blocks, self.width = self._find_blocks(batch)
        self.fan_in = _fan_in(network.module)
        blocks[0].register_forward_pre_hook(self._insert)
        blocks[-1].register_forward_hook(self._remove)
        for block in blocks[1:]:
            self._first_norm(block).register_forward_hook(self._hear_token)
        self._head.register_forward_pre_hook(self._hear_input)
        self._check(blocks[-1], batch)

    def __call__(
        self,
        batch: Tensor,
        prompts: Tensor | None = None,  # (P, D)
    ) -> tuple[Tensor, Tensor]:  # (B, C), (B, layers * D), the classifier's input last
        """Logits and class tokens of a batch."""
        self._prompts, self._heard = prompts, []
        try:
            logits = self._network(batch)
            self._given = self._heard[-1].shape[1], self._heard[-1].dtype
            return logits, torch.cat([tokens.float() for tokens in self._heard], dim=1)
        finally:  # no batch leaves a trace
            self._prompts = self._heard = None

    @property
    def n_features(self) -> int:
        """Width of the classifier's input."""
        return self._given[0]

    def classify(self, features: Tensor) -> Tensor:  # (B, n_features) -> (B, C)
        """Logits of the classifier's input."""
        model = self._network.model
        with torch.autocast(features.device.type, torch.bfloat16, model.bf16):
            logits: Tensor = self._head(features.to(self._given[1]))
        chosen: Tensor = self._network.columns(logits.float())
        return chosen

    def _find_blocks(self, batch: Tensor) -> tuple[list[Block], int]:
        """The longest list of modules of one class that work on (B, T, D), and D."""
        lists = [
            list(m.children()) for m in self._network.module.modules() if _is_list_of_one_class(m)
        ]
        shapes: dict[Block, tuple[int, ...]] = {}

        def note(block: Block, inputs: tuple[Any, ...]) -> None:
            if inputs and isinstance(inputs[0], Tensor):
                shapes[block] = tuple(inputs[0].shape)

        with ExitStack() as hooks:
            for block in {block for blocks in lists for block in blocks}:
                hooks.callback(block.register_forward_pre_hook(note).remove)
            self._network(batch)
        found: list[Block] = []
        for blocks in lists:
            given = {shapes.get(block, ()) for block in blocks}
            if len(given) == 1 and len(next(iter(given))) == 3 and len(blocks) > len(found):
                found = blocks
        if not found:
            raise self._refusal("it has no list of blocks that work on tokens")
        return found, shapes[found[0]][2]

    def _first_norm(self, block: Block) -> nn.Module:
        for layer in block.children():
            if isinstance(layer, nn.LayerNorm):
                return layer
        raise self._refusal(f"its {type(block).__name__} has no LayerNorm")

    def _check(self, last: Block, batch: Tensor) -> None:
        """That the class token alone is classified, by the classifier, with prompts as well."""
        try:
            logits, heard = self(batch)
        except RuntimeError as error:  # tokens of several widths
            raise self._refusal("its blocks do not all work on the same tokens") from error
        if not torch.allclose(self.classify(heard[:, -self.n_features :]), logits, 1e-3, 1e-3):
            raise self._refusal(f"its logits are not the output of {self._head_name!r}")
        poison = last.register_forward_hook(_forget_all_but_first)
        try:
            alone, _ = self(batch)
        finally:
            poison.remove()
        if not torch.equal(alone, logits):
            raise self._refusal("its classifier does not read the first token alone")
        try:
            self(batch, torch.zeros(1, self.width, device=batch.device))
        except RuntimeError as error:
            line = " ".join(str(error).split())[:200]
            raise self._refusal(f"it takes no more tokens: {line}") from error

    def _refusal(self, why: str) -> CasterError:
        return CasterError(
            f"{self._name} needs a vision transformer with a class token, and "
            f"{self._network.model.name} is none that it knows: {why}"
        )

    def _insert(self, block: Block, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._prompts is None:
            return None
        tokens, *others = inputs
        prompts = self._prompts.to(tokens.dtype).expand(len(tokens), -1, -1)
        return torch.cat([tokens[:, :1], prompts, tokens[:, 1:]], dim=1), *others

    def _remove(self, block: Block, inputs: Any, output: Any) -> Any:
        if self._prompts is None:
            return None
        tokens, n = _tokens_of(output), len(self._prompts)
        return _with_tokens(output, torch.cat([tokens[:, :1], tokens[:, 1 + n :]], dim=1))

    def _hear_token(self, norm: nn.Module, inputs: Any, output: Tensor) -> None:
        if self._heard is not None:
            self._heard.append(output[:, 0])

    def _hear_input(self, head: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._heard is not None:
            self._heard.append(as_rows(inputs[0], self._head_name))


def _is_list_of_one_class(module: nn.Module) -> bool:
    plain = isinstance(module, nn.Sequential | nn.ModuleList) and len(module) > 1
    return plain and len({type(block) for block in module.children()}) == 1


def _fan_in(module: nn.Module) -> int:
    first = next(m for m in module.modules() if isinstance(m, nn.Conv2d | nn.Linear))
    return first.weight[0].numel()


def _tokens_of(output: Any) -> Tensor:
    """Tokens a block returns: a tensor, or the first of a tuple."""
    tokens: Tensor = output[0] if isinstance(output, tuple) else output
    return tokens


def _with_tokens(output: Any, tokens: Tensor) -> Any:
    return (tokens, *output[1:]) if isinstance(output, tuple) else tokens


def _forget_all_but_first(block: Block, inputs: Any, output: Any) -> Any:
    tokens = _tokens_of(output).clone()
    tokens[:, 1:] = torch.nan  # whatever reads them gives no number
    return _with_tokens(output, tokens)
