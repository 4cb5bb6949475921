"""Serving the course's model: KV caches, a block allocator, an engine, a load and its report.

>>> cache = PagedKVCache(KVShape.of(model), tokens=32_768, device=model.device)
>>> engine = Engine(model, cache)
>>> request = engine.submit(tokenizer(text)["input_ids"], max_new_tokens=100)
>>> engine.run()
>>> tokenizer.decode(request.output)
"""

from flashcourse.serving.block_allocator import BlockAllocator, OutOfBlocks
from flashcourse.serving.clock import Clock, VirtualClock, WallClock
from flashcourse.serving.contiguous_cache import ContiguousKVCache
from flashcourse.serving.engine import Engine, StepRecord
from flashcourse.serving.kv_cache import CacheFull, KVCache, KVShape, Region, Usage
from flashcourse.serving.load import (
    Arrival,
    lognormal_lengths,
    make_load,
    poisson_times,
    serve,
)
from flashcourse.serving.paged_cache import PagedKVCache
from flashcourse.serving.report import Report, report
from flashcourse.serving.request import Request, RequestRefused
from flashcourse.serving.sampling import sample, uniform

__all__ = [
    "Arrival",
    "BlockAllocator",
    "CacheFull",
    "Clock",
    "ContiguousKVCache",
    "Engine",
    "KVCache",
    "KVShape",
    "OutOfBlocks",
    "PagedKVCache",
    "Region",
    "Report",
    "Request",
    "RequestRefused",
    "StepRecord",
    "Usage",
    "VirtualClock",
    "WallClock",
    "lognormal_lengths",
    "make_load",
    "poisson_times",
    "report",
    "sample",
    "serve",
    "uniform",
]
