"""Models with random weights, made on the spot: GGUF for llama.cpp, a folder for vLLM.

What a server does to latency needs the shape of a model, not what it has learnt. The vocabulary
holds 256 bytes and words ``w0``, ``w1``, ...; the rows of the output matrix that belong to anything
but words are zero, so that every generated token is text and one event of the stream.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from servegym._files import write_text

__all__ = ["FIRST_WORD", "VOCABULARY", "make_model", "parse_shape"]

VOCABULARY = 2048
SPECIALS = ("<unk>", "<s>", "</s>")
FIRST_WORD = len(SPECIALS) + 256
"""Id of the first word; ids from it to ``VOCABULARY`` are words in either format."""
HEAD_SIZE = 64
_SHAPE = re.compile(r"random:([0-9]{1,3})x([0-9]{2,5})")


def parse_shape(model: str) -> tuple[int, int] | None:
    """Layers and width of ``random:LAYERSxWIDTH``, None for anything else.

    Raises:
        ValueError: If the text begins with ``random:`` and is not of that form.
    """
    if not model.startswith("random:"):
        return None
    found = _SHAPE.fullmatch(model)
    layers, width = map(int, found.groups()) if found else (0, 0)
    if layers < 1 or width < HEAD_SIZE or width % HEAD_SIZE:
        raise ValueError(
            f"model is {model!r}; write random:LAYERSxWIDTH with at least one layer and a width "
            f"that is a multiple of {HEAD_SIZE}, such as random:8x384"
        )
    return layers, width


def make_model(engine: str, model: str, context: int, folder: Path, seed: int = 0) -> Path:
    """The file or folder of a model, made in ``folder`` if its weights are random.

    Args:
        engine: ``"llama.cpp"`` or ``"vllm"``.
        model: ``random:LAYERSxWIDTH``, else a path that is given back as it is.
        context: Tokens that the model can hold.
        folder: Where models are kept; one of the same shape is used again.
        seed: Of the weights.

    Returns:
        The path.

    Raises:
        ValueError: If there is no such file, or the shape cannot be read.
    """
    shape = parse_shape(model)
    if shape is None:
        path = Path(model)
        if not path.exists():
            raise ValueError(f"model is {model!r}; there is no such file and it is not random:LxW")
        return path
    layers, width = shape
    folder.mkdir(parents=True, exist_ok=True)
    if engine == "vllm":
        path = folder / f"random-{layers}x{width}-{context}"
        _write_folder(path, layers, width, context)
        return path
    path = folder / f"random-{layers}x{width}-{context}-{seed}.gguf"
    if not path.exists():
        temporary = path.with_suffix(".tmp")
        _write_gguf(temporary, layers, width, context, seed)
        temporary.replace(path)
    return path


def _feed_forward(width: int) -> int:
    """Width of the feed-forward layer: 8/3 of the model's, a multiple of 64."""
    return -(-8 * width // (3 * 64)) * 64


def _words() -> list[str]:
    return [f"w{i}" for i in range(VOCABULARY - FIRST_WORD)]


def _write_gguf(path: Path, layers: int, width: int, context: int, seed: int) -> None:
    """A llama model in Q8_0 with a SentencePiece vocabulary."""
    import gguf
    from gguf import quants

    random = np.random.default_rng(seed)
    heads, inner = width // HEAD_SIZE, _feed_forward(width)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(f"random-{layers}x{width}")
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_vocab_size(VOCABULARY)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    kinds = gguf.TokenType
    tokens = [*SPECIALS, *(f"<0x{i:02X}>" for i in range(256)), *(f"▁{w}" for w in _words())]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256]
    types += [kinds.NORMAL] * (VOCABULARY - len(types))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * FIRST_WORD + [-1.0 - i for i in range(len(_words()))])
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)

    def add(name: str, values: np.ndarray) -> None:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    add("token_embd.weight", matrix(VOCABULARY, width))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    output = matrix(VOCABULARY, width)
    output[:FIRST_WORD] = 0.0
    add("output.weight", output)
    for layer in range(layers):
        at = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{at}{name}.weight", np.ones(width, np.float32))
        for name, shape in (
            ("attn_q", (width, width)),
            ("attn_k", (width, width)),
            ("attn_v", (width, width)),
            ("attn_output", (width, width)),
            ("ffn_gate", (inner, width)),
            ("ffn_up", (inner, width)),
            ("ffn_down", (width, inner)),
        ):
            add(f"{at}{name}.weight", matrix(*shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_folder(path: Path, layers: int, width: int, context: int) -> None:
    """``config.json`` and a byte-level tokenizer; vLLM draws the weights (``--load-format dummy``).

    GPT-2's letters of the 256 bytes make every text encodable.
    """
    path.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: i for i, token in enumerate((*SPECIALS, *_byte_letters()))}
    vocabulary |= {f"Ġ{word}": FIRST_WORD + i for i, word in enumerate(_words())}
    special = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, token in enumerate(SPECIALS)
    ]
    byte_level: dict[str, Any] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    files: dict[str, Any] = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": width,
            "intermediate_size": _feed_forward(width),
            "num_hidden_layers": layers,
            "num_attention_heads": width // HEAD_SIZE,
            "num_key_value_heads": width // HEAD_SIZE,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": context,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": special,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": True,
                "vocab": vocabulary,
                "merges": [],
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "model_max_length": context,
        },
    }
    for name, content in files.items():
        write_text(path / name, json.dumps(content))


def _byte_letters() -> list[str]:
    """The letter of each byte in GPT-2's byte-level alphabet."""
    out, more = [], 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            out.append(chr(byte))
        else:
            out.append(chr(256 + more))
            more += 1
    return out
