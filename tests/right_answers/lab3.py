"""Right answers to lab 3 that are written in other ways than the solution."""

from __future__ import annotations

import math
from functools import reduce

import torch

INF = math.inf


# lab3.online_softmax ----------------------------------------------------------------------------


def through_log_sum_exp(blocks):
    """Keeps m and lse instead of m and l, and turns lse into l at the end."""
    m = lse = None
    for s in blocks:
        top = s.amax(dim=-1)
        part = s.exp().sum(-1).log() if s.abs().max() < 5 else _log_sum(s, top)
        m = top if m is None else torch.maximum(m, top)
        lse = part if lse is None else torch.logaddexp(lse, part)
    return m, torch.where(m == -INF, torch.zeros_like(m), torch.exp(lse - m))


def _log_sum(s, top):
    pivot = torch.nan_to_num(top, neginf=0.0)
    return pivot + (s - pivot[:, None]).exp().sum(-1).log()


def score_by_score(blocks):
    """Plain Python numbers, one score at a time, in double precision."""
    m, l = [], []
    for s in blocks:
        for row, values in enumerate(s.tolist()):
            if row == len(m):
                m.append(-INF)
                l.append(0.0)
            for x in values:
                if x == -INF:
                    continue
                if x > m[row]:
                    l[row] = l[row] * math.exp(m[row] - x) + 1.0
                    m[row] = x
                else:
                    l[row] += math.exp(x - m[row])
    return torch.tensor(m), torch.tensor(l)


def first_block_apart(blocks):
    """Starts from the first block's own m and l, and cleans up NaN from empty rows."""
    stream = iter(blocks)
    s = next(stream)
    m = s.max(dim=1).values
    l = torch.nan_to_num(torch.exp(s - m.unsqueeze(1))).sum(1)
    while True:
        s = next(stream, None)
        if s is None:
            return m, l
        block_m = s.max(dim=1).values
        block_l = torch.nan_to_num(torch.exp(s - block_m.unsqueeze(1))).sum(1)
        new = torch.maximum(m, block_m)
        l = l * torch.nan_to_num(torch.exp(m - new)) + block_l * torch.nan_to_num(
            torch.exp(block_m - new)
        )
        m = new


def in_float64(blocks):
    """Double precision, with an accumulator created at the first block."""
    state = None
    for s in blocks:
        s = s.double()
        old_m, old_l = state if state else (torch.full((len(s),), -INF).double(), 0)
        m = torch.cat([old_m[:, None], s], dim=1).amax(1)
        pivot = m.clamp(min=-1e300)
        state = m, old_l * torch.exp(old_m - pivot) + torch.exp(s - pivot[:, None]).sum(1)
    return tuple(x.float() for x in state)


# lab3.merge -------------------------------------------------------------------------------------


def merge_with_logaddexp(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a = torch.nan_to_num(torch.exp(lse_a - lse)).unsqueeze(-1)
    weight_b = torch.nan_to_num(torch.exp(lse_b - lse)).unsqueeze(-1)
    return weight_a * out_a + weight_b * out_b, lse


def merge_with_sigmoid(out_a, lse_a, out_b, lse_b):
    share = torch.sigmoid(torch.nan_to_num(lse_a - lse_b, nan=0.0, posinf=INF, neginf=-INF))
    out = torch.lerp(out_b, out_a, share.unsqueeze(-1))
    return out, torch.logsumexp(torch.stack([lse_a, lse_b]), dim=0)


def merge_with_softmax(out_a, lse_a, out_b, lse_b):
    lses = torch.stack([lse_a, lse_b], dim=-1)
    weights = torch.softmax(lses, dim=-1).nan_to_num(0.0)
    outs = torch.stack([out_a, out_b], dim=-2)
    return torch.einsum("...s,...sd->...d", weights, outs), lses.logsumexp(-1)


def merge_unnormalised(out_a, lse_a, out_b, lse_b):
    """Back to (o, l) relative to the common maximum, added, divided again."""
    m = torch.maximum(lse_a, lse_b).clamp(min=-1e30)
    l_a, l_b = torch.exp(lse_a - m), torch.exp(lse_b - m)
    l = l_a + l_b
    o = out_a * l_a[..., None] + out_b * l_b[..., None]
    return o / l.clamp(min=1e-30)[..., None], m + torch.log(l)


# lab3.tiled_forward -----------------------------------------------------------------------------


def forward_reversed(q, k, v, is_causal=False, block_q=32, block_k=32):
    """Keys from right to left, KV heads grouped instead of repeated, every tile visited."""
    batch, heads, seq_q, d = q.shape
    heads_kv, seq_k = k.shape[1:3]
    q5 = q.reshape(batch, heads_kv, heads // heads_kv, seq_q, d)
    out, lse = torch.empty_like(q5), torch.empty(q5.shape[:-1])
    for top in range(0, seq_q, block_q):
        rows = torch.arange(top, min(top + block_q, seq_q))
        m = torch.full((*q5.shape[:3], len(rows)), -INF)
        l, o = torch.zeros_like(m), torch.zeros(*m.shape, d)
        for left in reversed(range(0, seq_k, block_k)):
            columns = torch.arange(left, min(left + block_k, seq_k))
            s = torch.einsum("bhgid,bhjd->bhgij", q5[:, :, :, rows], k[:, :, columns]) / d**0.5
            if is_causal:
                bias = torch.zeros(len(rows), len(columns))
                bias[columns[None, :] - rows[:, None] > seq_k - seq_q] = -INF
                s = s + bias
            new = torch.maximum(m, s.max(dim=-1).values)
            p = torch.exp(s - new[..., None]).nan_to_num(0.0)
            factor = torch.exp(m - new).nan_to_num(0.0)
            l = l * factor + p.sum(-1)
            o = o * factor[..., None] + torch.einsum("bhgij,bhjd->bhgid", p, v[:, :, columns])
            m = new
        out[:, :, :, rows] = (o / l[..., None]).nan_to_num(0.0)
        lse[:, :, :, rows] = m + l.log()
    return out.reshape(q.shape), lse.reshape(batch, heads, seq_q)


def forward_by_merging(q, k, v, is_causal=False, block_q=32, block_k=32):
    """Each tile's own attention, joined by its lse; one head at a time; lists and cat."""
    group, seq_q, seq_k = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    outs, lses = [], []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            kh, vh = k[b, h // group], v[b, h // group]
            for i, q_i in enumerate(q[b, h].split(block_q)):
                tiles = []
                for j, (k_j, v_j) in enumerate(
                    zip(kh.split(block_k), vh.split(block_k), strict=True)
                ):
                    s = q_i @ k_j.T * q.shape[-1] ** -0.5
                    if is_causal:
                        row = torch.arange(len(q_i))[:, None] + i * block_q
                        column = torch.arange(len(k_j))[None, :] + j * block_k
                        s[column > row + seq_k - seq_q] = -INF
                    lse = torch.logsumexp(s, dim=1)
                    tiles.append((torch.exp(s - lse[:, None]).nan_to_num(0.0) @ v_j, lse))
                out, lse = reduce(lambda a, b: merge_with_logaddexp(*a, *b), tiles)
                outs.append(out)
                lses.append(lse)
    return torch.cat(outs).reshape(q.shape), torch.cat(lses).reshape(q.shape[:-1])


def forward_finite_start(q, k, v, is_causal=False, block_q=32, block_k=32):
    """A very low finite m to begin with, a mask on P, an expanded K, a double accumulator."""
    group, (seq_q, d), seq_k = q.shape[1] // k.shape[1], q.shape[2:], k.shape[2]
    k, v = (
        t[:, :, None].expand(-1, -1, group, -1, -1).reshape(q.shape[0], q.shape[1], seq_k, d)
        for t in (k, v)
    )
    out = torch.zeros(q.shape)
    lse = torch.zeros(q.shape[:-1])
    i = 0
    while i < seq_q:
        q_i = q[:, :, i : i + block_q] * d**-0.5
        m = torch.full(q_i.shape[:-1], -1e30).unsqueeze(-1)
        l = torch.zeros_like(m).double()
        o = torch.zeros_like(q_i).double()
        for j in range(0, seq_k, block_k):
            s = q_i.matmul(k[:, :, j : j + block_k].mT)
            keep = torch.ones_like(s)
            if is_causal:
                keep = keep.tril(i - j + seq_k - seq_q)
            s = torch.where(keep > 0, s, torch.tensor(-1e30))
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            p = torch.exp(s - new) * keep
            scale = torch.exp(m - new)
            l.mul_(scale).add_(p.sum(-1, keepdim=True))
            o.mul_(scale).add_(p @ v[:, :, j : j + block_k])
            m = new
        out[:, :, i : i + block_q] = (o / l.clamp(min=1e-12)).float()
        lse[:, :, i : i + block_q] = (m + l.log()).squeeze(-1).float()
        i += block_q
    return out, lse


# lab3.tiled_backward ----------------------------------------------------------------------------


def backward_grouped(q, k, v, out, lse, do, is_causal=False, block_q=32, block_k=32):
    """Keys outside, queries inside; five dimensions and einsum; double precision."""
    batch, heads, seq_q, d = q.shape
    heads_kv, seq_k = k.shape[1:3]
    shape = (batch, heads_kv, heads // heads_kv, seq_q)
    q5, do5, out5 = (t.double().reshape(*shape, d) for t in (q, do, out))
    lse5 = lse.double().reshape(shape)
    k, v = k.double(), v.double()
    delta = torch.einsum("bhgid,bhgid->bhgi", out5, do5)
    dq, dk, dv = torch.zeros_like(q5), torch.zeros_like(k), torch.zeros_like(v)
    for left in range(0, seq_k, block_k):
        c = slice(left, left + block_k)
        for top in range(0, seq_q, block_q):
            r = slice(top, top + block_q)
            s = torch.einsum("bhgid,bhjd->bhgij", q5[..., r, :], k[:, :, c]) / d**0.5
            if is_causal:
                row = torch.arange(seq_q)[r, None]
                column = torch.arange(seq_k)[None, c]
                s.masked_fill_(column > row + seq_k - seq_q, -INF)
            p = torch.exp(s - lse5[..., r, None]).nan_to_num(0.0)
            dp = torch.einsum("bhgid,bhjd->bhgij", do5[..., r, :], v[:, :, c])
            ds = (p * dp - p * delta[..., r, None]) / d**0.5
            dv[:, :, c] += torch.einsum("bhgij,bhgid->bhjd", p, do5[..., r, :])
            dk[:, :, c] += torch.einsum("bhgij,bhgid->bhjd", ds, q5[..., r, :])
            dq[..., r, :] += torch.einsum("bhgij,bhjd->bhgid", ds, k[:, :, c])
    return dq.reshape(q.shape).float(), dk.float(), dv.float()


def backward_head_by_head(q, k, v, out, lse, do, is_causal=False, block_q=32, block_k=32):
    """Two-dimensional matrices, delta from the row sum of P ∘ dP in a loop of its own."""
    group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    seq_q, seq_k = q.shape[2], k.shape[2]
    dq, dk, dv = (torch.zeros(t.shape) for t in (q, k, v))

    def tiles(b, h, i):
        for j in torch.arange(seq_k).split(block_k):
            s = (q[b, h, i] * scale) @ k[b, h // group, j].T
            if is_causal:
                s = s.where(j <= i[:, None] + (seq_k - seq_q), torch.tensor(-INF))
            row_lse = lse[b, h, i, None]
            p = torch.where(s > -INF, torch.exp(s - row_lse), torch.tensor(0.0))
            yield j, p, do[b, h, i] @ v[b, h // group, j].T

    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in torch.arange(seq_q).split(block_q):
                delta = sum((p * dp).sum(1) for _, p, dp in tiles(b, h, i))
                for j, p, dp in tiles(b, h, i):
                    ds = p * (dp - delta[:, None]) * scale
                    dq[b, h, i] += ds @ k[b, h // group, j]
                    dk[b, h // group, j] += ds.T @ q[b, h, i]
                    dv[b, h // group, j] += p.T @ do[b, h, i]
    return dq, dk, dv


def backward_skipping(q, k, v, out, lse, do, is_causal=False, block_q=32, block_k=32):
    """Scaled q, KV heads repeated and summed at the end, hidden tiles skipped, lse + inf trick."""
    group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    seq_q, seq_k = q.shape[2], k.shape[2]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    lse = lse.masked_fill(lse == -INF, INF)
    dq, dk, dv = torch.zeros(q.shape), torch.zeros(keys.shape), torch.zeros(values.shape)
    for top in range(0, seq_q, block_q):
        bottom = min(top + block_q, seq_q)
        q_i, do_i = q[:, :, top:bottom] * scale, do[:, :, top:bottom]
        delta = torch.einsum("bhid,bhid->bhi", do_i, out[:, :, top:bottom])[..., None]
        reach = min(seq_k, bottom + seq_k - seq_q) if is_causal else seq_k
        for left in range(0, reach, block_k):
            right = min(left + block_k, reach)  # the last tile may be cut at the diagonal
            s = q_i @ keys[:, :, left:right].mT
            if is_causal:
                hidden = torch.ones(s.shape[-2:]).triu(top - left + seq_k - seq_q + 1).bool()
                s = s.masked_fill(hidden, -INF)
            p = torch.exp(s - lse[:, :, top:bottom, None])
            ds = p * (do_i @ values[:, :, left:right].mT - delta)
            dq[:, :, top:bottom] += scale * (ds @ keys[:, :, left:right])
            dk[:, :, left:right] += ds.mT @ q_i
            dv[:, :, left:right] += p.mT @ do_i
    return dq, *(t.reshape(*k.shape[:2], group, *k.shape[2:]).sum(2) for t in (dk, dv))


RIGHT_ANSWERS = {
    "lab3.online_softmax": [through_log_sum_exp, score_by_score, first_block_apart, in_float64],
    "lab3.merge": [
        merge_with_logaddexp,
        merge_with_sigmoid,
        merge_with_softmax,
        merge_unnormalised,
    ],
    "lab3.tiled_forward": [forward_reversed, forward_by_merging, forward_finite_start],
    "lab3.tiled_backward": [backward_grouped, backward_head_by_head, backward_skipping],
}
