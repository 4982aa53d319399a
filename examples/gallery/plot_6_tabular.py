"""
No images required: a table of measurements
===========================================

``caster.Caster`` is a scikit-learn classifier for features that you already have: embeddings from
an API, activations from another framework or, as here, the columns of a table. Thirteen chemical
measurements distinguish three cultivars of wine. Then the laboratory replaces its instruments.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import caster

features, cultivar = load_wine(return_X_y=True)
source, target, source_labels, labels = train_test_split(
    features, cultivar, test_size=0.5, random_state=0, stratify=cultivar
)
frozen = make_pipeline(StandardScaler(), LogisticRegression()).fit(source, source_labels)
print(f"frozen, same instruments: {frozen.score(target, labels):.1%}")

# %%
# ``fit`` compares feature transport with the frozen model, and turns transport off if it is less
# accurate. Pass logits of rows that the model was not trained on, here by cross-validation: on its
# own training rows, any model looks perfect.

logits = cross_val_predict(frozen, source, source_labels, method="decision_function")
clf = caster.Caster().fit(source, source_labels, logits)
check = clf.source_check_
print(f"on the source: frozen {check.head:.1%}, transport {check.gated:.1%}")

# %%
# The new instruments have other gains and offsets, different for each column. ``drift`` is their
# error, in standard deviations of the column.

rng = np.random.default_rng(0)
gain, offset = rng.normal(size=(2, features.shape[1]))
spread = source.std(axis=0)


def measured(rows, drift):
    """Measure the same wine with instruments that have drifted."""
    return rows * (1 + 0.1 * drift * gain) + drift * offset * spread


drifts = np.linspace(0, 2, 9)
accuracies, verdicts = [], []
for drift in drifts:
    batch = measured(target, drift)
    out = clf.adapt(batch, head_logits=frozen.decision_function(batch))
    answers = (frozen.predict(batch), out.proposed, out.labels)
    accuracies.append([np.mean(answer == labels) for answer in answers])
    verdicts.append(out.verdict)
out

# %%
# One affine map, estimated from 89 unlabelled rows, undoes the drift. Its predictions are returned
# as long as the frozen ones show the three cultivars in about their usual proportions.

figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
for values, label, style in zip(
    np.transpose(accuracies),
    ("frozen", "transported", "returned: transported if accepted"),
    (
        {"color": "#4a5461", "ls": "--", "marker": "s"},
        {"color": "#d55e00", "ls": ":", "marker": "^"},
        {"color": "#0072b2", "ls": "-", "marker": "o", "markersize": 9, "fillstyle": "none"},
    ),
    strict=True,
):
    axes.plot(drifts, values, label=label, **style)
axes.set(xlabel="drift of the instruments, standard deviations", ylabel="accuracy", ylim=(0, 1.03))
axes.legend(frameon=False, loc="lower left")
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
for drift, verdict in zip(drifts, verdicts, strict=True):
    print(f"drift {drift:.2f}: {verdict.reason}, certificate {verdict.ratio:.2f}")

# %%
# From one standard deviation on, the frozen model predicts one cultivar too often. A batch of
# mostly that cultivar would look the same, and transport would be wrong there. The verdict is
# therefore ``"class_order"``, and the frozen predictions are returned, although the transported
# ones are right this time. If you know that your batches are mixed, ``Caster(safeguards=False)``
# leaves the decision to the certificate alone.
