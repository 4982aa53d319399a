"""Take docs/monitor.png and docs/monitor-phone.png: the page of `caster monitor` in a real browser.

    python -m docs.make_monitor [FOLDER]

Three streams of scikit-learn's digits are logged: one like the source, one that turns hazy, and one
in which only three classes come after a while. FOLDER keeps their logs.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from sklearn.model_selection import train_test_split
from tests.support.browser import browsing

import caster
from caster.io.files import replacing
from caster.monitor import page
from caster.monitor.log import StreamLog
from caster.report.digits_demo import generator, shifted, split_digits, train

START = 1_790_000_000.0  # seconds
BATCH, BATCHES, TURN = 64, 120, 60  # samples, batches of a stream, the batch of its turn
LABELLED = 4  # samples of a batch of the second stream
HELD_OUT = 450  # source samples that the network is not trained on


def main() -> None:
    """Log the streams, open their page, and write what it shows."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        write_logs(folder)
        made = Path(temporary, "page.html")
        made.write_text(page.render(page.from_folder(folder)), encoding="utf-8")
        with browsing() as browser:
            browser.open(made.as_uri())
            for name, width, height, dark in (
                ("monitor.png", 1100, 1650, False),
                ("monitor-phone.png", 390, 1500, True),
            ):
                browser.resize(width, height, scale=1.5, dark=dark)
                browser.evaluate("draw()")
                with replacing(Path(__file__).with_name(name)) as target:
                    target.write_bytes(browser.screenshot(whole=False))


def write_logs(folder: Path) -> None:
    """Log three streams of a network that was fitted to images it had not been trained on."""
    data = split_digits()
    images, held_out, labels, held_out_labels = train_test_split(
        data.source,
        data.source_labels,
        test_size=HELD_OUT,
        random_state=0,
        stratify=data.source_labels,
    )
    network = train(images, labels)
    adapter = caster.fit(caster.wrap(network, version="digits-1"), [(held_out, held_out_labels)])
    hazy = shifted(data.target, "haze", 3)
    few = np.flatnonzero(data.target_labels < 3)
    whole = np.arange(len(data.target))
    streams = {
        "north gate": (data.target, data.target, whole),
        "south gate": (data.target, hazy, whole),
        "east gate": (data.target, data.target, few),
    }
    for name, (before, after, rows) in streams.items():
        stream = adapter.new_stream()
        rng = generator(name)
        log = StreamLog(folder, name, adapter.state)
        for i in range(BATCHES):
            chosen = rng.choice(whole if i < TURN else rows, BATCH)
            position, time = i * BATCH, START + 30.0 * i
            out = stream((before if i < TURN else after)[chosen])
            log.append(out, position=position, time=time)
            if name == "south gate":
                ids = out.ids[:LABELLED]
                truth = data.target_labels[chosen[:LABELLED]]
                stream.feedback(ids, truth)
                log.feedback(ids, truth, betting=stream.betting, time=time)


if __name__ == "__main__":
    main()
