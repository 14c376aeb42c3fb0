"""One start of a training run on one rank: data, model, steps, evaluations, saves, and its end."""

from __future__ import annotations

import dataclasses
import math
import signal as signals
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

import flatshard

from .. import schedule
from ..errors import ConfigError
from ..policy import Gather, Partition
from . import data
from .config import has_weights, load_config
from .folder import RunFolder
from .llama import Llama
from .options import TrainConfig
from .rates import rate
from .report import (
    Display,
    Meter,
    Metrics,
    StepReport,
    TrainResult,
    draw_loss,
    own_pss,
    plain,
    reason,
    size,
)
from .stop import StopRequest
from .writing import write_sample

if TYPE_CHECKING:
    from ..optim import Optimizer
    from ..world import World

__all__ = ["Run", "check_model"]

NO_DECAY = ("*norm*", "*.bias")  # what AdamW leaves undecayed, as patterns of names


def check_model(config: TrainConfig, tokens: data.Tokens) -> None:
    """Raises ConfigError if the model is unknown, or too small for its data. Allocates nothing.

    Parameters
    ----------
    config : TrainConfig
    tokens : Tokens
        The data to train on.
    """
    model = load_config(config.model)
    if config.length > model.max_position_embeddings:
        raise ConfigError(
            f"length {config.length} is more than the {model.max_position_embeddings} positions "
            f"of {config.model} (max_position_embeddings)"
        )
    tokens.check_vocabulary(model.vocab_size)


class Run:
    """One start of a run on one rank."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        asked: StopRequest,
        on_step: Callable[[StepReport], object] | None,
        on_eval: Callable[[int, float], object] | None,
        on_save: Callable[[int, Path], object] | None,
    ) -> None:
        self.config, self.world, self.asked = config, world, asked
        self.on_step, self.on_eval, self.on_save = on_step, on_eval, on_save
        self.folder = RunFolder(config.out)
        self.first_rank = world.rank == 0
        self.model: Llama | None = None
        self.steps_skipped = 0
        self.metrics: Metrics | None = None
        self.display: Display | None = None
        self.meter = Meter(0, 0.0, "")  # of nothing, until the model is there
        self.params: int | None = None
        # What has happened so far; kept in the checkpoint's user data.
        self.step = 0
        self.tokens_seen = 0
        self.loss_first: float | None = None
        self.loss_last: float | None = None
        self.eval_loss: float | None = None
        self.grad_norm_last: float | None = None
        self.saved: Path | None = None
        self.saved_step = -1
        self.pss = 0

    def close(self) -> None:
        """Local; never waits."""
        for part in (self.display, self.metrics, self.model):
            if part is not None:
                part.close()

    # The parts of a run ---------------------------------------------------------------------

    def go(self) -> TrainResult:
        config, world = self.config, self.world
        self.open_data()
        with world.first() as first:  # nobody allocates before the folder is known to be free
            if first:
                self.folder.check(config)
        self.open_model()
        self.resume()
        if self.first_rank:
            self.folder.begin(config)
            self.metrics = Metrics(self.folder.metrics, after=self.step)
        self.display = Display(config.steps, self.step, on=self.first_rank)
        self.say_what()
        interrupted = self.loop()
        self.display.close()
        self.save()
        return self.finish(interrupted)

    def known(self) -> dict[str, Any]:
        """What a result can say at any time, after a failure too. Local."""
        speed = self.meter.tokens_per_second
        return {
            "params": self.params,
            "world_size": self.world.size,
            "stage": self.config.stage,
            "precision": self.config.precision,
            "steps": self.step,
            "steps_skipped": self.steps_skipped,
            "tokens_per_second": speed,
            "step_ms": self.meter.step_ms,
            "mfu": None if speed is None else self.meter.mfu(speed),
            "loss_first": self.loss_first,
            "loss_last": self.loss_last,
            "eval_loss": self.eval_loss,
            "grad_norm_last": self.grad_norm_last,
        }

    def open_data(self) -> None:
        config = self.config
        self.train_data = data.tokens(
            config.data,
            world=self.world,
            batch=config.batch,
            length=config.length,
            tokenizer=config.tokenizer,
            seed=config.seed,
            holdout=config.holdout,
            glob=config.glob,
            exclude=config.exclude,
            encoding=config.encoding,
            token_dtype=config.token_dtype,
            cache=config.cache,
        )
        self.heldout: data.Tokens | None = None
        if config.holdout > 0:
            self.heldout = data.Tokens(
                self.train_data.corpus,
                rank=self.world.rank,
                world_size=self.world.size,
                batch=config.batch,
                length=config.length,
                split="heldout",
                holdout=config.holdout,
                most=config.eval_sequences,
            )

    def open_model(self) -> None:
        config, world = self.config, self.world
        check_model(config, self.train_data)
        options: dict[str, Any] = {
            "world": world,
            "sharding": flatshard.Sharding(
                stage=config.stage,
                partition=cast(Partition, config.partition),
                gather=cast(Gather, config.gather),
            ),
            "precision": config.precision,
            "checkpointing": config.activation_checkpointing,
        }
        if has_weights(config.model):
            self.model = Llama.from_pretrained(config.model, **options)
        else:
            self.model = Llama.from_config(config.model, seed=config.seed, **options)
        self.params = self.model.params
        self.optimizer = self.make_optimizer(self.model)
        self.rate = self.make_schedule()
        self.meter = Meter(self.params, *rate(world, self.model.shards.policy.precision.param))

    def make_optimizer(self, model: Llama) -> Optimizer:
        config = self.config
        common: dict[str, Any] = {
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "no_decay": NO_DECAY,
            "check_every": config.check_every,
        }
        if config.optimizer == "sgd":
            return flatshard.SGD(model, momentum=config.betas[0], **common)
        if config.optimizer == "adagrad":
            return flatshard.Adagrad(model, eps=config.eps, **common)
        if config.optimizer == "lion":
            return flatshard.Lion(model, betas=config.betas, **common)
        kind = flatshard.AdamW if config.optimizer == "adamw" else flatshard.Adam
        return kind(model, betas=config.betas, eps=config.eps, **common)

    def make_schedule(self) -> schedule.Schedule:
        config = self.config
        if config.schedule == "constant":
            return schedule.constant(config.lr, warmup=config.warmup_steps)
        shape = schedule.linear if config.schedule == "linear" else schedule.cosine
        return shape(config.lr, warmup=config.warmup_steps, total=config.steps)

    def resume(self) -> None:
        if not self.config.resume:
            return
        loaded = flatshard.checkpoint.load(self.folder.path, self.model, self.optimizer)
        user = loaded.user
        self.train_data.restore(user["data"])
        self.step = loaded.step
        self.steps_skipped = self.optimizer.steps_skipped
        self.tokens_seen = user["tokens"]
        self.loss_first, self.loss_last = user["loss_first"], user["loss_last"]
        self.grad_norm_last = user["grad_norm_last"]
        same = [c for c in self.folder.checkpoints() if c.name.startswith(f"step-{self.step:06}")]
        self.saved, self.saved_step = same[-1], self.step

    def say_what(self) -> None:
        config, world, corpus = self.config, self.world, self.train_data.corpus
        note = self.note
        note(
            f"model   {config.model}: {self.params:,} parameters; {world.size} rank(s) on "
            f"{config.device}, stage {config.stage}, {config.precision}, {config.partition}"
        )
        held = self.heldout.token_count if self.heldout else 0
        note(
            f"data    {corpus.source}: {len(corpus.stream):,} tokens in {len(corpus.begins):,} "
            f"document(s), {held:,} held out"
        )
        tokens = world.size * config.batch * config.length * config.accumulate
        note(f"step    {tokens:,} tokens; {self.meter.formula()}")
        for group in self.optimizer.groups:
            note(
                f"group   {group.name}: {len(group.params)} parameters, "
                f"weight_decay {group.weight_decay:g}"
            )
        if self.step:
            note(f"resume  from step {self.step} of {config.steps}")

    def note(self, text: str) -> None:
        if self.display is not None:
            self.display.note(text)

    # The loop -------------------------------------------------------------------------------

    def loop(self) -> str | None:
        """Steps to the end or to a signal; returns the signal's name."""
        config = self.config
        self.batches = iter(self.train_data)
        if self.step == 0 and config.eval_every:
            self.evaluate()
        while self.step < config.steps:
            asked = self.one_step()
            last = self.step == config.steps
            if last or (config.eval_every and self.step % config.eval_every == 0):
                self.evaluate()
            if asked:
                return signals.Signals(asked).name
            if config.save_every and self.step % config.save_every == 0 and not last:
                self.save()
        return None

    def micro_batches(self, sums: npt.NDArray[np.float64]) -> None:
        """Forward and backward of a step; adds losses and targets to sums. Without memory for it,
        the step is skipped on every rank, and all go on behind its data."""
        assert self.model is not None
        drawn = 0
        try:
            for _ in range(self.config.accumulate):
                inputs, targets = next(self.batches)
                drawn += 1
                loss = self.model.forward_backward(inputs, targets)
                sums[0] += loss.local * loss.tokens
                sums[1] += loss.tokens
        except MemoryError as error:
            self.optimizer.skip(reason(error))
            self.train_data.pass_over(self.config.accumulate - drawn)
            self.batches = iter(self.train_data)

    def one_step(self) -> int:
        """One optimizer step on every rank; returns the signal that asked one to stop, or 0."""
        config, world = self.config, self.world
        started = time.perf_counter()
        # Sum of losses, targets, and whether Ctrl-C or another signal asked this rank to stop: one
        # small collective, so that all ranks agree on the step that is the last.
        sums = np.zeros(4)
        self.micro_batches(sums)
        lr = self.rate(self.optimizer.steps_applied)  # a skipped step moves no schedule
        result = self.optimizer.step(max_norm=config.max_norm or None, lr=lr)
        asked = self.asked.signal
        sums[2:] = asked == signals.SIGINT, asked not in (0, signals.SIGINT)
        sums = world.all_reduce(sums)
        seconds = time.perf_counter() - started
        tokens = int(sums[1])
        self.step += 1
        self.tokens_seen += tokens
        loss = float(sums[0] / sums[1]) if tokens else math.nan  # every rank's batch failed
        self.steps_skipped = self.optimizer.steps_skipped
        for rank, why in result.skipped:
            self.note(f"step {self.step} skipped: rank {rank}: {why}")
        if not result.skipped:
            self.loss_last = loss
            self.grad_norm_last = result.grad_norm
            if self.loss_first is None:
                self.loss_first = loss
            self.meter.add(seconds, tokens)
        report = StepReport(
            step=self.step,
            steps=config.steps,
            loss=loss,
            grad_norm=result.grad_norm,
            lr=lr,
            applied=result.applied,
            reason=result.reason,
            tokens=self.tokens_seen,
            tokens_per_second=tokens / seconds,
            step_ms=1e3 * seconds,
            mfu=self.meter.mfu(tokens / seconds),
            memory=self.memory_held(),
        )
        if self.metrics is not None:
            self.metrics.write(**dataclasses.asdict(report))
        if self.display is not None:
            recent = self.meter.recent
            self.display.step(report, recent, self.meter.mfu(recent))
        if self.on_step is not None:
            self.on_step(report)
        if sums[2]:
            return signals.SIGINT
        if sums[3]:
            # Which signal it was is known on the ranks that got it; a name is enough for the
            # others.
            return asked or signals.Signals[config.save_on[0]]
        return 0

    def evaluate(self) -> None:
        """Held-out loss: the same tokens on any number of ranks."""
        if self.heldout is None or self.model is None:
            return
        sums = np.zeros(2)
        for inputs, targets in self.heldout:
            loss = self.model.loss(inputs, targets)
            sums += loss.local * loss.tokens if loss.tokens else 0.0, loss.tokens
        total, tokens = self.world.all_reduce(sums)
        self.eval_loss = float(total / tokens)
        self.pss = max(self.pss, self.pss_now())
        if self.metrics is not None:
            self.metrics.write(step=self.step, eval_loss=self.eval_loss)
        self.note(f"step {self.step:>5}/{self.config.steps}  held-out loss {self.eval_loss:.3f}")
        if self.on_eval is not None:
            self.on_eval(self.step, self.eval_loss)

    def save(self) -> None:
        """A checkpoint of this step, if there is none yet."""
        if self.saved_step == self.step:
            return
        user = plain(
            {
                "data": self.train_data.state(),
                "tokens": self.tokens_seen,
                "loss_first": self.loss_first,
                "loss_last": self.loss_last,
                "grad_norm_last": self.grad_norm_last,
            }
        )
        saving = flatshard.checkpoint.save(
            self.folder.path,
            self.model,
            self.optimizer,
            step=self.step,
            user=user,
            keep=self.config.keep,
        )
        saving.wait()
        self.saved, self.saved_step = Path(saving.folder), self.step
        if self.on_save is not None:
            self.on_save(self.step, self.saved)

    # The end --------------------------------------------------------------------------------

    def finish(self, interrupted: str | None) -> TrainResult:
        model, folder = self.model, self.folder
        assert model is not None
        sample = None
        if interrupted is None:
            model.save_pretrained(folder.model)
            sample = write_sample(
                model,
                config=self.config,
                folder=folder,
                corpus=self.train_data.corpus,
                note=self.note if self.first_rank else None,
            )
        if self.first_rank:
            if interrupted not in (None, "SIGINT") and self.saved is not None:
                folder.note_stop(interrupted, self.step, self.saved)
            said = draw_loss(folder.metrics, folder.loss)
            if said:
                self.note(said)
        self.pss = max(self.pss, self.pss_now())
        memory = self.memory_table()
        self.say_how(interrupted, sum(sizes["host"] for sizes in memory.values()))
        return TrainResult(
            **self.known(),
            weights_sha256=flatshard.weights_sha256(model),
            memory=memory,
            pss=self.pss,
            interrupted=interrupted,
            checkpoint=self.saved,
            model=folder.model if interrupted is None else None,
            sample=sample,
        )

    def say_how(self, interrupted: str | None, ledger: int) -> None:
        """The last lines: how fast it was, what it took, and where everything is."""
        speed, folder = self.meter.tokens_per_second, self.folder
        if speed is not None:
            self.note(
                f"speed   {speed:,.0f} tokens/s, {self.meter.step_ms:.0f} ms a step (medians), "
                f"MFU {self.meter.mfu(speed):.0%}"
            )
        if self.pss:
            self.note(
                f"memory  peak {size(ledger)} in the ledger, {size(self.pss)} PSS of all ranks, "
                "interpreters and libraries included"
            )
        if interrupted is not None:
            self.note(
                f"stopped by {interrupted} after step {self.step} of {self.config.steps}; saved in "
                f"{self.saved}; the same command with --resume goes on"
            )
            return
        self.note(f"saved   {folder.model} (model), {self.saved} (checkpoint), {folder.metrics}")

    def memory_held(self) -> int:
        """Bytes this rank holds now."""
        rows = self.world.memory().values()
        return sum(private + shared + device for private, shared, _, device in rows)

    def pss_now(self) -> int:
        """Proportional set size of all ranks, bytes; threads are one process. Collective."""
        if self.world._core.is_threads:
            return own_pss()
        return int(self.world.all_reduce(np.array([own_pss()], np.int64))[0])

    def memory_table(self) -> dict[str, dict[str, int]]:
        """Peak of each class on this rank and, summed over its ranks, on the host. Collective."""
        mine = self.world.memory()
        peaks = np.array([row[2] for row in mine.values()], np.int64)
        host = self.world.all_reduce(peaks)
        return {
            name: {"rank": int(rank), "host": int(total)}
            for name, rank, total in zip(mine, peaks, host, strict=True)
        }
