"""
Side by side with what it replaces.

    python -m benchmarks dispatch --json dispatch.json
    python -m benchmarks vocab --quick
    python -m benchmarks expert_parallel --only "E 64"

Prints a table; `--json` writes the numbers. Exit code 1: a case that must meet its limits missed one; 2: it
cannot run like this, or here.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from benchmarks.harness import cores, measure
from benchmarks.report import environment, missed, table

# Modules by name: each has `cases(quick)`, and may have THREADS, `measure` and `table` in place of the common ones,
# `where()` with more about the environment, and `refusal(quick)`. Only the one that is asked for is imported.
BENCHMARKS = {
    "boundaries": "benchmarks.boundaries",
    "dispatch": "benchmarks.dispatch",
    "end_to_end": "benchmarks.end_to_end",
    "expert_parallel": "benchmarks.expert_parallel",
    "gpu": "benchmarks.gpu",
    "optimizer": "benchmarks.optimizer",
    "planner": "benchmarks.planner",
    "ring": "benchmarks.ring",
    "vocab": "benchmarks.vocab",
}
PAIRS, QUICK_PAIRS = 9, 3


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Ours beside stock, in pairs of steps.")
    parser.add_argument("name", choices=list(BENCHMARKS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE")
    parser.add_argument("--quick", action="store_true", help="small sizes, 3 pairs, no limits: that it runs, not how")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only the cases with TEXT in their name; FILE keeps what it has"
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="torch's threads in a process; default: cores, or 1 for several ranks"
    )
    arguments = parser.parse_args(argv)
    if arguments.threads is not None and arguments.threads < 1:
        parser.error(f"--threads {arguments.threads} must be at least 1")
    folder = arguments.json.absolute().parent if arguments.json else Path()
    if not folder.is_dir():
        parser.error(f"--json {arguments.json}: there is no folder {folder}; make it first")
    benchmark = importlib.import_module(BENCHMARKS[arguments.name])
    refusal = benchmark.refusal(arguments.quick) if hasattr(benchmark, "refusal") else None
    if refusal:
        print(f"python -m benchmarks {arguments.name} {refusal}", file=sys.stderr)
        return 2
    run, more = getattr(benchmark, "measure", measure), getattr(benchmark, "where", dict)()
    threads = arguments.threads or getattr(benchmark, "THREADS", cores())
    known = benchmark.cases(arguments.quick)
    chosen = [case for case in known if arguments.only in case.name]
    kept = _kept(arguments.json) if arguments.only else {}
    needed = {case.grows_from.case for case in chosen if case.grows_from} - set(kept)  # their peak is another's limit
    cases = [case for case in known if case in chosen or case.name in needed]
    if not cases:
        names = "".join(f"\n  {case.name}" for case in known)
        parser.error(f"--only {arguments.only!r} is in no case's name; the cases are{names}")

    result = {"name": arguments.name, "environment": environment(threads) | more, "cases": []}
    entries: dict[str, dict] = {}
    for case in cases:
        pairs, when = QUICK_PAIRS if arguments.quick else PAIRS, environment(threads)
        entries[case.name] = run(case, {**kept, **entries}, pairs, threads, _progress(case.name))
        entries[case.name] |= {name: when[name] for name in ("date", "load_average")}
        found = {**kept, **entries}
        result["cases"] = [found[case.name] for case in known if case.name in found]
        if arguments.json:  # after each case: a run that is cut short keeps what it measured
            arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")

    Console(width=max(Console().width, 110)).print(getattr(benchmark, "table", table)(result))
    complaints = [line for entry in entries.values() if entry["gate"] for line in missed(entry)]
    for line in complaints:
        print(line, file=sys.stderr)
    return 1 if complaints else 0


def _kept(file: Path | None) -> dict[str, dict]:
    """Cases of an earlier run, by name."""
    if file is None or not file.is_file():
        return {}
    return {entry["case"]: entry for entry in json.loads(file.read_text(encoding="utf-8"))["cases"]}


def _progress(case: str) -> Callable[[str], None]:
    """On a terminal, one line that says what is going on; elsewhere, a line a case. No thread: the harness forks."""
    if not sys.stderr.isatty():
        print(case, file=sys.stderr, flush=True)
        return lambda what: None
    return lambda what: print(f"\r\x1b[K{case}: {what}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
