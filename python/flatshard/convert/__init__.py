"""Checkpoints of other systems, with their optimizer state, made into ours.

No torch is imported, no world is started, and nothing that a file holds is run: see ``_pickles``.
One module a format: ``_huggingface``, ``_dcp``, ``_deepspeed``; ``_optimizer`` for the state of
torch.optim. Each lists what a folder holds (``_foreign``); ``_write`` makes the checkpoint.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from .._folders import committed
from ..errors import CheckpointError
from . import _dcp, _deepspeed, _deepspeed_files, _huggingface
from ._foreign import FLOATS, Foreign, opened
from ._write import Converted, Options, plan, write

__all__ = ["Converted", "convert"]

#: What ``flatshard.hf`` leaves in a folder as its last file.
_MARKER = "flatshard-complete.json"
_RULES = ("SGD", "Adam", "AdamW", "Lion", "Adagrad")


def convert(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str] | None,
    *,
    step: int | None = None,
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None,
    rule: Literal["SGD", "Adam", "AdamW", "Lion", "Adagrad"] | None = None,
    optimizer: str | os.PathLike[str] | None = None,
    names: Sequence[str] | None = None,
    ties: Mapping[str, str] | None = None,
    leave: Iterable[str] = (),
) -> Converted:
    """Make a checkpoint of what another system saved: weights, moments, step. Local.

    Parameters
    ----------
    source : path
        A Hugging Face folder (safetensors, or ``pytorch_model.bin``, single or sharded), with an
        ``optimizer.bin`` or ``optimizer.pt`` beside where there is one; a DCP folder (FSDP2,
        torchtitan, Accelerate); a DeepSpeed folder of ZeRO 1, 2 or 3; FSDP's
        ``pytorch_model_fsdp.bin`` with its optimizer's state; a single file of weights.
    directory : path or None
        A run's folder; gets ``step-NNNNNN``, committed as a save is. None writes nothing and only
        reports.
    step : int, optional
        The step of the checkpoint; by default what the source says, else the highest step count of
        a parameter.
    dtype : {"float32", "bfloat16", "float16", "float64"}, optional
        Of every weight and moment; widening is exact, narrowing rounds to nearest. By default each
        keeps its own.
    rule : {"SGD", "Adam", "AdamW", "Lion", "Adagrad"}, optional
        The optimizer, where the source does not tell it.
    optimizer : path, optional
        A file with an optimizer's state (``torch.save``), where it is not beside the weights.
    names : sequence of str, optional
        Names of parameters in the order in which an optimizer numbers them.
    ties : mapping, optional
        Second names: from the name to leave to the parameter it stands for. Both must hold the same
        values.
    leave : iterable of str
        Patterns of tensors to leave out.

    Returns
    -------
    Converted
        What was taken over, concluded and left out.

    Raises
    ------
    CheckpointError
        Not a source of these kinds, or damaged; a pickle that names what is not on the list of what
        a checkpoint may hold (which is named, and not run); links and names that lead out of the
        folder; weights and moments that do not fit together.
    OSError
        No room (checked before anything is written), or a folder cannot be read or written.

    Notes
    -----
    Streams: memory 10 MiB and the largest tensor that is not stored contiguously. Files of torch
    are read twice, first against their checksums.
    """
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(f"dtype={dtype!r}: expected one of {', '.join(FLOATS)}, or None")
    if rule is not None and rule not in _RULES:
        raise ValueError(f"rule={rule!r}: expected one of {', '.join(_RULES)}, or None")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise ValueError(f"step={step!r}: a whole number from 0 was expected")
    path = os.path.abspath(os.fspath(source))
    name = None
    if os.path.isfile(path):
        path, name = os.path.split(os.path.realpath(path))
    elif not os.path.isdir(path):
        raise CheckpointError(f"{path}: there is no such file or folder")
    elif committed(path):
        raise CheckpointError(f"{path}: a checkpoint of flatshard already; load it, or export it")
    elif names is None and os.path.isfile(os.path.join(path, _MARKER)):
        raise CheckpointError(
            f"{path}: saved by flatshard.hf, and needs no conversion: go on from it with "
            "trainer.train(resume_from_checkpoint=...) or accelerator.load_state(...). To make a "
            "checkpoint of flatshard.checkpoint of it all the same, give names= (--names)"
        )
    options = Options(step, dtype, rule, ties, tuple(leave))
    other = None if optimizer is None else os.fspath(optimizer)
    with contextlib.ExitStack() as stack:
        foreign = _read(stack, path, name, other, names)
        made = plan(foreign, path, options)
        return write(made, None if directory is None else os.fspath(directory))


def _read(
    stack: contextlib.ExitStack,
    path: str,
    name: str | None,
    optimizer: str | None,
    names: Sequence[str] | None,
) -> Foreign:
    """What the folder holds, by what lies in it. Files stay open until the stack is left."""
    folder = stack.enter_context(opened(path))
    deepspeed = None if name is not None else _deepspeed_files.folder_of(folder)
    if deepspeed is not None:
        return _deepspeed.read(stack.enter_context(opened(deepspeed)), names)
    dcp = [] if name is not None else _dcp.folders_of(folder)
    if dcp:
        return _dcp.read([stack.enter_context(opened(found)) for found in dcp], names)
    return _huggingface.read(folder, name, optimizer, names)
