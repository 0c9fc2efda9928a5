"""Every Hugging Face architecture that the profiler is held to, as a table: see hf_zoo for how they are built and read.

Sizes come from one list of names that configurations use (`SMALL`), wherever a configuration has that name; a row of
the table says only what is different. Two layers, 4 heads, a hidden size of 64, texts of 32 tokens, windows of 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LENGTH, TARGET = 32, 10  # tokens of a text, and of a decoder's text
VOCABULARY = 97
SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "embedding_dim", "encoder_hidden_size"), 64
    ),
    **dict.fromkeys(
        (
            "intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim", "d_inner",
            "dff",
        ),
        80,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
            "num_decoder_layers", "num_encoder_layers",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "attention_heads",
            "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
        ),
        4,
    ),
    "num_key_value_heads": 2, "head_dim": 16, "d_kv": 16,
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_seq_length"), 64),
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
    "decoder_start_token_id": 0,
    "sliding_window": 8,
    "image_size": 16, "patch_size": 4,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "projection_dim": 24,
    "partial_rotary_factor": 0.5,
    "query_pre_attn_scalar": 12,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One architecture: its module in transformers.models, and the settings that differ from `SMALL`."""

    family: str
    classes: str  # prefix of the classes "…Config" and "…Model"
    settings: Mapping[str, Any] = field(default_factory=dict)
    reads: str = "text"  # text, texts (source and target), image, and others: see `inputs`
    padding: str | None = "left"
    suffix: str = "Model"


def text(family: str, classes: str, **settings: Any) -> Row:
    return Row(family, classes, settings)


def texts(family: str, classes: str, **settings: Any) -> Row:
    return Row(family, classes, settings, "texts")


def image(family: str, classes: str, **settings: Any) -> Row:
    return Row(family, classes, settings, "image", None)


DROP = object()  # keep the configuration's default
SSM = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8,
       "mamba_d_conv": 4, "mamba_expand": 2}  # fmt: skip
MLA = {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
       "v_head_dim": 16, "first_k_dense_replace": 2, "n_group": 2, "topk_group": 1, "head_dim": DROP,
       "partial_rotary_factor": DROP}  # fmt: skip
CONV = {"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4}  # fmt: skip
SAMPLES = 330  # audio samples, which give 32 frames
IMAGE = 3  # id of the token that stands for a piece of an image; texts have none so small

ROUTED: dict[str, Row] = {
    "gpt2": text("gpt2", "GPT2"),
    "gpt2_reorder_upcast": text("gpt2", "GPT2", reorder_and_upcast_attn=True),
    "gpt_bigcode": text("gpt_bigcode", "GPTBigCode"),
    "ctrl": text("ctrl", "CTRL"),
    "gpt_neox": text("gpt_neox", "GPTNeoX"),
    "opt": text("opt", "OPT", word_embed_proj_dim=64),
    "llama": text("llama", "Llama"),
    "mistral": text("mistral", "Mistral"),
    "mixtral": text("mixtral", "Mixtral"),
    "qwen2": text("qwen2", "Qwen2"),
    "qwen2_swa": text("qwen2", "Qwen2", use_sliding_window=True, layer_types=["full_attention", "sliding_attention"]),
    "qwen2_moe": text("qwen2_moe", "Qwen2Moe"),
    "qwen3": text("qwen3", "Qwen3"),
    "qwen3_moe": text("qwen3_moe", "Qwen3Moe"),
    "qwen3_next": text("qwen3_next", "Qwen3Next", layer_types=["full_attention"] * 2),
    "qwen3_5_text": text("qwen3_5", "Qwen3_5Text", layer_types=["full_attention"] * 2),
    "gemma": text("gemma", "Gemma"),
    "gemma2": text("gemma2", "Gemma2", attn_logit_softcapping=5.0),
    "gemma3": text("gemma3", "Gemma3Text", layer_types=["sliding_attention", "full_attention"]),
    "gemma3n": text(
        "gemma3n", "Gemma3nText", num_hidden_layers=4, num_kv_shared_layers=0, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY, laurel_rank=8, activation_sparsity_pattern=[0.0] * 4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gemma4_text": text("gemma4", "Gemma4Text", layer_types=["sliding_attention", "full_attention"],
                        hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY, num_kv_shared_layers=0,
                        global_head_dim=16, num_experts=DROP),
    "phi": text("phi", "Phi"),
    "phi3": text("phi3", "Phi3", partial_rotary_factor=DROP),
    "phimoe": text("phimoe", "Phimoe", partial_rotary_factor=DROP),
    "gpt_oss": text("gpt_oss", "GptOss", layer_types=["sliding_attention", "full_attention"]),
    "olmo": text("olmo", "Olmo"),
    "olmo2": text("olmo2", "Olmo2"),
    "olmo3": text("olmo3", "Olmo3", layer_types=["sliding_attention", "full_attention"]),
    "olmoe": text("olmoe", "Olmoe"),
    "cohere": text("cohere", "Cohere"),
    "cohere2": text("cohere2", "Cohere2", layer_types=["sliding_attention", "full_attention"]),
    "stablelm": text("stablelm", "StableLm"),
    "starcoder2": text("starcoder2", "Starcoder2"),
    "deepseek_v3": text("deepseek_v3", "DeepseekV3", **MLA),
    "deepseek_v32": text("deepseek_v32", "DeepseekV32", **MLA, index_topk=8, index_head_dim=16, index_n_heads=2,
                         mlp_layer_types=["dense", "dense"]),
    "llama4_text": text("llama4", "Llama4Text", num_hidden_layers=4, attention_chunk_size=8, intermediate_size_mlp=72,
                        num_experts_per_tok=1),
    "smollm3": text("smollm3", "SmolLM3"),
    # The default multiplier, 1, makes scores of 43, whose rounding alone is 3e-6 in float32.
    "granite": text("granite", "Granite", attention_multiplier=0.3),
    "granitemoehybrid": text("granitemoehybrid", "GraniteMoeHybrid", layer_types=["mamba", "attention"], **SSM,
                             shared_intermediate_size=24),
    "nemotron": text("nemotron", "Nemotron"),
    "persimmon": text("persimmon", "Persimmon"),
    "glm4": text("glm4", "Glm4"),
    "ernie4_5": text("ernie4_5", "Ernie4_5"),
    "exaone4": text("exaone4", "Exaone4", layer_types=["sliding_attention", "full_attention"]),
    "jamba": text("jamba", "Jamba", attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
                  expert_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False),
    "bamba": text("bamba", "Bamba", attn_layer_indices=[1], **SSM),
    "zamba2": text("zamba2", "Zamba2", layers_block_type=["mamba", "hybrid"], mamba_headdim=16, n_mamba_heads=8,
                   mamba_d_state=8, mamba_ngroups=1, chunk_size=8, num_mem_blocks=1, attention_head_dim=32,
                   use_mamba_kernels=False, num_key_value_heads=4, hybrid_layer_ids=[1]),
    "falcon_h1": text("falcon_h1", "FalconH1", **SSM, mamba_d_ssm=128),
    "nemotron_h": text("nemotron_h", "NemotronH", layers_block_type=["mamba", "attention"], mamba_num_heads=8,
                       mamba_head_dim=16, ssm_state_size=8, n_groups=1, chunk_size=8, num_hidden_layers=DROP),
    "lfm2": text("lfm2", "Lfm2", layer_types=["conv", "full_attention"]),
    "recurrent_gemma": text("recurrent_gemma", "RecurrentGemma", block_types=["recurrent", "attention"], lru_width=64,
                            attention_window_size=8),
    "doge": text("doge", "Doge", num_experts=DROP),
    "diffllama": text("diffllama", "DiffLlama"),
    "modernbert_decoder": text("modernbert_decoder", "ModernBertDecoder", local_attention=16,
                               layer_types=["sliding_attention", "full_attention"]),
    "bitnet": text("bitnet", "BitNet"),
    "helium": text("helium", "Helium"),
    "jetmoe": text("jetmoe", "JetMoe", kv_channels=16),
    "apertus": text("apertus", "Apertus"),
    "seed_oss": text("seed_oss", "SeedOss"),
    "minimax": text("minimax", "MiniMax", layer_types=["linear_attention", "full_attention"], block_size=8),
    "biogpt": text("biogpt", "BioGpt"),
    "bert_decoder": text("bert", "Bert", is_decoder=True),
    "afmoe": text("afmoe", "Afmoe", layer_types=["sliding_attention", "full_attention"], num_dense_layers=1),
    "deepseek_v4": text("deepseek_v4", "DeepseekV4", num_key_value_heads=1),
    "dbrx": text("dbrx", "Dbrx", attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
                 ffn_config={"hidden_size": 64, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}),
    "bert": text("bert", "Bert"),
    "roberta": text("roberta", "Roberta"),
    "xlm_roberta": text("xlm_roberta", "XLMRoberta"),
    "distilbert": text("distilbert", "DistilBert"),
    "albert": text("albert", "Albert", embedding_size=24),
    "electra": text("electra", "Electra", embedding_size=24),
    "modernbert": text("modernbert", "ModernBert", local_attention=8),
    "esm": text("esm", "Esm", position_embedding_type="rotary", mask_token_id=3, token_dropout=False),
    "ernie": text("ernie", "Ernie"),
    "mobilebert": text("mobilebert", "MobileBert", normalization_type="layer_norm", intra_bottleneck_size=32,
                       embedding_size=24, true_hidden_size=32),
    "eurobert": text("eurobert", "EuroBert"),
    "nomic_bert": text("nomic_bert", "NomicBert"),
    "layoutlm": text("layoutlm", "LayoutLM"),
    "xmod": text("xmod", "Xmod", languages=["en_XX"], default_language="en_XX"),
    "t5": texts("t5", "T5"),
    "mt5": texts("mt5", "MT5"),
    "umt5": texts("umt5", "UMT5"),
    "switch_transformers": texts("switch_transformers", "SwitchTransformers"),
    "longt5_local": texts("longt5", "LongT5", local_radius=5),
    "longt5_tglobal": texts("longt5", "LongT5", local_radius=5, encoder_attention_type="transient-global",
                            global_block_size=4),
    "bart": texts("bart", "Bart"),
    "mbart": texts("mbart", "MBart"),
    "marian": texts("marian", "Marian"),
    "pegasus": texts("pegasus", "Pegasus"),
    "pegasus_x": texts("pegasus_x", "PegasusX", num_global_tokens=4, block_size=8),
    "blenderbot": texts("blenderbot", "Blenderbot"),
    "m2m_100": texts("m2m_100", "M2M100"),
    "plbart": texts("plbart", "PLBart"),
    "bigbird_pegasus": texts("bigbird_pegasus", "BigBirdPegasus", block_size=4, num_random_blocks=1),
    "t5gemma": texts("t5gemma", "T5Gemma"),
    "encoder_decoder(bert2gpt2)": Row("encoder_decoder", "EncoderDecoder", {}, "texts"),
    "vit": image("vit", "ViT"),
    "deit": image("deit", "DeiT"),
    "beit": image("beit", "Beit", use_relative_position_bias=True),
    "dinov2": image("dinov2", "Dinov2"),
    "dinov2_with_registers": image("dinov2_with_registers", "Dinov2WithRegisters"),
    "dinov3_vit": image("dinov3_vit", "DINOv3ViT"),
    "ijepa": image("ijepa", "IJepa"),
    "vit_mae": Row("vit_mae", "ViTMAE", {"decoder_num_attention_heads": 4, "decoder_hidden_size": 64,
                   "decoder_num_hidden_layers": 2, "decoder_intermediate_size": 80}, "image", None, "ForPreTraining"),
    "vit_msn": image("vit_msn", "ViTMSN"),
    "yolos": image("yolos", "Yolos", image_size=[16, 16]),
    "dpt": image("dpt", "DPT", num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3]),
    "swin": image("swin", "Swin", embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, image_size=32,
                  patch_size=2),
    "segformer": image("segformer", "Segformer", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[4, 2],
                       hidden_sizes=[16, 32], num_attention_heads=[2, 4], patch_sizes=[7, 3], strides=[4, 2],
                       mlp_ratios=[2, 2], image_size=32),
    "videomae": Row("videomae", "VideoMAE", {"num_frames": 2, "tubelet_size": 2}, "video", None),
    "vivit": Row("vivit", "Vivit", {"num_frames": 2, "tubelet_size": [2, 4, 4]}, "video", None),
    "vjepa2": Row("vjepa2", "VJEPA2", {"crop_size": 16, "frames_per_clip": 2, "tubelet_size": 2,
                  "pred_hidden_size": 64, "pred_num_attention_heads": 4, "pred_num_hidden_layers": 2}, "clip", None),
    "detr": Row("detr", "Detr", {"num_queries": 6, "image_size": 64}, "image", None),
    "sam": Row("sam", "Sam", {"vision_config": {"output_channels": 16, "global_attn_indexes": [1], "window_size": 2,
               "num_pos_feats": 8, "mlp_dim": 80}, "prompt_encoder_config": {"hidden_size": 16,
               "image_embedding_size": 4, "mask_input_channels": 4}, "mask_decoder_config": {"hidden_size": 16,
               "num_attention_heads": 2, "mlp_dim": 24, "iou_head_hidden_dim": 24}}, "points", None),
    "clip": Row("clip", "CLIP", {}, "both", "right"),
    "siglip": Row("siglip", "Siglip", {}, "both", "right"),
    "altclip": Row("altclip", "AltCLIP", {}, "both", "right"),
    "chinese_clip": Row("chinese_clip", "ChineseCLIP", {}, "both", "right"),
    "llava": Row("llava", "Llava", {"image_token_index": IMAGE, "image_seq_length": 16}, "described"),
    "paligemma": Row("paligemma", "PaliGemma", {"image_token_index": IMAGE, "projection_dim": 64},
                     "described", None),
    "gemma3_vlm": Row("gemma3", "Gemma3", {"mm_tokens_per_image": 4, "image_token_index": IMAGE, "text_config": {
                      "layer_types": ["sliding_attention", "full_attention"]}}, "described", None),
    "qwen2_5_vl": Row("qwen2_5_vl", "Qwen2_5_VL", {"image_token_id": IMAGE, "vision_config": {"depth": 2,
                      "out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1]}, "text_config": {
                      "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}},
                      "patches", None),
    "mllama": Row("mllama", "Mllama", {"image_token_index": IMAGE, "vision_config": {"num_global_layers": 1,
                  "max_num_tiles": 1, "vision_output_dim": 128, "intermediate_layers_indices": [1],
                  "supported_aspect_ratios": [[1, 1]]},
                  "text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]}}, "tiles", None),
    "idefics3": Row("idefics3", "Idefics3", {"image_token_id": IMAGE, "scale_factor": 2}, "described", None),
    "wav2vec2": Row("wav2vec2", "Wav2Vec2", CONV, "sound", "right"),
    "hubert": Row("hubert", "Hubert", CONV, "sound", "right"),
    "unispeech": Row("unispeech", "UniSpeech", CONV, "sound", "right"),
    "sew": Row("sew", "SEW", CONV, "sound", "right"),
    "wav2vec2_conformer": Row("wav2vec2_conformer", "Wav2Vec2Conformer", CONV, "sound", "right"),
    "wav2vec2_bert": Row("wav2vec2_bert", "Wav2Vec2Bert", {"feature_projection_input_dim": 16}, "frames", None),
    "ast": Row("audio_spectrogram_transformer", "AST", {"max_length": 24, "num_mel_bins": 16, "frequency_stride": 4,
               "time_stride": 4}, "spectrum", None),
    "whisper": Row("whisper", "Whisper", {"num_mel_bins": 16, "max_source_positions": LENGTH}, "mel", None),
    "speech_to_text": Row("speech_to_text", "Speech2Text", {"input_feat_per_channel": 16, "conv_channels": 32},
                          "speech", None),
    "moonshine": Row("moonshine", "Moonshine", {f"{side}_num_{what}": 4 for side in ("encoder", "decoder")
                     for what in ("attention_heads", "key_value_heads")}, "wave", None),
    "patchtst": Row("patchtst", "PatchTST", {"patch_length": 4, "patch_stride": 4, "num_input_channels": 2,
                    "use_cls_token": False}, "series", None),
    "time_series_transformer": Row("time_series_transformer", "TimeSeriesTransformer", {"prediction_length": 8,
                                   "context_length": LENGTH, "lags_sequence": [1, 2], "num_time_features": 1},
                                   "forecast", None),
    "parakeet_encoder": Row("parakeet", "ParakeetEncoder", {"num_mel_bins": 16, "subsampling_conv_channels": 8}, "mels",
                            None, ""),
}  # fmt: skip

UNROUTED: dict[str, Row] = {
    "openai_gpt": text("openai", "OpenAIGPT"),
    "gpt_neo": text("gpt_neo", "GPTNeo", attention_types=[[["global", "local"], 1]], window_size=8),
    "gptj": text("gptj", "GPTJ", rotary_dim=8),
    "codegen": text("codegen", "CodeGen", rotary_dim=8),
    "bloom": text("bloom", "Bloom"),
    "falcon": text("falcon", "Falcon"),
    "falcon_alibi": text("falcon", "Falcon", alibi=True),
    "mpt": text("mpt", "Mpt"),
    "mamba": text("mamba", "Mamba", state_size=8),
    "mamba2": text("mamba2", "Mamba2", num_heads=8, head_dim=16, state_size=8, n_groups=1, chunk_size=8),
    "rwkv": text("rwkv", "Rwkv"),
    "xglm": text("xglm", "XGLM"),
    "xlnet": text("xlnet", "XLNet"),
    "reformer": text("reformer", "Reformer", axial_pos_shape=[4, 8], axial_pos_embds_dim=[32, 32], is_decoder=False,
                     attention_head_size=16, attn_layers=["local", "lsh"], local_attn_chunk_length=8,
                     lsh_attn_chunk_length=8, num_buckets=4, feed_forward_size=80),
    "deberta": text("deberta", "Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "deberta_v2": text("deberta_v2", "DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "mpnet": text("mpnet", "MPNet"),
    "longformer": text("longformer", "Longformer", attention_window=[8, 8], max_position_embeddings=80),
    "big_bird": text("big_bird", "BigBird", block_size=4, num_random_blocks=1),
    "big_bird_full": text("big_bird", "BigBird", attention_type="original_full"),
    "nystromformer": Row("nystromformer", "Nystromformer", {"num_landmarks": 8, "segment_means_seq_len": 32}, "text",
                         None),  # it fails with any mask
    "roformer": text("roformer", "RoFormer", embedding_size=24),
    "convbert": text("convbert", "ConvBert", embedding_size=24),
    "squeezebert": text("squeezebert", "SqueezeBert", embedding_size=64),
    "fnet": Row("fnet", "FNet", {}, "text", None),
    "megatron_bert": text("megatron_bert", "MegatronBert"),
    "rembert": text("rembert", "RemBert", input_embedding_size=24),
    "ibert": text("ibert", "IBert"),
    "luke": text("luke", "Luke", entity_vocab_size=11, entity_emb_size=24),
    "canine": text("canine", "Canine", local_transformer_stride=8, downsampling_rate=4, num_hash_buckets=64),
    "xlm": text("xlm", "XLM"),
    "funnel": text("funnel", "Funnel", block_sizes=[1, 1], num_decoder_layers=1),
    "mvp": texts("mvp", "Mvp"),
    "led": texts("led", "LED", attention_window=[8, 8], max_encoder_position_embeddings=64,
                 max_decoder_position_embeddings=64),
    "prophetnet": texts("prophetnet", "ProphetNet", num_encoder_layers=2, num_decoder_layers=2, ngram=2),
    "fsmt": texts("fsmt", "FSMT", src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY, langs=["en", "de"],
                  scale_embedding=False),
    "data2vec_vision": Row("data2vec", "Data2VecVision", {}, "image", None),
    "swinv2": image("swinv2", "Swinv2", embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
                    image_size=32, patch_size=2),
    "pvt": image("pvt", "Pvt", image_size=64, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1],
                 num_attention_heads=[1, 2, 2, 2]),
    "convnext": image("convnext", "ConvNext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=32),
    "hiera": image("hiera", "Hiera", embed_dim=16, image_size=[64, 64], depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 8],
                   patch_size=[7, 7]),
    "timesformer": Row("timesformer", "Timesformer", {"num_frames": 2}, "video", None),
    "blip": Row("blip", "Blip", {}, "both", "right"),
    "wavlm": Row("wavlm", "WavLM", CONV, "sound", "right"),
    "speecht5_asr": Row("speecht5", "SpeechT5", CONV, "heard", None, "ForSpeechToText"),
    "vitdet": image("vitdet", "VitDet", window_size=2, image_size=16, pretrain_image_size=16),
    "groupvit_vision": image("groupvit", "GroupViTVision", depths=[2, 2, 1], num_group_tokens=[8, 4, 0],
                             num_output_groups=[8, 4, 4]),
    "perceiver": Row("perceiver", "Perceiver", {"num_latents": 8, "d_latents": 64, "d_model": 64, "num_blocks": 1,
                     "num_self_attends_per_block": 2, "num_self_attention_heads": 4, "num_cross_attention_heads": 4},
                     "vectors", None),
}  # fmt: skip
ALL = ROUTED | UNROUTED
