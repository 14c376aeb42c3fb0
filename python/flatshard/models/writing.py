"""Letting a model write: on and on, and the sample at the end of a training run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .report import write_file
from .tokenizer import load_tokenizer

if TYPE_CHECKING:
    from .corpus import Corpus
    from .folder import RunFolder
    from .llama import Llama
    from .options import TrainConfig

__all__ = ["known_words", "write", "write_sample"]

WORDS_MOST = 1 << 26  # tokens of the largest corpus in which a sample's words are looked up
WORDS_PIECE = 1 << 20


def write(
    model: Llama,
    ids: NDArray[np.int32],
    *,
    n: int,
    length: int,
    temperature: float,
    seed: int,
) -> NDArray[np.int32]:
    """Goes on from ids with a window of ``length`` tokens, moved on by half of it at a time.

    A model that never saw a position writes badly there, whatever its tables allow. Collective
    where :meth:`Llama.generate` is.

    Parameters
    ----------
    model : Llama
    ids : (m,) ndarray of int32
        At least one token.
    n : int
        Tokens to add.
    length : int
        Tokens seen at most, those written included; at least 2.
    temperature, seed
        See :meth:`Llama.generate`.

    Returns
    -------
    (m + n,) ndarray of int32
    """
    text = ids
    window = 0
    while n > 0:
        seen = text if text.size < length else text[-(length // 2) :]
        now = min(n, length - seen.size)
        longer = model.generate(seen, n=now, temperature=temperature, seed=seed + window)
        text = np.concatenate([text, longer[seen.size :]])
        n -= now
        window += 1
    return text


def write_sample(
    model: Llama,
    *,
    config: TrainConfig,
    folder: RunFolder,
    corpus: Corpus,
    note: Callable[[str], object] | None,
) -> str | None:
    """What a trained model writes at the end of its run. Collective.

    Parameters
    ----------
    model : Llama
    config : TrainConfig
        Prompt, tokens to write, temperature, seed and tokenizer.
    folder : RunFolder
        Of the run; gets the text and, beside the model, the tokenizer.
    corpus : Corpus
        What the model was trained on: the sample's words are looked up in it.
    note : callable or None
        Shows a line, on the rank that also writes the files; None on the others.

    Returns
    -------
    str or None
        None where no text can be had, or none was asked for.
    """
    if corpus.vocab_size is None and config.tokenizer == "bytes":
        if config.sample_tokens and note is not None:
            note("sample  none: the data are token ids; say --tokenizer to decode them")
        return None
    tokenizer = load_tokenizer(config.tokenizer)
    if note is not None:
        tokenizer.save(folder.model)
    ids = tokenizer.encode(config.prompt).astype(np.int32)
    if not config.sample_tokens or ids.size == 0:
        return None
    written = write(
        model,
        ids,
        n=config.sample_tokens,
        length=max(2, config.length),
        temperature=config.temperature,
        seed=config.seed,
    )
    text = tokenizer.decode(written.tolist())
    if note is not None:
        write_file(folder.sample, text.encode("utf-8"))
        note("sample  " + "\n        ".join(text.splitlines()))
        if len(corpus.stream) <= WORDS_MOST:
            pieces = (
                tokenizer.decode(corpus.stream[i : i + WORDS_PIECE])
                for i in range(0, len(corpus.stream), WORDS_PIECE)
            )
            found, words = known_words(text, pieces)
            note(f"words   {found} of {words} in the sample occur in the corpus")
    return text


def known_words(sample: str, corpus: Iterable[str]) -> tuple[int, int]:
    """Words of a sample, and how many of them occur in a corpus.

    A word is two or more letters in a row.

    Returns
    -------
    (int, int)
        Found, and all.
    """
    word = re.compile(r"[^\W\d_]{2,}")
    # The last word may be cut short by the end of the sample.
    words = word.findall(sample)[:-1] if sample[-1:].isalpha() else word.findall(sample)
    wanted = set(words)
    seen: set[str] = set()
    for text in corpus:
        seen.update(wanted.intersection(word.findall(text)))
        if len(seen) == len(wanted):
            break
    return sum(one in seen for one in words), len(words)
