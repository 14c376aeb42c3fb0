"""One rank of the job that tests/hf/conftest.py starts: runs cases, writes what they gave.

    flatshard launch -n 2 tests/hf/job.py FOLDER       # imports take most of the time: one job
    python tests/hf/job.py FOLDER --alone              # the cases of a world of one

Each case returns what can be written as JSON. An exception is a result too: {"raised", "text"}.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

Case = Callable[[Path], Any]


def clean() -> None:
    """Nothing of a case is left for the next one."""
    from accelerate.state import AcceleratorState, GradientState

    gc.collect()
    AcceleratorState._reset_state()
    GradientState._reset_state()


def run(case: Case, folder: Path) -> Any:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep()
    logging.getLogger("flatshard").addHandler(handler)
    try:
        found = case(folder)
    except Exception as error:
        where = traceback.format_exc()
        found = {"raised": type(error).__name__, "text": str(error), "where": where}
    finally:
        logging.getLogger("flatshard").removeHandler(handler)
    clean()
    return {"found": found, "log": lines}


def main() -> None:
    warnings.simplefilter("ignore")
    import transformers

    import flatshard as fs

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    import accelerate_cases
    import trainer_cases
    import trainer_run_cases

    folder = Path(sys.argv[1])
    alone = "--alone" in sys.argv
    wanted = [word for word in sys.argv[2:] if not word.startswith("--")]
    results = {}
    for module in (trainer_cases, trainer_run_cases, accelerate_cases):
        for name, case in module.ALONE.items() if alone else module.CASES.items():
            if wanted and name not in wanted:
                continue
            results[name] = run(case, folder)
            if wanted and fs.init().is_main:
                print(name, json.dumps(results[name])[:3000], flush=True)
    rank = fs.init().rank
    kind = "alone" if alone else "rank"
    (folder / f"{kind}-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
