"""`qkv sources`: from which passages a model read its answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from qkv._progress import spinner
from qkv._untrusted import allow
from qkv.cli.shared import Dtype, folder, read
from qkv.cli.terminal import print_files, print_line, show, table
from qkv.errors import renamed

if TYPE_CHECKING:
    from qkv.profiler.analyses.sources import Sources

OPTIONS = {"passages": "--passages", "question": "--question", "answer": "--answer", "max_new_tokens": "--tokens"}
BEGINS = 48  # characters of a passage in the table


def sources(
    model: Annotated[str, Positional, arg(metavar="[MODEL]")] = "smollm2",
    *,
    passages: Annotated[tuple[Path, ...], arg(metavar="FILE …")],
    question: Annotated[str, arg(metavar="TEXT")],
    answer: Annotated[str | None, arg(metavar="TEXT", help_behavior_hint="")] = None,
    tokens: Annotated[int, arg(metavar="N")] = 100,
    effect: bool = True,
    dtype: Dtype = "float32",
    max_size: Annotated[str | None, arg(metavar="SIZE", help_behavior_hint="")] = None,
    out: Annotated[Path, arg(metavar="DIR")] = Path("qkv-sources"),
) -> None:
    """Tell from which passages a language model read its answer, and whether the answer depends on them.

    The model answers a question about several passages, as in retrieval-augmented generation. For each sentence of the
    answer, every passage gets its share of the attention of the heads that read passages; the first token (the sink),
    the question and the chat template are counted apart. If the passages together get too little, the verdict is that
    none was read. Attention is no cause: beside the share stands the effect, by how many nats the sentence is less
    likely when the passage is hidden from attention, and when it is left out of the prompt.

    The heads are found once for each model, on generated prompts, in a few minutes; those of smollm2 come with qkv. The
    command says how often they were right on other generated prompts.

    qkv sources smollm2 --passages docs/*.txt --question "When was the bridge built?"

    qkv sources smollm2 --passages docs/*.txt --question "…" --no-effect      (one pass, without effects)

    qkv sources ./my-chat-model --passages a.txt b.txt --question "…" --answer "It was built in 1932."

    Args:
        model: "smollm2", a folder with a chat model of Hugging Face, a GGUF file, or a name on the Hugging Face hub.
        passages: Text files; each is one passage, in this order.
        question: What the model is asked.
        answer: Explain this answer instead of the model's own.
        tokens: Largest number of tokens of the model's own answer.
        effect: Also measure the effect of each passage: two forwards for each.
        dtype: Number format of the weights.
        max_size: Memory that a file which is opened may take, such as 8GB: see docs/howto/files-from-strangers.md.
        out: Folder for the results: a page, a table, and JSON, which qkv.Sources.load reads.
    """
    from qkv.models.loading import load_model
    from qkv.profiler.analyses import sources as analysis
    from qkv.report.html import write_sources

    allow(max_size)
    texts = [read(file, "--passages").strip() for file in passages]
    with folder(out), renamed(**OPTIONS):
        analysis.check_texts(texts, question, answer, tokens)
        with spinner(f"loading {model}"):
            loaded = load_model(model, dtype=dtype, head=True)
        found = analysis.sources(
            loaded.model, texts, question, answer=answer, tokenizer=loaded.tokenizer, effect=effect,
            max_new_tokens=tokens, name=loaded.name,
        )  # fmt: skip
        _show(found)
        print_line("Page", write_sources(found, out / "sources.html"), main=True)
        print_files(found.save(out))


def _show(found: Sources) -> None:
    """Print each sentence with its verdict, and the shares and effects of the passages."""
    from rich.text import Text

    from qkv.profiler.analyses.sources import OTHERS
    from qkv.profiler.data.frames import percent, signed

    effects = [name for name in ("hidden", "left_out") if name in found.table]
    for number, sentence in found.sentences.iterrows():
        show(Text(f"\n“{sentence['text']}”", "bold"), f"→ {found.verdict(int(str(number)))}")
        columns = ["passage", ">share", *(f">{name.replace('_', ' ')}, nats" for name in effects), "begins"]
        rows = table(*columns)
        for _, row in found.table[found.table["sentence"] == number].iterrows():
            at = int(row["passage"])
            begins = " ".join(found.passages[at].split())
            short = begins if len(begins) <= BEGINS else f"{begins[: BEGINS - 1]}…"
            rows.add_row(str(at + 1), percent(row["share"]), *(signed(row[name]) for name in effects), short)
        show(rows, "the rest: " + ", ".join(f"{name} {percent(sentence[name])}" for name in OTHERS))
    show("\n" + found.readers.described())
