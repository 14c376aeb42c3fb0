"""What PyTorch saves of sharded models: DCP folders, and FSDP's whole optimizer state."""

import itertools
import pathlib
import shutil

import converted
import numpy as np
import pytest
import safetensors.numpy

from flatshard import _folders, checkpoint
from flatshard.convert import _dcp, _pickle_values, _pickles, _sources
from flatshard.errors import CheckpointError

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]

DCP = converted.FIXTURES / "dcp"
COLUMNS = converted.FIXTURES / "dcp-columns"
FSDP = converted.FIXTURES / "fsdp"
TIE = (("head.weight", "embed.weight"),)
ORDER = ["unused", "embed.weight", "layers.0.up.weight", "layers.0.up.bias", "still.weight"]


def check_groups(state) -> None:
    """Two groups, as the making script has them."""
    decay, plain = state["groups"]
    assert (decay["name"], decay["weight_decay"], decay["betas"]) == ("default", 0.1, [0.9, 0.95])
    assert (plain["name"], plain["weight_decay"], plain["lr"]) == ("no_decay", 0.0, 1e-2)
    assert set(decay["params"]) == {"embed.weight", "layers.0.up.weight"}
    assert set(plain["params"]) == {"unused", "layers.0.up.bias"}


def check_steps(state, unused: int) -> None:
    assert state["steps"].pop("unused") == unused
    assert set(state["steps"].values()) == {3}


def check_dcp(source: pathlib.Path, truth, run: pathlib.Path) -> None:
    """Converts and loads, with tie, frozen and never trained parameters, at other shapes."""
    report = checkpoint.convert(source, run)
    assert (report.step, report.rule, report.ties) == (3, "AdamW", TIE)
    assert report.frozen == ("still.weight",)
    assert "begun with zeros: unused" in str(report) and "counts: int64" in str(report)
    assert checkpoint.verify(run) == []
    for size, sharding in ((1, {}), (3, {"stage": 3}), (2, {"stage": 1, "gather": "copy"})):
        _, state = converted.loads(run, truth, ties=TIE, size=size, **sharding)
        check_groups(state)
        check_steps(state, 0)
    converted.loads(run, truth, ties=TIE, precision="bf16", cast=True)


def test_dcp_of_fsdp2(tmp_path) -> None:
    check_dcp(DCP / "nested", converted.truth_of(DCP), tmp_path)


def test_dcp_in_columns(tmp_path) -> None:
    """Boxes that are cut along any dimension."""
    report = checkpoint.convert(COLUMNS, tmp_path / "run")
    assert report.parameters == 3 and report.rule is None
    truth = converted.truth_of(COLUMNS)
    checkpoint.export(tmp_path / "run", tmp_path / "out")
    got = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert all(got[name].tobytes() == arrays["weight"].tobytes() for name, arrays in truth.items())


def test_fsdp_by_names(tmp_path) -> None:
    report = checkpoint.convert(FSDP, tmp_path)
    assert report.kind == "FSDP folder" and report.ties == TIE
    _, state = converted.loads(tmp_path, converted.truth_of(FSDP), ties=TIE)
    check_groups(state)
    check_steps(state, 3)


def test_fsdp_by_numbers(tmp_path) -> None:
    """Numbers are places among the trained parameters: only the caller knows which those are."""
    source, optimizer = FSDP / "pytorch_model_fsdp.bin", FSDP / "by_ids.bin"
    with pytest.raises(CheckpointError, match=r"numbers 4 parameters, .* has 6; give their names"):
        checkpoint.convert(source, None, optimizer=optimizer)
    checkpoint.convert(source, tmp_path, optimizer=optimizer, names=ORDER[:4])
    _, state = converted.loads(tmp_path, converted.truth_of(FSDP), ties=TIE)
    check_groups(state)


def test_accelerate_keeps_model_and_optimizer_apart(tmp_path) -> None:
    """Two DCP folders, as Accelerate names them, are one source."""
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        shutil.copytree(DCP / "nested", tmp_path / name)
    with pytest.raises(CheckpointError, match=r"is in .* and in"):
        checkpoint.convert(tmp_path, None)
    for name, keep in (("pytorch_model_fsdp_0", "model."), ("optimizer_0", "optim.")):
        change(tmp_path / name, lambda fields, keep=keep: only(fields, keep))
    checkpoint.convert(tmp_path, tmp_path / "run")
    converted.loads(tmp_path / "run", converted.truth_of(DCP), ties=TIE)


def test_metadata_without_paths(tmp_path) -> None:
    """Older versions, and other planners, tell flat names alone."""
    source = tmp_path / "source"
    shutil.copytree(DCP / "nested", source)
    change(source, lambda fields: fields.update(planner_data=None))
    report = checkpoint.convert(source, tmp_path / "run")
    assert report.ties == TIE and report.parameters == 5
    converted.loads(tmp_path / "run", converted.truth_of(DCP), ties=TIE)


# -- metadata that lies ----------------------------------------------------------------------------


def only(fields, prefix: str) -> None:
    for table in ("state_dict_metadata", "planner_data"):
        for name in [n for n in fields[table] if not n.startswith(prefix)]:
            del fields[table][name]
    for key in [k for k in fields["storage_data"] if not k.fields["fqn"].startswith(prefix)]:
        del fields["storage_data"][key]


def change(folder: pathlib.Path, edit) -> None:
    """Rewrites the metadata of a folder: what a stranger could."""
    path = folder / ".metadata"
    value = _pickles.load("there", path.read_bytes())
    edit(value.fields)
    path.write_bytes(written(value))


def written(value) -> bytes:
    """The pickle of what our reader gives, by opcodes."""
    out = bytearray(b"\x80\x02")

    def put(item) -> None:
        if item is None:
            out.extend(b"N")
        elif isinstance(item, bool):
            out.extend(b"\x88" if item else b"\x89")
        elif isinstance(item, int):
            raw = item.to_bytes(9, "little", signed=True)
            out.extend(b"\x8a\x09" + raw)
        elif isinstance(item, str):
            raw = item.encode()
            out.extend(b"X" + len(raw).to_bytes(4, "little") + raw)
        elif isinstance(item, (list, tuple)):
            out.extend(b"(")
            for part in item:
                put(part)
            out.extend(b"t")
        elif isinstance(item, dict):
            out.extend(b"}(")
            for key, part in item.items():
                put(key)
                put(part)
            out.extend(b"u")
        elif isinstance(item, _pickle_values.Name):
            module, _, name = item.text.rpartition(".")
            out.extend(b"c" + f"{module}\n{name}\n".encode())
        else:
            module, _, name = item.name.rpartition(".")
            out.extend(b"c" + f"{module}\n{name}\n".encode())
            put(tuple(item.args))
            out.extend(b"R")
            put(item.fields)
            out.extend(b"b")

    put(value)
    return bytes(out) + b"."


def entry(fields, name: str, table: str = "state_dict_metadata"):
    return fields[table][name].fields


def place(fields, name: str):
    return next(v.fields for k, v in fields["storage_data"].items() if k.fields["fqn"] == name)


W = "model.layers.0.up.weight"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda f: place(f, W).update(relative_path="../x"), "not a plain file name"),
        (lambda f: place(f, W).update(relative_path="/etc/passwd"), "not a plain file name"),
        (lambda f: place(f, W).update(relative_path=".metadata"), "not|cut short"),
        (lambda f: place(f, W).update(relative_path=None), "a text was expected"),
        (lambda f: place(f, W).update(offset=-1), "a size was expected"),
        (lambda f: place(f, W).update(offset=2**61), "cut short"),
        (lambda f: place(f, W).update(length=2**61), "cut short"),
        (lambda f: place(f, W).update(length=100), "not a file of torch.save|cut short"),
        (lambda f: place(f, W).update(transform_descriptors=("zstd",)), "compressed or transf"),
        (lambda f: entry(f, W).update(size=(3, 6)), "hold 15 of 18 elements"),
        (lambda f: entry(f, W).update(size=(2**40, 2**40)), "no shape that is read here"),
        (lambda f: entry(f, W).update(size=("3", 5)), "a size was expected"),
        (lambda f: entry(f, W)["chunks"][0].fields.update(sizes=(4, 5)), "reaches beyond|expected"),
        (lambda f: entry(f, W)["chunks"][0].fields.update(offsets=(1, 0)), "no file holds the box"),
        (lambda f: entry(f, W).update(chunks=entry(f, W)["chunks"][:1]), "hold 10 of 15"),
        (lambda f: entry(f, W).update(chunks=entry(f, W)["chunks"][:1] * 2), "hold 20 of 15"),
        (lambda f: entry(f, W).update(chunks=()), "hold 0 of 15"),
        (lambda f: f["storage_data"].clear(), "no file holds"),
        (lambda f: f["state_dict_metadata"].pop(W), "which is not listed"),
        (lambda f: f.update(state_dict_metadata=[]), "a dict was expected"),
        (lambda f: f["planner_data"].update({W: ("a",) * 17}), "the path of"),
        (lambda f: f["planner_data"].update({W: ("model", "layers.0.up.wieght")}),
         "up.weight, which the weights lack; the nearest is layers.0.up.wieght"),
    ],
)  # fmt: skip
def test_metadata_that_lies(tmp_path, edit, words) -> None:
    source = tmp_path / "source"
    shutil.copytree(DCP / "nested", source)
    change(source, lambda fields: None)
    assert checkpoint.convert(source, None).step == 3, "the writer of this test is faithful"
    change(source, edit)
    with pytest.raises(CheckpointError, match=words):
        checkpoint.convert(source, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_boxes_that_overlap() -> None:
    _dcp._check_boxes("there", "w", (4, 4), [((0, 0), (4, 2)), ((0, 2), (4, 2))])
    for boxes in (
        [((0, 0), (4, 2)), ((0, 1), (4, 2))],
        [((0, 0), (2, 4)), ((1, 0), (2, 4))],
        [((0, 0), (2, 2)), ((1, 1), (2, 2)), ((2, 2), (2, 2)), ((0, 2), (1, 2)), ((3, 0), (1, 2))],
    ):
        with pytest.raises(CheckpointError, match="overlap"):
            _dcp._check_boxes("there", "w", (4, 4), boxes)


def test_mutations_of_metadata(tmp_path, rng) -> None:
    """Whatever bits change (names and numbers carry no checksum): an error of ours, or a checkpoint
    that is whole."""
    source = tmp_path / "source"
    shutil.copytree(DCP / "nested", source)
    good = (source / ".metadata").read_bytes()
    truth = converted.truth_of(DCP)
    refused = 0
    for _ in range(60):
        bad = bytearray(good)
        for at in rng.integers(0, len(bad), rng.integers(1, 4)):
            bad[at] ^= 1 << rng.integers(8)
        (source / ".metadata").write_bytes(bad)
        try:
            checkpoint.convert(source, tmp_path / "run", step=1)
        except CheckpointError:
            refused += 1
            continue
        (folder,) = _folders.committed(str(tmp_path / "run"))
        names = {p.name for p in _folders.read_index(folder).parameters}
        assert checkpoint.verify(tmp_path / "run") == []
        shutil.rmtree(tmp_path / "run")
        assert len(names) <= len(truth) + 1
    assert refused > 10


# -- parts -----------------------------------------------------------------------------------------


class Held:
    """A source in memory."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.numel, self.dtype = array.reshape(-1), array.size, array.dtype.name

    def read(self, begin: int, end: int) -> bytes:
        return self.array[begin:end].tobytes()


def test_sources_give_any_range(rng) -> None:
    whole = rng.standard_normal((6, 5, 4)).astype(np.float32)
    cuts = [
        ((i, j, k), (2, 5 - j if j else 3, 2), Held(whole[i : i + 2, j : j + 3, k : k + 2]))
        for i in (0, 2, 4)
        for j in (0, 3)
        for k in (0, 2)
    ]
    cuts = [
        (o, s, Held(whole[tuple(slice(a, a + b) for a, b in zip(o, s, strict=True))]))
        for o, s, _ in cuts
    ]
    flat = whole.reshape(-1)
    ends = [0, 7, 7, 50, 120]
    joined = [Held(flat[a:b]) for a, b in itertools.pairwise(ends)]
    for source in (_sources.Blocks(whole.shape, cuts), _sources.Joined(joined)):
        assert source.numel == 120
        for _ in range(100):
            begin, end = sorted(rng.integers(0, 121, 2))
            if begin < end:
                assert source.read(int(begin), int(end)) == flat[begin:end].tobytes()
    part = _sources.Part(Held(flat), 10, 20)
    assert part.read(3, 9) == flat[13:19].tobytes()


def test_a_tensor_that_is_not_contiguous(tmp_path) -> None:
    base = np.arange(24, dtype=np.float32)
    (tmp_path / "x").write_bytes(bytes(8) + base.tobytes())
    file = _sources.File(str(tmp_path), "x")
    view = np.lib.stride_tricks.as_strided(base[2:], (3, 2, 3), (4, 48, 12))
    source = _sources.Strided(file, 16, view.shape, (1, 12, 3), "float32")
    expected = np.ascontiguousarray(view).reshape(-1)
    for begin in range(0, 18, 5):
        end = min(begin + 5, 18)
        assert source.read(begin, end) == expected[begin:end].tobytes()
    file.close()
