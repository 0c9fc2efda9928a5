"""Patches of images: a patch that is changed lights up at its place, in every family, at several sizes of the image."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qkv
from conftest import Command
from qkv.profiler.capture.patches import window
from qkv.profiler.data import images
from viewer_fixture import Tab, inaccessible, serving

pytest_plugins = ["viewer_fixture"]

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
Image = pytest.importorskip("PIL.Image")

MARKS = [
    "<image>", "<start>", "<end>", "<boi>", "<eoi>", "<fake_token_around_image>", "<global-img>",
    *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)),
]  # fmt: skip
SIZES = [(24, 24), (20, 52), (50, 22)]  # height, width
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TOWER = SMALL | {"image_size": 16, "patch_size": 4}
TEXT = SMALL | {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 320, "pad_token_id": None, "rms_norm_eps": 1e-6}


@cache
def tokenizer() -> Any:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="<pad>")
    found.add_special_tokens({"additional_special_tokens": MARKS})
    return found


def cut(family: str, name: str, **settings: Any) -> Any:
    """An image processor that needs no torchvision."""
    module = import_module(f"transformers.models.{family}.image_processing_pil_{family}")
    return getattr(module, f"{name}ImageProcessorPil")(**settings)


def build(config: Any, kind: str) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, kind)(config).eval()


def written(pixels: dict[str, Tensor], *pieces: str) -> dict[str, Tensor]:
    """The inputs of a text with the tokens of an image in it."""
    ids = tokenizer()("".join(["Look: ", *pieces, " what is it?"]), return_tensors="pt")["input_ids"]
    return {"input_ids": ids, **pixels}


Family = tuple[Any, Any, Callable[[Any], dict[str, Tensor]]]
"""The model, its processor, and the inputs of an image."""


def token(name: str) -> int:
    return int(tokenizer().convert_tokens_to_ids(name))


def processed(images: Any, picture: Any) -> dict[str, Tensor]:
    return dict(images(picture, return_tensors="pt"))


def qwen(generation: str, patch: int) -> Family:
    images = cut(
        "qwen2_vl", "Qwen2VL", patch_size=patch, merge_size=2, temporal_patch_size=2,
        size={"shortest_edge": 64, "longest_edge": 4096},
    )  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    name = f"{generation}VL"
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": patch}
    tower |= {"out_hidden_size": 32, "window_size": 64, "fullatt_block_indexes": [0]} if patch == 14 else {
        "out_hidden_size": 32, "deepstack_visual_indexes": [], "num_position_embeddings": 64
    }  # fmt: skip
    kind = getattr(transformers, f"{name}Config".replace("2_5VL", "2_5_VL"))
    config = kind(
        text_config=TEXT | {"rope_parameters": rope, "max_position_embeddings": 512}, vision_config=tower,
        image_token_id=token("<image>"), vision_start_token_id=token("<start>"), vision_end_token_id=token("<end>"),
    )  # fmt: skip

    def inputs(picture: Any) -> dict[str, Tensor]:
        pixels = processed(images, picture)
        found = written(pixels, "<start>", "<image>" * (int(pixels["image_grid_thw"].prod()) // 4), "<end>")
        return found | {"mm_token_type_ids": (found["input_ids"] == token("<image>")).int()}

    return build(config, kind.__name__.replace("Config", "Model")), SimpleNamespace(image_processor=images), inputs


def fixed(kind: str, tower: str, cells: int, images: Any, text: str = "Llama", **settings: Any) -> Family:
    config = getattr(transformers, f"{kind}Config")(
        vision_config=getattr(transformers, f"{tower}VisionConfig")(**TOWER),
        text_config=getattr(transformers, f"{text}Config")(**TEXT), image_token_index=token("<image>"), **settings,
    )  # fmt: skip

    def inputs(picture: Any) -> dict[str, Tensor]:
        found = written(processed(images, picture), "<boi>", "<image>" * cells, "<eoi>")
        types = (found["input_ids"] == token("<image>")).long()
        return found | ({} if kind == "Llava" else {"token_type_ids": types if kind == "Gemma3" else 0 * types})

    return build(config, f"{kind}Model"), SimpleNamespace(image_processor=images, tokenizer=tokenizer()), inputs


def llava_next() -> Family:
    pinpoints = [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]]
    images = cut(
        "llava_next", "LlavaNext", image_grid_pinpoints=pinpoints, size={"shortest_edge": 16},
        crop_size={"height": 16, "width": 16},
    )  # fmt: skip
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**TOWER), text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=token("<image>"), image_grid_pinpoints=pinpoints,
    )  # fmt: skip
    processor = transformers.LlavaNextProcessor(
        images, tokenizer(), patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )

    def inputs(picture: Any) -> dict[str, Tensor]:
        return dict(processor(images=[picture], text="Look: <image> what is it?", return_tensors="pt"))

    return build(config, "LlavaNextModel"), processor, inputs


def idefics(kind: str) -> Family:
    images = cut("idefics3", "Idefics3", size={"longest_edge": 48}, max_image_size={"longest_edge": 16})
    config = getattr(transformers, f"{kind}Config")(
        vision_config=TOWER, text_config=transformers.LlamaConfig(**TEXT), image_token_id=token("<image>"),
        scale_factor=2,
    )  # fmt: skip
    processor = transformers.Idefics3Processor(images, tokenizer(), image_seq_len=4)

    def inputs(picture: Any) -> dict[str, Tensor]:
        return dict(processor(images=[picture], text="Look: <image> what is it?", return_tensors="pt"))

    return build(config, f"{kind}Model"), processor, inputs


def internvl() -> Family:
    images = cut("got_ocr2", "GotOcr2", size={"height": 16, "width": 16}, crop_to_patches=True, max_patches=6)
    config = transformers.InternVLConfig(
        vision_config=TOWER | {"image_size": [16, 16], "patch_size": [4, 4]},
        text_config=transformers.Qwen2Config(**TEXT), image_token_id=token("<image>"), image_seq_length=4,
    )  # fmt: skip

    def inputs(picture: Any) -> dict[str, Tensor]:
        pixels = processed(images, picture)
        return written(pixels, "<start>", "<image>" * (4 * int(pixels.pop("num_patches"))), "<end>")

    return build(config, "InternVLModel"), SimpleNamespace(image_processor=images, tokenizer=tokenizer()), inputs


def encoder(kind: str, images: Any, **settings: Any) -> Family:
    config = getattr(transformers, f"{kind}Config")(**TOWER, **settings)
    return build(config, f"{kind}Model"), images, lambda picture: processed(images, picture)


def squares(family: str = "siglip", name: str = "Siglip") -> Any:
    return cut(family, name, size={"height": 16, "width": 16})


def cropped() -> Any:
    return cut("clip", "CLIP", size={"shortest_edge": 20}, crop_size={"height": 16, "width": 16})


def padded() -> Any:
    return cut("llava", "Llava", size={"height": 16, "width": 16}, do_pad=True, do_center_crop=False)


FAMILIES: dict[str, Callable[[], Family]] = {
    "Qwen2.5-VL": lambda: qwen("Qwen2_5", 14),
    "Qwen3-VL": lambda: qwen("Qwen3", 16),
    "LLaVA": lambda: fixed("Llava", "CLIP", 16, cropped()),
    "LLaVA padded": lambda: fixed("Llava", "Siglip", 16, padded(), vision_feature_select_strategy="full"),
    "LLaVA-NeXT": llava_next,
    "Gemma 3": lambda: fixed("Gemma3", "Siglip", 4, squares(), "Gemma3Text", mm_tokens_per_image=4),
    "PaliGemma": lambda: fixed("PaliGemma", "Siglip", 16, squares(), "Gemma", projection_dim=32),
    "Idefics 3": lambda: idefics("Idefics3"),
    "SmolVLM": lambda: idefics("SmolVLM"),
    "InternVL": internvl,
    "ViT": lambda: encoder("ViT", squares()),
    "DINOv2 with registers": lambda: encoder("Dinov2WithRegisters", cropped(), num_register_tokens=3),
    "CLIP": lambda: encoder("CLIPVision", cropped()),
    "SigLIP": lambda: encoder("SiglipVision", squares()),
}


@cache
def family(name: str) -> Family:
    """A tiny random model; in its vision tower no patch sees another, and keys of text match what is changed."""
    model, processor, inputs = FAMILIES[name]()
    tower = getattr(model, "vision_tower", getattr(model, "visual", getattr(model, "vision_model", None)))
    for part, weight in model.named_parameters():
        if part.endswith("mm_input_projection_weight"):  # zeros at first
            nn.init.normal_(weight)
    for part, module in model.named_modules():
        if part.endswith(("q_norm", "k_norm")) and hasattr(module, "weight"):
            nn.init.constant_(module.weight, 8.0)
    for part, module in (model if tower is None else tower).named_modules():
        if "attn" in part or "attention" in part:
            last = part.rpartition(".")[2] in ("out_proj", "proj", "dense", "projection_layer", "o_proj")
            if last and isinstance(module, nn.Linear):
                nn.init.zeros_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
    return model, processor, inputs


def projections(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The projections of queries and keys of the last attention layer: the language model's, if there is one."""
    reader = getattr(model, "language_model", getattr(model, "text_model", model))
    found = {part.rpartition(".")[2]: module for part, module in reader.named_modules()}
    return tuple(found[name] for name in (("q_proj", "k_proj") if "q_proj" in found else ("query", "key")))  # type: ignore[return-value]


@contextmanager
def looking_for_changes(model: nn.Module, before: Tensor) -> Iterator[None]:
    """Inside, all queries of the last layer look for keys whose input is another than it was `before`."""
    query, key = projections(model)
    width = 16 if key.weight.shape[0] <= 16 else key.weight.shape[0] // 2

    def ask(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        out = torch.zeros_like(out)
        out[..., width // 2 - 1 :: width] = 8.0  # a dimension that rotary positions hardly turn
        return out

    def answer(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        changed = (args[0] - before).norm(dim=-1)
        out = 8 * torch.ones_like(out)  # so that a norm of keys leaves the changes
        out[..., width // 2 - 1 :: width] = (40 * changed / changed.max().clamp(min=1e-6))[..., None]
        return out

    hooks = [query.register_forward_hook(ask), key.register_forward_hook(answer)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def inputs_of_keys(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    found: list[Tensor] = []
    hook = projections(model)[1].register_forward_hook(lambda module, args, out: found.append(args[0].detach()))
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return found[-1]


def picture(height: int, width: int) -> np.ndarray:
    """A smooth picture, no two parts of which are alike."""
    y, x = np.mgrid[:height, :width] / max(height, width)
    return (255 * np.stack([0.3 * y, 0.3 * x, 0.1 + 0.2 * x * y], -1)).astype(np.uint8)


def profiled(name: str, array: np.ndarray, **options: Any) -> qkv.Profile:
    model, processor, inputs = family(name)
    return qkv.profile(
        model, inputs(Image.fromarray(array)), tokenizer=processor, progress=False, probe=False, **options
    )


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_changed_patch_lights_up_at_its_place(name: str, size: tuple[int, int]) -> None:
    model, _, inputs = family(name)
    scale = 4 if name.startswith("Qwen") else 2  # pixels enough for several cells
    array = picture(scale * size[0], scale * size[1])
    clean = profiled(name, array)
    [(group, seen)] = clean.attrs["images"].items()
    place = clean.groups[group]["patch"].values[0]
    before = inputs_of_keys(model, inputs(Image.fromarray(array)))
    patches = np.flatnonzero(~np.isnan(place[:, 0]))
    for at in np.random.default_rng(1).choice(patches, 3, replace=False):
        top, left, tall, wide = window(seen, *array.shape[:2])
        rows, columns = (place[at, [2, 4]] * tall + top, place[at, [3, 5]] * wide + left)
        painted = array.copy()
        spot = tuple(slice(max(round(a), 0), max(round(b), 0)) for a, b in (rows, columns))
        painted[spot] = 255
        if painted[spot].size < 12:
            continue  # in the padding of the image
        with looking_for_changes(model, before):
            data = profiled(name, painted).groups[group]
        same_view = patches[place[patches, 1] == place[at, 1]]
        row = data["weights"].values[0, -1, 0, -1, same_view]
        names = data["key_token"].values[0]
        assert names[same_view[row.argmax()]] == names[at], (names[at], row.max())


@pytest.fixture(scope="module")
def tiles() -> Any:
    """A profile of LLaVA-NeXT, whose head 1 has a sink at a patch."""
    model, _, inputs = family("LLaVA-NeXT")
    array = picture(40, 60)
    before = inputs_of_keys(model, inputs(Image.fromarray(array)))
    array[5:12, :7] = 255  # patch 1,0 of its tiles
    with looking_for_changes(model, before):
        found = profiled("LLaVA-NeXT", array)
        long = profiled("LLaVA-NeXT", array, map_tokens=30)
    return SimpleNamespace(array=array, short=found, long=long, inputs=inputs(Image.fromarray(array)), model=model)


def test_shares_of_image_sinks_and_text_are_sums_of_the_weights(tiles: Any) -> None:
    data = tiles.short.groups["text"]
    weights, place = data["weights"].values[0], data["patch"].values[0]
    is_patch = ~np.isnan(place[:, 0])
    rows = np.flatnonzero(np.isfinite(data["image"].values[0, 0, 0]))
    assert len(rows) == len("what is it?") + 1
    assert rows[0] == np.flatnonzero(is_patch)[-1] + 2  # after the mark of the last row
    visible = np.tril(np.ones_like(weights[0, 0])).sum(0)
    sinks = (np.nansum(weights, 2) / visible > 0.3) & is_patch & (visible >= 8)
    assert sinks.any()
    heads = tiles.short.image_shares()
    for name, part in (("image", is_patch & ~sinks), ("image_sinks", sinks)):
        want = np.einsum("lhqk,lhk->lhq", np.nan_to_num(weights), part)[:, :, rows].mean(-1)
        np.testing.assert_allclose(heads[name], want.ravel(), atol=1e-6)
    assert heads[["image", "image_sinks", "sink", "text"]].sum(axis=1).to_numpy() == pytest.approx(1, abs=1e-5)
    tokens = tiles.short.image_shares("token")
    assert tokens["chose"].tolist() == [*tokens["token"].tolist()[1:], ""]
    assert tokens["image_sinks"].mean() == pytest.approx(heads["image_sinks"].mean(), abs=1e-6)
    found = tiles.short.sink_tokens(group="text").iloc[0]
    assert (found["token"], found["place"]) == ("patch 1,0", "border of the image")


def test_rows_on_patches_of_long_texts_equal_all_weights(tiles: Any) -> None:
    assert "weights" not in tiles.long.groups["text"]
    for token in (-1, -5):
        short, long = (p.plot.image(tiles.array, token, layer=0, head=1).axes[1] for p in (tiles.short, tiles.long))
        shades = [axes.images[1].get_array() for axes in (short, long)]
        np.testing.assert_allclose(*shades, atol=1e-6)
    with pytest.raises(qkv.InputError, match=r"keeps the weights of \d+ tokens .* larger map_tokens"):
        tiles.long.plot.image(tiles.array, 0)


def test_a_figure_of_an_image_draws_its_patches_where_they_are(tiles: Any) -> None:
    figure = tiles.short.plot.image(tiles.array, [-1], layer=0, head=0)
    drawn = figure.axes[1].images[1]
    down, across = (n - 2 for n in drawn.get_array().shape)  # without the border, into which colours are continued
    left, right, bottom, top = drawn.get_extent()
    cell = 4 * 60 / 32  # 4 pixels of the 32 of the tiles, of an image of 60
    assert ((right - left) / (across + 2), (bottom - top) / (down + 2)) == pytest.approx((cell, cell))
    assert (left + cell, right - cell, (top + bottom) / 2) == pytest.approx((-0.5, 59.5, 19.5), abs=1e-3)
    for options, match in (
        ({"number": 1}, "number is 1, expected 0 to 0"), ({"token": 99}, "token is 99, expected a position from 0 to"),
        ({"head": 0, "layer": 7}, "layer is 7"), ({"text": 3}, "text: got 3"),
    ):  # fmt: skip
        with pytest.raises(qkv.InputError, match=match):
            tiles.short.plot.image(tiles.array, **options)


def test_the_viewer_draws_the_weights_of_a_token_over_the_image(tiles: Any, tab: Callable[..., Tab]) -> None:
    def add(session: Any) -> dict[str, int]:
        of = session.add_profile(tiles.short, image=Image.fromarray(tiles.array))
        return {"image": of.id, "bare": session.add_profile(tiles.short).id}

    weights = tiles.short.groups["text"]["weights"].values[0, 0, 1, -1]
    grids = dict(images.grids(tiles.short.groups["text"]))
    with serving("test", add) as served:
        group = [*tiles.short.groups].index("text")
        for source in ("image", "bare"):
            one = tab(served).open("text", source, group=group, layer=0, head=1)
            for figure, keys in zip(
                one.page.locator(".text-patch").all(), (g.keys for g in grids.values()), strict=True
            ):
                assert figure.locator("img").count() == (source == "image")
                shade = figure.locator("i").evaluate_all("x => x.map((one) => one.style.background)")
                dark = [float(re.findall(r"[\d.]+", one)[-1]) for one in shade]
                expected = 0.78 * (1 - weights[keys.ravel()] / weights[keys].max())
                np.testing.assert_allclose(dark, expected, atol=4e-3)
            assert inaccessible(one.page) == []


def test_images_survive_saving_and_rounding(tiles: Any, tmp_path: Any) -> None:
    found = qkv.Profile.load(tiles.long.save(tmp_path / "one.qkv.zip"))
    assert found.image_shares().round(3).equals(tiles.long.image_shares().round(3))
    assert found.plot.image(tiles.array, -1).axes


def test_what_is_not_known_is_said_in_one_sentence(tiles: Any) -> None:
    model, _, inputs = family("LLaVA")
    read = inputs(Image.fromarray(tiles.array))
    without = qkv.profile(model, read, progress=False, probe=False)
    assert without.groups["text"]["key_token"].values[0, 7] == "patch 0,0"
    with pytest.raises(qkv.InputError, match="how the image was cut is not known; pass tokenizer=processor"):
        without.plot.image(tiles.array)
    with pytest.raises(qkv.InputError, match="no keys are patches of an image"):
        qkv.profile("qkv-mini", "x = 1", progress=False, probe=False).image_shares()
    model, _, inputs = family("Idefics 3")
    marks = qkv.profile(model, inputs(Image.fromarray(tiles.array)), progress=False, probe=False)
    with pytest.raises(qkv.InputError, match="not known: the rows and columns of tiles are in the names of tokens"):
        marks.image_shares()
    model, processor, inputs = family("InternVL")
    flat = inputs(Image.fromarray(np.full((20, 100, 3), 90, np.uint8)))
    with pytest.raises(qkv.InputError, match="tiles of an image look alike"):
        qkv.profile(model, flat, tokenizer=processor, progress=False, probe=False).image_shares()


def test_several_images_are_told_apart() -> None:
    model, processor, inputs = family("Qwen2.5-VL")
    both = [inputs(Image.fromarray(picture(*size))) for size in ((96, 96), (80, 200))]
    read = {
        name: torch.cat([x[name] for x in both], 0 if name in ("pixel_values", "image_grid_thw") else 1)
        for name in both[0]
    }
    data = qkv.profile(model, read, tokenizer=processor, progress=False, probe=False).groups["text"]
    names, place = data["key_token"].values[0].tolist(), data["patch"].values[0]
    sizes = [tuple(n // 2 for n in x["image_grid_thw"][0, 1:].tolist()) for x in both]
    for number, (down, across) in enumerate(sizes):
        assert (place[:, 0] == number).sum() == down * across
        assert f"image {number + 1} patch {down - 1},{across - 1}" in names


def test_a_map_names_the_patches() -> None:
    model, processor, inputs = family("InternVL")
    found = qkv.profiler.attention_map(
        model, inputs(Image.fromarray(picture(40, 90))), layer=0, head=0, tokenizer=processor, group="text"
    )
    assert found.key_tokens(slice(7, 9)) == ["patch 0,0", "patch 0,1"]
    assert "thumbnail 1,1" in found.key_tokens()
    assert found.key_tokens()[-1] == "?"  # the processor has the tokenizer


def test_registers_and_class_token_of_an_encoder_are_named() -> None:
    found = profiled("DINOv2 with registers", picture(40, 40))
    assert found.data["key_token"].values[0, :5].tolist() == [
        "[CLS]",
        "register 1",
        "register 2",
        "register 3",
        "patch 0,0",
    ]
    table = found.image_shares()
    registers = found.data["weights"].values[0, :, :, :, 1:4].sum(-1).mean(-1).ravel()
    np.testing.assert_allclose(table["text"], registers, atol=1e-5)
    assert str(found.findings()[0]).startswith(f"{(1 - table['sink'] - table['text']).mean():.0%}"[:2])


def test_the_command_line_reads_an_image(tmp_path: Any, command: Command, undrawn: None) -> None:
    model, processor, _ = family("LLaVA-NeXT")
    model.save_pretrained(tmp_path / "vlm")
    processor.save_pretrained(tmp_path / "vlm")
    Image.fromarray(picture(40, 60)).save(tmp_path / "one.png")
    given = (tmp_path / "vlm", "What is it?", "--image", tmp_path / "one.png")
    said = command.succeeds("profile", *given, "--no-probe", "--out", tmp_path / "out")
    assert "attention is on patches of the image" in said
    assert f"--image {tmp_path / 'one.png'} --layer" in " ".join(said.split())
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("Where it looks in the image") == 1
    assert page.count("alt='The last token") == 2
    kept = qkv.Profile.load(tmp_path / "out" / "profile.qkv.zip")
    assert "thumbnail 0,0" in kept.groups["text"]["key_token"].values[0].tolist()
    said = command.succeeds("map", *given, "--layer", 0, "--head", 1, "--group", "text", "--out", tmp_path / "map.png")
    assert "text attention" in said or "Map" in said
    assert "--image: cannot read" in command.refuses("profile", tmp_path / "vlm", "?", "--image", tmp_path / "vlm")
    for name in ("profile", "view"):
        assert "reads no images" in command.refuses(name, "qkv-mini", "x", "--image", tmp_path / "one.png")
