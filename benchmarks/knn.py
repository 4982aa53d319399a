"""Nearest neighbours: ways to find them exactly, and the cost of exactness.

    pip install faiss-cpu  # for comparison only; caster does not use it
    python benchmarks/knn.py

The 20 nearest of 50,000 rows for a batch: caster's search, which proves its answer in float64; the
plain product and top-k it starts from; FAISS's flat index; scikit-learn's brute force; and on a
GPU, if there is one, the first two again. Times are medians over alternating rounds. Features are
Gaussian, around 100 centres. To show the effect of rounding, the script also counts wrong answers
in a bank far from the origin whose rows are close together.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from caster_bench.methods.knn import Neighbours
from measure import in_turns, machine

try:
    import faiss
except ImportError:
    faiss = None

ROWS, K, ROUNDS = 50_000, 20, 7
Search = Callable[[], object]  # indices (B, K)


def features(count: int, width: int, seed: int) -> Tensor:
    """Rows around 100 centres."""
    centres = np.random.default_rng(0).standard_normal((100, width), dtype=np.float32)
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((count, width), dtype=np.float32)
    return torch.from_numpy(centres[rng.integers(100, size=count)] + noise)


def plain(bank: Tensor) -> Callable[[Tensor], Tensor]:
    """A product and top-k, as in most programs."""
    halves = bank.square().sum(1) / 2
    return lambda queries: torch.addmm(halves, queries, bank.T, alpha=-1).topk(K, 1, False).indices


def on_cpu(bank: Tensor, queries: Tensor) -> dict[str, Search]:
    ours, product, array = Neighbours(bank), plain(bank), queries.numpy()
    brute = NearestNeighbors(n_neighbors=K, algorithm="brute").fit(bank.numpy())
    contenders: dict[str, Search] = {
        "caster": lambda: ours(queries, K),
        "torch product and top-k": lambda: product(queries),
        "scikit-learn, brute": lambda: brute.kneighbors(array, return_distance=False),
    }
    if faiss is not None:
        index = faiss.IndexFlatL2(bank.shape[1])
        index.add(bank.numpy())
        contenders["FAISS IndexFlatL2"] = lambda: index.search(array, K)[1]
    return contenders


def on_gpu(bank: Tensor, queries: Tensor) -> dict[str, Search]:
    bank, queries = bank.cuda(), queries.cuda()
    ours, product = Neighbours(bank), plain(bank)
    return {
        "caster, GPU": lambda: ours(queries, K).cpu(),
        "torch product and top-k, GPU": lambda: product(queries).cpu(),
    }


def times() -> None:
    places = [on_cpu, on_gpu] if torch.cuda.is_available() else [on_cpu]
    for width in (512, 2048):
        bank = features(ROWS, width, seed=1)
        for batch in (64, 512):
            queries = features(batch, width, seed=2)
            print(f"\n{ROWS:,} x {width} float32, batch of {batch}, k = {K}")
            for place in places:
                taken = in_turns(place(bank, queries), ROUNDS)
                first = next(iter(taken.values()))
                for name, seconds in taken.items():
                    share = f"{seconds / first:5.2f} times that" if seconds != first else ""
                    print(f"  {name:30}{1e3 * seconds:9.2f} ms   {share}", flush=True)


def errors() -> None:
    rng = np.random.default_rng(0)
    centre = 100 * rng.standard_normal(64)
    near = torch.tensor(centre + 1e-2 * rng.standard_normal((5000, 64)), dtype=torch.float32)
    wide = near.double()
    queries, expected = near[:500], []
    for query in wide[:500]:
        distances = (wide - query).square().sum(1)
        expected.append(set(distances.sort(stable=True).indices[:K].tolist()))
    print("\n5,000 x 64 float32, close together and far from 0: of 500 queries wrong")
    for name, search in on_cpu(near, queries).items():
        found = np.asarray(search()).tolist()
        wrong = sum(set(row) != right for row, right in zip(found, expected, strict=True))
        print(f"  {name:30}{wrong:5}")


def main() -> None:
    gpu = f"; {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    print(f"{machine()}, torch {torch.__version__}{gpu}")
    if faiss is None:
        print("FAISS is not installed, so it is not compared: pip install faiss-cpu")
    times()
    errors()


if __name__ == "__main__":
    main()
