"""Images read ahead of the model: in order, no further than one batch, and named when broken."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from caster import CasterError
from caster.adapt import image_batches as reading
from caster.adapt.image_batches import read_batches, run
from caster.models.preprocessing import Preprocessing
from tests.support.fakes import AS_THEY_ARE, FakeImages, answers, model
from tests.support.messages import error_line


def batches(images, rows=None, batch_size=4, preprocessing=AS_THEY_ARE, skip=False):
    rows = range(len(images)) if rows is None else rows
    return read_batches(images, preprocessing, rows, batch_size, skip_unreadable=skip)


def reading_threads():
    return [t for t in threading.enumerate() if t.name.startswith("caster-")]


def settled(images, count):
    """Wait until so many images were read, and then whether more are."""
    deadline = time.monotonic() + 5
    while len(images.reads) < count and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(0.05)
    return len(images.reads)


@pytest.mark.parametrize(
    ("count", "batch_size", "sizes"),
    [(10, 4, [4, 4, 2]), (8, 4, [4, 4]), (3, 4, [3]), (4, 1, [1, 1, 1, 1]), (5, 100, [5])],
)
def test_batches_are_full_but_for_the_last(count, batch_size, sizes):
    images = FakeImages(count)
    found = list(batches(images, batch_size=batch_size))
    assert [len(batch.rows) for batch in found] == sizes
    assert [row for batch in found for row in batch.rows] == list(range(count))
    assert sorted(images.reads) == list(range(count))
    pixels = np.concatenate([batch.groups[0].prepared for batch in found])
    assert np.array_equal(pixels, np.stack(images.pixels).astype(np.float32))


def test_the_order_is_the_one_asked_for_however_long_each_image_takes():
    images = FakeImages(12)
    read = images.read

    def slow_at_first(index):
        time.sleep(0.002 * (12 - index))
        return read(index)

    images.read = slow_at_first
    rows = [7, 2, 9, 0, 11, 4, 4, 1]
    found = list(batches(images, rows, batch_size=3))
    assert [batch.rows for batch in found] == [[7, 2, 9], [0, 11, 4], [4, 1]]
    for batch in found:
        expected = [images.pixels[row] for row in batch.rows]
        assert np.array_equal(batch.groups[0].prepared, expected)


def test_other_threads_read_and_no_more_than_there_may_be(monkeypatch):
    monkeypatch.setattr(reading, "THREADS", 3)
    images, at_once, most = FakeImages(12), [], []
    three = threading.Barrier(3)  # none goes on before three are there
    read = images.read

    def noting(index):
        at_once.append(index)
        most.append(len(at_once))
        three.wait(20)
        at_once.remove(index)
        return read(index)

    images.read = noting
    list(batches(images, batch_size=6))
    assert max(most) == 3
    assert threading.main_thread().name not in images.readers
    assert len(images.readers) == 3


def test_it_reads_one_batch_ahead_and_no_further():
    images = FakeImages(20)
    stream = batches(images)
    assert images.reads == []
    next(stream)
    assert settled(images, 8) == 8  # while the model has the first batch
    next(stream)
    assert settled(images, 12) == 12
    stream.close()


def test_stopping_early_ends_the_threads():
    images = FakeImages(40)
    stream = batches(images)
    next(stream)
    assert reading_threads()
    stream.close()
    assert reading_threads() == []
    assert settled(images, 0) <= 8


def test_stopping_does_not_wait_for_what_is_not_begun(monkeypatch):
    stopped = threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait=True, *, cancel_futures=False):
            super().shutdown(False, cancel_futures=cancel_futures)
            stopped.set()
            super().shutdown(wait)

    monkeypatch.setattr(reading, "THREADS", 1)
    monkeypatch.setattr(reading, "ThreadPoolExecutor", Pool)
    images = FakeImages(40)
    read = images.read

    def slow(index):
        if index >= 10:
            assert stopped.wait(20)
        return read(index)

    images.read = slow
    stream = batches(images, batch_size=10)
    next(stream)
    stream.close()
    assert images.reads in ([*range(10)], [*range(11)])  # one may have been begun
    assert reading_threads() == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_of_the_model_ends_the_threads_of_a_job(tmp_path, error):
    from caster.adapt.image_features import extract

    def failing(batch):
        raise error("no")

    with pytest.raises((KeyboardInterrupt, CasterError)) as caught:
        extract(model(failing), FakeImages(40), tmp_path, batch_size=4)
    assert reading_threads() == []  # though the error's frames are still alive
    assert caught.value.__traceback__ is not None


def test_nothing_to_read():
    assert list(batches(FakeImages(4), rows=[])) == []
    assert reading_threads() == []


# images that cannot be read


def test_an_unreadable_image_is_named_and_ends_it():
    images = FakeImages(12, broken=[5])
    stream = batches(images)
    assert next(stream).rows == [0, 1, 2, 3]
    assert error_line(next, stream) == (
        "cannot read fake5.png: it is broken: repair or remove it, or leave it out with "
        "skip_unreadable="
    )
    assert reading_threads() == []


def test_skipped_images_are_named_row_by_row():
    images = FakeImages(9, broken=[1, 4, 5, 6, 7])
    found = list(batches(images, skip=True))
    assert [batch.rows for batch in found] == [[0, 2, 3], [], [8]]
    assert [list(batch.unreadable) for batch in found] == [[1], [4, 5, 6, 7], []]
    assert found[0].unreadable == {1: "cannot read fake1.png: it is broken"}
    assert found[1].groups == []
    assert len(found[0].groups[0].prepared) == 3


def test_a_damaged_file_of_many_images_is_not_skipped():
    images = FakeImages(4)

    def damaged(index):
        raise CasterError("`images` in shots.npz is damaged")

    images.read = damaged
    with pytest.raises(CasterError, match=r"`images` in shots\.npz is damaged"):
        list(batches(images, skip=True))


# preprocessing


def test_images_are_resized_by_the_threads():
    images = FakeImages(3, size=(4, 8))
    halves = Preprocessing(1.0, (0.5,) * 3, (0.25,) * 3, "NCHW", resize=(2, 4), interpolation="box")
    (batch,) = batches(images, preprocessing=halves)
    boxes = np.stack(images.pixels).reshape(3, 2, 2, 4, 2, 3).mean(axis=(2, 4))
    expected = (boxes.transpose(0, 3, 1, 2) / 255 - 0.5) / 0.25
    assert batch.groups[0].prepared.shape == (3, 3, 2, 4)
    np.testing.assert_allclose(batch.groups[0].prepared, expected, atol=1.01 / 255 / 0.25)


def test_an_image_too_small_for_its_crop_is_named():
    images = FakeImages(6)
    images.pixels[4] = np.zeros((2, 3, 3), dtype=np.uint8)
    crop = Preprocessing(1.0, (0.0,) * 3, (1.0,) * 3, "NCHW", crop=(4, 4))
    stream = batches(images, preprocessing=crop)
    next(stream)
    line = error_line(next, stream)
    assert line.startswith("fake4.png: an image of 3x2 is smaller than the crop of")


def test_an_image_that_cannot_be_resized_is_named():
    images = FakeImages(2)

    class TooLong(Preprocessing):
        def resize_and_crop(self, image, limits):
            raise MemoryError

    endless = TooLong(1.0, (0.0,) * 3, (1.0,) * 3, "NCHW")
    with pytest.raises(CasterError, match=r"^fake0\.png: not enough memory to resize it$"):
        list(batches(images, preprocessing=endless))


# images of several sizes


def several_sizes():
    images = FakeImages(7)
    for i, shape in ((1, (6, 4, 3)), (2, (4, 6, 3)), (5, (6, 4, 3))):
        images.pixels[i] = np.full(shape, 10 * i, dtype=np.uint8)
    return images


def test_images_of_several_sizes_go_in_groups():
    (batch,) = batches(several_sizes(), batch_size=7)
    assert [(group.positions, group.prepared.shape[1:3]) for group in batch.groups] == [
        ([0, 3, 4, 6], (4, 4)),
        ([1, 5], (6, 4)),
        ([2], (4, 6)),
    ]


def test_answers_come_in_the_order_of_the_images():
    images = several_sizes()
    (batch,) = batches(images, [6, 1, 0, 5, 2], batch_size=7)
    features, logits = answers(images, [6, 1, 0, 5, 2])
    outputs = run(model(), batch, images.names)
    np.testing.assert_allclose(outputs.features, features, rtol=1e-6)
    np.testing.assert_allclose(outputs.logits, logits, rtol=1e-6, atol=1e-4)
    assert run(model(logits=False), batch, images.names).logits is None


def test_what_a_model_says_of_a_size_it_does_not_take_names_an_image():
    images = several_sizes()
    (batch,) = batches(images, batch_size=7)

    def only_squares(pixels):
        if pixels.shape[1] != pixels.shape[2]:
            raise RuntimeError("sizes of tensors must match\nexcept in dimension 1")
        return pixels.mean(axis=(1, 2))

    assert error_line(run, model(only_squares), batch, images.names) == (
        "sizes of tensors must match except in dimension 1 (on fake1.png and 1 more)"
    )


def test_other_than_one_row_per_image():
    from caster.models.protocol import Outputs

    images = FakeImages(3)
    (batch,) = batches(images)

    class Tokens:
        name = "tokens"

        def __call__(self, pixels):
            return Outputs(np.ones((6, 2)), np.ones((3, 2)))

    with pytest.raises(CasterError, match="gives 6 rows for 3 images"):
        run(Tokens(), batch, images.names)


def test_memory_is_reused_only_once_nothing_refers_to_it():
    memory = reading.RecycledMemory()
    first = memory.empty((4, 3), "float32")
    at = first.ctypes.data
    view = first[1:, :2].T
    del first
    second = memory.empty((4, 3), "float32")
    assert not np.shares_memory(view, second)
    del view
    assert memory.empty((3, 2, 2), "float32").ctypes.data == at
    assert memory.empty((4, 4), "float32").shape == (4, 4)


def test_batches_that_are_kept_stay_as_they_were():
    found = list(batches(FakeImages(12)))
    again = [batch.groups[0].prepared.copy() for batch in batches(FakeImages(12))]
    for batch, expected in zip(found, again, strict=True):
        assert np.array_equal(batch.groups[0].prepared, expected)
