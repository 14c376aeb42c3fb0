"""The native model: Llama, Mistral and Granite, forward and backward in C, sharded unit by unit."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import _core, blas
from .._charged import Charged, add
from .._layout import take_groups
from .._same import check_same
from .._shards import Shards
from ..policy import Precision, Sharding, resolve
from .config import LlamaConfig, load_config
from .definition import define, plan_rows

if TYPE_CHECKING:
    from ..world import World

__all__ = ["Llama", "Loss"]

Ids = npt.ArrayLike
_INT32 = np.iinfo(np.int32)
_STAGE_3 = Sharding()


class Loss(NamedTuple):
    """The loss of a micro-batch.

    Attributes
    ----------
    local : float, nats per token
        Mean over the targets of this rank; 0 when all were ignored.
    mean : float, nats per token
        Mean over the targets of all ranks.
    tokens : int
        Targets of this rank that were not ignored.
    """

    local: float
    mean: float
    tokens: int


@dataclass(frozen=True)
class _Largest:
    """The largest micro-batch so far: what the plan of a live model speaks of."""

    batch: tuple[int, int]
    train: bool


class Llama:
    """A Llama-family model, sharded over the ranks of a world. Made by :meth:`from_config` or
    :meth:`from_pretrained`.

    Attributes
    ----------
    config : LlamaConfig
        What the model is.
    shards : Shards
        Its parameters: what optimizers and checkpoints work on.
    params : int
        Number of parameters, a tied head counted once.

    Notes
    -----
    Activations, norms, softmax, rotary tables and loss are fp32 or better whatever the precision.
    Memory of attention grows with the length of a sequence, not its square; logits exist for a few
    hundred tokens at a time. Calls are collective, :meth:`logits` and :meth:`generate` only with
    ``gather="copy"``.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        world: World,
        sharding: Sharding,
        precision: Precision,
        checkpointing: bool,
        frozen: Iterable[str] = (),
        groups: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.config = config
        self.checkpointing = checkpointing
        taken = take_groups(groups)
        parameters, units = define(config, frozen=frozen, groups=taken)
        policy = resolve(world.size, sharding=sharding, precision=precision, device=world.device)
        if world.device == "cpu":
            blas.load()
        self.shards = Shards(world, parameters=parameters, units=units, policy=policy, groups=taken)
        self.params = sum(p.numel for p in parameters)
        try:
            # What shapes do not show: a rank with another epsilon would compute another model.
            check_same(world, "configuration", dataclasses.asdict(config))
            self._core = _core.Llama(self.shards._core, config.core(), checkpointing)
        except BaseException:
            self.shards.close()
            raise
        self._largest: _Largest | None = None

    def __repr__(self) -> str:
        world = self.shards.world
        return (
            f"Llama({self.config.model_type}, {self.params:,} parameters, "
            f"rank {world.rank} of {world.size})"
        )

    # -- making ------------------------------------------------------------------------------------

    @classmethod
    def from_config(
        cls,
        config: str | os.PathLike[str] | Mapping[str, Any] | LlamaConfig,
        *,
        world: World,
        sharding: Sharding = _STAGE_3,
        precision: Precision = "fp32",
        seed: int = 0,
        checkpointing: bool = False,
        frozen: Iterable[str] = (),
        groups: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Llama:
        """A new model with random weights. Collective.

        Parameters
        ----------
        config : str, path, dict or LlamaConfig
            A size ("tiny", "small", "32m", "125m", "350m", "1b", "7b"), a configuration with the
            keys of config.json, or such a file or its folder.
        world : World
            The ranks.
        sharding : Sharding
            What each rank keeps.
        precision : str or MixedPrecision
            A preset ("fp32", "bf16", "bf16-split", "bf16-pure", "bf16-pure-sr", "fp16") or a mix.
        seed : int
            Of the initial weights: the same on every rank. A weight depends on the seed, its
            parameter and its place alone: the model is the same at any world size and stage.
        checkpointing : bool
            Keep only each layer's input and compute the rest again in backward: the same bits, less
            memory, about a third more time.
        frozen : iterable of str
            Shell patterns of parameters that are not trained.
        groups : dict, optional
            Name to hyperparameters and ``match``, a list of name patterns, for the optimizer.

        Returns
        -------
        Llama

        Raises
        ------
        ConfigError
            An unknown size, another family, a wrong or unsupported value. Before anything is
            allocated, as all errors about arguments.
        ValueError
            A size out of range; a pattern that matches nothing.
        CollectiveMismatch
            Ranks differ in the configuration, the seed, or anything that shards are compared by.
        MemoryBudgetError
            It would not fit on the host.
        """
        loaded = load_config(config)
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed is {seed}: expected 0 to 2**64 - 1")
        model = cls(
            loaded,
            world=world,
            sharding=sharding,
            precision=precision,
            checkpointing=checkpointing,
            frozen=frozen,
            groups=groups,
        )
        try:
            check_same(world, "initial weights", {"seed": seed})
            model._core.init(seed, loaded.initializer_range)
        except BaseException:
            model.close()
            raise
        return model

    @classmethod
    def from_pretrained(
        cls,
        directory: str | os.PathLike[str],
        *,
        world: World,
        sharding: Sharding = _STAGE_3,
        precision: Precision = "fp32",
        checkpointing: bool = False,
        frozen: Iterable[str] = (),
        groups: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Llama:
        """A model from a folder in Hugging Face's layout. Collective.

        Parameters
        ----------
        directory : path
            Holds config.json and model.safetensors, or model.safetensors.index.json and its files.
        world, sharding, precision, checkpointing, frozen, groups
            As for :meth:`from_config`.

        Returns
        -------
        Llama

        Raises
        ------
        ConfigError
            No config.json there, or of another family.
        CheckpointError
            No weights there; a file is missing, cut short or damaged; a tensor is missing or has
            another shape. Before anything is allocated.

        Notes
        -----
        Each rank reads only the ranges that it keeps.
        """
        from .._export import check_weights, read_weights

        config = load_config(directory)
        parameters, _ = define(config)
        check_weights(world, parameters, directory)
        model = cls(
            config,
            world=world,
            sharding=sharding,
            precision=precision,
            checkpointing=checkpointing,
            frozen=frozen,
            groups=groups,
        )
        try:
            read_weights(model.shards, directory)
        except BaseException:
            model.close()
            raise
        return model

    def close(self) -> None:
        """Give the memory back. Never waits; twice is fine."""
        self._core.close()
        self.shards.close()

    # -- computing ---------------------------------------------------------------------------------

    def forward_backward(
        self, inputs: Ids, targets: Ids, *, sync: bool = True, count: int | None = None
    ) -> Loss:
        """Loss and gradients of one micro-batch; gradients add up until the optimizer's step.

        Parameters
        ----------
        inputs : (batch, length) integers
            Token ids below ``vocab_size``.
        targets : (batch, length) integers
            The id wanted after each input; -100 is ignored. Nothing is shifted here.
        sync : bool
            False keeps the gradients local until a call with True (stages 0 and 1 only).
        count : int, optional
            What this micro-batch weighs. None: its targets. The step divides the sum of gradients
            by the sum of counts over ranks and micro-batches.

        Returns
        -------
        Loss

        Raises
        ------
        ValueError
            An id out of range (it is named), a shape that does not fit, or sequences longer than
            ``max_position_embeddings``. Before anything is computed, on the rank concerned.
        WorldError
            The job is over.

        Notes
        -----
        The first call of a larger (batch, length) allocates what ``flatshard.plan`` says.
        """
        if count is not None and count < 0:
            raise ValueError(f"count={count}: expected 0 or more")
        ids, wanted = self._ids(inputs, "inputs"), self._ids(targets, "targets")
        sums = self._core.forward_backward(ids, wanted, -1 if count is None else count, not sync)
        self._note(ids, True)
        return _loss(sums)

    def loss(self, inputs: Ids, targets: Ids) -> Loss:
        """Loss without gradients.

        Parameters
        ----------
        inputs, targets : (batch, length) integers
            As for :meth:`forward_backward`.

        Returns
        -------
        Loss
        """
        ids, wanted = self._ids(inputs, "inputs"), self._ids(targets, "targets")
        sums = self._core.forward(ids, wanted, None, False)
        self._note(ids, False)
        return _loss(sums)

    def logits(self, inputs: Ids) -> npt.NDArray[np.float32]:
        """Scores of every next token.

        Parameters
        ----------
        inputs : (batch, length) integers
            Token ids.

        Returns
        -------
        (batch, length, vocab_size) ndarray of float32
        """
        ids = self._ids(inputs, "inputs")
        out = np.empty((*ids.shape, self.config.vocab_size), np.float32)
        self._core.forward(ids, None, out, False)
        self._note(ids, False)
        return out

    def generate(
        self, ids: Ids, *, n: int, temperature: float = 0.0, seed: int = 0
    ) -> npt.NDArray[np.int32]:
        """Go on from ids, token by token.

        Parameters
        ----------
        ids : (length,) or (batch, length) integers
            What comes before; at least one token.
        n : int
            Tokens to add.
        temperature : float
            0: the likeliest token each time. Above: drawn from the softmax of logits / temperature.
        seed : int
            Of the draws; the same on every rank.

        Returns
        -------
        ndarray of int32
            The ids given and the new ones, in the shape given but for the length.

        Notes
        -----
        Keys and values of all tokens are kept: each new one costs one pass over the weights. Past
        ``max_position_embeddings``, where the oldest tokens drop out and all positions move, each
        costs a forward over the last ``max_position_embeddings``.
        """
        if n < 0 or not temperature >= 0.0:
            raise ValueError(f"n={n}, temperature={temperature}: expected 0 or more")
        given = np.asarray(ids)
        if given.size == 0:
            raise ValueError("ids is empty: generation goes on from at least one token")
        text = self._ids(np.atleast_2d(given), "ids")
        rng = np.random.default_rng(seed)
        scores = np.empty((len(text), self.config.vocab_size), np.float32)
        most = self.config.max_position_embeddings
        cached = min(text.shape[1] + n - 1, most) if n and text.shape[1] <= most else 0
        try:
            if cached:
                self._core.cache_begin(len(text), cached)
            fresh = text
            for _ in range(n):
                if text.shape[1] <= cached:
                    self._core.cache_extend(np.ascontiguousarray(fresh), scores)
                else:
                    seen = np.ascontiguousarray(text[:, -most:])
                    self._core.forward(seen, None, scores, True)
                fresh = _draw(scores, temperature, rng)[:, None]
                text = np.concatenate([text, fresh], axis=1)
        finally:
            self._core.cache_end()
        return text if given.ndim == 2 else text[0]

    # -- saving ------------------------------------------------------------------------------------

    def save_pretrained(
        self, directory: str | os.PathLike[str], *, dtype: str | None = None
    ) -> None:
        """Write config.json and model.safetensors, which transformers and :meth:`from_pretrained`
        open. Collective; rank 0 writes.

        Parameters
        ----------
        directory : path
            Made if it is not there.
        dtype : {"float32", "bfloat16", "float16"}, optional
            Of the weights in the file. None: the compute dtype.

        Raises
        ------
        OSError
            No room (checked first), or not writeable; the same on every rank.

        Notes
        -----
        Streams: no rank holds the whole model.
        """
        from .._export import export
        from .._together import on_first

        path = os.fspath(directory)
        export(self, path, dtype=dtype)
        written = dtype or self.shards.policy.precision.param
        on_first(self.shards.world, lambda: self._write_config(path, written))

    def _write_config(self, path: str, dtype: str) -> None:
        text = json.dumps(self.config.to_hf(dtype=dtype), indent=2, sort_keys=True) + "\n"
        hidden = os.path.join(path, f".config.json.{os.getpid()}")
        with open(hidden, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(hidden, os.path.join(path, "config.json"))

    # -- memory ------------------------------------------------------------------------------------

    def planned(self) -> Charged:
        """What the plan says this rank holds: the shards', and for the largest micro-batch that was
        trained on."""
        rows = self.shards.planned()
        if self._largest is not None and self._largest.train:
            more = plan_rows(
                self.config,
                self.shards.policy,
                self.shards.world.size,
                self._largest.batch,
                checkpointing=self.checkpointing,
                frozen=[p.name for p in self.shards.parameters if not p.trainable],
            )
            rows = add(rows, more)
        return rows

    def _note(self, ids: npt.NDArray[np.int32], train: bool) -> None:
        before = self._largest
        if before is None or (train, ids.size) > (before.train, before.batch[0] * before.batch[1]):
            self._largest = _Largest((ids.shape[0], ids.shape[1]), train)

    # -- ids ---------------------------------------------------------------------------------------

    def _ids(self, ids: Ids, what: str) -> npt.NDArray[np.int32]:
        array = np.asarray(ids)
        if array.dtype == np.int32:
            return np.ascontiguousarray(array)
        if array.dtype.kind not in "iu":
            raise TypeError(f"{what}: dtype {array.dtype}, expected integers")
        if array.size and (array.max() > _INT32.max or array.min() < _INT32.min):
            bad = array[(array > _INT32.max) | (array < _INT32.min)].flat[0]
            raise ValueError(
                f"{what} holds {bad}: ids are between 0 and {self.config.vocab_size - 1} "
                f"(rank {self.shards.world.rank})"
            )
        return np.ascontiguousarray(array, dtype=np.int32)


def _loss(sums: tuple[float, int, float, int]) -> Loss:
    mine, tokens, every, all_tokens = sums
    return Loss(
        local=mine / tokens if tokens else 0.0,
        mean=every / all_tokens if all_tokens else 0.0,
        tokens=tokens,
    )


def _draw(
    scores: npt.NDArray[np.float32], temperature: float, rng: np.random.Generator
) -> npt.NDArray[np.int32]:
    """A token for each row of scores."""
    if temperature == 0.0:
        return np.asarray(np.argmax(scores, axis=-1), dtype=np.int32)
    z = scores.astype(np.float64) / temperature
    z -= z.max(axis=-1, keepdims=True)
    total = np.exp(z).cumsum(axis=-1)
    drawn = rng.random(len(scores)) * total[:, -1]
    # The first place where the running sum exceeds the draw; never past the end.
    places = (total <= drawn[:, None]).sum(axis=-1)
    return np.asarray(np.minimum(places, scores.shape[1] - 1), dtype=np.int32)
