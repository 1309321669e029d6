"""The page of figures that a monitor reads."""

from __future__ import annotations

import httpx

from tests.runtime.serve.fake_motor import Script
from tests.runtime.serve.played import play, post


def test_metrics_have_the_engine_s_figures_beside_the_front_s() -> None:
    async def ask(client: httpx.AsyncClient) -> str:
        await post(prompt="a")(client)
        return (await client.get("/metrics")).text

    lines = play(Script(), ask).splitlines()
    for line in (
        'penstock_requests_total{path="/v1/completions",status="200"} 1.0',
        "penstock_engine_busy_seconds_total 2.0",
        "penstock_engine_rows 1.0",
        'penstock_kind_passes_total{kind="prompt"} 3.0',
        'penstock_kind_pass_seconds_total{kind="prompt"} 1.5',
        'penstock_kind_predicted_pass_seconds_total{kind="prompt"} 1.25',
        'penstock_kind_longest_pass_seconds{kind="prompt"} 0.75',
        'penstock_binds{resource="link"} 1.0',
        'penstock_tier_bytes{part="kv",tier="vram"} 7.0',
        'penstock_predicted{figure="tokens_per_s"} 3.5',
        "penstock_ttft_seconds_count 1.0",
        "penstock_open_requests 0.0",
        "penstock_ready 1.0",
    ):
        assert line in lines
