"""`planner probe`: measure, keep the profile where ``hardware=NAME`` finds it, and show it."""

from __future__ import annotations

import datetime
from dataclasses import replace
from importlib import resources

from omegaconf import OmegaConf

from penstock.planner.asked.verb_schema import ProbeConfig
from penstock.planner.common.console import Screen
from penstock.planner.common.errors import UserError
from penstock.planner.common.outside.streams import tell
from penstock.planner.common.peers.shared_secret import shared_secret
from penstock.planner.contract.config.better_profile import read_earlier, worse_than
from penstock.planner.contract.config.config_schema import HardwareConfig, NetworkConfig
from penstock.planner.contract.config.profile_files import prepare_directory, profile_path, write_profile
from penstock.planner.probe.between.peer_address import PeerAddress
from penstock.planner.probe.between.peer_rates import NetworkRates, measure_peers
from penstock.planner.probe.between.peer_server import serve_peers
from penstock.planner.probe.measure import probe
from penstock.planner.probe.profile_table import profile_table


def probe_verb(cfg: ProbeConfig) -> None:
    """Measure this machine, or wait for those that measure the network to it. The name is refused before measuring: a preset's name would
    never be found."""
    settings = cfg.probe
    if settings.serve is not None:
        serve_peers(PeerAddress.of("probe.serve", settings.serve), shared_secret(), tell)
        return
    if resources.files("penstock").joinpath("conf", "hardware", f"{settings.name}.yaml").is_file():
        raise UserError(f"probe.name={settings.name}: a preset has this name and would hide the profile; choose another name")
    prepare_directory(profile_path(settings.name))
    peers = [PeerAddress.of("probe.peers", peer) for peer in (settings.peers or "").split()]
    network = measure_peers(peers, shared_secret()) if peers else None
    probed, earlier = probe(settings), read_earlier(profile_path(settings.name))
    config, console = _with_network(probed.profile, network, earlier), Screen(highlight=False)
    console.print(profile_table(config))
    if probed.load.busy:
        console.print(f"warning: the machine is busy: {probed.load}; these figures are marked busy", style="yellow", soft_wrap=True)
    worse = [] if earlier is None or settings.force else worse_than(earlier, config)
    if worse:
        more = f", and {len(worse) - 1} more {'is' if len(worse) == 2 else 'are'} worse" if len(worse) > 1 else ""
        why = " (the machine is busy)" if probed.load.busy else ""
        raise UserError(
            f"{profile_path(settings.name)} is kept, which has better figures: {worse[0]}{more}{why}; probe again on an idle machine, "
            "or set probe.force=true"
        )
    path = write_profile(settings.name, config)
    print(f"kept as hardware={settings.name} in {path}")
    figures = OmegaConf.to_container(OmegaConf.structured(config))
    assert isinstance(figures, dict)
    cfg.close({"profile": str(path)} | {str(k): v for k, v in figures.items()})


def _with_network(config: HardwareConfig, found: NetworkRates | None, earlier: HardwareConfig | None) -> HardwareConfig:
    """``config`` with the network that was ``found``, else with that of the ``earlier`` profile, which a probe of one host leaves alone."""
    if found is not None:
        origin = found.origin(datetime.date.today().isoformat())
        return replace(config, network=NetworkConfig(found.gbps, found.hop_s), origin=config.origin | origin)
    if earlier is None:
        return config
    origin = {path: how for path, how in earlier.origin.items() if path.startswith("network.")}
    return replace(config, network=earlier.network, origin=config.origin | origin)
