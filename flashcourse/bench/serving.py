"""The same memory and the same requests, a cache in rows against one in pages, on a GPU.

``python -m flashcourse.bench.serving`` measures and prints; with ``FLASHCOURSE_RECORD=1`` it keeps
the record that lesson 09 shows to those without a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from flashcourse import runtime
from flashcourse.attention import flash_decode, paged_attention
from flashcourse.files import write_whole
from flashcourse.measure import time_ms
from flashcourse.measure.memory import readable_bytes
from flashcourse.measure.recorded import machine, record
from flashcourse.model import (
    Size,
    count_parameters,
    encode,
    small_llama,
    standard_library,
    trained_model,
)
from flashcourse.model.lively import make_lively
from flashcourse.serving import (
    Arrival,
    ContiguousKVCache,
    Engine,
    KVCache,
    KVShape,
    PagedKVCache,
    Request,
    lognormal_lengths,
    make_load,
    report,
    serve,
)
from flashcourse.serving.check import agree_with_generate_batch, agree_with_model

RECORD = "serving"
MADE_BY = "python -m flashcourse.bench.serving"

# The shape of Llama-3.2-1B, with a small vocabulary: 32 KiB of cache a token in bfloat16.
LARGE = Size(2048, 16, 32, 8, 64, 8192, 8192, 2048, None, 1, 1, 1e-3)
LONGEST = 2048  # what a request may have: a prompt of three quarters, and an answer
ROWS = 16  # of the contiguous cache; the paged one gets the same memory
BUDGET = 1024  # tokens a step
MAX_RUNNING = 256
PAGE_SIZES = (1, 8, 16, 64, 256)


def trace(count: int, *, seed: int = 0) -> list[tuple[int, int]]:
    """(prompt, answer) lengths of a service for chats: means 300 and 200, a few very long.

    Kwon et al. (2023, figure 11) report means of 161 and 338 for ShareGPT, 19 and 58 for Alpaca.
    """
    prompts = lognormal_lengths(count, 300, spread=1.0, longest=LONGEST * 3 // 4, seed=seed)
    answers = lognormal_lengths(count, 200, spread=1.0, longest=LONGEST // 4, seed=seed + 1)
    return list(zip(prompts, answers, strict=True))


def caches(model: Any, page_size: int = 16) -> dict[str, Callable[[], KVCache]]:
    """Two caches of the same memory, by name."""
    shape, tokens, device = KVShape.of(model), ROWS * LONGEST, model.device
    return {
        "contiguous": lambda: ContiguousKVCache(
            shape, tokens=tokens, longest=LONGEST, device=device
        ),
        "paged": lambda: PagedKVCache(shape, tokens=tokens, page_size=page_size, device=device),
    }


def run(
    model: Any, make_cache: Callable[[], KVCache], load: list[Arrival], attention: str
) -> tuple[list[Request], dict[str, Any]]:
    """Serve a load from an empty cache: the requests, and what was measured."""
    engine = Engine(
        model, make_cache(), token_budget=BUDGET, max_running=MAX_RUNNING, attention=attention
    )
    requests = serve(engine, load)
    steps = engine.steps
    row = {
        **report(requests, steps).as_dict(),
        "step_ms": 1e3 * sum(step.time - step.begun for step in steps) / len(steps),
        "cache_bytes": engine.cache.num_bytes,
        "over_time": [
            [round(step.time - steps[0].begun, 4), step.running, step.waiting,
             step.usage.used, step.usage.reserved]
            for step in steps[:: max(1, len(steps) // 200)]  # enough for a picture
        ],
    }  # fmt: skip
    return requests, row


def compare(
    model: Any, load: list[Arrival], *, turns: int, attention: str = "flashcourse"
) -> dict[str, Any]:
    """Both caches on one load, in turns: one to compile and warm up, the others are measured.

    Returns:
        ``caches``: of each the row of the turn with the median throughput, of two the slower;
        ``ratio`` of their tokens a second; ``requests``: those of the last turn, by cache.
    """
    rows: dict[str, list[dict[str, Any]]] = {"contiguous": [], "paged": []}
    outputs = {}
    for turn in range(turns + 1):
        for name, make in sorted(caches(model).items(), reverse=bool(turn % 2)):
            outputs[name], row = run(model, make, load, attention)
            if turn:
                rows[name].append(row)
    middle = {
        name: sorted(found, key=lambda row: row["tokens_per_second"])[(len(found) - 1) // 2]
        for name, found in rows.items()
    }
    ratio = middle["paged"]["tokens_per_second"] / middle["contiguous"]["tokens_per_second"]
    return {"caches": middle, "ratio": ratio, "requests": outputs}


def describe(found: dict[str, Any]) -> str:
    """What :func:`compare` found, in lines."""
    lines = [
        f"{name:<10} {row['tokens_per_second']:>7,.0f} tokens/s, {row['max_running']:>3} at once, "
        f"{row['waste']:5.1%} waste, first token {row['first_token']['p50']:.2f} s (median), step "
        f"{row['step_ms']:.1f} ms, {row['preemptions']} preemptions"
        for name, row in found["caches"].items()
    ]
    return "\n".join([*lines, f"pages serve {found['ratio']:.2f}× the tokens a second"])


def check(model: Any, outputs: dict[str, list[Request]], sample: int) -> dict[str, Any]:
    """Every answer of both caches against the model alone, and against ``generate_batch``."""
    found: dict[str, Any] = {}
    for name, requests in outputs.items():
        alone = agree_with_model(model, requests)
        print(f"{name} against the model alone: {alone}", flush=True)
        found[name] = {
            "requests": alone.requests,
            "equal": alone.equal,
            "tokens": alone.tokens,
            "largest_gap": alone.largest_gap,
        }
    try:
        theirs = agree_with_generate_batch(model, outputs["paged"][:sample])
    except Exception as error:  # minutes of measurements are not lost for another engine
        told = f"{type(error).__name__}: {error}"
        print(f"generate_batch failed: {told}", flush=True)
        found["generate_batch"] = {"requests": sample, "equal": 0, "error": told}
    else:
        print(f"paged against generate_batch: {theirs}", flush=True)
        found["generate_batch"] = {
            "requests": theirs.requests, "equal": theirs.equal, "tokens": theirs.tokens
        }  # fmt: skip
    return found


def price_of_indirection(*, batch: int = 64, context: int = 8192) -> dict[str, Any]:
    """The decode kernel over rows and over pages in random order, with Llama-3-8B's heads.

    Returns:
        Milliseconds by page size, "contiguous" among them, and the bytes of keys and values.
    """
    heads_q, heads_kv, head_dim, device = 32, 8, 128, runtime.device()
    dtype = runtime.compute_dtype()
    q = torch.randn(batch, heads_q, 1, head_dim, dtype=dtype, device=device)
    # Tokens first, as both caches keep them.
    k, v = (torch.randn(batch * context, heads_kv, head_dim, dtype=dtype, device=device)
            for _ in range(2))  # fmt: skip
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    k_rows, v_rows = (
        held.view(batch, context, heads_kv, head_dim).transpose(1, 2) for held in (k, v)
    )
    calls: dict[str, Callable[[], object]] = {
        "contiguous": lambda: flash_decode(q, k_rows, v_rows, lengths)
    }
    for size in PAGE_SIZES:
        k_pages, v_pages = (held.view(-1, size, heads_kv, head_dim) for held in (k, v))
        table = torch.randperm(k_pages.shape[0], device=device).int().view(batch, -1)
        calls[str(size)] = partial(paged_attention, q, k_pages, v_pages, table, lengths)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(3):
        for name in sorted(calls, reverse=bool(turn % 2)):
            times[name].append(float(time_ms(calls[name], repeats=20)))
    middle = {name: sorted(found)[1] for name, found in times.items()}
    for name, ms in middle.items():
        print(f"  {name:<11} {ms:.3f} ms, {ms / middle['contiguous']:.2f} of contiguous")
    return {"ms": middle, "batch": batch, "context": context, "dtype": str(dtype)[6:],
            "bytes": 2 * k.numel() * k.element_size()}  # fmt: skip


def main(
    requests: Annotated[int, typer.Option(min=8, help="Requests of the load.")] = 256,
    turns: Annotated[int, typer.Option(min=1, help="Measured runs of each cache.")] = 2,
    sample: Annotated[
        int, typer.Option(min=1, help="Requests to compare with generate_batch.")
    ] = 256,
    trained: Annotated[
        bool, typer.Option(help="Check tokens on the trained model; else on a random one.")
    ] = True,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Also write the results here.")
    ] = None,
) -> None:
    """Serve one load from a contiguous and from a paged cache of the same size, and compare.

    Two models: a trained one in float32, whose every token is checked, and one of a billion
    parameters with random weights in bfloat16, whose throughput is closer to a real service's.
    All requests are there from the beginning, so the caches decide.
    """
    if not runtime.has_gpu():
        raise typer.BadParameter("this benchmark needs a GPU; lesson 09 shows its record")
    lengths = trace(requests)
    results: dict[str, Any] = {
        "lengths": lengths,
        "longest": LONGEST,
        "cache_tokens": ROWS * LONGEST,
        "page_size": 16,
        "models": {},
    }
    print("one decode step of the kernel, pages in random order:", flush=True)
    results["indirection"] = price_of_indirection()
    print(f"{machine()}\n{requests} requests, cache of {ROWS * LONGEST:,} tokens", flush=True)
    kinds: dict[str, Callable[[], Any]] = {
        "large": lambda: (_large(), None),
        "checked": _trained if trained else _lively,
    }
    for kind, make in kinds.items():
        model, text = make()
        shape = KVShape.of(model)
        print(
            f"\n{kind}: {count_parameters(model):,} parameters, {model.dtype}, "
            f"{readable_bytes(ROWS * LONGEST * shape.bytes_per_token)} of cache",
            flush=True,
        )
        load = make_load(lengths, model.config.vocab_size, text=text)
        found = compare(model, load, turns=turns)
        outputs = found.pop("requests")
        print(describe(found), flush=True)
        row = {"parameters": count_parameters(model), "dtype": str(model.dtype)[6:], **found}
        results["models"][kind] = row
        _keep(results, json_out)
        if kind == "checked":
            row["agreement"] = check(model, outputs, sample)
            _keep(results, json_out)
        del model, outputs
        torch.cuda.empty_cache()


def _keep(results: dict[str, Any], json_out: Path | None) -> None:
    """Write what there is so far: a run that is cut off keeps its finished parts."""
    if json_out is not None:
        write_whole({json_out: json.dumps({"machine": machine(), **results}, indent=1)})
    if record(RECORD, results, MADE_BY):
        print(f"kept as the record {RECORD!r}", flush=True)


def _trained() -> tuple[Any, list[int]]:
    """The course's model, and a text it has not seen, to cut prompts from."""
    kept = trained_model("small", attention="sdpa")
    documents = encode(kept.tokenizer, standard_library(None).held_out, 4096)
    return kept.model, [token for document in documents for token in document]


def _lively() -> tuple[Any, None]:
    model = small_llama("small", attention="sdpa").to(runtime.device())
    return make_lively(model, 4.0, 2.0), None


def _large() -> Any:
    model = small_llama(LARGE, attention="sdpa")
    return model.to(runtime.device(), runtime.compute_dtype()).eval()


if __name__ == "__main__":
    typer.run(main)
