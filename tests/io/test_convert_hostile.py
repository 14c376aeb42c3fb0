"""Hostile and damaged files of other systems: an error that names what was found, and no more."""

import builtins
import collections
import os
import pathlib
import pickle
import re
import resource
import shutil
import struct
import subprocess
import tracemalloc
import zipfile

import converted
import numpy as np
import pytest
import safetensors.numpy
import torch_zip

import flatshard as fs
from flatshard import checkpoint
from flatshard.convert import _pickle_values, _pickles, _sources, _torch_zip
from flatshard.errors import CheckpointError

pytestmark = [pytest.mark.quick, pytest.mark.timeout(120)]

LLAMA = converted.FIXTURES / "transformers"


def refuses(data: bytes, words: str) -> None:
    """The pickle is refused, with these words, and without taking much memory."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=words):
            _pickles.load("there", data)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000 + 64 * len(data)
    finally:
        tracemalloc.stop()


class Calls:
    """Pickles as a call of something."""

    def __init__(self, function, *args) -> None:
        self.what = (function, args)

    def __reduce__(self):
        return self.what


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("function", "args", "named"),
    [
        (os.system, ("touch /tmp/owned",), "posix.system"),
        (builtins.eval, ("1 + 1",), "(builtins|__builtin__).eval"),
        (builtins.exec, ("import os",), "(builtins|__builtin__).exec"),
        (builtins.getattr, (os, "system"), "(builtins|__builtin__).getattr"),
        (builtins.__import__, ("os",), "(builtins|__builtin__).__import__"),
        (subprocess.Popen, (["true"],), "(subprocess|commands).Popen"),
        (bytearray, (2**40,), "(builtins|__builtin__).bytearray"),
        (collections.Counter, ("aa",), "collections.Counter"),
        (pathlib.PurePosixPath, ("a",), "pathlib"),
    ],
)
def test_calls_of_anything_else_are_refused_by_name(protocol, function, args, named) -> None:
    if args and args[0] is os:
        args = ("os", "system")
    data = pickle.dumps({"w": [Calls(function, *args)]}, protocol)
    refuses(data, rf"names '{named}.*not on the list of what a checkpoint may hold")


def op(name: str, module: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


P2, STOP = b"\x80\x02", b"."
ORDERED = op("OrderedDict", "collections")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        # Attributes of what is listed, and names in disguise.
        (op("OrderedDict.__init__", "collections"), "names 'collections.OrderedDict.__init__'"),
        (op("_rebuild_tensor_v2.__globals__", "torch._utils"), "__globals__"),
        (b"c" + b"x" * 5000 + b"\ny\n", "a name without an end"),
        (b"X\x02\0\0\0osX\x06\0\0\0system\x93", "names 'os.system'"),
        (b"K\x01K\x02\x93", "a name that is no text"),
        # Calls of values, of names that only stand for values, with odd arguments.
        (b"K\x01)R", "calls 1"),
        (b"]q\0)R", "calls a list"),
        (op("float32", "torch") + b")R", "calls torch.float32"),
        (ORDERED + b"K\x01R", "calls collections.OrderedDict"),
        (ORDERED + b"K\x05\x85R", "an OrderedDict of something else"),
        (ORDERED + b"]K\x05a\x85R", "an OrderedDict of something else than pairs"),
        (op("encode", "_codecs") + b"X\x01\0\0\0aX\x05\0\0\0rot13\x86R", "_codecs.encode"),
        (op("_rebuild_tensor_v2", "torch._utils") + b")R", "a tensor of 0 arguments"),
        (
            op("_rebuild_tensor_v2", "torch._utils") + b"(K\x01K\0))tR",
            "a tensor whose storage is 1",
        ),
        (b"(K\x01ios\nsystem\n", "opcode 0x69"),
        (b"(" + op("system", "os") + b"o", "names 'os.system'"),
        # Lengths that the file does not have.
        (b"X\xff\xff\xff\x7fa", "claims 2147483647 bytes where 2 are left"),
        (b"\x8d" + struct.pack("<Q", 2**63), "claims 9223372036854775808 bytes"),
        (b"\x8e" + struct.pack("<Q", 2**40), "claims 1099511627776 bytes"),
        (b"\x96" + struct.pack("<Q", 2**40), "claims 1099511627776 bytes"),
        (b"\x95" + struct.pack("<Q", 2**50), "a frame of"),
        (b"\x8b" + struct.pack("<I", 2**31), "a whole number of 2147483648 bytes"),
        (b"\x8a\xff" + b"\x01" * 255, "a whole number of 255 bytes"),
        # The memo and the stack.
        (b"j\xff\xff\xff\xff", "recalls value 4294967295, which was never kept"),
        (b"0", "takes more values than there are"),
        (b"R", "takes more values than there are"),
        (b"(R", "takes more values than there are"),
        (b"e", "back to a mark that is not there"),
        (b"K\x01K\x02", "ends with values left over"),
        (b"K\x01.K\x02", "goes on behind its end"),
        (b"K\x01K\x02a", "appends to 1"),
        (b"}K\x01K\x02K\x03u", "takes values back to a mark"),
        (b"}(K\x01u", "sets 1 keys and values"),
        (b"K\x01}b", "sets the state of 1"),
        # Keys whose hash would recurse, or run for ever.
        (b"}" + b")" + b"\x85" * 20_000 + b"K\x01s", "as key"),
        (b"}]K\x01s", "a dict with a list as key"),
        (b"}\x8a\x09" + b"\x01" * 9 + b"K\x01s", "a dict with"),
        (b"X\x02\0\0\0\xff\xfe", "a text that is not UTF-8"),
        (b"K\x01Q", "refers to a storage, and there is none"),
        (b"\x80\x09", "pickle protocol 9"),
        (b"I1\n", "opcode 0x49"),
        (b"\x82\x01", "opcode 0x82"),
    ],
)
def test_opcodes_that_lie(body, words) -> None:
    refuses(P2 + body + STOP, words)


def test_values_are_not_copied_again_and_again() -> None:
    """A long list, and many calls that would copy it."""
    long = b"](" + b"K\x01" * 20_000 + b"eq\0"
    again = (op("Size", "torch") + b"h\0\x85R") * 5_000
    refuses(P2 + long + again + b"t" + STOP, "makes the same values again and again")


def test_what_refers_to_itself_is_read_and_not_walked_through() -> None:
    value = _pickles.load("there", P2 + b"}q\0X\x01\0\0\0ah\0s" + STOP)
    assert value["a"] is value
    # Lists of two of the last: 2^200 values for whoever walks.
    laughs = b"]q\0" + b"".join(b"](h\0h\0eq\0" for _ in range(200)) + b"\x85"
    pops = _pickles.load("there", P2 + b"(" + laughs + b"t" + STOP)
    assert _pickle_values.shown(pops[-1]) == "a tuple"
    assert _pickle_values.shown(value) == "a dict"


# -- archives --------------------------------------------------------------------------------------


def tensor(
    shape="(K\x02K\x03t", stride="(K\x03K\x01t", offset="K\0", numel="K\x06", key="0"
) -> bytes:
    """A pickle of {"w": tensor}, its numbers as opcodes."""
    pid = (
        b"(X\x07\0\0\0storage" + op("FloatStorage", "torch")
        + b"X" + struct.pack("<I", len(key)) + key.encode()
        + b"X\x03\0\0\0cpu" + numel.encode("latin-1") + b"tQ"
    )  # fmt: skip
    rest = b"".join(part.encode("latin-1") for part in (offset, shape, stride))
    call = op("_rebuild_tensor_v2", "torch._utils") + b"(" + pid + rest + b"\x89" + ORDERED
    return P2 + b"}X\x01\0\0\0w" + call + b")RtRs" + STOP


def archive(path: pathlib.Path, members, *, compress=zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compress) as file:
        for name, content in members:
            file.writestr(name, content)


GOOD = (("a/data.pkl", tensor()), ("a/byteorder", b"little"), ("a/data/0", bytes(24)))


def archive_refused(tmp_path, members, words, **options) -> None:
    path = tmp_path / "x.bin"
    archive(path, members, **options)
    with pytest.raises(CheckpointError, match=words):
        checkpoint.convert(path, tmp_path / "run")
    assert not (tmp_path / "run").exists(), "refused before anything is written"


def test_the_smallest_archive_is_read(tmp_path) -> None:
    archive(tmp_path / "x.bin", GOOD)
    assert checkpoint.convert(tmp_path / "x.bin", tmp_path / "run").numel == 6


def test_an_archive_beyond_4_gib(tmp_path) -> None:
    """Sizes and places in their 64-bit fields, and lies in those."""
    arrays = {"w": np.arange(6, dtype=np.float32)}
    path = tmp_path / "x.bin"
    torch_zip.write_large(path, arrays)
    assert content_of(path) == [arrays["w"].tobytes()]
    good = path.read_bytes()
    for place in (m.start() for m in re.finditer(re.escape(struct.pack("<2H", 1, 24)), good)):
        for field in range(3):
            for value in (2**64 - 1, 2**63, 2**40, 7):
                bad = bytearray(good)
                at = place + 4 + 8 * field
                bad[at : at + 8] = struct.pack("<Q", value)
                path.write_bytes(bad)
                with pytest.raises(CheckpointError):
                    content_of(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archives_that_lie(tmp_path) -> None:
    for extra, words in (
        ("../evil", "no name of torch.save"),
        ("a/../../evil", "no name of torch.save"),
        ("/etc/passwd", "no name of torch.save"),
        ("a/./x", "no name of torch.save"),
        ("a\\x", "no name of torch.save"),
        ("b/data/1", "members in two folders"),
        ("a/data/0", "'a/data/0' comes twice"),
        ("evil", "no name of torch.save"),
        ("a/constants.pkl", "a TorchScript program"),
    ):
        archive_refused(tmp_path, [*GOOD, (extra, b"x")], words)
    archive_refused(tmp_path, GOOD[1:], "a zip without data.pkl")
    archive_refused(tmp_path, GOOD, "is compressed", compress=zipfile.ZIP_DEFLATED)
    big = (GOOD[0], ("a/byteorder", b"big"), GOOD[2])
    archive_refused(tmp_path, big, "big-endian")
    # A bomb: what a few bytes claim to be.
    bomb = [*GOOD[:2], ("a/data/0", bytes(10**7))]
    archive_refused(tmp_path, bomb, "is compressed", compress=zipfile.ZIP_DEFLATED)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": "(K\x02K\x04t"}, "reaches beyond the 6 elements of storage '0'"),
        ({"stride": "(K\x04K\x01t"}, "reaches beyond"),
        ({"offset": "K\x01"}, "reaches beyond"),
        ({"offset": "J\xff\xff\xff\xff"}, "offset is -1"),
        ({"shape": "(J\xff\xff\xff\xffK\x03t"}, "with -1 in its shape"),
        ({"stride": "(J\xfd\xff\xff\xffK\x01t"}, "with -3 in its stride"),
        ({"stride": "(K\x01t"}, "2 dimensions with 1 strides"),
        ({"shape": "(\x8a\x08" + "\xff" * 7 + "\x0fK\x03t", "stride": "(K\0K\0t"}, "beyond"),
        ({"shape": "(K\x07K\x01t", "stride": "(K\0K\0t"}, "reaches beyond"),
        ({"shape": "(\x88K\x03t"}, "with True in its shape"),
        ({"numel": "K\x07"}, "storage 0 claims 7 elements of float32; it has 24 bytes"),
        ({"numel": "\x8a\x08" + "\xff" * 7 + "\x7f"}, "elements"),
        ({"key": "../0"}, "a storage with key"),
        ({"key": "1"}, "storage 1 claims"),
        ({"shape": "(" + "K\x01" * 33 + "t"}, "whose shape is a tuple"),
    ],
)
def test_tensors_that_reach_beyond(tmp_path, change, words) -> None:
    archive_refused(tmp_path, [("a/data.pkl", tensor(**change)), *GOOD[1:]], words)


def test_a_checksum_that_does_not_match(tmp_path) -> None:
    archive(tmp_path / "x.bin", GOOD)
    content = bytearray((tmp_path / "x.bin").read_bytes())
    at = content.index(bytes(24))
    content[at + 3] ^= 1
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match="data/0 does not match its checksum"):
        checkpoint.convert(tmp_path / "x.bin", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_other_files(tmp_path) -> None:
    for content, words in (
        (b"", "too short|not a file"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + bytes(100), "safetensors|header"),
        (b"PK\3\4" + bytes(100), "cut short"),
    ):
        (tmp_path / "x.bin").write_bytes(content)
        with pytest.raises(CheckpointError, match=words):
            checkpoint.convert(tmp_path / "x.bin", None)


# -- names and links -------------------------------------------------------------------------------


def shards_refuse(folder, words) -> None:
    def body(world):
        shards = fs.shard({"w": np.zeros(2, np.float32)}, world)
        with pytest.raises(CheckpointError, match=words):
            checkpoint.read_weights(shards, folder)

    fs.local_world(2).run(body)


def test_links_that_lead_out_are_refused_everywhere(tmp_path) -> None:
    """By the reader in C and by the one in Python, of every kind of folder."""
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    folder.mkdir()
    safetensors.numpy.save_file({"w": np.ones(2, np.float32)}, outside / "model.safetensors")
    (folder / "model.safetensors").symlink_to(outside / "model.safetensors")
    shards_refuse(folder, "a link that leads out of its folder")
    with pytest.raises(CheckpointError, match="a link that leads out of its folder"):
        checkpoint.convert(folder, tmp_path / "run")
    assert "leads out" in str(checkpoint.verify(folder)[0])
    # One that stays inside is a name like another; so is a folder that is a link itself.
    (folder / "model.safetensors").unlink()
    shutil.copy(outside / "model.safetensors", folder / "real.safetensors")
    (folder / "model.safetensors").symlink_to("real.safetensors")
    assert checkpoint.convert(folder, None).parameters == 1
    (tmp_path / "alias").symlink_to(folder)
    assert checkpoint.convert(tmp_path / "alias", None).parameters == 1
    assert checkpoint.verify(tmp_path / "alias") == []
    # The caller may name a link: that is their own path.
    (tmp_path / "named.safetensors").symlink_to(outside / "model.safetensors")
    assert checkpoint.convert(tmp_path / "named.safetensors", None).parameters == 1
    # Our own checkpoints keep to it too.
    checkpoint.convert(folder, tmp_path / "run")
    file = tmp_path / "run" / "step-000000" / "rank-00000-of-00001.safetensors"
    file.rename(tmp_path / "moved")
    file.symlink_to(tmp_path / "moved")
    assert "leads out" in str(checkpoint.verify(tmp_path / "run")[0])
    (folder / "pytorch_model.bin").symlink_to(LLAMA / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="a link that leads out"):
        checkpoint.convert(folder, None)


def test_the_cache_of_the_hub_is_a_folder_of_links_that_are_read(tmp_path) -> None:
    home = tmp_path / "models--a--b"
    snapshot, blobs = home / "snapshots" / "0123", home / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    safetensors.numpy.save_file({"w": np.ones(2, np.float32)}, blobs / "cafe")
    (snapshot / "model.safetensors").symlink_to("../../blobs/cafe")
    assert checkpoint.convert(snapshot, None).parameters == 1
    assert checkpoint.verify(snapshot) == []
    (blobs / "deep").mkdir()
    (blobs / "cafe").rename(blobs / "deep" / "cafe")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../blobs/deep/cafe")
    with pytest.raises(CheckpointError, match="leads out"):
        checkpoint.convert(snapshot, None)


def test_names_in_an_index_of_torch_files(tmp_path) -> None:
    shutil.copy(LLAMA / "pytorch_model.bin", tmp_path / "pytorch_model-1.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    for target in ("../x.bin", "/etc/x.bin", "a/b.bin", ".x.bin", "a\\\\b.bin", "x.safetensors"):
        index.write_text(f'{{"weight_map": {{"w": "{target}"}}}}')
        with pytest.raises(CheckpointError, match="'w' is said to be in"):
            checkpoint.convert(tmp_path, None)
    index.write_text('{"weight_map": {"w": "a.bin", "w": "a.bin"}}')
    with pytest.raises(CheckpointError, match="a key comes twice"):
        checkpoint.convert(tmp_path, None)
    index.write_text('{"weight_map": {"w": "pytorch_model-1.bin"}}')
    with pytest.raises(CheckpointError, match="its index: no file"):
        checkpoint.convert(tmp_path, None)


# -- chance ----------------------------------------------------------------------------------------


@pytest.fixture
def little_memory():
    """Whatever a file claims: half a GiB more than now must do."""
    now = resource.getrlimit(resource.RLIMIT_AS)
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), now[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, now)


def content_of(path: pathlib.Path) -> list[bytes]:
    """The bytes of every tensor of a file of torch.save."""
    file = _sources.File(str(path.parent), path.name)
    try:
        opened = _torch_zip.TorchFile(file)
        content = opened.load()
        found = []
        values = [content]
        for value in values:
            if type(value) is dict:
                values += [v for v in value.values() if v is not content][:100]
            elif isinstance(value, _pickle_values.Tensor):
                opened.check(value)
                found.append(opened.source(value).read(0, value.numel))
            if len(values) > 1000:
                break
        return found
    finally:
        file.close()


def test_every_truncation_of_an_archive(tmp_path, little_memory) -> None:
    archive(tmp_path / "x.bin", GOOD)
    good = (tmp_path / "x.bin").read_bytes()
    for cut in range(len(good)):
        (tmp_path / "x.bin").write_bytes(good[:cut])
        with pytest.raises(CheckpointError):
            content_of(tmp_path / "x.bin")


def test_flips_of_an_archive(tmp_path, little_memory, rng) -> None:
    """A bit of each byte of the smallest archive: an error of ours, or the right elements."""
    archive(tmp_path / "x.bin", GOOD)
    good = (tmp_path / "x.bin").read_bytes()
    refused = 0
    bits = [8 * byte + int(rng.integers(8)) for byte in range(len(good))]
    for bit in bits:
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << (bit % 8)
        (tmp_path / "x.bin").write_bytes(bad)
        try:
            assert content_of(tmp_path / "x.bin") == [bytes(24)], bit
        except CheckpointError:
            refused += 1
    # What may differ is what nothing reads: times, versions, attributes, other members.
    assert refused > len(good) // 2


def test_mutations_of_files_of_torch(tmp_path, little_memory, rng) -> None:
    for name in ("optimizer.pt", "pytorch_model.bin"):
        good = (LLAMA / name).read_bytes()
        expected = content_of(LLAMA / name)
        for _ in range(300):
            bad = bytearray(good)
            for at in rng.integers(0, len(bad), rng.integers(1, 9)):
                bad[at] = rng.integers(256)
            if rng.integers(4) == 0:
                del bad[rng.integers(len(bad)) :]
            (tmp_path / "x.bin").write_bytes(bad)
            try:
                found = content_of(tmp_path / "x.bin")
            except CheckpointError:
                continue
            assert found == expected


def test_mutations_of_pickles(little_memory, rng) -> None:
    """Without a checksum before it: the machine sees every kind of nonsense."""
    file = _sources.File(str(LLAMA), "optimizer.pt")
    opened = _torch_zip.TorchFile(file)
    member = opened.members["data.pkl"]
    good = file.read(member.at, member.nbytes)
    file.close()

    def storage(given):
        return _pickle_values.storage_of(given, lambda key: 4 << 20)

    seeds = [good, pickle.dumps({"a": [1, (2, 3), {"b": None}], "c": b"x" * 50}, 4)]
    codes = sorted(_pickles._OPCODES)
    refused = 0
    for number in range(3000):
        bad = bytearray(seeds[number % 2])
        for at in rng.integers(2, len(bad), rng.integers(1, 6)):
            how = rng.integers(4)
            if how == 0:
                bad[at] ^= 1 << rng.integers(8)
            elif how == 1:
                bad[at] = codes[rng.integers(len(codes))]
            elif how == 2:
                bad[at : at + 4] = struct.pack("<I", rng.integers(2**32))
            else:
                bad[at:at] = bytes([codes[rng.integers(len(codes))]])
        try:
            _pickles.load("there", bytes(bad), persistent=storage)
        except CheckpointError:
            refused += 1
    assert refused > 500
