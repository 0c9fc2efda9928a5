"""Run the benchmarks and keep their results: python -m benchmarks [NAME …]."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console

from benchmarks import (
    attend_speed,
    decoder_speed,
    llm_speed,
    map_speed,
    measure_speed,
    native_speed,
    own_objects,
    profile_cost,
    server_load,
    statistics_gradients,
    stream,
    survey_speed,
    training_speed,
    viewer,
    viewer_page,
    watch_cost,
)
from benchmarks.timing import save

ALL: dict[str, Callable[[], dict[str, Any]]] = {
    "window": attend_speed.window,
    "window_training": attend_speed.window_training,
    "masks": attend_speed.masks,
    "measure": measure_speed.long,
    "measure_short": measure_speed.short,
    "decode": measure_speed.decode,
    "native": native_speed.native,
    "profile_cost": profile_cost.against_plain,
    "profile_short": profile_cost.of_short_texts,
    "profile_length": profile_cost.against_length,
    "own": own_objects.own,
    "statistics_gradients": statistics_gradients.statistics_gradients,
    "decoder": decoder_speed.decoder,
    "training": training_speed.mechanisms,
    "stream": stream.stream,
    "llm": llm_speed.llm,
    "llm_evict": llm_speed.evicted,
    "llm_survey": llm_speed.surveyed,
    "llm_stream": llm_speed.streamed,
    "map": map_speed.maps,
    "viewer": viewer.viewer,
    "viewer_page": viewer_page.viewer_page,
    "server_load": server_load.server_load,
    "watch": watch_cost.watched,
    "survey": survey_speed.against_plain,
    "survey_processes": survey_speed.of_processes,
}


def main() -> None:
    names = sys.argv[1:] or list(ALL)
    unknown = [n for n in names if n not in ALL]
    if unknown:
        sys.exit(f"no benchmark {', '.join(unknown)}; there are {', '.join(ALL)}")
    console = Console()
    for name in names:
        with console.status(f"{name} …"):
            result = ALL[name]()
        path = save(name, result)
        console.print(f"[bold]{name}[/bold]  [dim]{path.relative_to(path.parents[2])}[/dim]")
        for what, value in result.items():
            if isinstance(value, float):
                console.print(f"  {what}: {value:.3g}", highlight=False)
            elif what.startswith("time"):
                parts = ", ".join(f"{n}: {v:.3f}" for n, v in value.items())
                console.print(f"  {what}: {parts}", highlight=False)


if __name__ == "__main__":
    main()
