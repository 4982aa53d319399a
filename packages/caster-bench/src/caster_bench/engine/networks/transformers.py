"""Vision transformers for small images, and the start they train well from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from caster.errors import CasterError
from caster_bench.engine.networks.convolutional import Four
from caster_bench.engine.networks.library import timm_models

if TYPE_CHECKING:
    from torch import Tensor, nn

SAME_TOKEN, OTHER_SIGN = 0.7, 0.4  # how near to I queries by keys, to -I projection by values


def vit(
    n_classes: int,
    size: int,
    drop_path: float,
    *,
    patch: int = 4,
    width: int = 768,
    depth: int = 12,
    heads: int = 12,
) -> nn.Module:
    """A ViT with a class token; ViT-B and DeiT-B on 8 x 8 patches."""
    module: nn.Module = timm_models("vision_transformer").VisionTransformer(
        img_size=size,
        patch_size=patch * (size // 32),
        embed_dim=width,
        depth=depth,
        num_heads=heads,
        num_classes=n_classes,
        drop_path_rate=drop_path,
    )
    return module


def swin(
    n_classes: int,
    size: int,
    drop_path: float,
    *,
    width: int = 96,
    depths: Four = (2, 2, 6, 2),
    heads: Four = (3, 6, 12, 24),
) -> nn.Module:
    """A Swin transformer: stages of 16, 8, 4 and 2 patches a side, in windows of 4.

    The last stage is smaller than a window, which timm shrinks to it.
    """
    module: nn.Module = timm_models("swin_transformer").SwinTransformer(
        img_size=size,
        patch_size=2 * (size // 32),
        embed_dim=width,
        depths=depths,
        num_heads=heads,
        window_size=4,
        num_classes=n_classes,
        drop_path_rate=drop_path,
    )
    return module


def drop_patches(net: nn.Module, share: float) -> None:
    """Have a ViT learn from a part of the patches, drawn for every image: a step costs less.

    In eval mode, or with `net.patch_drop` in it, it sees them all.
    """
    vit: Any = net
    if not hasattr(vit, "patch_drop"):
        raise CasterError(f"a {type(net).__name__} has no patches that can be left out")
    tokens = vit.num_prefix_tokens  # the class token stays
    dropping = timm_models("vision_transformer").PatchDropout(share, tokens)
    vit.patch_drop = dropping.train(vit.training)


def mimetic(net: nn.Module) -> None:
    """Begin a ViT's attention as it looks in trained ones: short runs on few images need it.

    After Trockman and Kolter 2023, who find 5 points on CIFAR-10: queries by keys near to the
    identity, values by projection near to minus the identity, positions as sines and cosines. They
    factor noisy identities; here an orthogonal matrix is added to the small noise timm begins with,
    which comes to the same.
    """
    import torch
    from torch import nn

    vit: Any = net
    if not hasattr(vit, "blocks") or not hasattr(vit, "pos_embed"):
        raise CasterError(f"a {type(net).__name__} has no attention to begin in this way")
    with torch.no_grad():
        for block in vit.blocks:
            query, key, value = block.attn.qkv.weight.chunk(3)
            shared = nn.init.orthogonal_(torch.empty_like(query))
            query += math.sqrt(SAME_TOKEN) * shared
            key += math.sqrt(SAME_TOKEN) * shared
            turned = nn.init.orthogonal_(torch.empty_like(value))
            value += math.sqrt(OTHER_SIGN) * turned
            block.attn.proj.weight -= math.sqrt(OTHER_SIGN) * turned.T
        n_patches = vit.patch_embed.num_patches
        vit.pos_embed[:, -n_patches:] = positions(math.isqrt(n_patches), vit.pos_embed.shape[2])


def positions(side: int, width: int) -> Tensor:  # (side * side, width)
    """Places on a square grid as sines and cosines: half of the width for rows, half for columns.

    >>> positions(8, 48).shape
    torch.Size([64, 48])
    """
    import torch

    n = width // 4
    turns = 10_000 ** -(torch.arange(n) / n)
    angles = torch.arange(side)[:, None] * turns  # (side, n)
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)  # (side, width / 2)
    rows = waves[:, None].expand(side, side, -1)
    columns = waves[None].expand(side, side, -1)
    return torch.cat([rows, columns], dim=2).flatten(0, 1)
