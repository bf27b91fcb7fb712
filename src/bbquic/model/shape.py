"""A model's sizes, as they follow from config.json; known without loading torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BYTES_PER_VALUE: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


def kv_shape(fields: Mapping[str, Any]) -> tuple[int, int]:
    """(key/value heads, size of one), given or as they follow from the other fields."""
    heads = int(fields["num_attention_heads"])
    kv_heads = int(fields.get("num_key_value_heads") or heads)
    head_dim = int(fields.get("head_dim") or fields["hidden_size"] // heads)
    return kv_heads, head_dim
