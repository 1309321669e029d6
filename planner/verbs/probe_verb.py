"""`planner probe`: measure, keep the profile where ``hardware=NAME`` finds it, and show it."""

from __future__ import annotations

from importlib import resources

from omegaconf import OmegaConf
from rich.console import Console

from penstock.planner.asked.verb_schema import ProbeConfig
from penstock.planner.common.errors import UserError
from penstock.planner.contract.config.better_profile import read_earlier, worse_than
from penstock.planner.contract.config.profile_files import prepare_directory, profile_path, write_profile
from penstock.planner.probe.measure import probe
from penstock.planner.probe.profile_table import profile_table


def probe_verb(cfg: ProbeConfig) -> None:
    """Measure this machine. The name is refused before measuring: a preset's name would never be found."""
    settings = cfg.probe
    if resources.files("penstock").joinpath("conf", "hardware", f"{settings.name}.yaml").is_file():
        raise UserError(f"probe.name={settings.name}: a preset has this name and would hide the profile; choose another name")
    prepare_directory(profile_path(settings.name))
    probed, earlier = probe(settings), read_earlier(profile_path(settings.name))
    config, console = probed.profile, Console(highlight=False)
    console.print(profile_table(config))
    if probed.load.busy:
        console.print(f"warning: the machine is busy: {probed.load}; these figures are marked busy", style="yellow", soft_wrap=True)
    worse = [] if earlier is None or settings.force else worse_than(earlier, config)
    if worse:
        more = f" and {len(worse) - 1} more are worse, too" if len(worse) > 1 else ""
        why = " while the machine is busy" if probed.load.busy else ""
        raise UserError(
            f"{profile_path(settings.name)} is kept, which has better figures: {worse[0]}{more}{why}; probe again on an idle machine, "
            "or set probe.force=true"
        )
    path = write_profile(settings.name, config)
    print(f"kept as hardware={settings.name} in {path}")
    figures = OmegaConf.to_container(OmegaConf.structured(config))
    assert isinstance(figures, dict)
    cfg.close({"profile": str(path)} | {str(k): v for k, v in figures.items()})
