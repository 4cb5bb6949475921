"""What the tests of the engine share: a small lively model, and each request computed alone."""

from __future__ import annotations

import functools

import torch

from flashcourse import runtime
from flashcourse.model import Size, small_llama
from flashcourse.model.lively import make_lively
from flashcourse.serving import ContiguousKVCache, KVShape, PagedKVCache, sample, uniform

DEVICE = runtime.device()
VOCAB = 61
SIZE = Size(32, 2, 4, 2, 8, 48, VOCAB, 64, None, 1, 1, 1e-3)


@functools.cache
def model():
    """Two layers, GQA, random weights; SDPA unless an engine serves it."""
    return make_lively(small_llama(SIZE, attention="sdpa", seed=3)).to(DEVICE)


@functools.cache
def alone(
    prompt: tuple[int, ...], count: int, temperature: float = 0.0, seed: int = 0, at: int = 0
):
    """The continuation of a prompt by the model alone, without a cache for a drawn one.

    Args:
        at: index of the first new token, where a seed's draws go on.
    """
    if temperature == 0:
        given = torch.tensor([prompt], device=DEVICE)
        return model().generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )[0, len(prompt) :].tolist()  # fmt: skip
    tokens = list(prompt)
    for index in range(at, at + count):
        with torch.no_grad():
            logits = model()(torch.tensor([tokens], device=DEVICE), use_cache=False).logits[:, -1]
        tokens += sample(logits, [temperature], [uniform(seed, index)])
    return tokens[len(prompt) :]


def paged(tokens=96, page_size=4, kind=PagedKVCache, **options):
    """A paged cache full of NaN."""
    return poisoned(
        kind(KVShape.of(model()), tokens=tokens, page_size=page_size, device=DEVICE, **options)
    )


def contiguous(tokens=192, longest=48, kind=ContiguousKVCache):
    """A contiguous cache full of NaN."""
    return poisoned(kind(KVShape.of(model()), tokens=tokens, longest=longest, device=DEVICE))


def poisoned(cache):
    """NaN in every slot that nobody holds: whoever reads there cannot miss it."""
    held = torch.zeros(cache.capacity, dtype=torch.bool)
    for region in cache.regions():
        held[region.start : region.start + region.used] = True
    for memory in (cache.k, cache.v):
        memory[:, ~held.to(DEVICE)] = float("nan")
    return cache


CACHES = {"paged": paged, "contiguous": contiguous}
