"""Our Muon and RandAugment against torch's and timm's, in the same run.

    python benchmarks/training_speed.py

RandAugment is timed on a batch of 256 images of 32 pixels, on one CPU thread; Muon on the matrices
of a ViT-B, on a GPU if there is one.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from caster_bench.engine.train.augmentation import randaugment
from caster_bench.engine.train.trainer import Muon
from measure import complete_torchvision, in_turns, machine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAGNITUDE = 9.0
TIMMS = (  # the same eleven operations
    *("Invert", "Solarize", "SolarizeAdd", "Posterize", "AutoContrast", "Equalize"),
    *("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel"),
)
SHAPES = {(2304, 768): 3, (768, 768): 1, (3072, 768): 1, (768, 3072): 1}  # and parts of each
BLOCKS = 12


def augmentation() -> dict[str, float]:
    complete_torchvision()
    from timm.data.auto_augment import rand_augment_transform

    images = torch.randint(0, 256, (256, 3, 32, 32), dtype=torch.uint8)
    pixels = images.permute(0, 2, 3, 1).numpy()
    transform = rand_augment_transform(
        f"rand-m{MAGNITUDE:g}-n1-mstd0.5", {"img_mean": (128,) * 3}, transforms=list(TIMMS)
    )
    generator = torch.Generator().manual_seed(0)

    def timms() -> Tensor:
        changed = [np.asarray(transform(Image.fromarray(image))) for image in pixels]
        return torch.from_numpy(np.stack(changed))

    contenders = {"ours": lambda: randaugment(images, MAGNITUDE, generator), "timm": timms}
    return in_turns(contenders, rounds=7, repeats=3)


def muon() -> dict[str, float]:
    def parameters(shape: tuple[int, int]) -> list[nn.Parameter]:
        values = [nn.Parameter(torch.randn(shape, device=DEVICE) / 50) for _ in range(BLOCKS)]
        for value in values:
            value.grad = torch.randn_like(value)
        return values

    groups = [{"params": parameters(shape), "parts": parts} for shape, parts in SHAPES.items()]
    every = [value for shape in SHAPES for value in parameters(shape)]
    optimisers: dict[str, torch.optim.Optimizer] = {
        "ours": Muon(groups, 1e-3, 0.1),
        "torch": torch.optim.Muon(every, 1e-3, adjust_lr_fn="match_rms_adamw"),
    }

    def step(name: str) -> None:
        optimisers[name].step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    contenders = {"ours": lambda: step("ours"), "torch": lambda: step("torch")}
    return in_turns(contenders, rounds=5, repeats=20 if DEVICE == "cuda" else 1)


def main() -> None:
    torch.set_num_threads(1)
    print(machine())
    for what, seconds in (("RandAugment, 256 images", augmentation()), ("Muon, ViT-B", muon())):
        ours, other = seconds.values()
        times = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in seconds.items())
        print(f"{what}: {times}, ratio {other / ours:.1f}")


if __name__ == "__main__":
    main()
