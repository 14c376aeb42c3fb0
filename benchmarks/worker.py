"""One rank of a contender of several processes; started by benchmarks.ranks."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import traceback
from typing import Any


def main() -> None:
    name, arguments = sys.argv[1], json.loads(sys.argv[2])
    answers = sys.stdout
    job: Any = None
    # What libraries print must not be taken for an answer.
    with contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin:
            command = line.strip()
            try:
                value = None
                if command == "open":
                    module, _, function = name.partition(":")
                    job = getattr(importlib.import_module(module), function)(**arguments)
                else:
                    value = getattr(job, command)()
                answer: dict[str, Any] = {"value": value}
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)
            if "error" in answer:
                sys.exit(1)
        if job is not None:
            job.close()


if __name__ == "__main__":
    main()
