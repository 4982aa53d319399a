"""
A week in the life of a stream, monitored
=========================================

A camera reads digits around the clock, one batch of 64 an hour. Over a week, fog comes and goes,
the mix of digits changes, and the sensor fails. The monitor reads a log of every batch, without
images and with only a few labels.
"""

import tempfile

import digits
import matplotlib.pyplot as plt
import numpy as np

import caster
from caster.monitor.log import StreamLog

# %%
# Train the network on one half of the source and fit on the other. On its training images, a
# network looks better than it can on any stream.

source, source_labels, target, labels = digits.load()
net = digits.train(source[:451], source_labels[:451])
fitted = caster.fit(caster.wrap(net), digits.batches(source[451:], source_labels[451:]))
adapter = caster.Adapter(fitted.model, fitted.state, every=1)  # compare, and measure drift, always

# %%
# Each of the seven days has a corruption and the digits that occur.

EVERY = np.arange(10)
WEEK = {
    "Monday": (lambda x: x, EVERY),
    "Tuesday": (lambda x: x, EVERY),
    "Wednesday: fog": (lambda x: digits.fog(x, 0.35), EVERY),
    "Thursday": (lambda x: x, EVERY),
    "Friday: few digits": (lambda x: x, EVERY[:3]),
    "Saturday": (lambda x: x, EVERY),
    "Sunday: sensor fails": (lambda x: digits.noise(x, 0.9), EVERY),
}
HOURS, SIZE, LABELLED = 24, 64, 4

# %%
# Every hour, the stream classifies a batch and logs it. An operator labels four samples of each.

stream = adapter.new_stream()
log = StreamLog(tempfile.mkdtemp(), "camera 1", adapter.state)
rng = np.random.default_rng(0)
true = []
for day, (spoil, digits_that_come) in enumerate(WEEK.values()):
    rows = np.flatnonzero(np.isin(labels, digits_that_come))
    for hour in range(HOURS):
        chosen = rng.choice(rows, SIZE)
        out = stream(spoil(target[chosen]))
        log.append(out, position=int(out.ids[0]), time=3600.0 * (HOURS * day + hour))
        ids, known = out.ids[:LABELLED], labels[chosen[:LABELLED]]
        stream.feedback(ids, known)
        log.feedback(ids, known, betting=stream.betting, time=3600.0 * (HOURS * day + hour))
        answers = np.asarray(out.frozen).argmax(axis=1), np.asarray(out.labels)
        true.append([np.mean(answer == labels[chosen]) for answer in answers])

monitor = log.monitor
for alarm in monitor.alarms:
    print(f"{alarm.kind}: from hour {alarm.position // SIZE}", end=" ")
    print("on" if alarm.until is None else f"to {alarm.until // SIZE}")

# %%
# Plot the true accuracy, which the monitor does not know, and its estimate; the p-values of its
# windows; and its alarms. The monitor pauses after a window that looks like the source.

points = list(monitor.points)
hours = np.array([point["position"] for point in points]) / SIZE
frozen, returned = np.transpose(true)
estimated = [point["accuracy"]["served"][0] for point in points]
windows = [(h, point["drift"]) for h, point in zip(hours, points, strict=True) if point["drift"]]
ALARMS = ("images", "classes", "labelled_risk")

figure, (top, middle, bottom) = plt.subplots(
    3, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 2, 1.2), layout="constrained"
)
top.plot(hours, frozen, "--", color=digits.INK, lw=1.2, label="frozen")
top.plot(hours, returned, color=digits.BLUE, lw=2, label="returned")
top.plot(hours, estimated, ":", color=digits.VERMILLION, lw=2, label="estimated, without labels")
top.set(ylabel="accuracy", ylim=(0, 1.04))
top.legend(frameon=False, loc="lower left", ncols=3)
for kind, colour, marker, p_value in (
    ("images", digits.BLUE, "o", lambda drift: drift["given_mixture"]["p"]),
    ("classes", digits.VERMILLION, "^", lambda drift: drift["psi_p"]),
):
    values = [max(p_value(drift), 1e-3) for _, drift in windows]
    middle.plot([h for h, _ in windows], values, marker, color=colour, ms=5, label=kind)
middle.axhline(0.01, color=digits.INK, lw=1)
middle.set(ylabel="p-value of a window", yscale="log", ylim=(7e-4, 1.5))
middle.legend(frameon=False, loc="lower left", ncols=2)
for i, kind in enumerate(ALARMS):
    for alarm in (found for found in monitor.alarms if found.kind == kind):
        start = alarm.position / SIZE
        end = hours[-1] + 1 if alarm.until is None else alarm.until / SIZE
        bottom.barh(i, end - start, left=start, color=digits.PURPLE)
bottom.set(yticks=range(3), yticklabels=ALARMS, ylim=(2.6, -0.6))
bottom.set(xlabel="hour of the week", ylabel="alarms")
for day, name in enumerate(WEEK):
    top.text(24 * day + 1, 1.06, name.replace(": ", "\n"), fontsize=8, va="bottom")
for axes in (top, middle, bottom):
    axes.set_xticks(range(0, 24 * 7 + 1, 24))
    axes.grid(axis="x", color=digits.INK, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# - **Wednesday.** The frozen network fails in the fog, but the returned predictions stay right. The
#   alarm ``images`` says that the camera sees something new. Labels confirm the adapted
#   predictions; from then on they decide, not the certificate.
# - **Friday.** Only zeros, ones and twos occur. The images look the same, so the alarm is
#   ``classes``, not ``images``. For a few hours the memory still holds Thursday's classes, and the
#   returned predictions are worse than the frozen ones; the certificate would have rejected them.
# - **Sunday.** In noise this strong, the aligned network predicts one class everywhere, with
#   confidence. The estimate, which uses no labels, trusts it. Four labels an hour reveal it: the
#   alarm ``labelled_risk`` says to stop relying on the predictions.
#
# ``caster monitor FOLDER`` shows the same log as a table or a page.
