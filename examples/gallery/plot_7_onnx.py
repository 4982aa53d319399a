"""
Compile to ONNX, and run it in a browser
========================================

``caster compile`` combines a frozen ONNX classifier and its state in one file that adapts itself
wherever ONNX Runtime runs: on a server, on a phone, in a browser. Running it needs neither Python
nor caster.
"""

import json
import tempfile
import warnings
from pathlib import Path

import digits
import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
import torch

import caster
from caster.export import compile_model

# %%
# Export a trained network to an ONNX file, the form in which you might receive one.

source, source_labels, target, labels = digits.load()
net = digits.train(source, source_labels)
folder = Path(tempfile.mkdtemp())
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # raised inside the exporter
    torch.onnx.export(
        net,
        (torch.zeros(2, 1, 8, 8),),
        folder / "digits.onnx",
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("rows")},),
        opset_version=18,
        external_data=False,
        verbose=False,
    )

# %%
# Fit and compile. On the command line, use ``caster fit`` and ``caster compile``.

model = caster.wrap(folder / "digits.onnx")
adapter = caster.fit(model, digits.batches(source, source_labels))
compile_model(model, adapter.state, folder / "adaptive.onnx")
for path in sorted(folder.glob("*.onnx")):
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")

# %%
# From here on, only ONNX Runtime is used. A stream starts with zeros, and the state that one batch
# returns is an input of the next.

session = onnxruntime.InferenceSession(folder / "adaptive.onnx")
metadata = session.get_modelmeta().custom_metadata_map
state = {t["name"]: np.zeros(t["shape"], t["dtype"]) for t in json.loads(metadata["caster.state"])}
reasons = json.loads(metadata["caster.reasons"])
names = [output.name for output in session.get_outputs()]

frozen = onnxruntime.InferenceSession(folder / "digits.onnx")
accuracies, ratios = [], []
for images, truth in digits.batches(digits.fog(target, density=0.4), labels, 32):
    out = dict(zip(names, session.run(names, {"images": images, **state}), strict=True))
    state = {name: out[f"next.{name}"] for name in state}
    (logits,) = frozen.run(None, {"images": images})
    accuracies.append([np.mean(logits.argmax(axis=1) == truth), np.mean(out["labels"] == truth)])
    ratios.append(float(out["ratio"]))
print(f"last batch: accepted {bool(out['accepted'])}, reason {reasons[int(out['reason'])]}")

# %%
figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 5), sharex=True, layout="constrained")
for values, label, style in zip(
    np.transpose(accuracies), ("digits.onnx", "adaptive.onnx"), ("s--", "o-"), strict=True
):
    colour = digits.BLUE if label.startswith("adaptive") else digits.INK
    top.plot(values, style, color=colour, label=label)
top.set(ylabel="accuracy in fog", ylim=(0, 1.03))
top.legend(frameon=False, loc="center right")
bottom.axhline(1, color=digits.INK, lw=1)
bottom.annotate("rejected above", (0, 1), (0, 3), textcoords="offset points", fontsize=9)
bottom.plot(ratios, "o-", color=digits.BLUE)
bottom.set(xlabel="batch of 32 images", ylabel="ratio", ylim=(0, 1.2))
for axes in (top, bottom):
    axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# The same file runs in a browser, with onnxruntime-web and without a server: :doc:`/docs/browser`
# shows such a page, and ``examples/browser`` builds it.
