import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from caster import Caster
from caster.adapt import source_moments
from caster.core import threads
from caster.core.threads import one_blas_thread, parallel_map
from tests.conftest import problem


@pytest.fixture
def three_threads(monkeypatch):
    monkeypatch.setattr(threads, "_blas_threads", lambda: 3)


def blas_threads():
    return [library["num_threads"] for library in threads._blas().info()]


def test_items_run_at_once_and_keep_their_order(three_threads):
    meeting = threading.Barrier(3, timeout=30)  # breaks unless three items are under way

    def meet(item):
        meeting.wait()
        return item, threading.current_thread()

    found = list(parallel_map(meet, range(9)))
    assert [item for item, _ in found] == list(range(9))
    assert {thread.name[:6] for _, thread in found} == {"caster"}


def test_items_start_no_threads(three_threads):
    def within(item):
        found = parallel_map(lambda _: threading.current_thread(), range(3))
        return set(found) == {threading.current_thread()}

    assert all(parallel_map(within, range(3)))


@pytest.mark.skipif(threads._blas_threads() < 2, reason="one core")
def test_a_limit_on_blas_is_none_on_items():
    with one_blas_thread():
        assert blas_threads() == [1] * len(blas_threads())
        found = list(parallel_map(lambda _: threading.current_thread(), range(9)))
    assert threading.current_thread() not in found


@pytest.mark.skipif(threads._blas_threads() < 2, reason="one core")
def test_a_limit_on_blas_stands_until_its_last_holder_leaves():
    before = blas_threads()
    first, second = one_blas_thread(), one_blas_thread()
    with ThreadPoolExecutor(1) as other:
        other.submit(first.__enter__).result()
        second.__enter__()
        other.submit(first.__exit__, None, None, None).result()
        assert blas_threads() == [1] * len(before)
        assert threads._blas_threads() == max(before)
        second.__exit__(None, None, None)
        assert blas_threads() == before
        with one_blas_thread():
            assert blas_threads() == [1] * len(before)
        assert blas_threads() == before


def test_results_wait_only_for_a_few_items(three_threads):
    started = []
    results = parallel_map(started.append, range(100))
    next(results)
    assert len(started) <= 4
    results.close()


def test_an_error_is_the_callers_and_restores_the_blas_threads(three_threads):
    before = blas_threads()
    with pytest.raises(ZeroDivisionError):
        list(parallel_map(lambda item: 1 / item, [1, 0, 2]))
    assert blas_threads() == before


def test_floating_point_warnings_are_those_of_the_caller(three_threads):
    with np.errstate(all="ignore"):
        found = list(parallel_map(np.sqrt, [np.array([-1.0])] * 3))  # a warning would be an error
    assert np.isnan(found).all()


def test_a_fit_is_the_same_on_any_number_of_threads(three_threads, monkeypatch):
    h, y = problem(n=600, dtype=np.float32)
    monkeypatch.setattr(source_moments, "CHUNK_ELEMENTS", 80 * h.shape[1])
    parallel = Caster().fit(h, y).moments_
    monkeypatch.setattr(threads, "_blas_threads", lambda: 1)
    alone = Caster().fit(h, y).moments_
    for name in ("U", "means", "covariances"):
        assert np.array_equal(getattr(parallel, name), getattr(alone, name))
