"""The one entry: python -m benchmarks --help."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import pkgutil
import sys

from benchmarks import suites
from benchmarks.harness import (
    Quiet,
    Result,
    Settings,
    Suite,
    Unavailable,
    about_machine,
    measure,
)

SUITES = sorted(module.name for module in pkgutil.iter_modules(suites.__path__))


def load(name: str) -> Suite:
    suite = importlib.import_module(f"benchmarks.suites.{name}").SUITE
    assert isinstance(suite, Suite)
    return suite


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures flatshard beside what a user would pick instead.",
        epilog="Suites: " + "; ".join(f"{name}: {load(name).about}" for name in SUITES),
    )
    parser.add_argument("--suite", action="append", choices=SUITES, help="default: all")
    parser.add_argument("--samples", type=int, default=None, help="of each contender (default 10)")
    parser.add_argument(
        "--smoke", action="store_true", help="smallest cases, one sample, no waiting"
    )
    parser.add_argument("--no-peers", action="store_true", help="flatshard alone")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for a quiet machine")
    parser.add_argument("--json", metavar="FILE", help="write machine and raw samples")
    parser.add_argument("option", nargs="*", metavar="NAME=VALUE", help="an option of a suite")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    options = dict(word.split("=", 1) for word in arguments.option)
    settings = Settings(
        smoke=arguments.smoke,
        samples=arguments.samples or (1 if arguments.smoke else 10),
        warmup=1 if arguments.smoke else 2,
        peers=not arguments.no_peers,
        options=options,
    )
    quiet = Quiet(enabled=not (arguments.smoke or arguments.no_wait))
    machine = about_machine()
    for key, value in machine.items():
        print(f"{key:>18}: {value}")
    results: list[Result] = []

    def write() -> None:
        """After each case: a run that is cut short keeps what it had."""
        if arguments.json:
            rows = [dataclasses.asdict(result) for result in results]
            with open(arguments.json, "w", encoding="utf-8") as file:
                whole = {"machine": machine, "command": sys.argv, "results": rows}
                json.dump(whole, file, indent=1)

    write()
    for name in arguments.suite or SUITES:
        suite = load(name)
        print(f"\n== {suite.name}: {suite.about}")
        try:
            cases = suite.cases(settings)
        except Unavailable as error:
            if arguments.suite:
                raise SystemExit(f"suite {name}: {error}") from None
            print(f"  left out: {error}")
            continue
        print(f"  {'':<44} {'min':>9} {'median':>9} {'p99':>9} {'at the median':>14}")
        for case in cases:
            results += measure(case, settings, quiet)
            write()
    if quiet.waited > 60:
        print(f"\nwaited {quiet.waited:.0f} s for a quiet machine")


if __name__ == "__main__":
    main()
