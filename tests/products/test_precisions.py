"""The native model in precisions beyond the full product: one set of bits at every stage."""

import cases
import pytest

import flatshard as fs

pytestmark = pytest.mark.timeout(120)

PRECISIONS = {
    "split": "bf16-split",
    "split, bf16 accumulators": fs.MixedPrecision(
        param="bfloat16", master="split", accumulate="bfloat16"
    ),
    "bf16-pure": "bf16-pure",
    "bf16-pure-sr": "bf16-pure-sr",
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_set_of_bits_at_every_stage(precision, size):
    several = [
        cases.Case("flat", PRECISIONS[precision], stage, gather, reshard, 1, False)
        for stage in range(4)
        for gather in ("view", "copy")
        for reshard in ((True, False) if (stage, gather) == (3, "copy") else (True,))
    ]
    ranks = fs.local_world(size).run(cases.run, several)
    hashes = {result[:2] for rank in ranks for result in rank}
    assert len(hashes) == 1
    for rank in ranks:
        assert len({str(losses) for _, _, losses in rank}) == 1, "losses too, on each rank"


def test_the_precisions_differ():
    """A split master rounds ties alone in another way than bf16, and few steps meet none."""
    several = [
        cases.Case("flat", precision, 2, "view", True, 1, False)
        for precision in PRECISIONS.values()
    ]
    (results,) = fs.local_world(1).run(cases.run, several)
    assert len({result[0] for result in results}) == len(several)
