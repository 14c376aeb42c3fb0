"""Modules sharded over a device: copies in the order of the device's streams, the host's bits.

On the stand-in for CUDA, whose ranks are threads. torch is built for the CPU here: Parameters are
tensors of the host, and only shards, gathers, sums and steps are on the device. What torch computes
is then the same in both worlds, and every weight must be, bit for bit.
"""

import pathlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

import flatshard as fs

torch = pytest.importorskip("torch", reason="torch is not installed")
ft = pytest.importorskip("flatshard.torch")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("cuda"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

_seeding = threading.Lock()  # torch's generator is the process's


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(12)
        self.up = torch.nn.Linear(12, 29)
        self.down = torch.nn.Linear(29, 12, bias=False)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    """A tied head, a block that is called twice, one that may be left out, one recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(19, 12)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
        self.head = torch.nn.Linear(12, 19, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any, skip: bool) -> Any:
        x = self.embed(tokens)
        x = self.blocks[0](self.blocks[0](x))
        x = torch.utils.checkpoint.checkpoint(self.blocks[1], x, use_reentrant=False)
        x = self.blocks[2](x)
        if not skip:
            x = self.blocks[3](x)
        return self.head(x)


def build(world: fs.World, stage: int, precision: str, seed: int = 0) -> tuple[Any, Any]:
    with _seeding:
        torch.manual_seed(seed)
        net = Net()
    optimizer = ft.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    sharding = fs.Sharding(stage=stage, gather="copy")
    ft.fully_shard(net, world=world, sharding=sharding, mp_policy=precision)
    return net, optimizer


def train(
    world: fs.World, net: Any, optimizer: Any, steps: range, *, skips: bool = True
) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(17 * step + world.rank)
        optimizer.zero_grad()
        for part in range(2):
            tokens = torch.randint(0, 19, (3, 8), generator=generator)
            with ft.accumulate(net, last=part == 1):
                # At stage 3 all ranks gather alike: they leave the block out together.
                logits = net(tokens[:, :-1], skips and step == 1).float()
                loss = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), tokens[:, 1:].flatten()
                )
                ft.backward(loss / 2, optimizer=optimizer)
        ft.clip_grad_norm_(net, 0.5)
        assert optimizer.step().applied
        losses.append(loss.item())
    return losses


def on(device: str, n: int, function: Callable[[fs.World], Any]) -> list[Any]:
    return fs.local_world(n, device=device).run(function)


@pytest.mark.parametrize(
    ("n", "stage", "precision"),
    [
        (1, 3, "bf16"),
        (2, 0, "bf16"),
        (2, 1, "fp32"),
        (2, 3, "fp32"),
        (2, 3, "fp16"),
        (3, 3, "bf16"),
    ],
)
def test_the_bits_of_a_world_on_the_host(n: int, stage: int, precision: str) -> None:
    def rank(world: fs.World) -> Any:
        net, optimizer = build(world, stage, precision)
        losses = train(world, net, optimizer, range(4))
        state = {k: v.clone() for k, v in ft.state_dict(net).items()}
        return losses, fs.weights_sha256(ft.shards(net)), state

    host, device = on("cpu", n, rank), on("cuda", n, rank)
    for (losses, digest, state), (losses_there, digest_there, state_there) in zip(
        host, device, strict=True
    ):
        assert losses == losses_there
        assert digest == digest_there
        assert state.keys() == state_there.keys()
        assert all(torch.equal(state[k], state_there[k]) for k in state)


@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_checkpoint_moves_between_devices(
    tmp_path: pathlib.Path, devices: tuple[str, str]
) -> None:
    def whole(world: fs.World) -> Any:
        net, optimizer = build(world, 3, "bf16")
        return train(world, net, optimizer, range(4))[2:], fs.weights_sha256(ft.shards(net))

    def first(world: fs.World) -> None:
        net, optimizer = build(world, 3, "bf16")
        train(world, net, optimizer, range(2))
        ft.save(tmp_path, net, optimizer, step=2).wait()

    def second(world: fs.World) -> Any:
        net, optimizer = build(world, 3, "bf16", seed=5)
        assert ft.load(tmp_path, net, optimizer).step == 2
        return train(world, net, optimizer, range(2, 4)), fs.weights_sha256(ft.shards(net))

    expected = on("cpu", 2, whole)
    on(devices[0], 2, first)
    assert on(devices[1], 2, second) == expected


def test_reading_and_writing_from_outside() -> None:
    def rank(world: fs.World) -> None:
        net, optimizer = build(world, 3, "fp32")
        with ft.full_params(net, write=True) as named:
            named["blocks.2.up.bias"].fill_(0.25)
        assert torch.equal(ft.get(net.blocks[2].up.bias, full=True), torch.full((29,), 0.25))
        ft.put(net.blocks[2].up.bias, "weight", torch.arange(29.0))
        with ft.full_params(net) as named:
            assert torch.equal(named["blocks.2.up.bias"], torch.arange(29.0))
        train(world, net, optimizer, range(1))
        with torch.no_grad():
            net(torch.zeros((1, 4), dtype=torch.long), False)
        ft.unshard(net)
        assert net.head.weight is net.embed.weight
        assert not torch.equal(net.blocks[2].up.bias, torch.arange(29.0))

    on("cuda", 2, rank)


def test_refusals() -> None:
    from flatshard.torch import _device

    class Row:
        def __init__(self, name: str, device: str) -> None:
            self.name = name
            self.parameter = type("P", (), {"device": torch.device(device)})()

    def rank(world: fs.World) -> None:
        with pytest.raises(ValueError, match=r"a is on cuda:1, .* computes on cuda:0: module\.to"):
            _device.check_device([Row("a", "cuda:1")], world)
        with pytest.raises(ValueError, match="several devices: a on cuda:0, b on cpu"):
            _device.check_device([Row("a", "cuda:0"), Row("b", "cpu")], world)
        with pytest.raises(NotImplementedError, match="a is on xpu:0"):
            _device.check_device([Row("a", "xpu:0")], world)
        net = Net()
        with pytest.raises(ValueError, match="shares weights in host memory"):
            ft.fully_shard(net, world=world, sharding=fs.Sharding(stage=3, gather="view"))

    on("cuda", 1, rank)

    def host(world: fs.World) -> None:
        with pytest.raises(ValueError, match=r"a is on cuda:0.*flatshard\.init\(device=\"cuda\"\)"):
            _device.check_device([Row("a", "cuda:0")], world)

    on("cpu", 1, host)
