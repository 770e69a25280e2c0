"""ETTR of a two-week run that loses devices: everything restarted, and only the lost part rebuilt.

    python benchmarks/long_run.py [--json] [--days 14] [--step-s 60]

Simulated (rollick/simulator/long_run.py). The failure rate is that published for a large cluster,
one interruption every 3 h at 16,384 GPUs, by the number of GPUs. A quarter as many GPUs train as
generate. The other assumptions are printed; change them with --set NAME=VALUE.
"""

from __future__ import annotations

import argparse
import json

from rollick.simulator.long_run import FailureConfig, LongRun, LongRunReport, compare_repairs

ENGINES = (1024, 4096)
ENGINES_PER_LEARNER = 4
INTERVALS_S = (600, 1800, 3600)


def measure(config: FailureConfig, *, days: float, step_s: float) -> list[LongRunReport]:
    reports: list[LongRunReport] = []
    for engines in ENGINES:
        learners = engines // ENGINES_PER_LEARNER
        gpus = engines + learners
        reports.append(compare_repairs(LongRun(config, engines, learners, gpus, step_s, days)))
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--days", type=float, default=14.0)
    parser.add_argument("--step-s", type=float, default=60.0)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    changes = dict(text.split("=", 1) for text in arguments.set)
    rows = [
        (interval_s, report)
        for interval_s in INTERVALS_S
        for report in measure(
            FailureConfig.model_validate({"checkpoint_every_s": interval_s, **changes}),
            days=arguments.days,
            step_s=arguments.step_s,
        )
    ]
    if arguments.json:
        for interval_s, report in rows:
            print(json.dumps({"checkpoint_every_s": interval_s, **report.to_json()}))
        return
    print("| engines | GPUs | failures | checkpoint every | restart all | rebuild part |")
    print("|---|---|---|---|---|---|")
    for interval_s, report in rows:
        size = f"| {report.engines:,} | {report.gpus:,} | {report.failures:.0f}"
        ettr = f"{report.ettr_restart_all:.1%} | {report.ettr:.1%} |"
        print(f"{size} | {interval_s // 60} min | {ettr}")
    fixed = FailureConfig.model_validate(changes).model_dump(exclude={"checkpoint_every_s"})
    print(f"\nAssumptions: step {arguments.step_s:g} s, {fixed}")


if __name__ == "__main__":
    main()
