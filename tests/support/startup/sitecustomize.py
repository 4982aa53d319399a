"""For processes that tests start: what tests/conftest.py does, before torchvision is imported."""

from __future__ import annotations

import sys

KEPT = []


class Define:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if "+cpu" in torch.__version__:  # a CUDA-built torchvision beside it lacks these two
                library = torch.library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    library.define(
                        f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    )
                KEPT.append(library)  # it ends with its last reference


sys.meta_path.insert(0, Define())
