"""Sizes of the models that are measured: MaxText keys."""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "cpu": {
        "base_emb_dim": 512,
        "base_mlp_dim": 1536,
        "base_num_decoder_layers": 4,
        "base_num_query_heads": 8,
        "base_num_kv_heads": 8,
        "head_dim": 64,
        "vocab_size": 2048,
        "max_target_length": 256,
        "per_device_batch_size": 8,
    },
    # Layers of Llama 3 8B on one GPU of 140 GB.
    "h200": {
        "base_emb_dim": 4096,
        "base_mlp_dim": 14336,
        "base_num_decoder_layers": 2,
        "base_num_query_heads": 32,
        "base_num_kv_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_target_length": 4096,
        "per_device_batch_size": 1,
    },
    "tiny": {
        "base_emb_dim": 64,
        "base_mlp_dim": 128,
        "base_num_decoder_layers": 2,
        "base_num_query_heads": 4,
        "base_num_kv_heads": 4,
        "head_dim": 16,
        "vocab_size": 256,
        "max_target_length": 64,
        "per_device_batch_size": 4,
    },
}
