"""Random phase-one calls on the host NPU, compared with CANN's rules: ``make phase-one``."""

import argparse
import sys
import time

from tests.phase_one.comparison import Tally, compare_all


def report(tallies: dict[str, Tally]) -> str:
    """Return a table of the counts, and an example for every class of difference."""
    lines = ["| operator | calls | accepted | undefined | differences |", "|---|---|---|---|---|"]
    for name, tally in tallies.items():
        share = f"{tally.accepted / tally.calls:.0%}"
        undefined, different = tally.undefined.total(), tally.differences.total()
        lines.append(f"| {name} | {tally.calls:,} | {share} | {undefined:,} | {different:,} |")
    lines.append("")
    for name, tally in tallies.items():
        lines += [f"undefined, {count:,} times: {why}" for why, count in tally.undefined.items()]
        for why, count in tally.differences.most_common():
            lines += [f"DIFFERENCE of {name}, {count:,} times: {why}", f"    {tally.examples[why]}"]
    return "\n".join(lines)


def main() -> int:
    """Run the comparison that the command line requests."""
    parser = argparse.ArgumentParser(prog="python -m tests.phase_one", description=__doc__)
    parser.add_argument("--calls", type=int, default=1_000_000, help="on all chips (default: 1,000,000)")
    parser.add_argument("--seed", type=int, default=0, help="another one gives other calls")
    arguments = parser.parse_args()
    start = time.perf_counter()
    tallies = compare_all(arguments.calls, arguments.seed)
    print(report(tallies))
    different = sum(tally.differences.total() for tally in tallies.values())
    print(f"{arguments.calls:,} calls in {time.perf_counter() - start:.0f} s, {different:,} of them different")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
