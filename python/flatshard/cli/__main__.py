"""``flatshard COMMAND ...``: finds the command, and turns exceptions into sentences."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from ..errors import ConfigError, FlatshardError

__all__ = ["main"]

COMMANDS = {
    "demo": "plan, train, kill, resume and damage a run, in under a minute",
    "train": "train a Llama-family model on text or tokens",
    "sample": "let a trained model write",
    "plan": "the memory of a run, before anything is allocated",
    "launch": "start a script on every rank of this machine",
    "fsck": "check the checkpoints of a run, and name what is damaged",
    "export": "a checkpoint's weights as a Hugging Face folder",
    "convert": "what another system saved, as a checkpoint",
    "config": "check or write FSDP, DeepSpeed and Accelerate configurations",
    "env": "this machine, as flatshard sees it",
}
# Commands that people look for and that are not there yet: refused by name.
LATER = {
    "bench": "measure this machine; meanwhile python -m benchmarks does in a clone",
}
BAD_USAGE = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Parameters
    ----------
    arguments : sequence of str, optional
        Without the program's name. Default: ``sys.argv[1:]``.

    Returns
    -------
    int
        Exit status: 0 done, 1 failed, 2 asked wrongly, 130 interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if words else BAD_USAGE
    if words[0] in ("-V", "--version"):
        from .env import version

        print(f"flatshard {version('flatshard')}")
        return 0
    command, rest = words[0], words[1:]
    if command in LATER:
        print(f"flatshard {command} is not there yet: {LATER[command]}", file=sys.stderr)
        return BAD_USAGE
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, [*COMMANDS, *LATER], n=1)
        hint = f"did you mean 'flatshard {near[0]}'?" if near else "flatshard --help lists them"
        print(f"flatshard: unknown command {command!r}; {hint}", file=sys.stderr)
        return BAD_USAGE
    module = importlib.import_module(f".{command}", __package__)
    try:
        return int(module.main(rest) or 0)
    except BrokenPipeError:
        # Whoever read our output has gone; Python's flush at exit must not find the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"flatshard {command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (FlatshardError, OSError) as error:
        rank = os.environ.get("RANK", "") if os.environ.get("WORLD_SIZE", "1") != "1" else ""
        where = f" (rank {rank})" if rank else ""
        print(f"flatshard {command}{where}: {error}", file=sys.stderr)
        return BAD_USAGE if isinstance(error, ConfigError) else 1


def _usage() -> str:
    lines = ["usage: flatshard COMMAND ...   (flatshard COMMAND --help)", ""]
    lines += [f"  {name:<8} {meaning}" for name, meaning in COMMANDS.items()]
    lines += ["", "not there yet: " + ", ".join(LATER)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
