"""FP8 KV in torch and numpy: the rule of baton_kv, and blocks of it."""

import numpy as np
import torch

BLOCK_TOKENS = 16
# Values of the codes without sign, 0 to 448.
CODES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()


def quantize(bits):
    """Returns codes and scale exponents of bf16 bits [..., dim], by a table of all codes."""
    magnitude, sign = bits & 0x7FFF, bits >> 15
    is_nan = magnitude > 0x7F80
    magnitude = np.where(is_nan, 0, np.minimum(magnitude, 0x7F70)).astype(np.uint32)
    amax = magnitude.max(-1).astype(np.int64)
    exponents = np.maximum((amax >> 7) - np.where(amax & 0x7F > 0x60, 7, 8), 1)
    values = (magnitude << 16).view(np.float32).astype(np.float64) * 2.0 ** (127 - exponents)[..., None]
    middles = (CODES[1:] + CODES[:-1]) / 2
    codes = np.searchsorted(middles, values)
    is_tie = middles[np.minimum(codes, 125)] == values
    codes = codes + (is_tie & (codes % 2 == 1))
    return (codes | np.where(is_nan, 0, sign) << 7).astype(np.uint8), exponents.astype(np.uint8)


def dequantize(blocks, dim):
    """Returns [..., token, dim] (f32) of blocks of bytes [..., 16 * (dim + 1)]."""
    codes = blocks[..., : BLOCK_TOKENS * dim].contiguous().view(torch.float8_e4m3fn).float()
    scales = (blocks[..., BLOCK_TOKENS * dim :].int() << 23).view(torch.float32)
    return codes.view(*blocks.shape[:-1], BLOCK_TOKENS, dim) * scales[..., None]


def blocks_of(values):
    """Returns blocks [..., 16 * (dim + 1)] of finite values [..., token, dim], not zero, of usual magnitude."""
    bits = values.bfloat16().abs().amax(-1).view(torch.int16).int()
    exponents = (bits >> 7) - torch.where(bits & 0x7F > 0x60, 7, 8)
    codes = (values.bfloat16().float() * torch.exp2((127 - exponents).float())[..., None]).to(torch.float8_e4m3fn)
    return torch.cat((codes.view(torch.uint8).flatten(-2), exponents.to(torch.uint8)), -1)
