"""What `qkv` alone prints: the commands by purpose, each as a line that can be typed as it stands."""

from __future__ import annotations

MENU: dict[str, dict[str, str]] = {
    "Look at a model": {
        "qkv profile": "measure where every head attends, and write a report",
        "qkv view": "explore the heads of a model, or a saved profile, in your browser",
        "qkv map --layer 1 --head 2": "draw one head, query by key, at any zoom",
        "qkv flow": "trace which tokens the last token's final state comes from",
    },
    "Find out what matters": {
        "qkv ablate": "remove one head after the other: how much the loss rises",
        "qkv evict": "evict keys from the cache: how much attention and loss it costs",
        "qkv survey minilm notes/": "profile a whole corpus, resumable, on many machines",
    },
    "Learn": {
        "qkv lab sinks": "run a lab or a chapter of the tutorial here; qkv lab lists them",
        "qkv check multi_head my.py": "check your answer to an exercise of a lab",
        "qkv train reversal": "train a small model whose correct attention is known (half a minute)",
        "qkv experiment": "claims about attention, tested on small models",
        "qkv claims C014 C061": "what courses claim about attention: verdicts with evidence",
    },
    "Run": {
        'qkv generate qkv-mini "class Stack:"': "continue a text",
    },
}


def show_menu() -> None:
    """Print the menu."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print("[bold]qkv[/bold]: compose, measure and explain attention.")
    for heading, lines in MENU.items():
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(style="cyan", no_wrap=True, min_width=WIDTH)
        table.add_column()
        for command, purpose in lines.items():
            table.add_row(f"  {command}", purpose)
        console.print(f"\n[bold]{heading}[/bold]")
        console.print(table)
    console.print("\nStart with [cyan]qkv profile[/cyan]: a small model comes with qkv, so nothing is downloaded.")
    console.print("[cyan]qkv COMMAND --help[/cyan] shows the options of a command with examples.")


WIDTH = 2 + max(len(command) for lines in MENU.values() for command in lines)
