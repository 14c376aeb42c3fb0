"""Tensors where the world computes on a GPU: which module goes with which world, and the order
between torch's streams and ours.

Torch's caching allocator hands memory out, and takes it back, in the order of torch's current
stream. So before our stream touches a tensor of the GPU it waits for that stream, and that stream
for ours afterwards; the host waits for neither. Tensors of the host are read and written while the
caller waits: torch then computes on the host, and only shards lie on the GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from .. import _core
from .._device_arrays import LEGACY_STREAM, read_device_array
from ._arrays import as_array, borrow_array, dtype_name

if TYPE_CHECKING:
    from ..world import World
    from ._module import Sharded

__all__ = ["check_device", "place", "put_gradient", "where_to_build"]

_log = logging.getLogger("flatshard")


def check_device(members: Sequence[Any], world: World) -> None:
    """Refuses Parameters that do not lie where this rank can use them, before anything is
    allocated.

    Parameters
    ----------
    members : sequence of Member
        Of a module; on the meta device as well.
    world : World
        Of the ranks.

    Raises
    ------
    ValueError
        On a GPU in a world on the CPU, or on another GPU than this rank's, or on several devices.
    NotImplementedError
        On a device that is neither a CPU nor a CUDA GPU.
    """
    places: dict[str, str] = {}
    for member in members:
        places.setdefault(str(member.parameter.device), member.name)
    for place, name in places.items():
        kind = torch.device(place).type
        if kind not in ("cpu", "meta", "cuda"):
            raise NotImplementedError(
                f"Parameter {name} is on {place}: modules on the CPU and on CUDA GPUs are sharded"
            )
        if kind == "cuda" and place != world.device:
            cure = (
                'make the world with flatshard.init(device="cuda")'
                if world.device == "cpu"
                else f"module.to({world.device!r})"
            )
            raise ValueError(
                f"rank {world.rank}: Parameter {name} is on {place}, and this rank computes on "
                f"{world.device}: {cure} first"
            )
    if len(places) > 1:
        raise ValueError(
            f"rank {world.rank}: Parameters are on several devices: "
            + ", ".join(f"{name} on {place}" for place, name in places.items())
        )
    if "cpu" in places and world.device != "cpu" and torch.cuda.is_available():
        _log.warning(
            "the module's Parameters are on the CPU and the world computes on %s: torch will "
            "compute on the host; module.to(%r) before fully_shard() moves it",
            world.device, world.device,
        )  # fmt: skip


def where_to_build(world: World) -> torch.device:
    """The device of Parameters that are on the meta device until they are sharded."""
    on_device = world.device != "cpu" and torch.cuda.is_available()
    return torch.device(world.device if on_device else "cpu")


def _stream_of(tensor: torch.Tensor) -> int:
    """torch's current stream of the tensor's GPU, as CUDA numbers it."""
    return int(torch.cuda.current_stream(tensor.device).cuda_stream) or LEGACY_STREAM


@contextmanager
def _in_order(world: World, tensor: torch.Tensor) -> Iterator[int]:
    """Our work inside comes after torch's of before, and torch's of afterwards after it."""
    stream = _stream_of(tensor)
    world._core.after_stream(stream)
    try:
        yield stream
    finally:
        world._core.stream_after(stream)


def place(world: World, array: _core.DeviceArray, into: torch.Tensor) -> None:
    """Writes weights that lie in our memory into a tensor of the host (waits) or of this rank's GPU
    (does not), behind autograd's back."""
    if into.device.type == "cpu":
        world._core.fetch(array, borrow_array(into).reshape(array.shape))
        return
    with _in_order(world, into):
        there = _core.device_array(
            into.data_ptr(), dtype_name(into.dtype), tuple(into.shape), into.device.index, into
        )
        world._core.copy(there, array)


def put_gradient(sharded: Sharded, index: int, grad: torch.Tensor) -> None:
    """Copies, or adds, a gradient into its slot; afterwards torch may reuse its memory."""
    core = sharded.shards._core
    if grad.device.type == "cpu":
        core.grad_put(index, as_array(grad))
        return
    grad = grad.detach().contiguous()
    with _in_order(sharded.world, grad) as stream:
        name = f"gradient of {sharded.members[index].name}"
        core.grad_put(index, read_device_array(name, grad, sharded.world, stream))
