"""Arrays in a GPU's memory: given out by gathered units, taken as gradients, and refused.

On the stand-in for CUDA's runtime. It ends the program where two streams touch the same memory
without an order, or the host touches a device's.
"""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flatshard as fs
from flatshard import _core, _device_arrays
from flatshard._device_arrays import DeviceArray

pytestmark = pytest.mark.usefixtures("cuda")


def on_device(function: Callable[..., Any], n: int = 1, **words: Any) -> list[Any]:
    return fs.local_world(n, device="cuda", **words).run(function)


def somewhere(world: fs.World, dtype: str = "float32", ordinal: int = 0) -> DeviceArray:
    """An array at an address that nobody reads."""
    core = _core.device_array(0x1000, dtype, (2, 3), ordinal, object())
    return DeviceArray(core, world, set())


class Interface:
    """What speaks __cuda_array_interface__ alone."""

    def __init__(self, array: DeviceArray, **changed: Any) -> None:
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, **changed}


# ---- what an array says of itself ---------------------------------------------------------------


def test_an_array_is_no_array_of_the_host() -> None:
    def rank(world: fs.World) -> None:
        array = somewhere(world)
        assert (array.shape, array.size, array.nbytes) == ((2, 3), 6, 24)
        assert array.dtype == np.float32 and array.device == "cuda:0"
        with pytest.raises(TypeError, match=r"cuda:0 is not copied .* copy_to_host\(\)"):
            np.asarray(array)
        with pytest.raises(TypeError, match="copy_to_host"):
            np.add(array, 1)
        with pytest.raises((BufferError, RuntimeError, TypeError)):
            np.from_dlpack(array)

    on_device(rank)


def test_dlpack() -> None:
    def rank(world: fs.World) -> None:
        for dtype in ("float32", "bfloat16", "float16", "float64"):
            array = somewhere(world, dtype)
            assert array.__dlpack_device__() == (2, 0)
            for capsule in (
                array.__dlpack__(stream=-1),
                array.__dlpack__(stream=1, max_version=(1, 0)),
                array.__dlpack__(max_version=(0, 8), dl_device=(2, 0)),
            ):
                assert _core.dlpack_read(capsule) == (0x1000, dtype, (2, 3), 2, 0, True)
        assert "dltensor_versioned" in repr(array.__dlpack__(max_version=(1, 1)))
        assert "versioned" not in repr(array.__dlpack__())
        with pytest.raises(BufferError, match="stream=0"):
            array.__dlpack__(stream=0)
        with pytest.raises(BufferError, match="another device"):
            array.__dlpack__(dl_device=(1, 0))
        with pytest.raises(BufferError, match="copy"):
            array.__dlpack__(copy=True)
        with pytest.raises(BufferError, match="not a DLPack tensor"):
            _core.dlpack_read(object())

    on_device(rank)


def test_a_capsule_keeps_the_memory_until_it_goes() -> None:
    class Owner:
        alive = 0

        def __init__(self) -> None:
            Owner.alive += 1

        def __del__(self) -> None:
            Owner.alive -= 1

    array = _core.device_array(0x1000, "float32", (3,), 0, Owner())
    capsules = [array.dlpack(True), array.dlpack(False)]
    del array
    gc.collect()
    assert Owner.alive == 1
    del capsules
    gc.collect()
    assert Owner.alive == 0


def test_array_interface() -> None:
    def rank(world: fs.World) -> None:
        said = somewhere(world).__cuda_array_interface__
        assert said["data"] == (0x1000, True) and said["typestr"] == "<f4" and said["stream"] == 1
        assert not hasattr(somewhere(world, "bfloat16"), "__cuda_array_interface__")

    on_device(rank)


# ---- refusals: nothing is read ------------------------------------------------------------------


def test_refusals() -> None:
    def rank(world: fs.World) -> None:
        read = _device_arrays.read_device_array
        mine = somewhere(world)
        with pytest.raises(ValueError, match=r"rank 0: w lies on cuda:1, .* computes on cuda:0"):
            read("w", somewhere(world, ordinal=1), world)
        with pytest.raises(TypeError, match="dtype int32, expected a float"):
            read("w", somewhere(world, "int32"), world)
        with pytest.raises(ValueError, match="not contiguous"):
            read("w", Interface(mine, strides=(4, 8)), world)
        assert read("w", Interface(mine, strides=(12, 4)), world).shape == (2, 3)
        assert read("w", mine, world).pointer == 0x1000

    on_device(rank)

    def on_cpu(world: fs.World) -> None:
        shards = fs.shard({"w": np.ones((2, 3), np.float32)}, world)
        array = _core.device_array(0x1000, "float32", (2, 3), 0, object())
        with pytest.raises(TypeError, match="GPU's memory, and this world computes on the CPU"):
            _device_arrays.read_device_array("w", _Foreign(), world)
        with pytest.raises(ValueError, match="rank 0: gradient lies on cuda:0"):
            shards._core.grad_put(0, array)
        with pytest.raises(RuntimeError, match="computes on the CPU: it has no streams"):
            world._core.after_stream(1)

    fs.local_world(1, device="cpu").run(on_cpu)


class _Foreign:
    """Says that it lies on a GPU."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **words: Any) -> object:
        raise AssertionError("it is not to be asked")
