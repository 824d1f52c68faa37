"""The embedded policy before its warm-up: a byte-level BPE tokenizer and a random Qwen3 of 3.7M parameters."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from agentrl.envs.factbook import countries, records

TAGS = ("<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tokenizer(out: Path, texts: Iterable[str], vocabulary: int = 2048) -> None:
    """Train BPE on `texts`, with single digits. The names of held-out countries and their capitals are removed from the texts."""
    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    held_out = [v for name in countries("test") for v in (name, records()[name].facts["capital"][0])]
    removed = re.compile("|".join(map(re.escape, [*sorted(held_out, key=len, reverse=True), *SPECIAL, *TAGS])))
    size, alphabet = vocabulary - len(TAGS), pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator((part for t in texts for part in removed.split(t) if part), trainer)
    bpe.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    out.mkdir(parents=True)
    bpe.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "chat_template": TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def make_model(out: Path, vocabulary: int = 2048) -> None:
    """Save a model with random weights from a fixed seed."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    tokens = {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    Qwen3ForCausalLM(
        Qwen3Config(**shape, **tokens, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=True)
    ).save_pretrained(out)
