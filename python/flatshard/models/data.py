"""Batches of token ids for every rank: deterministic, disjoint, resumable at the exact batch.

The training part of a corpus is a ring of tokens, cut into sequences of ``length`` from a place
that changes with every epoch; the sequences of an epoch come in an order that depends on the seed
and the epoch alone. Global batch *k* is the next ``world.size * batch`` of them, and each rank
takes its slice: what the ranks together see depends on the global batch, not on how many ranks
share it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from .corpus import Corpus, read_corpus
from .tokenizer import Tokenizer, load_tokenizer

__all__ = ["Batch", "Tokens", "tokens"]

SPLITS = ("train", "heldout", "all")
STATE_FORMAT = 1
IGNORED = -100  # a target the loss does not count


class _World(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...


class Batch(NamedTuple):
    """What one rank trains on in one micro-batch.

    Attributes
    ----------
    inputs : (batch, length) ndarray of int32
        Token ids.
    targets : (batch, length) ndarray of int32
        The ids that follow; -100 where nothing does, which the loss does not count.
    """

    inputs: NDArray[np.int32]
    targets: NDArray[np.int32]


def tokens(
    path: str | os.PathLike[str],
    *,
    world: _World,
    batch: int,
    length: int,
    tokenizer: str | os.PathLike[str] | Tokenizer = "bytes",
    seed: int = 0,
    split: str = "train",
    holdout: float = 0.05,
    most: int | None = None,
    glob: str | Sequence[str] = "*",
    exclude: str | Sequence[str] = (),
    encoding: str = "utf-8",
    token_dtype: str = "uint16",
    cache: str | os.PathLike[str] | None = None,
) -> Tokens:
    """Batches of a corpus for this rank.

    Parameters
    ----------
    path : str or path
        A text file, a ``.jsonl`` of ``{"text": ...}``, a folder of these, a ``.npy`` or ``.bin`` of
        token ids, or ``stdlib``; see :func:`flatshard.models.corpus.read_corpus`, which also takes
        ``glob``, ``exclude``, ``encoding``, ``token_dtype`` and ``cache``.
    world : World
        Only its rank and size are read.
    batch : int
        Sequences of one rank's batch.
    length : int
        Tokens of a sequence.
    tokenizer : str, path or Tokenizer
        ``"bytes"``, a ``tokenizer.json`` or a folder with one. Not used for token files.
    seed : int
        Of the order of the training sequences.
    split : str
        ``"train"``: without the held-out part, in random order, without end. ``"heldout"``: the
        held-out part, in order, once. ``"all"``: as ``"train"``, nothing held out.
    holdout : float
        The part held out, 0 to 0.5. Of ``1 / holdout`` documents or more, every
        ``1 / holdout``-th is held out whole; of fewer, the end of the corpus. Depends on nothing
        else.
    most : int, optional
        Of ``"heldout"``: at most so many sequences, evenly spaced over it.

    Returns
    -------
    Tokens
        An iterable of :class:`Batch`.

    Raises
    ------
    ConfigError
        If the data are missing, empty, shorter than one sequence, fewer sequences than one global
        batch, or not readable as what they are said to be.

    Notes
    -----
    Costs one read of the files, and one to four bytes of memory a token where they are not mapped.
    A batch is ``8 * batch * length`` bytes, newly made, so it may be kept.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> alone = SimpleNamespace(rank=0, size=1)
    >>> for inputs, targets in tokens("stdlib", world=alone, batch=8, length=256):
    ...     break
    >>> inputs.shape, bool((inputs[:, 1:] == targets[:, :-1]).all())
    ((8, 256), True)
    """
    sizes = {"batch": batch, "length": length, "most": 1 if most is None else most}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name} {value}: expected at least 1")
    if split not in SPLITS:
        raise ConfigError(f"split {split!r}: expected one of {', '.join(SPLITS)}")
    if not 0.0 <= holdout <= 0.5:
        raise ConfigError(f"holdout {holdout}: expected 0 to 0.5")
    corpus = read_corpus(
        path,
        tokenizer=load_tokenizer(tokenizer),
        glob=glob,
        exclude=exclude,
        encoding=encoding,
        token_dtype=token_dtype,
        cache=cache,
    )
    return Tokens(
        corpus,
        rank=world.rank,
        world_size=world.size,
        batch=batch,
        length=length,
        seed=seed,
        split=split,
        holdout=holdout,
        most=most,
    )


class Tokens:
    """An iterable of :class:`Batch` over a corpus. Made by :func:`tokens`, which explains the rest.

    Iterating over a training split goes on without end and from where it is; over ``"heldout"`` it
    starts anew each time and ends.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        rank: int,
        world_size: int,
        batch: int,
        length: int,
        seed: int = 0,
        split: str = "train",
        holdout: float = 0.05,
        most: int | None = None,
    ) -> None:
        self.corpus = corpus
        self.rank, self.world_size = rank, world_size
        self.batch, self.length = batch, length
        self.seed, self.split = seed, split
        begins, ends = _split(corpus, split, 0.0 if split == "all" else holdout)
        self._begins, self._ends = begins, ends
        self._at = np.concatenate(([0], np.cumsum(ends - begins)))
        self.token_count = int(self._at[-1])
        self._epoch, self._sample = 0, 0
        if split == "heldout":
            if self.token_count < 2:
                raise ConfigError(
                    f"data {corpus.source!r}: a held-out part of {self.token_count} tokens; "
                    "raise holdout, or give more data"
                )
            self._held = -(-(self.token_count - 1) // length)
            self.sequences = self._held if most is None else min(self._held, most)
            return
        if self.token_count < length + 1:
            raise ConfigError(
                f"data {corpus.source!r} is shorter than one sequence: {self.token_count} tokens "
                f"to train on, {length + 1} needed for length {length}"
            )
        self.sequences = self.token_count // length
        if self.sequences < world_size * batch:
            raise ConfigError(
                f"data {corpus.source!r}: {self.sequences} sequences of {length} tokens are fewer "
                f"than one step of {world_size} ranks x batch {batch}; lower batch or length"
            )

    def __iter__(self) -> Iterator[Batch]:
        return self._held_out() if self.split == "heldout" else self._endless()

    def __len__(self) -> int:
        """Batches of one pass; an epoch's for a training split."""
        step = self.world_size * self.batch
        return -(-self.sequences // step) if self.split == "heldout" else self.sequences // step

    @property
    def vocab_size(self) -> int:
        """Ids a model needs: the tokenizer's; of token files, one more than the largest in them."""
        if self.corpus.vocab_size is not None:
            return self.corpus.vocab_size
        return self.corpus.largest() + 1

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ConfigError if a token of the corpus is not below ``vocab_size``.

        Cost: none if the tokenizer's vocabulary fits, else one read of the corpus.
        """
        known = self.corpus.vocab_size
        if known is not None and known <= vocab_size:
            return
        largest = self.corpus.largest()
        if largest >= vocab_size:
            raise ConfigError(
                f"data {self.corpus.source!r} holds token {largest}, the model's vocabulary ends "
                f"at {vocab_size - 1}; take a model with a larger vocabulary or another tokenizer"
            )

    # Position ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Where the next batch begins; plain numbers and strings, the same on every rank.

        Raises ConfigError for ``"heldout"``, which has no position.
        """
        self._refuse_heldout()
        return {
            "format": STATE_FORMAT,
            "epoch": self._epoch,
            "sample": self._sample,
            "seed": self.seed,
            "length": self.length,
            "tokens": self.token_count,
            "fingerprint": self._fingerprint(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to where a state was taken; the next batch is the one that would have come then.

        Any number of ranks and any batch may go on from there: no sequence of the epoch comes
        twice. With the same global batch the batches are the same.

        Raises
        ------
        ConfigError
            If the state is of other data, another seed or another length.
        """
        self._refuse_heldout()
        if state.get("format") != STATE_FORMAT:
            raise ConfigError(
                f"data state of format {state.get('format')!r}; this version reads {STATE_FORMAT}"
            )
        mine = self.state()
        for name in ("seed", "length", "tokens", "fingerprint"):
            if state.get(name) != mine[name]:
                raise ConfigError(
                    f"data state: {name} was {state.get(name)!r}, now {mine[name]!r}; to go on at "
                    "the same batch give the same data, seed and length"
                )
        self._epoch, self._sample = int(state["epoch"]), int(state["sample"])

    def _refuse_heldout(self) -> None:
        if self.split == "heldout":
            raise ConfigError("held-out data have no position: they come in order, once")

    def _fingerprint(self) -> int:
        """crc32 of up to 64 places of the corpus: notices other data without reading all of it."""
        stream = self.corpus.stream
        crc = zlib.crc32(np.int64(len(stream)).tobytes() + self._begins.tobytes())
        for begin in np.linspace(0, max(0, len(stream) - 256), 64).astype(np.int64).tolist():
            crc = zlib.crc32(stream[begin : begin + 256].astype("<i4").tobytes(), crc)
        return crc

    # Batches ----------------------------------------------------------------------------------

    def _take(self, begin: int, n: int) -> NDArray[np.int32]:
        """n tokens of the split from a place of its ring on."""
        out = np.empty(n, np.int32)
        done = 0
        place = begin % self.token_count
        part = int(np.searchsorted(self._at, place, side="right")) - 1
        while done < n:
            first = int(self._begins[part]) + place - int(self._at[part])
            got = min(n - done, int(self._ends[part]) - first)
            out[done : done + got] = self.corpus.stream[first : first + got]
            done += got
            part = (part + 1) % len(self._begins)
            place = int(self._at[part])
        return out

    def _endless(self) -> Iterator[Batch]:
        step = self.world_size * self.batch
        while True:
            if self._sample + step > self.sequences:
                self._epoch, self._sample = self._epoch + 1, 0
            first = self._sample + self.rank * self.batch
            order = _shuffle(
                np.arange(first, first + self.batch, dtype=np.uint64),
                self.sequences,
                (self.seed, self._epoch),
            )
            # The epoch's cut; the first epoch cuts at 0, so that a short run reads what one
            # expects.
            phase = _hash_int(self.seed, self._epoch) % self.length if self._epoch else 0
            rows = np.empty((self.batch, self.length + 1), np.int32)
            for row, sequence in zip(rows, order.tolist(), strict=True):
                row[:] = self._take(phase + sequence * self.length, self.length + 1)
            self._sample += step
            yield _batch(rows)

    def pass_over(self, batches: int) -> None:
        """Move on as if so many batches had been read; an iterator that failed must be made anew.

        Parameters
        ----------
        batches : int
            Of this rank.
        """
        self._refuse_heldout()
        step = self.world_size * self.batch
        for _ in range(batches):
            if self._sample + step > self.sequences:
                self._epoch, self._sample = self._epoch + 1, 0
            self._sample += step

    def _held_out(self) -> Iterator[Batch]:
        step = self.world_size * self.batch
        for global_first in range(0, self.sequences, step):
            rows = np.zeros((self.batch, self.length + 1), np.int32)
            known = np.zeros(self.batch, np.int64)  # tokens a row really has
            for row in range(self.batch):
                sequence = global_first + self.rank * self.batch + row
                if sequence >= self.sequences:
                    continue  # a row without tokens: every rank makes the same number of batches
                begin = sequence * self._held // self.sequences * self.length
                known[row] = min(self.length + 1, max(0, self.token_count - begin))
                rows[row, : known[row]] = self._take(begin, int(known[row]))
            batch = _batch(rows)
            batch.targets[np.arange(1, self.length + 1)[None, :] >= known[:, None]] = IGNORED
            yield batch


def _batch(rows: NDArray[np.int32]) -> Batch:
    return Batch(rows[:, :-1].copy(), rows[:, 1:].copy())


def _split(
    corpus: Corpus, split: str, holdout: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The ranges of the stream that a split has, as begins and ends; ranges that touch are one."""
    n, documents = len(corpus.stream), len(corpus.begins)
    if holdout == 0.0:
        empty = split == "heldout"
        return np.zeros(1, np.int64), np.full(1, 0 if empty else n, np.int64)
    every = round(1.0 / holdout)
    if documents < every:
        cut = n - round(n * holdout)
        begin, end = (cut, n) if split == "heldout" else (0, cut)
        return np.full(1, begin, np.int64), np.full(1, end, np.int64)
    held = np.arange(documents) % every == every - 1
    mine = held if split == "heldout" else ~held
    ends = np.append(corpus.begins[1:], n)
    follows = np.concatenate(([False], mine[:-1] & mine[1:]))  # goes on where the last one ended
    precedes = np.append(follows[1:], False)
    return corpus.begins[mine & ~follows], ends[mine & ~precedes]


# Order ----------------------------------------------------------------------------------------


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit words without visible structure. Source: Stafford 2011, variant 13."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def _hash_int(*words: int) -> int:
    value = np.zeros(1, np.uint64)
    for word in words:
        value = _mix(
            value + np.uint64(0x9E3779B97F4A7C15) + np.array([word % (1 << 64)], np.uint64)
        )
    return int(value[0])


def _shuffle(index: NDArray[np.uint64], n: int, key: tuple[int, int]) -> NDArray[np.uint64]:
    """Where a keyed permutation of range(n) sends each index.

    A Feistel network on the next even number of bits, walked until it is back in range: no table,
    so a corpus of any size costs nothing, and no generator whose stream another NumPy may change.
    Source: Black & Rogaway 2002, "Ciphers with arbitrary finite domains".
    """
    half = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(_hash_int(*key, turn)) for turn in range(6)]
    out: NDArray[np.uint64] = index.copy()
    todo = np.ones(len(out), np.bool_)
    while todo.any():
        left, right = out[todo] >> half, out[todo] & mask
        for turn in keys:
            left, right = right, left ^ (_mix(right + turn) & mask)
        out[todo] = (left << half) | right
        todo = out >= np.uint64(n)
    return out
