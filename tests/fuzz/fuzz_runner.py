"""Train random models plainly and sharded on a pool of ranks, and report every difference, error and hang."""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import fuzz_paths  # noqa: F401

# isort: split

from fuzz_compare import difference, tolerance_of
from fuzz_reduce import reduced
from fuzz_spec import Spec, compilable, random_spec
from fuzz_training import Plain, Sharded, train
from ranks import RankPool, reset_dynamo

FORMS = ("eager", "fx", "inductor")
_SECONDS_BETWEEN_SIGNS_OF_LIFE = 30
_MODELS_A_POOL = 100  # process groups of a model live as long as its ranks


def check(spec: Spec, form: str) -> str:
    """On every rank: the first difference between the two trainings of a spec, "" if there is none."""
    spec = spec if form == "eager" else compilable(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = train(spec, Plain(spec, _backend_of_oracle(spec, form)))
        reset_dynamo()
        return difference(want, train(spec, Sharded(spec, form)), tolerance_of(spec))


def _backend_of_oracle(spec: Spec, form: str) -> str:
    """"" for eager. Without Inductor every operator that a compiled graph is decomposed into rounds to bf16, so there
    the oracle is the plain model in the same decomposition."""
    bf16 = any(layer.dtype == "bfloat16" for layer in spec.layers)
    return "aot_eager_decomp_partition" if bf16 and form == "fx" else ""


@dataclass
class Runner:
    """Checks specs one by one. A rank that raises, dies or does not answer in ``seconds`` is a fault of its spec."""

    ranks: int
    form: str
    seconds: float = 0.0  # 0: enough for any that does not hang

    def __post_init__(self) -> None:
        slow = self.form == "inductor"  # ranks wait for each other while one of them compiles
        deadline = self.seconds or (300.0 if slow else 90.0)
        self._pool = RankPool(self.ranks, group_timeout=90.0 if slow else 30.0, deadline=deadline)
        self._done = 0

    def fault(self, spec: Spec) -> str:
        """What is wrong with a spec; "" if nothing."""
        self._done += 1
        if self._done % _MODELS_A_POOL == 0:
            self._pool.close()
        try:
            said = self._pool.run(check, spec, self.form)
        except AssertionError as error:
            return str(error)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(said) if text), "")

    def close(self) -> None:
        self._pool.close()


def report(spec: Spec, runner: Runner, fault: str) -> str:
    """What a person needs to see a fault again."""
    command = f"python tests/fuzz/fuzz.py --seed {spec.seed} --ranks {runner.ranks} --form {runner.form}"
    return f"{spec.describe()}\n  {fault}\n  again: {command}"


def main(say: Callable[[str], None] = lambda text: print(text, flush=True)) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=1, help="how many, from seed to seed + models - 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--form", choices=FORMS, default="eager")
    parser.add_argument("--reduce", action="store_true", help="look for the smallest spec that fails in the same way")
    args = parser.parse_args()
    runner, faults, began = Runner(args.ranks, args.form), [], time.monotonic()
    said = began
    for seed in range(args.seed, args.seed + args.models):
        spec = random_spec(seed)
        if fault := runner.fault(spec):
            faults.append(seed)
            say(report(spec, runner, fault))
            if args.reduce:
                small = reduced(spec, lambda s: bool(runner.fault(s)))
                say(f"  reduced:\n{small.describe()}\n  {runner.fault(small)}")
        if time.monotonic() - said > _SECONDS_BETWEEN_SIGNS_OF_LIFE:
            said = time.monotonic()
            say(f"{seed - args.seed + 1} models, {len(faults)} faults, {said - began:.0f} s")
    runner.close()
    say(f"{args.models - len(faults)} models train as one process does, {len(faults)} faults {faults}")
    return 1 if faults else 0
