"""
Compare five methods
====================

caster-bench has published methods behind one interface. Each is created by name, gets the same
frozen network and works on its own copy, so a comparison is a loop.
"""

import time

import digits
import matplotlib.pyplot as plt
import numpy as np

import caster
from caster_bench import methods

source, source_labels, target, labels = digits.load()
model = caster.wrap(digits.train(source, source_labels))
source_batches = list(digits.batches(source, source_labels))
known = methods.Source(state=caster.fit(model, source_batches).state, batches=source_batches)

# %%
# Run every method on six streams of 896 images in batches of 64: one clean, five shifted.

SHIFTS = {
    "clean": lambda x: x,
    "fog, 20 %": lambda x: digits.fog(x, 0.2),
    "fog, 40 %": lambda x: digits.fog(x, 0.4),
    "noise": lambda x: digits.noise(x, 0.3),
    "low contrast": lambda x: 0.35 * x,
    "inverted": lambda x: 1 - x,
}
NAMES = ["frozen", "bn-adapt", "tent", "t3a", "lame", "mixture-transport"]

accuracy = np.empty((len(SHIFTS), len(NAMES)))
seconds = np.zeros(len(NAMES))
for j, name in enumerate(NAMES):
    method = methods.create(name, model, known)
    for i, shift in enumerate(SHIFTS.values()):
        method.reset()  # exactly as constructed
        start = time.perf_counter()
        stream = digits.batches(shift(target), labels)
        answers = [method.predict(images).logits for images, _ in stream]
        seconds[j] += time.perf_counter() - start
        predicted = np.concatenate([np.asarray(logits).argmax(axis=1) for logits in answers])
        accuracy[i, j] = np.mean(predicted == labels)

for name, total, mean in zip(NAMES, seconds, accuracy.mean(axis=0), strict=True):
    print(f"{name:18} {mean:6.1%}  {total:5.2f} s")

# %%
# On shuffled streams, batch statistics are hard to beat. Tent, which builds on them, learns little
# in fourteen batches. Mixture transport is on a par with both here, and also works on sorted
# streams (:ref:`sphx_glr_docs_gallery_plot_2_class_order.py`). T3A and LAME correct the predictions
# of a network that still works; they cannot help one that has failed. Inverted digits defeat all
# methods, and the certificate does not notice, so watch a stream with a monitor.

figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
image = axes.imshow(accuracy, cmap="cividis", vmin=0, vmax=1, aspect="auto")
for (i, j), value in np.ndenumerate(accuracy):
    axes.text(j, i, f"{value:.0%}", ha="center", va="center", color="w" if value < 0.6 else "k")
axes.set_xticks(range(len(NAMES)), [name.replace("-", "-\n") for name in NAMES])
axes.set_yticks(range(len(SHIFTS)), SHIFTS)
axes.set(xlabel="method", ylabel="shift")
figure.colorbar(image, label="accuracy")
plt.show()

# %%
# One small network on six streams is an illustration, not a benchmark. ``caster bench`` runs sweeps
# over networks, data sets, corruptions, orders and seeds, and makes tables only from complete
# records.
