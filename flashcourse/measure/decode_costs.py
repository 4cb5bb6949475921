"""What decoding and prefill cost: bytes of the KV cache, FLOPs and bytes of a step.

The counting is that of Pope et al. (2022), "Efficiently Scaling Transformer Inference", section 2:
only what must move to or from device memory at least once, and only matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashcourse.measure.traffic import visible_pairs


@dataclass(frozen=True)
class ModelShape:
    """What the KV cache of a published model depends on.

    Attributes:
        name: as its makers call it.
        layers, heads_q, heads_kv, head_dim: of its attention.
        parameters: how many numbers the weights hold.
        source: where the shape is stated.
    """

    name: str
    layers: int
    heads_q: int
    heads_kv: int
    head_dim: int
    parameters: float
    source: str

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of the cache for one token, see :func:`kv_bytes_per_token`."""
        return kv_bytes_per_token(self.layers, self.heads_kv, self.head_dim, itemsize)


_CONFIG = "config.json of the published model"
MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("Qwen2.5-0.5B", 24, 14, 2, 64, 0.494e9, _CONFIG),
        ModelShape("Qwen3-0.6B", 28, 16, 8, 128, 0.596e9, _CONFIG),
        ModelShape("Qwen2.5-7B", 28, 28, 4, 128, 7.616e9, _CONFIG),
        ModelShape("Mistral-7B", 32, 32, 8, 128, 7.242e9, _CONFIG),
        ModelShape("Llama-2-7B", 32, 32, 32, 128, 6.738e9, _CONFIG),
        ModelShape("Llama-3-8B", 32, 32, 8, 128, 8.030e9, _CONFIG),
        ModelShape("Llama-3-70B", 80, 64, 8, 128, 70.554e9, _CONFIG),
    )
}


def kv_bytes_per_token(layers: int, heads_kv: int, head_dim: int, itemsize: float) -> int:
    """Bytes that one token leaves in the cache: a key and a value for each KV head of each layer.

    Args:
        layers, heads_kv, head_dim: of the model.
        itemsize: bytes of a number; 0.5 for four bits.

    Raises:
        ValueError: a size is not positive.
    """
    for name, size in (("layers", layers), ("heads_kv", heads_kv), ("head_dim", head_dim),
                       ("itemsize", itemsize)):  # fmt: skip
        if not size > 0:
            raise ValueError(f"{name} must be positive, got {size!r}")
    return round(2 * layers * heads_kv * head_dim * itemsize)


@dataclass(frozen=True)
class Cost:
    """FLOPs of a call and the bytes it must move.

    Attributes:
        flops: of its matrix products, a multiply-add counted as two.
        bytes_moved: to and from device memory, each array once.
    """

    flops: float
    bytes_moved: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / self.bytes_moved

    def seconds(self, peak_flops: float, bandwidth: float) -> float:
        """The least time on a chip with these two ceilings: the longer of the two."""
        return max(self.flops / peak_flops, self.bytes_moved / bandwidth)


def decode_attention_cost(
    batch: int, heads_q: int, heads_kv: int, seq_k: int, head_dim: int, itemsize: int
) -> Cost:
    """One new query a sequence over ``seq_k`` cached keys, one layer.

    The cache is read once for all query heads of a group: a kernel that reads it once for each
    query head moves ``heads_q / heads_kv`` times as much.
    """
    flops = 4 * batch * heads_q * seq_k * head_dim
    numbers = batch * head_dim * (2 * heads_kv * seq_k + 2 * heads_q)
    return Cost(flops, numbers * itemsize)


def prefill_attention_cost(
    batch: int, heads_q: int, heads_kv: int, seq: int, head_dim: int, itemsize: int
) -> Cost:
    """Causal attention over a whole prompt in a fused kernel, one layer, forward."""
    flops = 4 * batch * heads_q * visible_pairs(seq, seq, is_causal=True) * head_dim
    numbers = batch * seq * head_dim * (2 * heads_q + 2 * heads_kv)
    return Cost(flops, numbers * itemsize)


def matmul_cost(tokens: int, parameters: float, itemsize: int) -> Cost:
    """The products of ``tokens`` vectors with weights; the weights are read once for all.

    The vectors themselves are left out: they are small beside the weights until there are about
    as many tokens as a matrix has rows.
    """
    return Cost(2 * tokens * parameters, parameters * itemsize)
