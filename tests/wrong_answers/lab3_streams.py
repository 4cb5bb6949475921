"""Lab 3, streams of scores: whole rows in another guise, narrower ranges, epsilons."""

import math

import numpy
import torch

from wrong_answers import named
from wrong_answers.lab1 import OneBuffer

INF = math.inf


# lab3.online_softmax ----------------------------------------------------------------------------


def _of_row(row):
    m = row.amax(1)
    return m, torch.exp(row - torch.where(m == -INF, 0.0, m)[:, None]).sum(1)


def _online(blocks, epsilon=0.0, start=-INF, skipped=INF, forgotten=INF):
    m = l = None
    for s in blocks:
        if m is None:
            m, l = s.new_full((len(s),), start), s.new_zeros(len(s))
        if (s.amax(1) < m - skipped).all():
            continue
        if (m < s.amax(1) - forgotten).all():
            l = torch.zeros_like(l)
        new = torch.maximum(m, s.amax(1))
        pivot = torch.where(new == -INF, 0.0, new)
        l = l * torch.exp(m - pivot) + torch.exp(s - pivot[:, None]).sum(1)
        m = new
    return m, l + epsilon


def row_put_together(blocks):
    row = None
    for s in blocks:
        row = s.clone() if row is None else torch.cat([row, s], 1)
    return _of_row(row)


def blocks_copied(blocks):
    return _of_row(torch.cat([s.clone() for s in blocks], 1))


def blocks_copied_to_numpy(blocks):
    return _of_row(torch.from_numpy(numpy.concatenate([s.numpy().copy() for s in blocks], 1)))


def blocks_copied_to_lists(blocks):
    rows = None
    for s in blocks:
        rows = rows or [[] for _ in s]
        for row, new in zip(rows, s.tolist(), strict=True):
            row.extend(new)
    return _of_row(torch.tensor(rows))


def exponentials_kept(blocks):
    kept = []
    for s in blocks:
        m = s.amax(1)
        kept.append((m, torch.exp(s - torch.where(m == -INF, 0.0, m)[:, None])))
    top = torch.stack([m for m, _ in kept]).amax(0)
    pivot = torch.where(top == -INF, 0.0, top)
    return top, sum(e.sum(1) * torch.exp(m - pivot) for m, e in kept)


def first_block_pivot_in_float64(blocks):
    m = pivot = None
    l = 0.0
    for s in blocks:
        s = s.double()
        if m is None:
            m = s.amax(1)
            pivot = torch.where(m == -INF, 0.0, m)
        m = torch.maximum(m, s.amax(1))
        l = l + torch.exp(s - pivot[:, None]).sum(1)
    back = torch.exp(pivot - torch.where(m == -INF, 0.0, m))
    return m.float(), torch.where(m == -INF, 0.0, l * back).float()


def _parts_kept(blocks):
    for s in blocks:
        m = s.amax(1)
        yield m, torch.exp(s - torch.where(m == -INF, 0.0, m)[:, None]).sum(1)


def parts_kept(blocks):
    return _joined(*zip(*list(_parts_kept(blocks)), strict=True))


def parts_kept_in_numpy(blocks):
    kept = [(m.numpy().copy(), l.numpy().copy()) for m, l in _parts_kept(blocks)]
    ms, ls = zip(*[[torch.from_numpy(x) for x in part] for part in kept], strict=True)
    return _joined(ms, ls)


def _joined(ms, ls):
    m = torch.stack(ms).amax(0)
    return m, (torch.stack(ls) * torch.exp(torch.stack(ms) - torch.where(m == -INF, 0.0, m))).sum(0)


def log_sums_kept(blocks):
    m, lses = None, []
    for top, l in _parts_kept(blocks):
        m = top if m is None else torch.maximum(m, top)
        lses.append(top + torch.log(l))
    return m, torch.exp(torch.stack(lses) - torch.where(m == -INF, 0.0, m)).sum(0)


def small_epsilon(blocks):
    return _online(blocks, 1e-5)


# lab3.merge -------------------------------------------------------------------------------------


def _merge(out_a, lse_a, out_b, lse_b, epsilon=0.0, pivot=None):
    m = torch.maximum(lse_a, lse_b) if pivot is None else pivot
    m = torch.where(m == -INF, 0.0, m)
    a, b = torch.exp(lse_a - m), torch.exp(lse_b - m)
    total = a + b
    safe = torch.where(total == 0, 1.0, total) + epsilon
    out = (a / safe)[..., None] * out_a + (b / safe)[..., None] * out_b
    return out.float(), (m + torch.log(total)).float()


def merge_with_epsilon(out_a, lse_a, out_b, lse_b):
    return _merge(out_a, lse_a, out_b, lse_b, 5e-6)


def merge_winner_takes_all(out_a, lse_a, out_b, lse_b, beyond=10):
    out, lse = _merge(out_a, lse_a, out_b, lse_b)
    out = torch.where((lse_a - lse_b > beyond)[..., None], out_a, out)
    return torch.where((lse_b - lse_a > beyond)[..., None], out_b, out), lse


def merge_no_max_in_float64(out_a, lse_a, out_b, lse_b):
    zero = torch.zeros(lse_a.shape).double()
    return _merge(out_a, lse_a.double(), out_b, lse_b.double(), pivot=zero)


def merge_pivot_of_a_in_float64(out_a, lse_a, out_b, lse_b):
    return _merge(out_a, lse_a.double(), out_b, lse_b.double(), pivot=lse_a.double())


def merge_writes_to_its_inputs(out_a, lse_a, out_b, lse_b):
    result = _merge(out_a, lse_a, out_b, lse_b)
    lse_a.clamp_(min=torch.finfo(torch.float32).min)
    return result


WRONG_ANSWERS = {
    "lab3.online_softmax": [
        row_put_together,
        blocks_copied,
        blocks_copied_to_numpy,
        blocks_copied_to_lists,
        exponentials_kept,
        first_block_pivot_in_float64,
        parts_kept,
        parts_kept_in_numpy,
        log_sums_kept,
        small_epsilon,
        named("starts_at_minus_350", _online, start=-350.0),
        named("starts_at_minus_500", _online, start=-500.0),
        *(named(f"skips_blocks_{t}_below", _online, skipped=t) for t in (3, 6, 10, 12)),
        named("forgets_what_is_10_below", _online, forgotten=10),
        named("forgets_what_is_12_below", _online, forgotten=12),
        OneBuffer(_online),
    ],
    "lab3.merge": [
        merge_with_epsilon,
        merge_winner_takes_all,
        named("merge_winner_takes_all_beyond_12", merge_winner_takes_all, beyond=12),
        named("merge_winner_takes_all_beyond_14", merge_winner_takes_all, beyond=14),
        OneBuffer(_merge),
        merge_no_max_in_float64,
        merge_pivot_of_a_in_float64,
        merge_writes_to_its_inputs,
    ],
}
