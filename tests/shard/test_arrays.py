"""The arrays way in: NumPy, the buffer protocol, torch and JAX on the CPU give the same bits."""

import array as pyarray

import ml_dtypes
import numpy as np
import pytest

import flatshard as fs

pytestmark = [pytest.mark.quick, pytest.mark.timeout(120)]

BF16 = np.dtype(ml_dtypes.bfloat16)


def numpy_arrays(values):
    return values


def buffers(values):
    """A memoryview of C numbers, a nested list where there are two dimensions."""
    return {
        n: memoryview(pyarray.array("f", v.ravel().tolist())) if v.ndim == 1 else v.tolist()
        for n, v in values.items()
    }


def torch_tensors(values):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    return {n: torch.from_numpy(v.copy()) for n, v in values.items()}


def torch_parameters(values):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    return {n: torch.nn.Parameter(torch.from_numpy(v.copy())) for n, v in values.items()}


def transposed_tensors(values):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    return {n: torch.from_numpy(v.T.copy()).t() for n, v in values.items()}


def jax_arrays(values):
    jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    return {n: jnp.asarray(v) for n, v in values.items()}


class Lender:
    """An array of some other library: speaks DLPack, and is nothing else that NumPy knows."""

    def __init__(self, value):
        self.value = value

    def __dlpack__(self, **options):
        return self.value.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.value.__dlpack_device__()


def lenders(values):
    return {n: Lender(v) for n, v in values.items()}


KINDS = [
    numpy_arrays,
    buffers,
    lenders,
    torch_tensors,
    torch_parameters,
    transposed_tensors,
    jax_arrays,
]


def train(world, start, grads, make):
    shards = fs.shard(make(start), world, precision="bf16", sharding=fs.Sharding(2))
    opt = fs.AdamW(shards, lr=0.1, weight_decay=0.1)
    for step in grads:
        given = make(step)
        for unit in reversed(shards.units):
            unit.reduce({n: given[n] for n in unit.names})
        opt.step(max_norm=1.0)
    return fs.weights_sha256(shards), fs.state_sha256(shards)


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_any_library_gives_the_bits_of_numpy(make, rng):
    start = {
        "a.w": rng.standard_normal((33, 7)).astype(np.float32),
        "b.w": rng.standard_normal(65).astype(np.float32),
    }
    grads = [
        {n: rng.standard_normal(v.shape).astype(np.float32) for n, v in start.items()}
        for _ in range(3)
    ]
    make(start)  # skips where the library is missing
    want = fs.local_world(2).run(train, start, grads, numpy_arrays)
    assert fs.local_world(2).run(train, start, grads, make) == want
    assert len(set(want)) == 1


def of_numpy(value):
    return value


def of_torch(value):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    return torch.from_numpy(value.astype(np.float32)).bfloat16()


def of_torch_recording(value):
    return of_torch(value).requires_grad_()


def of_jax(value):
    jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    return jnp.asarray(value)


@pytest.mark.parametrize("make", [of_numpy, of_torch, of_torch_recording, of_jax])
def test_bfloat16_stays_bfloat16_on_the_way(make):
    """Every bf16 pattern but NaN comes through, and gradients go on the wire as they are."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bits.view(BF16)
    values = values[~np.isnan(values.astype(np.float32))]
    given = make(values)

    def rank(world):
        shards = fs.shard({"w": given}, world, precision="bf16-pure")
        assert shards.policy.precision.reduce == "bfloat16"
        found = shards.full("w")
        fs.SGD(shards, lr=0.0)
        shards.units[0].reduce({"w": given})
        shards.end_micro_batch()
        gradient = shards.full("w", "grad")
        return found.tobytes(), gradient.astype(BF16).tobytes()

    assert fs.local_world(1).run(rank) == [(values.tobytes(),) * 2]


def test_the_callers_memory_is_not_kept():
    """Changed after shard() and after reduce(): neither shows."""

    def rank(world):
        start, gradient = np.ones(4, np.float32), np.ones(4, np.float32)
        shards = fs.shard({"w": start}, world)
        start[:] = 7
        opt = fs.SGD(shards, lr=1.0)
        shards.units[0].reduce({"w": gradient})
        gradient[:] = 7
        opt.step()
        return shards.full("w").tolist()

    assert fs.local_world(2).run(rank) == [[0.0] * 4] * 2


def test_one_array_under_two_names_is_a_tie():
    for make in (np.asarray, lambda v: of_torch(v).float(), of_jax):

        def rank(world, make=make):
            table = make(np.ones((4, 3), np.float32))
            shards = fs.shard({"embed.w": table, "head.w": table}, world)
            opt = fs.SGD(shards, lr=1.0)
            shards.units[0].reduce({"embed.w": np.ones((4, 3)), "head.w": np.ones((4, 3))})
            opt.step()
            return shards.full("head.w").tolist() == [[-1.0] * 3] * 4

        assert fs.local_world(2).run(rank) == [True, True]


def test_what_is_no_float_array_of_this_host_is_named():
    def rank(world):
        with pytest.raises(TypeError, match="w: dtype int64, expected a float dtype"):
            fs.shard({"w": np.zeros(3, np.int64)}, world)
        with pytest.raises(TypeError, match="w: dtype object"):
            fs.shard({"w": object()}, world)
        torch = pytest.importorskip("torch", reason="torch is not installed")
        with pytest.raises(TypeError, match=r"w: a torch.Tensor that cannot be read as .*meta"):
            fs.shard({"w": torch.zeros(3, device="meta")}, world)
        with pytest.raises(TypeError, match=r"w: a torch.Tensor that cannot be read as .*Sparse"):
            fs.shard({"w": torch.eye(3).to_sparse()}, world)

    fs.local_world(1).run(rank)
