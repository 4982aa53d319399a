"""
Adapt a classifier to fog in twenty lines
=========================================

A small convolutional network classifies handwritten digits almost without errors, until fog rolls
in. Its weights never change. Instead, caster maps the statistics of its layers back to those of
clean images.
"""

import digits
import matplotlib.pyplot as plt
import numpy as np

import caster

# %%
# Train a network on half of scikit-learn's digits. From here on it is frozen.

source, source_labels, target, labels = digits.load()
net = digits.train(source, source_labels)

# %%
# Fit once on the labelled source images. One pass measures the features and every layer.

model = caster.wrap(net)
adapter = caster.fit(model, digits.batches(source, source_labels))
adapter

# %%
# The other half arrives in fog, 64 images at a time. The adapter is not told about the fog or the
# labels.

foggy = digits.fog(target, density=0.4)
stream = adapter.new_stream()
frozen, adapted = [], []
for images, truth in digits.batches(foggy, labels):
    out = stream(images)
    adapted.append(np.mean(np.asarray(out.labels) == truth))
    frozen.append(np.mean(np.argmax(np.asarray(out.frozen), axis=1) == truth))
print(f"frozen {np.mean(frozen):.1%}, adapted {np.mean(adapted):.1%}")
out.verdict

# %%
# Adaptation works from the first batch, because there is nothing to train.

figure, (left, right) = plt.subplots(
    1, 2, figsize=(9, 3.4), width_ratios=(1, 1.5), layout="constrained"
)
tiles = [
    np.hstack(np.pad(images[:4, 0], ((0, 0), (0, 1), (0, 1)), constant_values=1))
    for images in (target, foggy)
]
left.imshow(np.vstack(tiles), cmap="gray", vmin=0, vmax=1)
left.set_yticks([3.5, 12.5], ["clean", "fog"], fontsize=11)
left.set_xticks([])
left.spines[:].set_visible(False)
left.tick_params(length=0)
right.plot(adapted, "o-", color=digits.BLUE, label="adapted")
right.plot(frozen, "s--", color=digits.INK, label="frozen")
right.set(xlabel="batch of 64 images", ylabel="accuracy", ylim=(0, 1.03))
right.legend(frameon=False, loc="center right")
right.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# Denser fog hides the digits, and no alignment can restore them.
# :ref:`sphx_glr_docs_gallery_plot_3_verdict.py` shows what the verdict says then.
