"""
Why class-ordered streams break test-time adaptation
====================================================

Most test-time adaptation methods replace the network's statistics by those of the current batch.
This removes a shift, but also everything else that distinguishes the batch from the source. In a
stream sorted by class, that includes the class itself.
"""

import digits
import matplotlib.pyplot as plt
import numpy as np

import caster
from caster_bench import methods

source, source_labels, target, labels = digits.load()
model = caster.wrap(digits.train(source, source_labels))
source_batches = list(digits.batches(source, source_labels))
state = caster.fit(model, source_batches).state
foggy = digits.fog(target, density=0.4)

# %%
# One channel of the last convolution shows the problem. Its mean depends on the fog, which
# adaptation should undo, and on the class, which it should not. In a batch of zeros, the two
# effects cannot be separated by the mean alone.

clean, fogged = (np.asarray(model(images).features) for images in (target, foggy))
between = [clean[labels == c].mean(axis=0) for c in range(10)]
channel = np.argmax(np.var(between, axis=0) / clean.var(axis=0))

# %%
# Compare six methods on two streams of the same foggy images, shuffled and sorted by class. Every
# method gets the same frozen network and batches of 64, without target labels.

NAMES = {
    "frozen": "frozen",
    "bn-adapt": "BN statistics",
    "tent": "Tent",
    "sar": "SAR",
    "lame": "LAME",
    "mixture-transport": "mixture transport",
}
orders = {"shuffled": np.arange(len(labels)), "sorted by class": np.argsort(labels, kind="stable")}


def accuracy(name, rows):
    """Accuracy of a method on one order of the foggy images."""
    method = methods.create(name, model, methods.Source(state=state, batches=source_batches))
    right = [
        np.asarray(method.predict(images).logits).argmax(axis=1) == truth
        for images, truth in digits.batches(foggy[rows], labels[rows])
    ]
    return np.concatenate(right).mean()


results = {order: [accuracy(name, rows) for name in NAMES] for order, rows in orders.items()}
print(f"{'':18} shuffled   sorted")
for name, *values in zip(NAMES.values(), *results.values(), strict=True):
    print(f"{name:18}", *(f"{value:8.1%}" for value in values))

# %%
# Batch statistics, and the methods built on them, work on the shuffled stream and fail on the
# sorted one. Mixture transport estimates which classes are present and aligns the batch with the
# source statistics *of those classes*. It even gains from the order: neighbours that share a class
# help to classify an unclear digit. LAME, designed for such streams, smooths the predictions of the
# frozen network, and in this fog they are mostly wrong.

figure, (left, right) = plt.subplots(
    1, 2, figsize=(10, 3.8), width_ratios=(1, 1.5), layout="constrained"
)
for values, name, colour in ((clean, "clean", digits.GREEN), (fogged, "fog", digits.VERMILLION)):
    means = [values[labels == c, channel].mean() for c in range(10)]
    left.plot(range(10), means, "o", color=colour, label=f"{name}, by class")
    left.axhline(values[:, channel].mean(), color=colour, ls="--", lw=1.2, label=f"{name}, mixed")
left.set(xlabel="digit", ylabel="mean of one channel", xticks=range(10))
left.legend(frameon=False, fontsize=8)
positions = np.arange(len(NAMES))
for offset, colour, (order, values) in zip(
    (-0.2, 0.2), (digits.INK, digits.BLUE), results.items(), strict=True
):
    bars = right.bar(positions + offset, values, 0.38, color=colour, label=order)
    right.bar_label(bars, [f"{value:.0%}" for value in values], fontsize=8)
right.set_xticks(positions, [name.replace(" ", "\n") for name in NAMES.values()])
right.set(ylabel="accuracy in fog", ylim=(0, 1.2), yticks=np.linspace(0, 1, 6))
right.legend(frameon=False, ncols=2, loc="upper left")
for axes in (left, right):
    axes.spines[["top", "right"]].set_visible(False)
plt.show()
