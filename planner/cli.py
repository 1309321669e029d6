"""The ``planner`` program: measure the machine, and decide where every byte lives and when it moves."""

from __future__ import annotations

import hydra

from planner.app import CONFIG, Program, Verb, job
from planner.schema import ProbeConfig, ReplayConfig, SimulateConfig, SolveConfig
from planner.threads import wait_asleep


@hydra.main(version_base="1.3", config_path=CONFIG, config_name="probe")
@job
def probe(cfg: ProbeConfig) -> None:
    """measure this machine and keep what was found as a hardware profile"""
    from planner.probe_verb import probe_verb

    probe_verb(cfg.probe)


@hydra.main(version_base="1.3", config_path=CONFIG, config_name="solve")
@job
def solve(cfg: SolveConfig) -> None:
    """compute a plan for a model on a machine, and say what it will do"""
    from planner.solve import solve_plan

    solve_plan(cfg)


@hydra.main(version_base="1.3", config_path=CONFIG, config_name="replay")
@job
def replay(cfg: ReplayConfig) -> None:
    """act a routing trace out under expert policies, and compare what they keep and fetch with the best possible"""
    from planner.replay_verb import replay_verb

    replay_verb(cfg)


@hydra.main(version_base="1.3", config_path=CONFIG, config_name="simulate")
@job
def simulate(cfg: SimulateConfig) -> None:
    """act a plan out unit by unit: its loads, evictions and waits, and the seconds that come of them"""
    from planner.simulate_verb import simulate_verb

    simulate_verb(cfg)


PROGRAM = Program(
    "planner",
    "decides where a model's weights, KV cache and experts live on a machine, and writes it down as a plan.",
    (
        Verb(probe, ProbeConfig, "planner probe probe.path=/data/checkpoints probe.quick=true"),
        Verb(solve, SolveConfig, "planner solve hardware=rtx5080 model=llama70b workload.batch=4 out=plan.yaml", reads_wsm=True),
        Verb(simulate, SimulateConfig, "planner simulate plan=plan.yaml trace=sim.png"),
        Verb(replay, ReplayConfig, "planner replay traces=routing.jsonl.xz model=mixtral8x7b slots=[2,4] plot=replay.png"),
    ),
)


def main() -> None:
    """Entry point of the ``planner`` console script."""
    wait_asleep()
    PROGRAM.main()
