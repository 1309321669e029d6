"""Penstock, through its two programs: a plan by `planner solve` for the job's budgets, executed by `runtime run`."""

from __future__ import annotations

from pathlib import Path

from bench.link import Bench, limit_of
from bench.peers.peer import Job, Measured


def measure(job: Job) -> Measured:
    """One warm-up round and one that counts, as for the others. The limits are measured before and after, in the run's own process."""
    bench = Bench(job.scratch)
    bench.env["PENSTOCK_CONFIG_DIR"] = job.config_dir
    batch = len(job.prompts)
    work = {"prompt_tokens": len(job.prompts[0]), "new_tokens": job.new_tokens, "batch": batch, "requests": batch}
    solve = [f"workload.{key}={value}" for key, value in work.items()] + [f"hardware.vram_bytes={job.vram_bytes}"]
    if job.dram_bytes is not None:
        solve.append(f"hardware.dram_bytes={job.dram_bytes}")
    report = bench.run("penstock", Path(job.checkpoint), solve, ["warmup_rounds=1"])
    measured = report["measured"]
    return Measured(
        prefill_s=measured["prefill_s"],
        step_s=report["step_s"],
        tokens=report["tokens"],
        load_s=measured["load_s"],
        vram_bytes=measured["vram_bytes"],
        dram_bytes=measured["dram_bytes"],
        limit={
            link: measured[f"{link}_bytes_per_token"] / 1e9 / limit_of(report, f"{link}_gbps")
            for link in ("ssd", "h2d")
            if measured[f"{link}_bytes_per_token"]
        },
    )
