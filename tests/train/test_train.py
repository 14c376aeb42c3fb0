"""Small runs from end to end: threads and processes, stops, resumes, results, failures."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import flatshard
from flatshard.cli.__main__ import main
from flatshard.cli.plan import of_run
from flatshard.errors import ConfigError
from flatshard.models.data import Tokens
from flatshard.models.llama import Llama
from flatshard.models.report import RESULT_KEYS, StepReport
from flatshard.models.stop import StopRequest
from flatshard.models.train import TrainConfig, TrainResult, train
from flatshard.models.writing import write

DEADLINE = 120.0  # seconds any of these may take; each needs a few


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 kB of words that repeat, so that a few steps already learn something."""
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]
    pick = np.random.default_rng(3).integers(0, len(words), 3_500)
    file = tmp_path_factory.mktemp("corpus") / "words.txt"
    file.write_text(" ".join(words[i] for i in pick))
    return file


def config_of(corpus: Path, out: Path, **changes: Any) -> TrainConfig:
    base = TrainConfig(
        model="tiny", data=str(corpus), out=str(out), batch=2, length=32, steps=8, lr=3e-3,
        warmup=2, precision="bf16", save_every=0, eval_every=4, eval_sequences=5,
        sample_tokens=12, prompt="alpha ",
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def run_threads(config: TrainConfig, ranks: int, **callbacks: Any) -> list[TrainResult]:
    with StopRequest(config.save_on) as stop:
        return flatshard.local_world(ranks, threads=config.threads).run(
            lambda world: train(config, world=world, stop=stop, **callbacks)
        )


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """A run of two ranks that nothing stopped."""
    out = tmp_path_factory.mktemp("straight") / "run"
    return run_threads(config_of(corpus, out), 2)[0]


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("optimizer", ["lion", "adagrad", "adam", "sgd"])
def test_every_optimizer_trains(corpus: Path, tmp_path: Path, optimizer: str) -> None:
    config = config_of(
        corpus,
        tmp_path / "run",
        optimizer=optimizer,
        steps=6,
        lr=1e-3 if optimizer == "lion" else 1e-2,
        betas=(0.9, 0.99),
        eval_every=0,
        sample_tokens=0,
    )
    run_threads(config, 1)
    losses = [line["loss"] for line in metrics(tmp_path / "run") if "loss" in line]
    assert losses[-1] < losses[0]


# What a run leaves ------------------------------------------------------------------------------


def test_a_run_learns_and_leaves_its_files(straight: TrainResult) -> None:
    assert straight.interrupted is None and straight.steps == 8
    assert straight.checkpoint is not None and straight.model is not None
    out = straight.checkpoint.parent
    assert straight.checkpoint.name == "step-000008"
    assert {file.name for file in straight.model.iterdir()} >= {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    lines = metrics(out)
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert [line["step"] for line in evaluations] == [0, 4, 8]
    assert {field.name for field in dataclasses.fields(StepReport)} == set(steps[0])
    assert [line["tokens"] for line in steps] == [128 * step for step in range(1, 9)]
    assert evaluations[0]["eval_loss"] == pytest.approx(np.log(512), abs=0.3)  # knows nothing yet
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"] - 0.5
    assert straight.eval_loss == evaluations[-1]["eval_loss"]
    assert (straight.loss_first, straight.loss_last) == (steps[0]["loss"], steps[-1]["loss"])
    assert steps[1]["lr"] == pytest.approx(3e-3)
    assert steps[-1]["lr"] < steps[2]["lr"]
    assert all(line["applied"] and line["grad_norm"] > 0 and line["mfu"] > 0 for line in steps)
    assert straight.sample is not None and straight.sample.startswith("alpha ")
    assert (out / "sample.txt").read_text() == straight.sample
    assert len(straight.weights_sha256) == 64
    assert straight.memory["master"]["host"] >= 4 * straight.params
    assert straight.memory["moments"]["rank"] < straight.memory["moments"]["host"]
    assert straight.pss > sum(sizes["host"] for sizes in straight.memory.values()) / 2


def test_threads_and_stages_change_no_bit(
    corpus: Path, tmp_path: Path, straight: TrainResult
) -> None:
    for name, changes in {
        "threads": {"threads": 2},
        "stage 0": {"stage": 0},
        "copy": {"gather": "copy"},
        "checkpointing": {"activation_checkpointing": True},
    }.items():
        result = run_threads(config_of(corpus, tmp_path / name, **changes), 2)
        assert {one.weights_sha256 for one in result} == {straight.weights_sha256}, name


def test_what_is_told_to_callbacks(corpus: Path, tmp_path: Path) -> None:
    told: list[tuple[Any, ...]] = []
    train(
        config_of(corpus, tmp_path / "run", steps=4, save_every=2, eval_every=2, sample_tokens=0),
        on_step=lambda report: told.append(("step", report.step)),
        on_eval=lambda step, loss: told.append(("eval", step)),
        on_save=lambda step, folder: told.append(("save", step, folder.name)),
    )
    assert told == [
        ("eval", 0), ("step", 1), ("step", 2), ("eval", 2), ("save", 2, "step-000002"),
        ("step", 3), ("step", 4), ("eval", 4), ("save", 4, "step-000004"),
    ]  # fmt: skip


def test_a_tokenizer_of_ones_own(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained with it, kept beside the model, used by sample; the same ids from a token file."""
    engine = pytest.importorskip("tokenizers")
    made = engine.Tokenizer(engine.models.BPE())
    made.pre_tokenizer = engine.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = engine.decoders.ByteLevel()
    alphabet = engine.pre_tokenizers.ByteLevel.alphabet()
    trainer = engine.trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=alphabet
    )
    text = corpus.read_text()
    made.train_from_iterator([text], trainer)
    file = tmp_path / "tokenizer.json"
    made.save(str(file))
    by_text = train(config_of(corpus, tmp_path / "text", tokenizer=str(file), steps=3))
    ids = np.asarray(made.encode(text).ids, np.uint16)
    np.save(tmp_path / "ids.npy", ids)
    config = config_of(tmp_path / "ids.npy", tmp_path / "ids", tokenizer=str(file), steps=3)
    by_ids = train(config)
    assert by_ids.weights_sha256 == by_text.weights_sha256
    assert by_text.sample is not None and by_text.sample == by_ids.sample
    capsys.readouterr()
    assert main(["sample", str(tmp_path / "text"), "--prompt", "alpha", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("alpha")
    bare = train(dataclasses.replace(config, tokenizer="bytes", out=str(tmp_path / "bare")))
    assert bare.sample is None and "say --tokenizer to decode" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["data", "model"])
def test_a_batch_without_memory_is_skipped_by_all(
    corpus: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank of two fails in the second step, or both do: the same weights in the end."""

    def run(out: Path, failing: tuple[int, ...]) -> list[TrainResult]:
        drawn = [0, 0]

        def fails(rank: int) -> None:
            drawn[rank] += 1
            if rank in failing and drawn[rank] == 3:  # two micro-batches a step
                raise MemoryError(f"no room for batch {drawn[rank]}")

        take, compute = Tokens._take, Llama.forward_backward

        def fail_in_data(self: Tokens, start: int, n: int) -> Any:
            if self.split == "train" and start_of_batch(self):
                fails(self.rank)
            return take(self, start, n)

        def start_of_batch(self: Tokens) -> bool:
            self.rows = getattr(self, "rows", 0) + 1  # type: ignore[attr-defined]
            return bool(self.rows % self.batch == 1)

        def fail_in_model(self: Llama, inputs: Any, targets: Any) -> Any:
            fails(self.shards.world.rank)
            return compute(self, inputs, targets)

        with monkeypatch.context() as patch:
            if where == "data":
                patch.setattr(Tokens, "_take", fail_in_data)
            else:
                patch.setattr(Llama, "forward_backward", fail_in_model)
            return run_threads(config_of(corpus, out, accumulate=2, steps=5), 2)

    results = run(tmp_path / "one", (1,))
    assert [result.steps_skipped for result in results] == [1, 1]
    rows = [row for row in metrics(tmp_path / "one") if "loss" in row]
    assert [row["reason"] for row in rows] == ["applied", "rank_skipped", *["applied"] * 3]
    assert rows[1]["tokens"] - rows[0]["tokens"] == 2 * 2 * 32, "of the other rank alone"
    both = run(tmp_path / "both", (0, 1))
    assert [row["loss"] for row in metrics(tmp_path / "both") if "loss" in row][1] is None
    hashes = {result.weights_sha256 for result in (*results, *both)}
    assert len(hashes) == 1, "the same data on both sides of the skip"


def test_accumulation_counts_tokens(corpus: Path, tmp_path: Path) -> None:
    """Two micro-batches of two sequences are one of four: the same batches, the same mean."""
    once = train(config_of(corpus, tmp_path / "a", precision="fp32", batch=4, sample_tokens=0))
    twice = train(
        config_of(corpus, tmp_path / "b", precision="fp32", batch=2, accumulate=2, sample_tokens=0)
    )
    assert twice.loss_first == pytest.approx(once.loss_first, rel=1e-6)
    assert twice.loss_last == pytest.approx(once.loss_last, rel=1e-4)


# Stop and resume --------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_stopped_and_resumed_is_never_stopped(
    corpus: Path, tmp_path: Path, straight: TrainResult, ranks: int
) -> None:
    once = threading.Lock()  # every rank is told of its step; one of them presses Ctrl-C

    def interrupt(report: StepReport) -> None:
        if report.step == 3 and once.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGINT)

    config = config_of(corpus, tmp_path / "run", save_every=2)
    if ranks == 1:
        whole = train(config_of(corpus, tmp_path / "whole"))
        stopped = train(config, on_step=interrupt)
    else:
        whole = straight
        stopped = run_threads(config, ranks, on_step=interrupt)[0]
    assert stopped.interrupted == "SIGINT"
    assert 3 <= stopped.steps < 8 and stopped.model is None
    assert stopped.checkpoint is not None
    assert stopped.checkpoint.name == f"step-{stopped.steps:06}"
    again = dataclasses.replace(config, resume=True)
    ended = train(again) if ranks == 1 else run_threads(again, ranks)[0]
    assert ended.weights_sha256 == whole.weights_sha256
    assert (ended.loss_first, ended.loss_last) == (whole.loss_first, whole.loss_last)
    assert ended.eval_loss == whole.eval_loss
    steps = [line["step"] for line in metrics(tmp_path / "run") if "loss" in line]
    assert steps == list(range(1, 9))


def test_reschedule_goes_further(corpus: Path, tmp_path: Path) -> None:
    config = config_of(corpus, tmp_path / "run", steps=4, sample_tokens=0)
    train(config)
    with pytest.raises(ConfigError, match="say --reschedule"):
        train(dataclasses.replace(config, steps=6, resume=True))
    result = train(dataclasses.replace(config, steps=6, resume=True, reschedule=True))
    assert result.steps == 6


def test_resume_on_other_ranks_and_stage(corpus: Path, tmp_path: Path) -> None:
    """The same global batches on one rank as on two: the same data, close results."""
    config = config_of(corpus, tmp_path / "run", precision="fp32", save_every=4, sample_tokens=0)
    straight = run_threads(config, 2)[0]
    shutil.rmtree(tmp_path / "run" / "step-000008")
    again = dataclasses.replace(config, batch=4, stage=1, resume=True, reschedule=True)
    ended = train(again)
    assert ended.steps == 8 and ended.world_size == 1
    assert ended.loss_last == pytest.approx(straight.loss_last, rel=1e-5)
    assert ended.eval_loss == pytest.approx(straight.eval_loss, rel=1e-5)


def test_another_run_is_refused(corpus: Path, tmp_path: Path) -> None:
    config = config_of(corpus, tmp_path / "run", steps=2, sample_tokens=0)
    train(config)
    with pytest.raises(ConfigError, match="holds another run"):
        train(config)


# The command ------------------------------------------------------------------------------------


def words_of(config: TrainConfig, *more: str) -> list[str]:
    return [
        "train", config.model, "--data", config.data, "--out", config.out, "--batch", "2",
        "--length", "32", "--steps", str(config.steps), "--lr", "3e-3", "--warmup", "2",
        "--precision", "bf16", "--save-every", "0", "--eval-every", "4", "--eval-sequences", "5",
        "--sample-tokens", "12", "--prompt", "alpha ", *more,
    ]  # fmt: skip


class Command:
    """``flatshard ...`` as a process of its own session, ended with the test."""

    def __init__(self, words: list[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flatshard.cli", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate(timeout=DEADLINE)

    def until(self, text: str) -> None:
        """Reads lines up to one that holds text."""
        assert self.process.stdout is not None
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            line = self.process.stdout.readline()
            self.lines.append(line)
            if text in line:
                return
            assert line, "".join(self.lines)
        raise AssertionError("".join(self.lines))

    def end(self) -> int:
        """Waits; the exit status."""
        out, _ = self.process.communicate(timeout=DEADLINE)
        self.lines.append(out)
        return self.process.returncode

    @property
    def output(self) -> str:
        return "".join(self.lines)


def test_processes_train_the_same_bits(corpus: Path, tmp_path: Path, straight: TrainResult) -> None:
    file = tmp_path / "result.json"
    config = config_of(corpus, tmp_path / "run")
    with Command(words_of(config, "-n", "2", "--json", str(file))) as command:
        assert command.end() == 0, command.output
    result = json.loads(file.read_text())
    assert tuple(result) == RESULT_KEYS
    assert result["weights_sha256"] == straight.weights_sha256
    assert result["eval_loss"] == straight.eval_loss
    assert (result["world_size"], result["stage"], result["steps"]) == (2, 3, 8)
    assert result["params"] == straight.params
    assert all(set(sizes) == {"rank", "host"} for sizes in result["memory"].values())
    assert result["tokens_per_second"] > 0 and result["step_ms"] > 0 and result["mfu"] > 0
    for text in ("MFU is 6 x", "held-out loss", "words ", "group   no_decay"):
        assert text in command.output


@pytest.mark.parametrize("everyone", [True, False], ids=["terminal", "kill"])
def test_ctrl_c_saves_and_resume_goes_on(
    corpus: Path, tmp_path: Path, straight: TrainResult, everyone: bool
) -> None:
    """A terminal sends Ctrl-C to the launcher and to every rank, kill to the launcher alone."""
    file = tmp_path / "result.json"
    config = config_of(corpus, tmp_path / "run")
    long = dataclasses.replace(config, steps=4000)
    with Command(words_of(long, "-n", "2", "--json", str(file))) as command:
        command.until("step     1/4000")
        if everyone:
            os.killpg(command.process.pid, signal.SIGINT)
        else:
            command.process.send_signal(signal.SIGINT)
        assert command.end() == 130, command.output
        assert "the job is over" not in command.output
        assert "the same command with --resume goes on" in command.output
    stopped = json.loads(file.read_text())
    assert stopped["error"] == f"stopped by SIGINT after step {stopped['steps']}"
    assert (tmp_path / "run" / f"step-{stopped['steps']:06}" / "index.json").is_file()
    assert not (tmp_path / "run" / "stopped.json").exists()


def test_a_named_signal_saves_and_ends_well(corpus: Path, tmp_path: Path) -> None:
    config = config_of(corpus, tmp_path / "run", steps=4000)
    words = words_of(config, "-n", "2", "--save-on", "SIGTERM", "SIGUSR1")
    with Command(words) as command:
        command.until("step     1/4000")
        command.process.send_signal(signal.SIGUSR1)
        assert command.end() == 0, command.output
    marker = json.loads((tmp_path / "run" / "stopped.json").read_text())
    assert marker["signal"] == "SIGUSR1"
    assert (tmp_path / "run" / marker["checkpoint"] / "index.json").is_file()


def test_second_ctrl_c_ends_at_once(corpus: Path, tmp_path: Path) -> None:
    """The ranks sleep in their callback-free loop; two interrupts end them without a save."""
    config = config_of(corpus, tmp_path / "run", steps=4000)
    with Command(words_of(config)) as command:
        command.until("step     1/4000")
        command.process.send_signal(signal.SIGSTOP)
        command.process.send_signal(signal.SIGINT)
        command.process.send_signal(signal.SIGCONT)
        command.process.send_signal(signal.SIGINT)
        assert command.end() == 130, command.output


@pytest.mark.parametrize(
    "more,message",
    [
        (["--batch", "0"], "batch 0: expected at least 1"),
        (["--data", "nowhere.txt"], "data 'nowhere.txt': no such file or folder"),
        (["--length", "100000"], "shorter than one sequence"),
        (["--precision", "fp8"], "'fp8' is not there yet"),
        (["-n", "0"], "-n 0: expected at least 1 rank"),
        (["--resume"], "nothing to resume"),
    ],
)
def test_bad_input_is_refused_before_anything(
    corpus: Path, tmp_path: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    words = words_of(config_of(corpus, tmp_path / "run"), "--json", str(file), *more)
    assert main(words) == 2
    assert message in capsys.readouterr().err
    result = json.loads(file.read_text())
    assert tuple(result) == (*RESULT_KEYS, "error")
    assert message in result["error"]
    assert not (tmp_path / "run").exists()


def test_unknown_model(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(corpus, tmp_path / "run", model="smal")
    assert main(words_of(config)) == 2
    assert "small" in capsys.readouterr().err


def test_folders_are_trained_further_or_refused(
    corpus: Path, tmp_path: Path, straight: TrainResult, capsys: pytest.CaptureFixture[str]
) -> None:
    assert straight.model is not None and straight.eval_loss is not None
    further = train(config_of(corpus, tmp_path / "further", model=str(straight.model), steps=2))
    assert further.loss_first == pytest.approx(straight.eval_loss, abs=0.6)  # not from scratch

    broken = tmp_path / "broken"
    shutil.copytree(straight.model, broken)
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:-1000])
    for words in (["-n", "2"], []):
        config = config_of(corpus, tmp_path / "run", model=str(broken))
        with Command(words_of(config, *words)) as command:
            assert command.end() == 1, command.output
        assert "model.safetensors" in command.output and "Traceback" not in command.output

    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "gpt2", "n_embd": 8}')
    assert main(words_of(config_of(corpus, tmp_path / "run", model=str(other)))) == 2
    assert "gpt2" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_vocabulary_smaller_than_a_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens.npy"
    np.save(file, np.full(5_000, 40_000, np.uint16))
    assert main(words_of(config_of(file, tmp_path / "run"))) == 2
    assert "holds token 40000" in capsys.readouterr().err


def test_more_than_memory_allows(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr("flatshard.cli.train.memory", lambda: (1 << 30, 1 << 20))
    file = tmp_path / "result.json"
    words = words_of(config_of(corpus, tmp_path / "run"), "-n", "3", "--json", str(file))
    assert main(words) == 1
    said = capsys.readouterr().err
    assert "of 1.0 MiB on the host" in said and "moments" in said
    assert json.loads(file.read_text())["error"].startswith("MemoryBudgetError: needs ")
    assert not (tmp_path / "run").exists()


def test_a_rank_of_another_launcher(corpus: Path, tmp_path: Path, straight: TrainResult) -> None:
    file = tmp_path / "result.json"
    words = words_of(config_of(corpus, tmp_path / "run"), "--json", str(file))
    with Command(["launch", "-n", "2", "-m", "flatshard.cli", *words]) as command:
        assert command.end() == 0, command.output
    assert json.loads(file.read_text())["weights_sha256"] == straight.weights_sha256
    with Command(["launch", "-n", "2", "-m", "flatshard.cli", *words, "-n", "3"]) as command:
        assert command.end() == 2
    assert "-n 3, and this process already is a rank of the 2" in command.output


def test_ranks_as_threads(
    corpus: Path, tmp_path: Path, straight: TrainResult, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    words = words_of(config_of(corpus, tmp_path / "run"), "--json", str(file))
    assert main([*words, "-n", "2", "--ranks-as", "threads"]) == 0
    assert json.loads(file.read_text())["weights_sha256"] == straight.weights_sha256


def test_the_plan_is_what_a_run_holds(
    straight: TrainResult, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "tiny", "-n", "2", "--precision", "bf16", "--batch", "2", "--length", "32"]
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    for name in ("weights", "gradients", "accumulators", "master", "moments", "activations"):
        assert plan["memory"][name] == straight.memory[name], name
    assert main([*words, "--budget", "2M"]) == 1
    out = capsys.readouterr().out
    assert "does not fit in the 1.9 MiB of this host" in out and "master" in out
    assert main([*words, "--budget", "much"]) == 2


def test_the_plan_of_a_run_on_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """None need be here: what lies in a GPU's memory does not count as the host's."""
    words = ["plan", "tiny", "-n", "2", "--precision", "bf16", "--batch", "2", "--length", "32"]
    assert main([*words, "--gather", "copy", "--json"]) == 0
    cpu = json.loads(capsys.readouterr().out)
    words += ["--device", "cuda"]
    assert main([*words, "--device-budget", "1G", "--json"]) == 0
    gpu = json.loads(capsys.readouterr().out)
    assert gpu["memory"]["master"]["device"] == gpu["memory"]["master"]["rank"] > 0
    assert gpu["total"]["host"] < cpu["total"]["host"] / 4
    assert gpu["device_room"] == 10**9 and gpu["fits"]
    assert main([*words, "--device-budget", "1M"]) == 1
    out = capsys.readouterr().out
    assert "does not fit in the 976.6 KiB of each GPU" in out and "its device" in out
    config = TrainConfig(model="7b", stage=3, precision="bf16", device="cuda", optimizer="adamw")
    held = of_run(config, 8, budget=32 * 10**9)  # the host of eight GPUs
    assert held.device_nbytes > 10**10


def test_a_killed_rank_is_in_the_result(corpus: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    config = config_of(corpus, tmp_path / "run", steps=4000)
    with Command(words_of(config, "-n", "2", "--json", str(file))) as command:
        command.until("step     1/4000")
        ranks = Path(f"/proc/{command.process.pid}/task/{command.process.pid}/children")
        os.kill(int(ranks.read_text().split()[1]), signal.SIGKILL)
        assert command.end() not in (0, 2, 130)
    result = json.loads(file.read_text())
    assert "PeerLost" in result["error"] and "rank 1" in result["error"]
    assert result["params"] == 0 or result["params"] > 0


def test_writing_moves_a_window() -> None:
    """What each call sees and adds, from a model that only takes notes."""
    calls: list[tuple[int, int, int]] = []

    class Notes:
        def generate(self, ids: Any, *, n: int, temperature: float, seed: int) -> Any:
            calls.append((int(ids[0]), len(ids), n))
            return np.concatenate([ids, ids[-1] + 1 + np.arange(n, dtype=np.int32)])

    ids = np.arange(3, dtype=np.int32)
    text = write(cast(Any, Notes()), ids, n=20, length=8, temperature=0.0, seed=0)
    assert text.tolist() == list(range(23))  # nothing is lost or told twice
    assert calls == [(0, 3, 5), (4, 4, 4), (8, 4, 4), (12, 4, 4), (16, 4, 3)]
    assert max(seen + more for _, seen, more in calls) == 8
    assert write(cast(Any, Notes()), ids, n=0, length=8, temperature=0.0, seed=0) is ids


def test_sample_writes(
    straight: TrainResult, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert straight.model is not None
    for folder in (straight.model, straight.model.parent):
        assert main(["sample", str(folder), "--prompt", "beta", "--tokens", "9"]) == 0
        assert capsys.readouterr().out.startswith("beta")
    long = ["sample", str(straight.model), "--prompt", "beta", "--tokens", "90"]
    assert main([*long, "--temperature", "0"]) == 0
    windows = capsys.readouterr().out  # of the run's length, 32
    assert main([*long, "--temperature", "0", "--context", "512"]) == 0
    assert capsys.readouterr().out[:20] == windows[:20]
    assert main(["sample", str(tmp_path)]) == 2
    assert "holds no config.json" in capsys.readouterr().err
    assert main(["sample", str(straight.model), "--prompt", ""]) == 2
    assert "--prompt is empty" in capsys.readouterr().err
