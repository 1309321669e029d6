"""The measured figures as a table."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from penstock.planner.common.measures import show_bytes, show_seconds
from penstock.planner.common.origins import unmeasured
from penstock.planner.contract.config.config_schema import GpuConfig, HardwareConfig, LinksConfig


def profile_table(config: HardwareConfig) -> Table:
    """The figures with how each was measured; what was not measured says why."""
    table = Table(title=f"hardware profile {config.name}", title_justify="left", show_lines=False)
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("origin", overflow="fold", style="dim")
    lacking = unmeasured(config.origin)
    for path, value in _figures(config):
        origin = lacking.get(path, config.origin.get(path, ""))
        table.add_row(path, "[yellow]not measured[/yellow]" if path in lacking else escape(value), escape(origin))
    for path in sorted(set(lacking) - {path for path, _ in _figures(config)}):
        table.add_row(path, "[yellow]not measured[/yellow]", escape(lacking[path]))
    return table


def _figures(config: HardwareConfig) -> list[tuple[str, str]]:
    gpu = config.gpu
    network = config.network
    rows = [
        *([("network.gbps", f"{network.gbps:.3g} GB/s"), ("network.hop_s", show_seconds(network.hop_s))] if network.gbps else []),
        ("dram_bytes", show_bytes(config.dram_bytes)),
        ("dram.copy_gbps", f"{config.dram.copy_gbps:.1f} GB/s"),
        ("dram.bus_gbps", f"{config.dram.bus_gbps:.1f} GB/s"),
        ("dram.pin_s_per_gb", f"{show_seconds(config.dram.pin_s_per_gb)}/GB"),
        ("ssd_bytes", show_bytes(config.ssd_bytes)),
        ("ssd.write_gbps", f"{config.ssd.write_gbps:.2f} GB/s"),
        ("ssd.read", _read_grid(config.ssd.read)),
        *([("ssd.long_gbps", f"{config.ssd.long_gbps:.2f} GB/s after {config.ssd.burst_s:g} s")] if config.ssd.long_gbps else []),
        ("cpu.cores", str(config.cpu.cores)),
        ("cpu.threads", str(config.cpu.threads)),
        ("cpu.matvec_gbps", f"{config.cpu.matvec_gbps:.1f} GB/s"),
        ("cpu.dense_tflops", f"{config.cpu.dense_tflops:.3g} TFLOP/s"),
        *([("cpu.attention_gbps", f"{config.cpu.attention_gbps:.2f} GB/s")] if config.cpu.attention_gbps else []),
        *([("cpu.attention_tflops", f"{config.cpu.attention_tflops:.3g} TFLOP/s")] if config.cpu.attention_tflops else []),
        ("layer_launch_s", show_seconds(config.layer_launch_s)),
    ]
    if gpu is None:
        return rows + _hops(config.links)
    rows += [("gpu.prompt_piece_s", show_seconds(gpu.prompt_piece_s))] if gpu.prompt_piece_s else []
    if (host := config.host) is not None:
        products = "\n".join(_products(name, rates) for name, rates in host.products.items())
        others = ", ".join(f"{count} for {name}" for name, count in host.format_threads.items())
        rows += [("host.threads", "; ".join(filter(None, [str(host.threads), others]))), ("host.products", products)]
        if host.f16_products:
            rows.append(("host.f16_products", "\n".join(_products(name, rates) for name, rates in host.f16_products.items())))
        rows += [("host.beside_h2d", f"{host.beside_h2d:.0%}"), ("host.h2d_beside", f"{host.h2d_beside:.0%}")]
        rows += [("host.ahead_bytes", f"{show_bytes(host.ahead_bytes)} a thread")] if host.ahead_bytes else []
        rows += [("host.attention_gbps", f"{host.attention_gbps:.1f} GB/s of KV")] if host.attention_gbps else []
        rows += [("host.attention_beside_h2d", f"{host.attention_beside_h2d:.0%}")] if host.attention_beside_h2d else []
        rows += [("host.h2d_beside_attention", f"{host.h2d_beside_attention:.0%}")] if host.h2d_beside_attention else []
    if config.devices is not None:
        rows += [("devices", ", ".join(map(str, config.devices)))]
    if (links := config.links) is not None:
        at_once = "\n".join(f"{count:g} GPUs {gbps:.1f} GB/s" for count, gbps in links.together_gbps)
        rows += [("links.together_gbps", at_once), *_hops(links)]
    rows += _card("", config.vram_bytes, gpu)
    for number, other in enumerate(config.others):
        rows += [(f"others.{number}.device", str(other.device)), *_card(f"others.{number}.", other.vram_bytes, other.gpu)]
    return rows


def _card(of: str, vram_bytes: int, gpu: GpuConfig) -> list[tuple[str, str]]:
    """A card's, whose keys begin with ``of``."""
    return [
        (f"{of}gpu.name", gpu.name),
        (f"{of}vram_bytes", show_bytes(vram_bytes)),
        (f"{of}gpu.context_bytes", show_bytes(gpu.context_bytes)),
        (f"{of}gpu.dense_tflops", f"{gpu.dense_tflops:.0f} TFLOP/s"),
        (f"{of}gpu.attention_tflops", f"{gpu.attention_tflops:.0f} TFLOP/s"),
        *([(f"{of}gpu.burst_tflops", f"{gpu.burst_tflops:.0f} TFLOP/s for {show_seconds(gpu.burst_s)}")] if gpu.burst_tflops else []),
        (f"{of}gpu.memory_gbps", f"{gpu.memory_gbps:.0f} GB/s"),
        (f"{of}gpu.h2d", _curve(gpu.h2d)),
        (f"{of}gpu.d2h", _curve(gpu.d2h)),
        (f"{of}gpu.h2d_pageable_gbps", f"{gpu.h2d_pageable_gbps:.1f} GB/s"),
        (f"{of}gpu.h2d_with_d2h_gbps", f"{gpu.h2d_with_d2h_gbps:.1f} GB/s"),
        (f"{of}gpu.copy_s", show_seconds(gpu.copy_s)),
    ]


def _hops(links: LinksConfig | None) -> list[tuple[str, str]]:
    """Between ranks, as far as they were measured."""
    if links is None or links.hop_s is None:
        return []
    return [("links.hop_s", show_seconds(links.hop_s)), ("links.p2p_gbps", f"{links.p2p_gbps or 0.0:.1f} GB/s")]


def _binary(nbytes: float) -> str:
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:g} KiB"


def _curve(rows: list[list[float]]) -> str:
    return "\n".join(f"{_binary(size)} {rate:.1f} GB/s" for size, rate in rows)


def _products(name: str, rows: list[list[float]]) -> str:
    """GB/s of one format by rows."""
    return f"{name} " + ", ".join(f"{gbps:.1f} GB/s of {count:g} row{'s' * (count > 1)}" for count, gbps in rows)


def _read_grid(rows: list[list[float]]) -> str:
    """A line for each block size, a column for each queue depth, in GB/s."""
    depths = sorted({int(depth) for _, depth, _ in rows})
    rates = {(block, int(depth)): f"{rate:.2f}" for block, depth, rate in rows}
    lines = ["depth".rjust(8) + "".join(f"{depth:>6}" for depth in depths)]
    for block in sorted({block for block, _, _ in rows}):
        lines.append(_binary(block).rjust(8) + "".join(f"{rates.get((block, depth), '-'):>6}" for depth in depths))
    return "\n".join(lines)
