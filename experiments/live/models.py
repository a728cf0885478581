"""Models with random weights for llama.cpp, made on the spot as GGUF.

What a server does to latency needs the shape of a model, not what it has learnt. The vocabulary
holds 256 bytes and words ``w0``, ``w1``, ...; the rows of the output matrix that belong to anything
but words are zero, so that every generated token is text and one event of the stream.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

VOCABULARY = 2048
SPECIALS = ("<unk>", "<s>", "</s>")
FIRST_WORD = len(SPECIALS) + 256
"""Id of the first word; ids from it to ``VOCABULARY`` are words."""
HEAD_SIZE = 64
_SHAPE = re.compile(r"random:([0-9]{1,3})x([0-9]{2,5})")


def make_model(model: str, context: int, folder: Path) -> Path:
    """The path of a model; of ``random:LAYERSxWIDTH`` a file in ``folder``, for so long a context.

    One of the same shape is used again.

    Raises:
        ValueError: If there is no such file, or the shape cannot be read.
    """
    if not model.startswith("random:"):
        path = Path(model)
        if not path.exists():
            raise ValueError(f"model is {model!r}; there is no such file and it is not random:LxW")
        return path
    shape = _SHAPE.fullmatch(model)
    layers, width = map(int, shape.groups()) if shape else (0, 0)
    if layers < 1 or width < HEAD_SIZE or width % HEAD_SIZE:
        raise ValueError(
            f"model is {model!r}; write random:LAYERSxWIDTH with at least one layer and a width "
            f"that is a multiple of {HEAD_SIZE}, such as random:8x384"
        )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"random-{layers}x{width}-{context}.gguf"
    if not path.exists():
        temporary = path.with_suffix(".tmp")  # what a full disk leaves of it is no model
        _write_gguf(temporary, layers, width, context)
        temporary.replace(path)
    return path


def _write_gguf(path: Path, layers: int, width: int, context: int) -> None:
    """A llama model in Q8_0 with a SentencePiece vocabulary."""
    import gguf
    from gguf import quants

    random = np.random.default_rng(0)
    heads = width // HEAD_SIZE
    inner = -(-8 * width // (3 * 64)) * 64  # 8/3 of the width, a multiple of 64
    words = [f"w{i}" for i in range(VOCABULARY - FIRST_WORD)]
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
    tokens = [*SPECIALS, *(f"<0x{i:02X}>" for i in range(256)), *(f"▁{w}" for w in words)]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256]
    types += [kinds.NORMAL] * (VOCABULARY - len(types))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * FIRST_WORD + [-1.0 - i for i in range(len(words))])
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
    shapes = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (width, width))
    shapes |= {"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
    for layer in range(layers):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(width, np.float32))
        for name, shape in shapes.items():
            add(f"blk.{layer}.{name}.weight", matrix(*shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
