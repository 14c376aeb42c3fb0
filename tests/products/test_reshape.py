"""A checkpoint has no shape: saved at any size, stage and partition, it loads in any other."""

import itertools
import json
import math
import pathlib
import struct
from collections import defaultdict

import pytest
from cases import pairs, share
from reshape_cases import SIZES, Case, Shape, load, product, save
from test_bits import SEED, SHARES

import flatshard as fs

CLOSE = 1e-6


def name(shape: Shape) -> str:
    return "-".join(map(str, shape))


def elements(folder: pathlib.Path) -> dict[str, int]:
    """Elements of each state in the files of a checkpoint, from their headers alone."""
    found: dict[str, int] = defaultdict(int)
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + size])
        header.pop("__metadata__")
        for key, entry in header.items():
            begin, end = entry["data_offsets"]
            assert end - begin == 4 * math.prod(entry["shape"])
            found[key.split(":")[1]] += math.prod(entry["shape"])
        assert len(content) == 8 + size + max(e["data_offsets"][1] for e in header.values())
    return found


def test_the_pairs_hold_every_pair_of_values():
    cases, few = product(), pairs(product())
    assert len(cases) == 1600 and len(few) < 60
    for i, j in itertools.combinations(range(len(Case._fields)), 2):
        assert {(c[i], c[j]) for c in few} == {(c[i], c[j]) for c in cases}


@pytest.mark.parametrize("part", SHARES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.timeout(280)
def test_any_shape_into_any_other(size: int, part: float, tmp_path: pathlib.Path):
    """Equal states; the next losses are the saving job's, bit for bit at its number of ranks."""
    cases = [case for case in share(product(), SEED, part) if case.size == size]
    shapes = sorted({case.saved for case in cases})
    ranks = fs.local_world(size, threads=1, timeout=120.0).run(
        lambda world: [save(world, str(tmp_path / name(shape)), shape) for shape in shapes]
    )
    saved = dict(zip(shapes, ranks[0], strict=True))
    model = fs.local_world(1).run(lambda world: numel(world))[0]
    for shape in shapes:
        # Padding is in no file: each state has every element once, and nothing else.
        states = elements(tmp_path / name(shape) / "step-000002")
        assert states == {"weight": model, "moment1": model, "moment2": model}
    for to_size in SIZES:
        wanted = [case for case in cases if case.to_size == to_size]
        results = fs.local_world(to_size, threads=1, timeout=120.0).run(
            lambda world, wanted=wanted: [
                load(world, str(tmp_path / name(case.saved)), case.loaded) for case in wanted
            ]
        )
        for each, (case, result) in itertools.product(
            range(to_size), zip(wanted, results[0], strict=True)
        ):
            hashes, losses, user = result
            assert results[each][wanted.index(case)] == result, "every rank sees the same"
            expected_hashes, expected = saved[case.saved]
            assert hashes == expected_hashes, case
            assert user == list(case.saved)
            if to_size == size:
                assert losses == expected, case
            for got, want in zip(losses, expected, strict=True):
                assert abs(got - want) <= CLOSE * abs(want), (case, losses, expected)


def numel(world: fs.World) -> int:
    from cases import CONFIG

    model = fs.models.Llama.from_config(CONFIG, world=world)
    model.close()
    return model.params
