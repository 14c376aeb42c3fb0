"""PyTorch modules: whole training steps with flatshard.torch, DDP, FSDP2 and ZeRO-3, on one Llama.

Options: size=32m|125m|tiny, ranks=2, threads=1, batch=4, length=256, stages=3 (a list),
settings=best|all: FSDP2 and DDP in the setting that is best by experience, or in each. The memory
that is printed is the proportional set size of all ranks above what imports and an idle group take.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness import Case, Contender, Settings, Suite
from benchmarks.ranks import Ranks
from benchmarks.suites.train import CONFIGS

__all__ = ["SUITE"]


class Weighed(Ranks):
    """Ranks that also say how much memory they hold."""

    def verify(self) -> None:
        super().verify()
        total = sum(int(nbytes) for nbytes in self.ask("memory"))
        print(f"  {self.name:<44} {total / 1e6:>9,.0f} MB of PSS above the imports", flush=True)


def cases(settings: Settings) -> Sequence[Case]:
    if not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        print("  left out: torch and transformers are not installed")
        return []
    options = settings.options
    size = options.get("size", "tiny" if settings.smoke else "32m")
    n, threads = int(options.get("ranks", 2)), int(options.get("threads", 1))
    batch = int(options.get("batch", 2 if settings.smoke else 4))
    length = int(options.get("length", 32 if settings.smoke else 256))
    shape: dict[str, Any] = {"config": CONFIGS[size], "batch": batch, "length": length}
    stages = [int(stage) for stage in options.get("stages", "3").split(",")]

    def ours(stage: int, part: str) -> Callable[[], Contender | None]:
        name = f"flatshard.torch stage {stage}" + (", our own part" if part == "own" else "")
        return lambda: (Ranks if part == "own" else Weighed)(
            name,
            "benchmarks.peers.torch_flatshard:open_sharded",
            n=n,
            threads=threads,
            stage=stage,
            part=part,
            precision="fp32",
            **shape,
        )

    def peer(mode: str, fused: bool, reshard: bool) -> Callable[[], Contender | None]:
        how = ("fused" if fused else "foreach") + ("" if reshard else ", kept after forward")
        return lambda: Weighed(
            f"torch {mode}, {how}",
            "benchmarks.peers.torch_world:open_training",
            n=n,
            threads=threads,
            mode=mode,
            precision="fp32",
            fused=fused,
            reshard=reshard,
            **shape,
        )

    def zero3() -> Contender | None:
        job = "benchmarks.peers.torch_world:open_zero3"
        return Weighed("DeepSpeed ZeRO-3, fused", job, n=n, threads=threads, **shape)

    who = [ours(stage, "step") for stage in stages]
    if settings.peers:
        who += [peer("ddp", True, True), peer("fsdp2", True, False)]
        if importlib.util.find_spec("deepspeed"):
            who.append(zero3)
        else:
            print("  left out: DeepSpeed's ZeRO-3: deepspeed is not installed")
        if options.get("settings", "best") == "all":
            who += [peer("fsdp2", fused, True) for fused in (True, False)]
            who.append(peer("ddp", False, True))
    who.append(ours(stages[0], "own"))
    title = f"{size} fp32, {n} ranks x {threads} threads, batch {batch} x {length}"
    return [Case(title, who, float(n * batch * length), "tokens")]


SUITE = Suite("torch", "tokens/s of PyTorch modules: flatshard.torch, DDP, FSDP2, ZeRO-3", cases)
