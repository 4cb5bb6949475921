"""Attention through the HBM meter: the four kernels of the naive form, and the one of flash.

Both compute in float32 and move what :func:`flashcourse.measure.attention_traffic` predicts.
"""

from __future__ import annotations

import torch

from flashcourse.measure.hbm import HBM, Array


def metered_naive(hbm: HBM, q: Array, k: Array, v: Array) -> Array:
    """Four launches, each in a section named as in ``attention_traffic``; the handle of out.

    A launch reads whole arrays, so the memory must have no limit for the chip.

    Args:
        q: handle, ``(batch, heads, seq_q, head_dim)``. k, v: ``(batch, heads, seq_k, head_dim)``.
    """
    matrix = (*q.shape[:-1], k.shape[-2])
    s, scaled, p = (hbm.empty(matrix, q.dtype, name=name) for name in ("S", "scaled S", "P"))
    out = hbm.empty(q.shape, q.dtype, name="out")

    def scores(hbm: HBM) -> None:
        queries, keys = hbm.load(q).float(), hbm.load(k).float()
        hbm.store(s, ..., queries @ keys.transpose(-2, -1))

    def scale(hbm: HBM) -> None:
        hbm.store(scaled, ..., hbm.load(s).float() * q.shape[-1] ** -0.5)

    def softmax(hbm: HBM) -> None:
        hbm.store(p, ..., torch.softmax(hbm.load(scaled).float(), dim=-1))

    def output(hbm: HBM) -> None:
        hbm.store(out, ..., hbm.load(p).float() @ hbm.load(v).float())

    kernels = {"S = QKᵀ": scores, "S · scale": scale, "P = softmax(S)": softmax, "O = PV": output}
    for name, kernel in kernels.items():
        with hbm.section(name):
            hbm.launch(kernel)
    return out


def metered_flash(
    hbm: HBM, q: Array, k: Array, v: Array, block_q: int = 64, block_k: int = 64
) -> Array:
    """One launch over blocks of queries, in the section ``"flash forward"``; the handle of out.

    Dao (2023), "FlashAttention-2", algorithm 1: q stays on the chip while k and v pass by.
    """
    out = hbm.empty(q.shape, q.dtype, name="out")
    with hbm.section("flash forward"):
        hbm.launch(_flash_kernel, q, k, v, out, block_q, block_k)
    return out


def _flash_kernel(
    hbm: HBM, q: Array, k: Array, v: Array, out: Array, block_q: int, block_k: int
) -> None:
    batch, heads, seq_q, head_dim = q.shape
    for head in [(b, h) for b in range(batch) for h in range(heads)]:
        for first_row in range(0, seq_q, block_q):
            rows = slice(first_row, first_row + block_q)  # cut at the edge by the meter
            q_i = hbm.load(q, (*head, rows)).float()  # (block_q, head_dim)
            m = torch.full((q_i.shape[0], 1), float("-inf"))
            l = torch.zeros(q_i.shape[0], 1)
            o = torch.zeros_like(q_i)
            for first_column in range(0, k.shape[2], block_k):
                columns = slice(first_column, first_column + block_k)
                s = q_i @ hbm.load(k, (*head, columns)).float().T * head_dim**-0.5
                m_new = torch.maximum(m, s.amax(dim=-1, keepdim=True))
                p = torch.exp(s - m_new)  # (block_q, block_k)
                alpha = torch.exp(m - m_new)  # what was summed before used the old maximum
                l = alpha * l + p.sum(dim=-1, keepdim=True)
                o = alpha * o + p @ hbm.load(v, (*head, columns)).float()
                m = m_new
            hbm.store(out, (*head, rows), o / l)
