// Low-rank updates (LoRA) in a GEMM: adds shrunk B^T of the rows of x. skinny_gemm.cu starts its accumulators with the
// update, and wide_kernel.h adds the update after its last slice.
#pragma once

#include "device.cuh"

namespace baton {
namespace {

// Slot and rank of a row's adapter. Slot -1: the row has no adapter, or the slot is empty.
struct RowAdapter {
  int slot, rank;

  __device__ __forceinline__ static RowAdapter of(const baton_low_rank& update, int row, int rows) {
    const int slot = row < rows ? update.row_adapters[row] : -1;
    const int rank = slot >= 0 ? update.ranks[slot] : 0;
    return {rank > 0 ? slot : -1, rank};
  }
};

// The adapters of a warp's rows, each once. A lane has the adapters of two rows.
struct Adapters {
  RowAdapter first, second;

  __device__ __forceinline__ RowAdapter next() {
    const unsigned firsts = __ballot_sync(FULL, first.slot >= 0), seconds = __ballot_sync(FULL, second.slot >= 0);
    if ((firsts | seconds) == 0) return {-1, 0};
    const int lane = __ffs(firsts ? firsts : seconds) - 1;
    const RowAdapter from = firsts ? first : second;
    const RowAdapter found = {__shfl_sync(FULL, from.slot, lane), __shfl_sync(FULL, from.rank, lane)};
    if (first.slot == found.slot) first.slot = -1;
    if (second.slot == found.slot) second.slot = -1;
    return found;
  }
};

// Splits four numbers into bf16 numbers and their remainders in bf16, whose sums have 16 bits of precision.
__device__ __forceinline__ void split4(float4 from, uint32_t (&high)[2], uint32_t (&low)[2]) {
  const float values[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float a = values[2 * i], b = values[2 * i + 1];
    const __nv_bfloat162 near = __floats2bfloat162_rn(a, b);
    const __nv_bfloat162 rest = __floats2bfloat162_rn(a - __low2float(near), b - __high2float(near));
    high[i] = *reinterpret_cast<const uint32_t*>(&near);
    low[i] = *reinterpret_cast<const uint32_t*>(&rest);
  }
}

constexpr int kPartsMost = 4;  // parts of k of `shrunk`

// Sums four adjacent numbers of `shrunk` over its parts.
__device__ __forceinline__ float4 sum_of_parts(const baton_low_rank& update, const float* from, int64_t part_stride) {
  float4 parts[kPartsMost];
#pragma unroll
  for (int part = 0; part < kPartsMost; ++part) {
    parts[part] = part < update.parts ? *reinterpret_cast<const float4*>(from + part * part_stride) : make_float4(0.f, 0.f, 0.f, 0.f);
  }
#pragma unroll
  for (int part = 1; part < kPartsMost; ++part) {
    parts[0].x += parts[part].x, parts[0].y += parts[part].y, parts[0].z += parts[part].z, parts[0].w += parts[part].w;
  }
  return parts[0];
}

// Adds the updates of 16 rows of x to a warp's accumulators, in the layout of mma.m16n8. acc[j] has eight outputs: the first
// half of j those from at.x on, the second half those from at.y on, at least at.x. The warp adds every `step`th adapter of
// its rows from `turn` on.
//
// Loads take over a microsecond while a GEMM streams its weights. So `prepare` loads everything that is older than
// `shrunk` before the kernel waits for it, and the loads of B of TOGETHER adapters are in flight at the same time.
template <int EIGHTS, int TOGETHER>
struct UpdateOfRows {
  const baton_low_rank& update;
  int rows, n, m, turn, step;
  RowAdapter own[2];  // of the two rows of a lane, m and m + 8
  int rank_most;
  int2 at;
  int range, range_last, k;
  Adapters left;
  int passed;
  RowAdapter adapters[TOGETHER];
  uint2 weights[TOGETHER][EIGHTS];

  __device__ __forceinline__ UpdateOfRows(const baton_low_rank& update_, int rows_, int n_, int m0, int turn_, int step_)
      : update(update_), rows(rows_), n(n_), m(m0 + threadIdx.x % WARP / 4), turn(turn_), step(step_) {
#pragma unroll
    for (int i = 0; i < 2; ++i) own[i] = RowAdapter::of(update, m + 8 * i, rows);
    rank_most = max(own[0].rank, own[1].rank);
#pragma unroll
    for (int distance = WARP / 2; distance >= 4; distance /= 2) {
      rank_most = max(rank_most, __shfl_xor_sync(FULL, rank_most, distance));
    }
  }

  __device__ __forceinline__ int output(int j) const {
    return j < EIGHTS / 2 ? at.x + j * 8 : at.y + (j - EIGHTS / 2) * 8;
  }
  __device__ __forceinline__ int range_of(int output) const {
    return (output >= update.firsts[0]) + (output >= update.firsts[1]);
  }

  // Loads B of the next adapters.
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      adapters[i] = left.next();
      for (; adapters[i].slot >= 0 && passed % step != turn; ++passed) adapters[i] = left.next();
      ++passed;
      const auto [slot, rank] = adapters[i];
      const bf16* b = static_cast<const bf16*>(update.b) + static_cast<int64_t>(max(slot, 0)) * n * update.rank_max +
                      (threadIdx.x % WARP / 4) * rank + k;
#pragma unroll
      for (int j = 0; j < EIGHTS; ++j) {
        const bool is_in = k < rank && output(j) < n && range_of(output(j)) == range;
        weights[i][j] = is_in ? *reinterpret_cast<const uint2*>(b + static_cast<int64_t>(output(j)) * rank) : make_uint2(0, 0);
      }
    }
  }
  __device__ __forceinline__ void begin() {
    left = {own[0], own[1]};
    passed = 0;
    load();
  }

  // Loads B of the first adapters for a tile. May run before the kernel waits for its predecessor.
  __device__ __forceinline__ void prepare(int2 tile_rows) {
    at = tile_rows;
    range = range_of(at.x);
    range_last = range_of(min(output(EIGHTS - 1), n - 8));
    k = 4 * (threadIdx.x % 4);
    begin();
  }

  // Adds the updates for the prepared tile.
  __device__ __forceinline__ void add(float (&acc)[EIGHTS][4]) {
    const int64_t pitch = static_cast<int64_t>(update.ranges) * update.rank_max;
    while (range <= range_last) {
      for (; k < rank_most; k += 16, begin()) {
        if (adapters[0].slot < 0) continue;
        uint32_t near[2][2] = {}, rest[2][2] = {};
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          if (k >= own[row].rank) continue;
          const float* from = update.shrunk + (m + row * 8) * pitch + range * own[row].rank + k;
          split4(sum_of_parts(update, from, rows * pitch), near[row], rest[row]);
        }
        for (; adapters[0].slot >= 0; load()) {
#pragma unroll
          for (int i = 0; i < TOGETHER; ++i) {
            const int slot = adapters[i].slot;
            if (slot < 0) continue;
            const uint32_t low = own[0].slot == slot ? ~0u : 0u, high = own[1].slot == slot ? ~0u : 0u;
#pragma unroll
            for (int j = 0; j < EIGHTS; ++j) {
              const uint2 b = weights[i][j];
              mma(acc[j], near[0][0] & low, near[1][0] & high, near[0][1] & low, near[1][1] & high, b.x, b.y);
              mma(acc[j], rest[0][0] & low, rest[1][0] & high, rest[0][1] & low, rest[1][1] & high, b.x, b.y);
            }
          }
        }
      }
      ++range;
      k = 4 * (threadIdx.x % 4);
      if (range <= range_last) begin();
    }
  }
};

}  // namespace
}  // namespace baton
