"""Tokens per second of whole training steps: forward, backward, reduce, clip, AdamW.

Options: size=32m|125m|tiny, ranks=2, threads=1, precision=fp32,bf16, batch=4, length=256, and
settings=best|all: peers in the setting that is best by experience, or in each.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from benchmarks.harness import Case, Contender, Settings, Suite
from benchmarks.ranks import Ranks

__all__ = ["SUITE", "open_flatshard"]

# The sizes' shapes, as Hugging Face names them.
CONFIGS: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 512,
    },
    "32m": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 8192,
        "max_position_embeddings": 512,
    },
    "125m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 512,
    },
}


class Training:
    """One rank of the native model.

    steps : of one sample.
    offload : homes of memory classes, as keywords of flatshard.Offload.
    """

    def __init__(
        self,
        config: dict[str, int],
        precision: str,
        stage: int,
        gather: Literal["view", "copy"],
        batch: int,
        length: int,
        device: str = "cpu",
        checkpointing: bool = False,
        offload: dict[str, Any] | None = None,
        steps: int = 1,
    ) -> None:
        import flatshard as fs

        self.world = fs.init(device=device)
        whole = {"model_type": "llama", "tie_word_embeddings": False, **config}
        homes = fs.Offload(**offload) if offload else None
        sharding = fs.Sharding(stage=stage, gather=gather, offload=homes)
        self.model = fs.models.Llama.from_config(
            whole,
            world=self.world,
            sharding=sharding,
            precision=precision,
            checkpointing=checkpointing,
        )
        self.device, self.steps = device, steps
        self.optimizer = fs.AdamW(self.model, lr=1e-3)
        self.rng = np.random.default_rng(self.world.rank)
        self.shape = (batch, length)
        self.vocabulary = config["vocab_size"]

    def batch(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        return self.rng.integers(0, self.vocabulary, self.shape, dtype=np.int32)

    def step(self, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> float:
        targets = np.full_like(tokens, -100)
        targets[:, :-1] = tokens[:, 1:]
        loss = self.model.forward_backward(tokens, targets)
        assert self.optimizer.step(max_norm=1.0)
        return float(loss.mean)

    def verify(self) -> None:
        tokens = self.batch()
        losses = [self.step(tokens) for _ in range(3)]
        start = math.log(self.vocabulary)
        assert abs(losses[0] - start) < 0.1 * start, f"first loss {losses[0]}, not near {start}"
        assert losses[2] < losses[0], f"the loss does not fall: {losses}"

    def wait(self) -> None:
        """A device may still be at the update: reading a weight waits for it."""
        if self.device != "cpu":
            self.model.shards.full(self.model.shards.names[-1])

    def sample(self) -> float:
        batches = [self.batch() for _ in range(self.steps)]
        self.wait()
        self.world.barrier()
        started = time.perf_counter()
        for tokens in batches:
            self.step(tokens)
        self.wait()
        return (time.perf_counter() - started) / self.steps

    def close(self) -> None:
        self.world.close()


def open_flatshard(**arguments: Any) -> Training:
    return Training(**arguments)


def cases(settings: Settings) -> Sequence[Case]:
    options = settings.options
    size = options.get("size", "tiny" if settings.smoke else "32m")
    n, threads = int(options.get("ranks", 2)), int(options.get("threads", 1))
    batch = int(options.get("batch", 2 if settings.smoke else 4))
    length = int(options.get("length", 32 if settings.smoke else 256))
    config = CONFIGS[size]
    every = options.get("settings", "best") == "all"
    peers = settings.peers and all(map(importlib.util.find_spec, ("torch", "transformers")))

    def ours(
        precision: str, stage: int, gather: Literal["view", "copy"]
    ) -> Callable[[], Contender | None]:
        return lambda: Ranks(
            f"flatshard {precision} stage {stage} {gather}",
            "benchmarks.suites.train:open_flatshard",
            n=n,
            threads=threads,
            config=config,
            precision=precision,
            stage=stage,
            gather=gather,
            batch=batch,
            length=length,
        )

    def peer(
        mode: str, precision: str, fused: bool, reshard: bool
    ) -> Callable[[], Contender | None]:
        how = ("fused" if fused else "foreach") + ("" if reshard else ", kept after forward")
        return lambda: Ranks(
            f"torch {mode} {precision}, {how}",
            "benchmarks.peers.torch_world:open_training",
            n=n,
            threads=threads,
            mode=mode,
            precision=precision,
            config=config,
            batch=batch,
            length=length,
            fused=fused,
            reshard=reshard,
        )

    found = []
    for precision in options.get("precision", "fp32,bf16").split(","):
        who = [ours(precision, 3, "view")]
        if every:
            who += [ours(precision, stage, "view") for stage in (0, 1, 2)]
            who.append(ours(precision, 3, "copy"))
        if peers:
            who += [peer("ddp", precision, True, True), peer("fsdp2", precision, True, False)]
            if every:
                who += [peer("fsdp2", precision, fused, True) for fused in (True, False)]
                who += [peer("ddp", precision, False, True)]
        tokens = float(n * batch * length)
        title = f"{size} {precision}, {n} ranks x {threads} threads, batch {batch} x {length}"
        found.append(Case(title, who, tokens, "tokens"))
    return found


SUITE = Suite("train", "tokens/s of whole training steps", cases)
