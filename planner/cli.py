"""The ``planner`` program: measure the machine, and decide where every byte lives and when it moves."""

from __future__ import annotations

import hydra

from penstock.planner.asked.verb_schema import (
    DiffConfig,
    DoctorConfig,
    ExplainConfig,
    ExportConfig,
    ProbeConfig,
    ReplanConfig,
    ReplayConfig,
    ReportConfig,
    SimulateConfig,
)
from penstock.planner.common.command.app import CONFIG, Program, Verb, job
from penstock.planner.common.threads import wait_asleep
from penstock.planner.contract.config.config_schema import SolveConfig


@hydra.main(version_base="1.3", config_path=CONFIG, config_name="probe")
@job
def probe(cfg: ProbeConfig) -> None:
    """measure this machine and keep what was found as a hardware profile"""
    from penstock.planner.verbs.probe_verb import probe_verb

    probe_verb(cfg)


@hydra.main(version_base="1.3", config_path=CONFIG, config_name="solve")
@job
def solve(cfg: SolveConfig) -> None:
    """compute a plan for a model on a machine, and say what it will do"""
    from penstock.planner.verbs.solve_verb import solve_plan

    solve_plan(cfg)


@hydra.main(version_base="1.3", config_path=CONFIG, config_name="replan")
@job
def replan(cfg: ReplanConfig) -> None:
    """solve a plan's own problem again, with room for a longer context"""
    from penstock.planner.verbs.replan_verb import replan_verb

    replan_verb(cfg)


@hydra.main(version_base="1.3", config_path=CONFIG, config_name="explain")
@job
def explain(cfg: ExplainConfig) -> None:
    """say why a plan is as it is, what each resource and decision is worth, and what to buy next; or why no plan fits"""
    from penstock.planner.verbs.explain_verb import explain_verb

    explain_verb(cfg)


@hydra.main(version_base="1.3", config_path=CONFIG, config_name="diff")
@job
def diff(cfg: DiffConfig) -> None:
    """show where two plans differ: decisions, predictions, and what they assume"""
    from penstock.planner.verbs.diff_verb import diff_verb

    diff_verb(cfg)


@hydra.main(version_base="1.3", config_path=CONFIG, config_name="doctor")
@job
def doctor(cfg: DoctorConfig) -> int:
    """look at this machine: what stands in the way of a fast run, what to change and why"""
    from penstock.planner.verbs.doctor_verb import doctor_verb

    return doctor_verb(cfg)


@hydra.main(version_base="1.3", config_path=CONFIG, config_name="replay")
@job
def replay(cfg: ReplayConfig) -> None:
    """run recorded routings through each expert policy, and compare what it keeps and fetches with the best possible"""
    from penstock.planner.verbs.replay_verb import replay_verb

    replay_verb(cfg)


@hydra.main(version_base="1.3", config_path=CONFIG, config_name="export")
@job
def export(cfg: ExportConfig) -> None:
    """write a plan for another engine, with what that engine cannot express and what it costs"""
    from penstock.planner.verbs.export_verb import export_verb

    export_verb(cfg)


@hydra.main(version_base="1.3", config_path=CONFIG, config_name="report")
@job
def report(cfg: ReportConfig) -> None:
    """gather plans and runs of a directory of sweeps into one table: CSV, JSON and a page with plots"""
    from penstock.planner.verbs.report_verb import report_verb

    report_verb(cfg)


@hydra.main(version_base="1.3", config_path=CONFIG, config_name="simulate")
@job
def simulate(cfg: SimulateConfig) -> None:
    """play a plan without the model, unit by unit: its loads, evictions and waits, and how long it takes"""
    from penstock.planner.verbs.simulate_verb import simulate_verb

    simulate_verb(cfg)


PROBLEM = (
    "hardware",
    "model",
    "model.checkpoint",
    "hardware.vram_bytes",
    "hardware.dram_bytes",
    "workload.prompt_tokens",
    "workload.new_tokens",
)
"""What people say most of machine, model and work."""

PROGRAM = Program(
    "planner",
    "decides where a model's weights, KV cache and experts live on a machine, and writes it down as a plan.",
    (
        Verb(probe, ProbeConfig, "planner probe probe.path=/data/checkpoints probe.quick=true"),
        Verb(
            solve,
            SolveConfig,
            "planner solve hardware=rtx5080 model=llama70b workload.batch=4 out=plan.yaml",
            reads_wsm=True,
            used=(*PROBLEM, "workload.batch", "workload.kv_spill", "out"),
            figures={"tokens/s": "predicted.decode_tokens_per_s", "bound by": "predicted.bottleneck_decode"},
        ),
        Verb(replan, ReplanConfig, "planner replan plan=plan.yaml context_tokens=16384"),
        Verb(
            explain,
            ExplainConfig,
            "planner explain plan=plan.yaml html=explain.html",
            reads_wsm=True,
            instead="plan",
            used=("plan", "html", "out", *PROBLEM),
        ),
        Verb(diff, DiffConfig, "planner diff plan.yaml edited.yaml", words=("a", "b")),
        Verb(doctor, DoctorConfig, "planner doctor path=/data/checkpoints"),
        Verb(
            simulate,
            SimulateConfig,
            "planner simulate plan=plan.yaml trace=sim.png",
            used=("plan", "demo", "rules", "routings", "trace", "out"),
        ),
        Verb(
            replay,
            ReplayConfig,
            "planner replay routings=routing.jsonl.xz model=mixtral8x7b slots=[2,4] plot=replay.png",
            used=("routings", "model", "policy", "slots", "prefetch", "out", "plot"),
        ),
        Verb(export, ExportConfig, "planner export plan=plan.yaml to=accelerate"),
        Verb(report, ReportConfig, "planner report sweeps/0", words=("dir",)),
    ),
)


def main() -> None:
    """Entry point of the ``planner`` console script."""
    wait_asleep()
    PROGRAM.main()
