"""The chat template and the config.json of the model folder in conftest.py."""

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = {
    "model_type": "qwen3",
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 300,
}
