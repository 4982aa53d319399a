"""
Write your own method and have it checked
=========================================

A method is a class with ``predict``, ``reset``, ``retained`` and the frozen model it falls back to.
caster-bench checks its behaviour: it must leave the model unchanged, be reproducible, reset exactly
and never revise earlier predictions.
"""

import digits
import matplotlib.pyplot as plt
import numpy as np

import caster
from caster_bench.methods import Frozen, OnFeatures, Prediction, Retained, Source, checks

source, source_labels, target, labels = digits.load()
model = caster.wrap(digits.train(source, source_labels))

# %%
# This method assumes that all classes are equally frequent. It subtracts a running mean of the
# logits, which corrects a network that prefers one digit in fog.


class Balanced(OnFeatures):
    """Logits minus their running mean over the stream."""

    def __init__(self, model, source, *, name="balanced", momentum=0.9):
        super().__init__(model)
        self.name, self.frozen, self.momentum = name, Frozen(model, source), momentum
        self.mean = None

    def answer(self, outputs):
        """Update the mean with this batch, and subtract it."""
        logits = self.frozen.logits(outputs)
        batch = logits.mean(axis=0)
        old = batch if self.mean is None else self.mean
        self.mean = self.momentum * old + (1 - self.momentum) * batch
        return Prediction(logits - self.mean)


# %%
# Run every check. This version has a common bug that is hard to see in the accuracy:

batches = [images for images, _ in digits.batches(target[:256], labels[:256], 32)]
try:
    checks.check_method(lambda: Balanced(model, Source()), batches)
except checks.CheckFailed as failure:
    print(failure)

# %%
# ``reset`` does not clear the mean, so the next stream would start with the previous one's. Also,
# ``retained`` must report the mean, because it is kept between batches.


class Repaired(Balanced):
    """The same method, with an exact reset."""

    def reset(self):
        """Forget the stream."""
        self.mean = None

    def retained(self):
        """Report the mean: ten numbers after the first batch."""
        return Retained(statistics=0 if self.mean is None else self.mean.nbytes)


checks.check_method(lambda: Repaired(model, Source()), batches)
print(f"{len(checks.ALL)} checks passed")

# %%
# Now a comparison is meaningful. The correction helps in light fog, but less on a stream sorted by
# class, where the running mean reflects only the last few classes.

foggy = digits.fog(target, density=0.25)
rows = {"shuffled": np.arange(len(labels)), "sorted by class": np.argsort(labels, kind="stable")}
figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
for offset, colour, method in (
    (-0.2, digits.INK, Frozen(model, Source())),
    (0.2, digits.BLUE, Repaired(model, Source())),
):
    accuracies = []
    for order in rows.values():
        method.reset()
        stream = digits.batches(foggy[order], labels[order])
        right = [np.asarray(method.predict(x).logits).argmax(axis=1) == y for x, y in stream]
        accuracies.append(np.concatenate(right).mean())
    bars = axes.bar(np.arange(2) + offset, accuracies, 0.38, color=colour, label=method.name)
    axes.bar_label(bars, [f"{value:.0%}" for value in accuracies])
axes.set_xticks(range(2), rows)
axes.set(xlabel="order of the stream", ylabel="accuracy in fog", ylim=(0, 1.2))
axes.set_yticks(np.linspace(0, 1, 6))
axes.legend(frameon=False, ncols=2)
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# Once the method has an entry point, ``caster methods`` lists it and sweeps can run it: see *Your
# own method* in the page on methods.
