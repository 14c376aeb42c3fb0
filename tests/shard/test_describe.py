"""describe() says dtype and home of every buffer in every phase: compared with the buffers."""

import numpy as np
import pytest

import flatshard as fs
from flatshard._layout import numpy_dtype
from flatshard.policy import PRESETS

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]

PHASES = ("load", "flat", "optimizer", "forward", "backward", "reduce", "pre-step", "step")
NUMEL = 64 * 4 * 30
PRECISIONS = {
    **PRESETS,
    "bf16 wire and sums": fs.MixedPrecision(
        param="bfloat16", reduce="bfloat16", accumulate="bfloat16", master="float32"
    ),
    "fp16 wire": fs.MixedPrecision(reduce="float16", loss_scale=1024.0),
}
SHARDINGS = [
    fs.Sharding(stage, gather=gather) for stage in range(4) for gather in ("view", "copy")
] + [fs.Sharding(3, replicate=2)]


def rows_of(text):
    """{(phase, buffer): what is said}, in the order of the lines."""
    rows = {}
    for line in text.splitlines()[1:]:
        phase, rest = line.split(maxsplit=1)
        buffer, said = (part.strip() for part in rest.split("  ", 1))
        rows[phase, buffer] = said
    return rows


def first(said):
    """The dtype that a line begins with."""
    return numpy_dtype(said.split(",")[0].split(" ")[0])


def share(said, size):
    """How much of a whole array a rank holds, as the line has it."""
    if "whole on each rank" in said:
        return 1.0
    if " parts" in said:
        kept, _, of = said.split(",")[-1].split()[:3]
        return int(kept) / int(of)
    assert "owned part" in said, said
    return 1 / size


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_the_table_is_what_the_buffers_are(precision):
    def rank(world, sharding):
        start = {"u.w": np.ones(NUMEL, np.float32)}
        before = world.memory()
        shards = fs.shard(start, world, sharding=sharding, precision=PRECISIONS[precision])
        opt = fs.AdamW(shards, lr=0.1)
        held = {
            name: tuple(row[i] - before[name][i] for i in (0, 1))
            for name, row in world.memory().items()
        }
        rows = rows_of(fs.describe(shards))
        assert tuple(dict.fromkeys(phase for phase, _ in rows)) == PHASES

        def check(line, what, nbytes):
            """What the ledger holds of a class, all in world memory, within the rounding of
            places."""
            private, shared = held[what]
            assert "world memory" in rows[line], line
            assert private == 0 and 0 <= shared - nbytes <= 8192, (line, shared, nbytes)

        said = rows["flat", "compute copy"]
        assert shards.full("u.w").dtype == first(said)
        if "one copy on the host" in said:
            check(("flat", "compute copy"), "weights", NUMEL * first(said).itemsize / world.size)
        else:
            part = 1.0 if "whole" in said else 1 / world.size
            check(("flat", "compute copy"), "weights", NUMEL * first(said).itemsize * part)

        said = rows["flat", "master"]
        nbytes = 0 if said.startswith("none") else 2 if "remainder" in said else 4
        if nbytes:
            part = share(said, world.size)
            check(("flat", "master"), "master", NUMEL * nbytes * part)
        else:
            assert held["master"] == (0, 0)
        master = shards.full("u.w", "master").dtype
        assert master == (first(said) if nbytes else shards.full("u.w").dtype)
        assert rows["load", "weights read"].endswith(f"-> {master.name}")

        said = rows["optimizer", "moments"]
        assert shards.full("u.w", "exp_avg").dtype == first(said)
        nbytes = 2 * NUMEL * first(said).itemsize * share(said, world.size)
        check(("optimizer", "moments"), "moments", nbytes)

        said = rows["forward", "gathered unit"]
        with shards.units[0].gathered() as weights:
            assert weights["u.w"].dtype == first(said)
            assert not weights["u.w"].flags.writeable
        assert (held["pool"][0] >= NUMEL * first(said).itemsize) == ("private pool" in said)
        assert (held["pool"] == (0, 0)) == ("the weights themselves" in said)

        said = rows["backward", "gradients in slots"]
        check(("backward", "gradients in slots"), "gradients", NUMEL * first(said).itemsize)

        said = rows["reduce", "sum over ranks"]
        stored = numpy_dtype(said.split("stored as ")[1].split(",")[0])
        assert shards.full("u.w", "grad").dtype == stored
        nbytes = NUMEL * stored.itemsize * share(said, world.size)
        check(("reduce", "sum over ranks"), "accumulators", nbytes)

        scaled = PRECISIONS[precision].loss_scale is not None
        assert rows["pre-step", "loss scale"].startswith("a power of two") == scaled
        assert "float64" in rows["pre-step", "norm"]
        said = rows["step", "update"]
        assert f"writes {master.name} and {shards.dtype('u.w', 'exp_avg').name}" in said
        assert first(rows["step", "published weights"]) == shards.full("u.w").dtype

        # A tie between two bf16 numbers shows how the step rounds what it publishes.
        if master == np.float32 and shards.full("u.w").dtype.name == "bfloat16":
            shards.units[0].reduce({"u.w": np.full(NUMEL, 1.0, np.float32)})
            opt.step(lr=0.0)
            shards.set_full("u.w", np.full(NUMEL, 1 + 2.0**-8, np.float32))
            shards.units[0].reduce({"u.w": np.full(NUMEL, 1.0, np.float32)})
            opt.step(lr=0.0)
            up = float(shards.full("u.w")[0]) > 1.0
            assert up == ("ties away from zero" in rows["step", "published weights"])
        world.barrier()
        shards.close()

    for sharding in SHARDINGS:
        fs.local_world(4).run(rank, sharding)
