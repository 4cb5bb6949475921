"""Are an engine's tokens the model's? Against the model alone, and against Transformers' own
engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashcourse.serving.request import Request


@dataclass(frozen=True)
class Agreement:
    """How greedy answers compare with another way to compute them.

    Attributes:
        requests, equal: answers, and those of them that are the same, token by token.
        tokens: of all answers.
        largest_gap: of the tokens that the model alone would not have chosen, by how much its
            best logit is above the chosen one's; 0 if there is none. A gap as small as rounding
            (1e-4 for float32) is a tie, not an error.
    """

    requests: int
    equal: int
    tokens: int
    largest_gap: float = 0.0

    def __str__(self) -> str:
        text = f"{self.equal} of {self.requests} answers equal ({self.tokens:,} tokens)"
        if self.largest_gap:
            text += f"; where they differ, two logits are at most {self.largest_gap:.1e} apart"
        return text


@torch.inference_mode()
def agree_with_model(model: Any, requests: Sequence[Request]) -> Agreement:
    """Compare greedy answers with the model alone: no cache, no batch, no engine.

    The model reads each prompt with its answer once. The answer is what the model generates alone
    if every token of it has the largest logit after all tokens before it.

    Args:
        model: with any attention of Transformers, such as "sdpa".
        requests: finished, with temperature 0.

    Raises:
        ValueError: an answer was drawn.
    """
    equal = tokens = 0
    largest = 0.0
    for request in requests:
        if request.temperature:
            raise ValueError(f"request {request.number} was drawn with a temperature; only greedy "
                             "answers can be compared")  # fmt: skip
        ids = torch.tensor([request.tokens[:-1]], device=model.device)
        keep = len(request.output)
        logits = model(ids, use_cache=False, logits_to_keep=keep).logits[0].float()
        chosen = torch.tensor(request.output, device=model.device)
        gap = logits.amax(-1) - logits.gather(-1, chosen[:, None])[:, 0]
        differs = logits.argmax(-1) != chosen
        equal += not bool(differs.any())
        largest = max(largest, float(torch.where(differs, gap, 0.0).max()))
        tokens += keep
    return Agreement(len(requests), equal, tokens, largest)


def agree_with_generate_batch(
    model: Any, requests: Sequence[Request], *, num_blocks: int | None = None
) -> Agreement:
    """Compare greedy answers with Transformers' own paged engine, ``model.generate_batch``.

    Args:
        model: with "sdpa" or "eager" attention; that engine has its own paged form of them.
        requests: finished, with temperature 0 and without stop tokens.
        num_blocks: pages of its cache, of 256 tokens each; None: as many as two more than these
            requests can need at once.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    longest = max(len(r.output) for r in requests)
    if num_blocks is None:
        num_blocks = 2 + sum(-(-(len(r.prompt) + longest) // 256) for r in requests)
    options: dict[str, Any] = {"auto_switch_to_flash": False}  # keep the attention asked for
    known = ContinuousBatchingConfig.__dataclass_fields__  # 5.17 does not know that one
    config = ContinuousBatchingConfig(
        num_blocks=num_blocks,
        use_cuda_graph=False,  # the plain way: two things less that could differ
        use_async_batching=False,
        max_batch_tokens=max(64, min(1024, sum(len(r.prompt) for r in requests))),
        **{name: value for name, value in options.items() if name in known},
    )
    # One length for all: a greedy answer that goes on longer begins with the same tokens.
    generation = GenerationConfig(
        max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    attention = model.config._attn_implementation
    if "auto_switch_to_flash" not in known:  # 5.17 leaves a paged form alone
        model.set_attn_implementation(f"paged|{attention}")
    try:
        found = model.generate_batch(
            [r.prompt for r in requests],
            generation_config=generation,
            continuous_batching_config=config,
        )
    finally:
        if model.config._attn_implementation != attention:
            model.set_attn_implementation(attention)
    if len(found) != len(requests):
        raise RuntimeError(f"generate_batch answered {len(found)} of {len(requests)} requests")
    equal = sum(
        answer.generated_tokens[: len(r.output)] == r.output
        for r, answer in zip(requests, found.values(), strict=True)
    )
    return Agreement(len(requests), equal, sum(len(r.output) for r in requests))
