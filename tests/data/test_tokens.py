"""Batches: deterministic, disjoint between ranks, resumable; clear errors for what will not do."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatshard.errors import ConfigError
from flatshard.models import data
from flatshard.models.data import IGNORED, _shuffle

pytestmark = pytest.mark.quick


def rank_of(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=rank, size=size)


ALONE = rank_of(0, 1)


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """Tokens 0 .. 9999: a token says where it came from."""
    file = tmp_path / "numbers.npy"
    np.save(file, np.arange(10_000, dtype=np.uint16))
    return file


def first(tokens: data.Tokens, n: int) -> list[data.Batch]:
    return [batch for _, batch in zip(range(n), tokens, strict=False)]


def inputs(tokens: data.Tokens, n: int) -> np.ndarray:
    return np.stack([batch.inputs for batch in first(tokens, n)])


def test_targets_follow_inputs(numbers: Path) -> None:
    for batch in first(data.tokens(numbers, world=ALONE, batch=3, length=7), 50):
        assert batch.inputs.dtype == batch.targets.dtype == np.int32
        assert batch.inputs.shape == batch.targets.shape == (3, 7)
        assert batch.inputs.flags.c_contiguous and batch.targets.flags.c_contiguous
        assert (batch.targets[:, :-1] == batch.inputs[:, 1:]).all()
        assert (batch.targets == batch.inputs + 1).all()


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_an_epoch_gives_each_sequence_once(numbers: Path, world: int) -> None:
    per_rank = [
        data.tokens(numbers, world=rank_of(r, world), batch=4, length=16, split="all")
        for r in range(world)
    ]
    for epoch in range(3):
        seen = np.concatenate([inputs(tokens, len(tokens)).reshape(-1) for tokens in per_rank])
        assert len(np.unique(seen)) == len(seen)  # no token twice, on whatever rank
        assert len(seen) > 10_000 - (world * 4 + 1) * 16  # less than a step and a sequence left out
        starts = np.unique(seen.reshape(-1, 16)[:, 0] % 16)
        assert len(starts) == 1 or epoch > 0  # the first epoch is cut at multiples of the length


def test_ranks_share_one_global_batch(numbers: Path) -> None:
    alone = inputs(data.tokens(numbers, world=ALONE, batch=12, length=16, seed=3), 40)
    for world, batch in ((2, 6), (3, 4), (4, 3)):
        parts = [
            inputs(
                data.tokens(numbers, world=rank_of(r, world), batch=batch, length=16, seed=3), 40
            )
            for r in range(world)
        ]
        assert (np.concatenate(parts, axis=1) == alone).all()


def test_seed_and_epoch_decide_the_order(numbers: Path) -> None:
    def order(seed: int) -> np.ndarray:
        return inputs(data.tokens(numbers, world=ALONE, batch=4, length=16, seed=seed), 300)[
            :, :, 0
        ]

    assert (order(0) == order(0)).all()
    assert (order(0) != order(1)).mean() > 0.9
    epoch = len(data.tokens(numbers, world=ALONE, batch=4, length=16))
    assert (order(0)[:epoch] != order(0)[epoch : 2 * epoch]).mean() > 0.9
    in_file_order = np.sort(order(0)[:epoch].reshape(-1))
    assert (order(0)[:epoch].reshape(-1) != in_file_order).mean() > 0.9


def test_the_order_is_kept_for_ever(numbers: Path) -> None:
    """A run resumed under a later version must see the same batches: these numbers never change."""
    batch = first(data.tokens(numbers, world=ALONE, batch=4, length=16, seed=7), 1)[0]
    assert batch.inputs[:, 0].tolist() == PINNED


PINNED = [7936, 8704, 7264, 6080]


@pytest.mark.parametrize("at", [0, 1, 17, 148, 149, 150, 301])
def test_restore_goes_on_at_the_next_batch(numbers: Path, at: int) -> None:
    tokens = data.tokens(numbers, world=rank_of(1, 2), batch=2, length=16)
    first(tokens, at)
    state = json.loads(json.dumps(tokens.state()))  # a checkpoint keeps it as JSON
    expected = inputs(tokens, 5)
    again = data.tokens(numbers, world=rank_of(1, 2), batch=2, length=16)
    first(again, 3)
    again.restore(state)
    assert (inputs(again, 5) == expected).all()


def test_restore_on_other_ranks_repeats_nothing(numbers: Path) -> None:
    ranks = [data.tokens(numbers, world=rank_of(r, 2), batch=4, length=16) for r in range(2)]
    seen = [inputs(tokens, 20) for tokens in ranks]
    other = [data.tokens(numbers, world=rank_of(r, 3), batch=3, length=16) for r in range(3)]
    for tokens in other:
        tokens.restore(ranks[0].state())
    left = (ranks[0].sequences - 20 * 8) // 9
    seen += [inputs(tokens, left) for tokens in other]
    flat = np.concatenate([part.reshape(-1) for part in seen])
    assert len(np.unique(flat)) == len(flat)


def test_restore_refuses_other_data(numbers: Path, tmp_path: Path) -> None:
    state = data.tokens(numbers, world=ALONE, batch=2, length=16).state()
    changed = tmp_path / "changed.npy"
    array = np.load(numbers)
    array[5_000:] += 1
    np.save(changed, array)
    with pytest.raises(ConfigError, match="fingerprint was"):
        data.tokens(changed, world=ALONE, batch=2, length=16).restore(state)
    with pytest.raises(ConfigError, match="length was 16, now 8"):
        data.tokens(numbers, world=ALONE, batch=2, length=8).restore(state)
    with pytest.raises(ConfigError, match="seed was 0, now 1"):
        data.tokens(numbers, world=ALONE, batch=2, length=16, seed=1).restore(state)
    with pytest.raises(ConfigError, match="format None"):
        data.tokens(numbers, world=ALONE, batch=2, length=16).restore({})


# Held-out --------------------------------------------------------------------------------------


def test_heldout_is_the_rest(numbers: Path) -> None:
    train = data.tokens(numbers, world=ALONE, batch=1, length=10, holdout=0.1)
    trained = np.unique(inputs(train, len(train)))
    heldout = list(
        data.tokens(numbers, world=ALONE, batch=1, length=10, split="heldout", holdout=0.1)
    )
    targets = np.concatenate([b.targets.reshape(-1) for b in heldout])
    assert trained.max() < 9_000
    assert targets[targets != IGNORED].tolist() == list(range(9_001, 10_000))


@pytest.mark.parametrize("world,batch", [(1, 1), (1, 8), (2, 3), (4, 5)])
def test_heldout_counts_each_token_once_on_any_world(numbers: Path, world: int, batch: int) -> None:
    parts = [
        list(data.tokens(numbers, world=rank_of(r, world), batch=batch, length=33, split="heldout"))
        for r in range(world)
    ]
    assert len({len(part) for part in parts}) == 1  # every rank makes the same number of calls
    targets = np.concatenate([b.targets.reshape(-1) for part in parts for b in part])
    assert sorted(targets[targets != IGNORED].tolist()) == list(range(9_501, 10_000))


def test_heldout_may_be_thinned(numbers: Path) -> None:
    def heldout(size: int, batch: int) -> list[int]:
        parts = [
            list(
                data.tokens(
                    numbers, world=rank_of(r, size), batch=batch, length=10, split="heldout", most=7
                )
            )
            for r in range(size)
        ]
        rows = np.concatenate([b.targets for part in parts for b in part])
        return sorted(rows[rows[:, 0] != IGNORED, 0].tolist())

    assert heldout(1, 1) == [9_501 + 10 * (i * 50 // 7) for i in range(7)]
    assert heldout(2, 2) == heldout(3, 5) == heldout(1, 1)


def test_whole_documents_are_held_out(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(chr(ord("A") + i) * 50)
    letters = {
        split: {
            chr(t)
            for b in first(data.tokens(folder, world=ALONE, batch=1, length=8, split=split), 300)
            for t in b.inputs.reshape(-1).tolist()
        }
        - {"\0"}
        for split in ("train", "heldout")
    }
    assert letters["heldout"] == {chr(ord("A") + 19), chr(ord("A") + 39)}
    assert letters["train"] == {chr(ord("A") + i) for i in range(40)} - letters["heldout"]


def test_heldout_has_no_position(numbers: Path) -> None:
    tokens = data.tokens(numbers, world=ALONE, batch=1, length=10, split="heldout")
    assert [b.inputs.tolist() for b in tokens] == [b.inputs.tolist() for b in tokens]
    with pytest.raises(ConfigError, match="no position"):
        tokens.state()


# Sources ---------------------------------------------------------------------------------------


def text_of(tokens: data.Tokens) -> str:
    return bytes(tokens.corpus.stream.tolist()).decode()


def test_text_file_is_mapped(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("größer\n" * 20, encoding="utf-8")
    tokens = data.tokens(file, world=ALONE, batch=1, length=8)
    assert isinstance(tokens.corpus.stream, np.memmap)
    assert text_of(tokens) == "größer\n" * 20
    assert tokens.vocab_size == 256


def test_folder_is_read_by_name_and_pattern(tmp_path: Path) -> None:
    for name, text in {
        "b.py": "bb",
        "a.py": "aa",
        "c.txt": "cc",
        "sub/d.py": "dd",
        "test/e.py": "ee",
        ".git/f.py": "ff",
        "__pycache__/g.py": "gg",
        "empty.py": "",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    tokens = data.tokens(
        tmp_path, world=ALONE, batch=1, length=2, glob="*.py", exclude="test", split="all"
    )
    assert text_of(tokens) == "aa\0bb\0dd\0"
    assert tokens.corpus.begins.tolist() == [0, 3, 6]


def test_jsonl(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "eins\\n"}\n\n{"text": ""}\n{"id": 3, "text": "zwei"}\n')
    tokens = data.tokens(file, world=ALONE, batch=1, length=4, split="all")
    assert text_of(tokens) == "eins\n\0zwei\0"


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_token_files(tmp_path: Path, dtype: str) -> None:
    ids = (np.arange(500) % 250).astype(dtype)
    (tmp_path / "a.bin").write_bytes(ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
    np.save(tmp_path / "a.npy", ids)
    for name in ("a.bin", "a.npy"):
        tokens = data.tokens(
            tmp_path / name, world=ALONE, batch=1, length=8, token_dtype=dtype, split="all"
        )
        assert isinstance(tokens.corpus.stream, np.memmap)
        assert tokens.corpus.stream.tolist() == ids.tolist()
        assert tokens.vocab_size == 250


def test_standard_library() -> None:
    tokens = data.tokens("stdlib", world=ALONE, batch=4, length=128)
    assert tokens.token_count > 5_000_000
    assert len(tokens.corpus.begins) > 300
    text = text_of(tokens)
    assert "def " in text and "import unittest.mock\nfrom test" not in text


def test_cache_is_mapped_and_keyed(tmp_path: Path) -> None:
    file, cache = tmp_path / "a.txt", tmp_path / "cache"
    file.write_text("x" * 100)

    def open_() -> data.Tokens:
        return data.tokens(file, world=ALONE, batch=1, length=8, cache=cache)

    plain = data.tokens(file, world=ALONE, batch=1, length=8)
    made, found = open_(), open_()
    assert isinstance(found.corpus.stream, np.memmap)
    assert made.corpus.stream.tolist() == found.corpus.stream.tolist()
    assert [*plain.corpus.stream.tolist(), 0] == found.corpus.stream.tolist()
    assert len(list(cache.iterdir())) == 2
    file.write_text("y" * 101)
    assert set(open_().corpus.stream.tolist()) == {ord("y"), 0}
    assert len(list(cache.iterdir())) == 4


# What will not do ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name,content,options,message",
    [
        ("a.txt", b"", {}, "is empty"),
        ("a.jsonl", b"\n\n", {}, "is empty"),
        ("a.npy", b"", {}, "is empty"),
        ("a.bin", b"", {}, "is empty"),
        ("a.bin", b"abc", {}, "3 bytes are no whole number of uint16"),
        ("a.npy", b"no array", {}, "no readable .npy"),
        ("a.txt", b"short", {}, "shorter than one sequence: 5 tokens to train on, 17 needed"),
        ("a.txt", b"x" * 40, {"batch": 9}, "fewer than one step of 1 ranks x batch 9"),
        ("a.txt", b"fine " * 20 + b"\xff", {}, "is not utf-8 text: byte 100: invalid start byte"),
        ("a.txt", b"\xff\xfea\0b\0" * 9, {}, "begins like UTF-16: --encoding utf-16"),
        ("a.txt", b"x" * 99, {"encoding": "utf-99"}, "encoding 'utf-99' is unknown"),
        ("a.jsonl", b'{"text": "a"}\n{text}\n', {}, "line 2: no JSON"),
        ("a.jsonl", b'{"content": "a"}\n', {}, "line 1: expected .* got keys \\['content'\\]"),
        ("a.jsonl", b"[1]\n", {}, "got list"),
        ("a.txt", b"x" * 99, {"batch": 0}, "batch 0: expected at least 1"),
        ("a.txt", b"x" * 99, {"most": 0}, "most 0: expected at least 1"),
        ("a.txt", b"x" * 99, {"length": 0}, "length 0: expected at least 1"),
        ("a.txt", b"x" * 99, {"holdout": 0.9}, "holdout 0.9: expected 0 to 0.5"),
        ("a.txt", b"x" * 99, {"split": "test"}, "split 'test': expected one of"),
        ("a.txt", b"x" * 99, {"split": "heldout", "holdout": 0.0}, "held-out part of 0 tokens"),
        ("a.bin", b"xx" * 99, {"token_dtype": "float32"}, "token_dtype 'float32': expected"),
        (
            "a.txt",
            b"x" * 99,
            {"tokenizer": "missing.json"},
            "tokenizer 'missing.json': no such file",
        ),
    ],
)
def test_refused(
    tmp_path: Path, name: str, content: bytes, options: dict[str, Any], message: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        data.tokens(file, world=ALONE, **{"batch": 1, "length": 16, **options})


def test_refused_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        data.tokens(tmp_path / "nothing", world=ALONE, batch=1, length=8)
    (tmp_path / "a.txt").write_text("x" * 99)
    with pytest.raises(ConfigError, match=r"no file matches '\*\.py'"):
        data.tokens(tmp_path, world=ALONE, batch=1, length=8, glob="*.py")
    np.save(tmp_path / "b.npy", np.zeros(99, np.uint16))
    with pytest.raises(ConfigError, match="a token file in a folder of text"):
        data.tokens(tmp_path, world=ALONE, batch=1, length=8)
    np.save(tmp_path / "c.npy", np.zeros((9, 9), np.float32))
    with pytest.raises(ConfigError, match="float32 of shape \\(9, 9\\)"):
        data.tokens(tmp_path / "c.npy", world=ALONE, batch=1, length=8)


def test_bad_byte_is_found_behind_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A character cut by a chunk is no error; a bad one is named by its place in the file."""
    monkeypatch.setattr("flatshard.models.corpus.CHUNK", 4)
    file = tmp_path / "a.txt"
    file.write_bytes("äöü€".encode() * 5)
    data.tokens(file, world=ALONE, batch=1, length=8)
    for at in range(1, 12):
        file.write_bytes(b"x" * at + "€".encode()[:2] + b"y" * 20)
        with pytest.raises(ConfigError, match=f"byte {at}: invalid continuation byte"):
            data.tokens(file, world=ALONE, batch=1, length=8)


def test_vocabulary(numbers: Path, tmp_path: Path) -> None:
    tokens = data.tokens(numbers, world=ALONE, batch=1, length=8)
    tokens.check_vocabulary(10_000)
    with pytest.raises(ConfigError, match="holds token 9999, the model's vocabulary ends at 9998"):
        tokens.check_vocabulary(9_999)
    file = tmp_path / "a.txt"
    file.write_text("abc" * 20)
    tokens = data.tokens(file, world=ALONE, batch=1, length=8)
    tokens.check_vocabulary(256)
    tokens.check_vocabulary(100)  # smaller than the tokenizer's, but every token is there
    with pytest.raises(ConfigError, match="holds token 99"):
        tokens.check_vocabulary(99)
    negative = tmp_path / "negative.npy"
    np.save(negative, np.array([3, 4, -5, 6] * 9, np.int32))
    with pytest.raises(ConfigError, match="token 2 is -5"):
        data.tokens(negative, world=ALONE, batch=1, length=8).check_vocabulary(9)


# Order -----------------------------------------------------------------------------------------


@given(st.integers(1, 3_000), st.integers(0, 2**64 - 1), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_shuffle_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    out = _shuffle(np.arange(n, dtype=np.uint64), n, (seed, epoch))
    assert np.sort(out).tolist() == list(range(n))


def test_shuffle_spreads() -> None:
    """A permutation of 4096 is uniform over 64 x 64 cells: chi-square within 5 sigma."""
    n, cells = 4096, 64
    counts = np.zeros((cells, cells))
    for seed in range(32):
        out = _shuffle(np.arange(n, dtype=np.uint64), n, (seed, 0)).astype(np.int64)
        np.add.at(counts, (np.arange(n) // (n // cells), out // (n // cells)), 1)
    expected = 32 * n / cells**2
    chi2 = ((counts - expected) ** 2 / expected).sum()
    freedom = (cells - 1) ** 2
    assert abs(chi2 - freedom) < 5 * np.sqrt(2 * freedom)


def test_shuffle_is_the_network_it_says() -> None:
    """The same in Python's integers: splitmix finalizer, six rounds, walking back into range."""
    word = (1 << 64) - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & word
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & word
        return x ^ (x >> 31)

    def hash_(*words: int) -> int:
        value = 0
        for w in words:
            value = mix((value + 0x9E3779B97F4A7C15 + w) & word)
        return value

    n, half, mask = 777, 5, 31
    out = _shuffle(np.arange(n, dtype=np.uint64), n, (5, 2))
    for i in range(n):
        x = i
        while True:
            left, right = x >> half, x & mask
            for turn in range(6):
                left, right = right, left ^ (mix((right + hash_(5, 2, turn)) & word) & mask)
            x = left << half | right
            if x < n:
                break
        assert out[i] == x
