"""Weights from their natural order [rows, K] to the order in which the whole-step kernel streams them, and back.

The stream of a matrix is [block][group of that block][tile along K][column of 16 bytes][64 rows][16 bytes]: a tile is
what one bulk copy brings, and in it 8 rows x 16 bytes are the 128 bytes that a tensor core reads as one core matrix.
Both directions are a permutation of bytes (plus zeros where `Matrix` pads), in torch, on the tensor's own device.
"""

from __future__ import annotations

import torch

from .plan import Matrix

COLUMN = 16  # bytes of K of one row that lie together


def halves_together(rows: int, block: int) -> torch.Tensor:
    """int64 [rows]: stream row -> natural row. In each `block` of rows, 8 of the first half precede the 8 of the second
    that belong to them: a rotary pair in a head of q or k, gate and up in gate_up (block = all rows).

    Raises ValueError if `block` is no multiple of 16 or does not divide `rows`.
    """
    if block % 16 or rows % block:
        raise ValueError(f"{rows} rows in blocks of {block}")
    return torch.arange(rows).view(-1, 2, block // 16, 8).transpose(1, 2).reshape(-1)


def pack(weight: torch.Tensor, matrix: Matrix, order: torch.Tensor | None = None) -> torch.Tensor:
    """uint8 [matrix.packed_bytes] of `weight` [rows, K], of any dtype. order: stream row -> natural row, see
    `halves_together`. Raises ValueError if the shape is not the plan's."""
    natural = weight.contiguous().view(torch.uint8)
    if natural.shape != (matrix.rows, matrix.k_bytes):
        raise ValueError(f"{matrix.name} is {tuple(natural.shape)} bytes, planned {(matrix.rows, matrix.k_bytes)}")
    if order is not None:
        natural = natural[order.to(natural.device)]
    padding = (0, matrix.padded_k_bytes - matrix.k_bytes, 0, matrix.groups * matrix.group - matrix.rows)
    padded = torch.nn.functional.pad(natural, padding) if any(padding) else natural
    columns = matrix.width // COLUMN
    split = padded.view(matrix.groups, matrix.group, matrix.tiles, matrix.pieces, columns, COLUMN)
    return split[_streamed(matrix, natural.device)].permute(0, 2, 4, 3, 1, 5).reshape(-1)


def unpack(stream: torch.Tensor, matrix: Matrix, dtype: torch.dtype, order: torch.Tensor | None = None) -> torch.Tensor:
    """`weight` [rows, K] again, from what `pack` made of it with the same `matrix` and `order`."""
    columns = matrix.width // COLUMN
    tiles = stream.view(matrix.groups, matrix.tiles, columns, matrix.pieces, matrix.group, COLUMN)
    split = torch.empty_like(tiles)
    split[_streamed(matrix, stream.device)] = tiles
    natural = split.permute(0, 4, 1, 3, 2, 5).reshape(matrix.groups * matrix.group, matrix.padded_k_bytes)
    natural = natural[: matrix.rows, : matrix.k_bytes]
    if order is not None:
        natural = torch.empty_like(natural).index_copy_(0, order.to(natural.device), natural)
    return natural.contiguous().view(dtype)


def _streamed(matrix: Matrix, device: torch.device) -> torch.Tensor:
    """Place in the stream -> natural group: each block's groups one after the other."""
    groups = torch.arange(matrix.groups, device=device)
    return torch.argsort(groups % matrix.blocks, stable=True)
