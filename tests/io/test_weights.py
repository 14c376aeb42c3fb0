"""Whole weights: from Hugging Face folders into shards and out again; the package is the judge."""

import json
import os
import pathlib
import re

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import small
from safetensors import safe_open

import flatshard as fs
from flatshard import _core, checkpoint
from flatshard.errors import CheckpointError

pytestmark = [pytest.mark.quick, pytest.mark.timeout(120)]


def weights(seed=7, dtype=np.float32) -> dict[str, np.ndarray]:
    arrays = small.values(seed)
    del arrays["head.weight"]
    return {name: array.astype(dtype) for name, array in arrays.items()}


def write_sharded(folder: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    """As Hugging Face writes it: two files and an index."""
    folder.mkdir(exist_ok=True)
    names = sorted(arrays)
    parts = [names[::2], names[1::2]]
    weight_map = {}
    for i, part in enumerate(parts, 1):
        file = f"model-{i:05d}-of-00002.safetensors"
        safetensors.numpy.save_file({n: arrays[n] for n in part}, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_into(folder, size=3, precision="fp32", **options):
    """Every parameter and what was reported, after reading on some ranks."""

    def body(world):
        shards = small.build(world, precision=precision, partition="per_parameter")
        report = checkpoint.read_weights(shards, folder, **options)
        found = {n: (shards.full(n), shards.full(n, "master")) for n in small.SHAPES}
        world.barrier()
        return report, found

    return fs.local_world(size).run(body)[-1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_reads_single_and_sharded_folders(tmp_path, dtype, precision) -> None:
    arrays = weights(dtype=dtype)
    write_sharded(tmp_path / "sharded", arrays)
    (tmp_path / "single").mkdir()
    safetensors.numpy.save_file(arrays, tmp_path / "single" / "model.safetensors")
    for source in ("sharded", "single", "single/model.safetensors"):
        report, found = read_into(tmp_path / source, precision=precision)
        assert report.missing == report.unexpected == ()
        for name, array in arrays.items():
            exact = array.astype(np.float32)
            weight, master = found[name]
            if precision == "fp32":
                assert weight.tobytes() == exact.tobytes()
            else:
                assert weight.tobytes() == exact.astype(ml_dtypes.bfloat16).tobytes()
                if name not in small.FROZEN:
                    assert master.tobytes() == exact.tobytes(), "masters keep what the file has"


def test_a_tied_weight_is_found_under_either_name(tmp_path) -> None:
    arrays = weights()
    arrays["head.weight"] = arrays.pop("embed.weight")
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    report, found = read_into(tmp_path)
    assert report.missing == report.unexpected == ()
    assert (found["embed.weight"][0] == arrays["head.weight"]).all()


def test_tensors_that_do_not_begin_aligned(tmp_path) -> None:
    """Other writers do not pad their header."""
    arrays = weights()
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    n = int.from_bytes(content[:8], "little")
    for pad in range(1, 8):
        header = content[8 : 8 + n].rstrip() + b" " * pad
        text = len(header).to_bytes(8, "little") + header + content[8 + n :]
        (tmp_path / "model.safetensors").write_bytes(text)
        _, found = read_into(tmp_path, size=2)
        assert all((found[name][0] == array).all() for name, array in arrays.items()), pad


def test_other_names_and_buffers(tmp_path) -> None:
    arrays = {f"transformer.{name}": array for name, array in weights().items()}
    arrays["transformer.layers.0.rotary_emb.inv_freq"] = np.zeros(3, np.float32)
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    report, found = read_into(tmp_path, rename=lambda name: f"transformer.{name}")
    assert report.unexpected == ()
    assert (found["norm.weight"][0] == arrays["transformer.norm.weight"]).all()


def refused(folder, words, error=CheckpointError, **options) -> None:
    """Reading fails alike on every rank, and changes nothing."""

    def body(world):
        shards = small.build(world)
        before = small.hashes(shards)
        with pytest.raises(error, match=words):
            checkpoint.read_weights(shards, folder, **options)
        assert small.hashes(shards) == before

    fs.local_world(2).run(body)


def test_what_is_refused_before_anything_is_read(tmp_path) -> None:
    refused(tmp_path, "holds no weights")
    arrays = weights()
    file = tmp_path / "model.safetensors"

    extra = {**arrays, "other": np.zeros(2, np.float32)}
    del extra["norm.weight"]
    safetensors.numpy.save_file(extra, file)
    refused(tmp_path, r"it lacks norm\.weight; it has besides other")
    report, _ = read_into(tmp_path, strict=False)
    assert (report.missing, report.unexpected) == (("norm.weight",), ("other",))

    safetensors.numpy.save_file({**arrays, "norm.weight": np.zeros((2, 1), np.float32)}, file)
    refused(tmp_path, r"norm\.weight is \[2, 1\] there and \[2\] here")
    safetensors.numpy.save_file({**arrays, "norm.weight": np.zeros(2, np.int64)}, file)
    refused(tmp_path, r"norm\.weight is I64 there, not a floating-point type")

    safetensors.numpy.save_file(arrays, file)
    content = file.read_bytes()
    for cut in (0, 7, 8, 100, len(content) - 1):
        file.write_bytes(content[:cut])
        refused(tmp_path, re.escape(str(file)))
    file.unlink()

    write_sharded(tmp_path, arrays)
    index = tmp_path / "model.safetensors.index.json"
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused(
        tmp_path, r"model-00002-of-00002\.safetensors is missing, and with it layers\.0\.frozen"
    )
    write_sharded(tmp_path, arrays)
    values = json.loads(index.read_text())
    for target in ("../model.safetensors", "/etc/passwd", "a.bin", 3):
        values["weight_map"]["norm.weight"] = target
        index.write_text(json.dumps(values))
        refused(tmp_path, "norm.weight' is said to be in")
    values["weight_map"]["norm.weight"] = "model-00002-of-00002.safetensors"
    place = next(
        n for n in values["weight_map"] if values["weight_map"][n].startswith("model-00001")
    )
    values["weight_map"][place] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(values))
    refused(tmp_path, "its index says model-00002-of-00002|its index lists")
    write_sharded(tmp_path, arrays)
    values = json.loads(index.read_text())
    values["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(values))
    refused(tmp_path, "its index lists ghost, no file has it")
    index.write_text('{"weight_map": {}, "weight_map": {}}')
    refused(tmp_path, "a key comes twice")


def test_a_name_in_two_files(tmp_path) -> None:
    arrays = weights()
    write_sharded(tmp_path, arrays)
    file = tmp_path / "model-00002-of-00002.safetensors"
    safetensors.numpy.save_file({**safetensors.numpy.load_file(file), **arrays}, file)
    refused(tmp_path, "is both in model-00001-of-00002.safetensors and in model-00002")


# -- out -------------------------------------------------------------------------------------------


def exported(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """All tensors of an exported folder, read by the package."""
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.exists():
        files = set(json.loads(index.read_text())["weight_map"].values())
    assert {f for f in os.listdir(folder) if f.endswith(".safetensors")} == files
    found: dict[str, np.ndarray] = {}
    for file in files:
        with safe_open(folder / file, "np") as opened:
            assert opened.metadata() == {"format": "pt"}
        found.update(safetensors.numpy.load_file(folder / file))
    return found


@pytest.mark.parametrize("gather", ["view", "copy"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_export_of_a_model_and_of_its_checkpoint_are_equal(tmp_path, precision, gather) -> None:
    def body(world):
        shards = small.build(world, precision=precision, gather=gather)
        opt = small.optimizer(shards)
        small.step(shards, opt, 1)
        checkpoint.save(tmp_path / "run", shards, opt, step=1)
        for dtype in (None, "float32", "float16", "bfloat16"):
            checkpoint.export(shards, tmp_path / f"live-{dtype}", dtype=dtype)
        found = {n: (shards.full(n), shards.full(n, "master")) for n in small.SHAPES}
        world.barrier()
        return found

    truth = fs.local_world(3).run(body)[0]
    for dtype in (None, "float32", "float16", "bfloat16"):
        checkpoint.export(tmp_path / "run", tmp_path / f"saved-{dtype}", dtype=dtype)
        live, saved = exported(tmp_path / f"live-{dtype}"), exported(tmp_path / f"saved-{dtype}")
        assert live.keys() == saved.keys() == small.SHAPES.keys(), "a tie is written once"
        for name, (weight, master) in truth.items():
            wanted = (
                weight
                if dtype is None
                else master.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
            )
            for array in (live[name], saved[name]):
                assert array.dtype == wanted.dtype and array.shape == wanted.shape
                assert array.tobytes() == wanted.tobytes(), (dtype, name)
    # And back in: what was exported in full precision gives the same masters.
    report, found = read_into(tmp_path / "saved-float32", precision=precision)
    assert report.missing == ()
    for name, (_, master) in truth.items():
        assert found[name][1].astype(np.float32).tobytes() == master.astype(np.float32).tobytes()


def test_export_in_several_files_and_over_earlier_ones(tmp_path) -> None:
    def body(world):
        shards = small.build(world)
        checkpoint.save(tmp_path / "run", shards, step=1)
        checkpoint.export(shards, tmp_path / "hf", file_nbytes=400)

    fs.local_world(2).run(body)
    (tmp_path / "hf" / "config.json").write_text("{}")
    first = exported(tmp_path / "hf")
    assert first.keys() == small.SHAPES.keys()
    assert len(list((tmp_path / "hf").glob("model-0000?-of-0000?.safetensors"))) == 4
    checkpoint.export(tmp_path / "run", tmp_path / "hf")
    assert sorted(os.listdir(tmp_path / "hf")) == ["config.json", "model.safetensors"]
    second = exported(tmp_path / "hf")
    assert all(first[name].tobytes() == second[name].tobytes() for name in small.SHAPES)
    checkpoint.export(tmp_path / "hf", tmp_path / "hf", file_nbytes=1)
    assert len(os.listdir(tmp_path / "hf")) == len(small.SHAPES) + 2
    assert exported(tmp_path / "hf").keys() == small.SHAPES.keys()


def test_a_failing_export_leaves_the_earlier_one(tmp_path) -> None:
    def body(world):
        checkpoint.save(tmp_path / "run", small.build(world), step=1)

    fs.local_world(2).run(body)
    checkpoint.export(tmp_path / "run", tmp_path / "hf")
    before = (tmp_path / "hf" / "model.safetensors").read_bytes()
    file = tmp_path / "run" / "step-000001" / "rank-00001-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"block 0 is damaged: header, .* rows 0-.*, rank 1"):
        checkpoint.export(tmp_path / "run", tmp_path / "hf")
    assert os.listdir(tmp_path / "hf") == ["model.safetensors"]
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == before
    with pytest.raises(ValueError, match="dtype='int8'"):
        checkpoint.export(tmp_path / "run", tmp_path / "hf", dtype="int8")
    with pytest.raises(CheckpointError, match="holds no weights"):
        checkpoint.export(tmp_path / "none", tmp_path / "hf")


def test_ranges_of_a_catalog(tmp_path) -> None:
    """The reader under export: any range of any state, from as many files as hold it."""

    def body(world):
        shards = small.build(world, partition="per_parameter", precision="bf16")
        opt = small.optimizer(shards)
        small.step(shards, opt, 1)
        checkpoint.save(tmp_path, shards, opt, step=1)
        name = "layers.1.mlp.up_proj.weight"
        return shards.full(name, "master"), shards.full(name, "exp_avg_sq")

    master, second = fs.local_world(5).run(body)[0]
    from flatshard import _folders

    catalog = _folders.catalog_of(_folders.read_index(str(tmp_path / "step-000001"))).core
    rng = np.random.default_rng(3)
    for _ in range(50):
        begin, end = sorted(rng.integers(0, master.size + 1, 2))
        for state, truth in ((0, master), (4, second)):
            got = np.empty(end - begin, np.float32)
            _core.catalog_fetch(catalog, "layers.1.mlp.up_proj.weight", state, int(begin), got)
            assert got.tobytes() == truth.reshape(-1)[begin:end].tobytes()
    with pytest.raises(CheckpointError, match='no file holds elements 2560 to 2561 of "layers'):
        _core.catalog_fetch(
            catalog, "layers.1.mlp.up_proj.weight", 0, 2559, np.empty(2, np.float32)
        )
