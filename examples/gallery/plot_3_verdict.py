"""
Reading a verdict
=================

Every batch gets a verdict: whether its adaptation is accepted, the reason, and the ratio behind the
decision. A rejected batch gets the frozen network's own output, bit for bit.
"""

import digits
import matplotlib.pyplot as plt
import numpy as np

import caster

source, source_labels, target, labels = digits.load()
model = caster.wrap(digits.train(source, source_labels))
adapter = caster.fit(model, digits.batches(source, source_labels))

# %%
# Print a verdict, or show it in a notebook:

out = adapter(digits.fog(target, density=0.4)[:64])
print(out.verdict)
out.verdict

# %%
# With aligned layers, the ratio compares frozen with adapted predictions. Below 1, the adapted
# network is more confident without predicting the same class everywhere. Above 1, the batch is
# rejected, with the reason ``"ratio"``. Fog of growing density shows the whole range.

densities = np.linspace(0, 0.9, 10)
accuracies, ratios, shares = [], [], []
for density in densities:
    stream, right, accepted, seen = adapter.new_stream(), [], [], []
    for images, truth in digits.batches(digits.fog(target, density), labels):
        out = stream(images)
        answers = (out.frozen.argmax(axis=1), out.proposed, out.labels)
        right.append([np.mean(np.asarray(answer) == truth) for answer in answers])
        accepted.append(out.verdict.accepted)
        seen.append(out.verdict.ratio)
    accuracies.append(np.mean(right, axis=0))
    ratios.append(np.median(seen))
    shares.append(np.mean(accepted))

# %%
# Up to a density of one half, alignment restores the accuracy and every batch is accepted. Beyond
# that, read both panels together:

figure, (top, bottom) = plt.subplots(2, 1, figsize=(7.5, 6), sharex=True, layout="constrained")
for values, label, style in zip(
    np.transpose(accuracies),
    ("frozen", "ungated: adapted, whatever the verdict", "returned"),
    (
        {"color": digits.INK, "ls": "--", "marker": "s"},
        {"color": digits.VERMILLION, "ls": ":", "marker": "^"},
        {"color": digits.BLUE, "ls": "-", "marker": "o", "markersize": 9, "fillstyle": "none"},
    ),
    strict=True,
):
    top.plot(densities, values, label=label, **style)
top.set(ylabel="accuracy", ylim=(0, 1.03))
top.legend(frameon=False)
bottom.axhline(1, color=digits.INK, lw=1)
bottom.annotate("rejected above", (0, 1), (0, 3), textcoords="offset points", fontsize=9)
bottom.plot(densities, ratios, "o-", color=digits.BLUE)
bottom.set(xlabel="density of the fog", ylabel="median ratio of the batches")
for axes in (top, bottom):
    axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
for density, share, ratio in zip(densities, shares, ratios, strict=True):
    print(f"density {density:.1f}: {share:4.0%} of batches accepted, median ratio {ratio:.2f}")

# %%
# A verdict is not a guarantee, in either direction. At a density of 0.6, it rejects an alignment
# that would still have helped. In denser fog, the aligned network is confidently wrong: it predicts
# one digit everywhere, which looks like a stream of that digit, and is accepted. The ratio compares
# confidence, and without labels no test can rule this out. With a few labels, ``stream.feedback``
# decides; ``caster monitor`` reports drift.
