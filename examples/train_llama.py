"""Trains a Llama on text, on however many ranks it is started.

    python examples/train_llama.py                          # alone
    flatshard launch -n 4 examples/train_llama.py           # four ranks of this machine

The library calls that ``flatshard train`` is made of, and nothing else.
"""

from __future__ import annotations

import argparse

import flatshard as fs


def main() -> None:
    """Reads the options, trains, saves."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", default="tiny", help="a size by name, or a config.json")
    options.add_argument("--data", default="stdlib", help="text file, folder, .jsonl or tokens")
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--batch", type=int, default=4, help="sequences of each rank")
    options.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    options.add_argument("--lr", type=float, default=2e-3)
    options.add_argument("--out", default="run")
    given = options.parse_args()

    world = fs.init()
    model = fs.models.Llama.from_config(
        given.model, world=world, sharding=fs.Sharding(stage=3), precision="bf16"
    )
    opt = fs.AdamW(model, lr=given.lr, weight_decay=0.1, no_decay=("*norm*",))
    rate = fs.schedule.cosine(given.lr, warmup=given.steps // 10, total=given.steps)
    data = fs.data.tokens(given.data, world=world, batch=given.batch, length=given.length)

    for step, batch in zip(range(given.steps), data, strict=False):
        loss = model.forward_backward(batch.inputs, batch.targets)
        result = opt.step(max_norm=1.0, lr=rate(step))
        if step % 10 == 0:
            world.print(f"step {step:4}  loss {loss.mean:.3f}  norm {result.grad_norm:.2f}")

    fs.checkpoint.save(given.out, model, opt, step=given.steps, user={"data": data.state()}).wait()
    model.save_pretrained(f"{given.out}/model")
    world.print(f"saved {given.out}/model")
    world.close()


if __name__ == "__main__":
    main()
