"""Run cases: ``python tests/cases/run.py [--ranks 2] [--form eager|fx|inductor] [NAME...]``, a line a case.

Ends with the numbers of cases that passed and failed, and exit status 1 if any failed.
"""

from __future__ import annotations

import argparse
import sys
import time

import case_paths  # noqa: F401

# isort: split

import case_control_flow  # noqa: F401
import case_lifecycle  # noqa: F401
import case_modules  # noqa: F401
import case_steps  # noqa: F401
import case_values  # noqa: F401
import case_weights  # noqa: F401
import case_whole_models  # noqa: F401
from case_harness import CASES, FORMS, Outcome, run_case
from ranks import RankPool


def run_named(name: str, form: str) -> Outcome:
    """``run_case``; by this module's name a worker finds it, and imports all cases."""
    return run_case(name, form)


def merged(outcomes: list[Outcome]) -> Outcome:
    """One outcome of all ranks: that of the first bad one, else the first's."""
    return next((o for o in outcomes if not o.good), outcomes[0])


def first_error(report: str) -> str:
    """The line of a report of failed ranks that says most."""
    lines = [line.strip() for line in report.splitlines()]
    errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception", "Unsupported", "Failed"))]
    return next(iter([*errors[1:], *errors[:1], *lines]), "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--form", choices=FORMS, default="eager")
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - CASES.keys())
    if unknown:
        parser.error(f"no cases {unknown}; there are {sorted(CASES)}")
    timeout = {"eager": 15.0, "fx": 60.0, "inductor": 120.0}[args.form]  # one may wait while another rank compiles
    pool = RankPool(args.ranks, group_timeout=timeout, deadline=60.0 + 2 * timeout)
    passed = failed = 0
    for case in CASES.values():
        if args.ranks not in case.ranks or (args.names and case.name not in args.names):
            continue
        if not case.available:
            print(f"skip  {case.group:13} {case.name:48} needs {case.needs}")
            continue
        began = time.monotonic()
        try:
            outcome = merged(pool.run(run_named, case.name, args.form))
        except AssertionError as error:
            outcome = Outcome(False, str(error) if args.names else first_error(str(error)))
        passed, failed = passed + outcome.good, failed + (not outcome.good)
        word = "pass" if outcome.good else "FAIL"
        print(f"{word}  {case.group:13} {case.name:48} {outcome.text} [{time.monotonic() - began:.1f} s]", flush=True)
    pool.close()
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    import run  # so that workers, which import this file by name, and this process name the same functions

    sys.exit(run.main())
