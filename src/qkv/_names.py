"""Argument names of other libraries, and what to pass instead."""

from __future__ import annotations

OTHER_NAMES = {
    "attn_mask": "mask=, a boolean tensor that is True where a query may attend, or bias=qkv.biases.Dense(tensor) for "
    "a float one",
    "attention_mask": "mask=, True where a query may attend; for a tokenizer's: mask=(m == 1)[:, None, None, :]",
    "key_padding_mask": "mask=~key_padding_mask[:, None, None, :], since True means may attend here",
    "is_causal": "mask=qkv.masks.Causal()",
    "causal": "mask=qkv.masks.Causal()",
    "scale": "score=qkv.scores.Dot(scale)",
    "softmax_scale": "score=qkv.scores.Dot(scale)",
    "dropout": "dropout_p=",
    "dropout_rate": "dropout_p=",
    "enable_gqa": "nothing: grouped-query attention follows from the number of key heads",
    "need_weights": "return_weights=",
    "return_attention": "return_weights=",
    "output_attentions": "return_weights=",
    "window_size": "mask=qkv.masks.Window(size)",
    "alibi_slopes": "bias=qkv.biases.ALiBi(slopes)",
    "softcap": "bias=qkv.biases.SoftCap(cap)",
    "score_mod": "bias=, one of qkv.biases or your own",
    "block_mask": "mask=, one of qkv.masks, or qkv.masks.from_flex(block_mask)",
    "sinks": "normalizer=qkv.normalizers.Softmax(sink=logits)",
}
