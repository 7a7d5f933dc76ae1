// Parts of low-rank updates (LoRA), y[row] += (x[row] A^T) B^T, of which low_rank.cu makes kernels of their own, and GEMMs of
// few rows make work of their helper warps. The idea is that of Punica's SGMV and S-LoRA.
#pragma once

#include "device.cuh"

namespace baton {
namespace {

constexpr int kShrinkSlice = 128;  // k of a step of a warp

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

  __device__ __forceinline__ bool is_any() const { return __any_sync(FULL, first.slot >= 0 || second.slot >= 0); }
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

__device__ __forceinline__ void prefetch(const void* from, int64_t bytes) {
#if __CUDA_ARCH__ >= 900
  if (bytes > 0) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(static_cast<uint32_t>(bytes)) : "memory");
  }
#endif
}

// Adds x A^T for HALVES rows of x per lane (-1: no row) and NT * 8 rows of A, over every `slice_step`th slice of k. Loads of
// TOGETHER slices are in flight.
template <int NT, int HALVES, int TOGETHER>
__device__ __forceinline__ void shrink_group(const bf16* a, const bf16* x, int64_t x_stride, const int (&x_rows)[HALVES],
                                             int depth, int rows_of_a, int first_slice, int slice_step, int slices,
                                             float (&acc)[NT][4]) {
  const int lane = threadIdx.x % WARP, g = lane >> 2, c = lane & 3;
  const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll 1
  for (int first = first_slice; first < slices; first += TOGETHER * slice_step) {
    uint4 rows[TOGETHER][HALVES][4], weights[TOGETHER][NT][4];
#pragma unroll
    for (int u = 0; u < TOGETHER; ++u) {
      const int slice = first + u * slice_step;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int k = slice * kShrinkSlice + i * 32 + c * 8;
        auto load = [&](const bf16* row, bool is_in) {
          return is_in && k < depth && slice < slices ? *reinterpret_cast<const uint4*>(row + k) : zero;
        };
#pragma unroll
        for (int half = 0; half < HALVES; ++half) rows[u][half][i] = load(x + x_rows[half] * x_stride, x_rows[half] >= 0);
#pragma unroll
        for (int t = 0; t < NT; ++t) weights[u][t][i] = load(a + static_cast<int64_t>(t * 8 + g) * depth, t * 8 < rows_of_a);
      }
    }
#pragma unroll
    for (int u = 0; u < TOGETHER; ++u) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 low = rows[u][0][i], high = HALVES > 1 ? rows[u][HALVES - 1][i] : zero;
#pragma unroll
        for (int t = 0; t < NT; ++t) {
          mma(acc[t], low.x, high.x, low.y, high.y, weights[u][t][i].x, weights[u][t][i].y);
          mma(acc[t], low.z, high.z, low.w, high.w, weights[u][t][i].z, weights[u][t][i].w);
        }
      }
    }
  }
}

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

constexpr int kPartsMost = 16;  // parts of k of `shrunk`

// Rows of x A^T, as a sum of parts.
struct Shrunk {
  const float* first;
  int64_t pitch, part_stride;
  int parts;

  // Returns four adjacent numbers of a row.
  __device__ __forceinline__ float4 four(int row, int at) const {
    float4 sums[kPartsMost];
#pragma unroll
    for (int part = 0; part < kPartsMost; ++part) {
      const auto* from = reinterpret_cast<const float4*>(first + row * pitch + part * part_stride + at);
      sums[part] = part < parts ? *from : make_float4(0.f, 0.f, 0.f, 0.f);
    }
#pragma unroll
    for (int part = 1; part < kPartsMost; ++part) {
      sums[0].x += sums[part].x, sums[0].y += sums[part].y, sums[0].z += sums[part].z, sums[0].w += sums[part].w;
    }
    return sums[0];
  }
};

// Returns the range of an output.
__device__ __forceinline__ int range_of(const baton_low_rank& update, int output) {
  return (output >= update.firsts[0]) + (output >= update.firsts[1]);
}

// x A^T of up to 64 rows, computed by warps of all CTAs of a GEMM while other warps multiply. An item is 16 rows of an
// adapter's A and one part of k. A warp computes an item alone and stores its sums to `shrunk`. `arrivals` counts the items,
// and then the warps that have read `shrunk`. All CTAs of the GEMM must run at the same time. All lanes of a warp call a
// function together.
struct SharedShrink {
  static constexpr int kRows = 64;
  const baton_low_rank& update;
  int rows, depth, slices, parts;
  RowAdapter own[2];  // of rows lane and lane + 32
  int first_sixteenth[2];  // sixteens of ranks of the adapters before that of the row
  int sixteens;            // of all adapters
  int rank_most;

  __device__ __forceinline__ SharedShrink(const baton_low_rank& update_, int rows_, int depth_)
      : update(update_), rows(rows_), depth(depth_), slices((depth + kShrinkSlice - 1) / kShrinkSlice) {
    const int lane = threadIdx.x % WARP;
    parts = min(max(slices / 2, 1), kPartsMost);
    sixteens = rank_most = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) own[i] = RowAdapter::of(update, i * WARP + lane, rows), first_sixteenth[i] = 0;
    for_each_adapter([&](RowAdapter adapter) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (own[i].slot == adapter.slot) first_sixteenth[i] = sixteens;
      }
      sixteens += adapter.rank / 16;
      rank_most = max(rank_most, adapter.rank);
    });
  }

  template <class Body>
  __device__ __forceinline__ void for_each_adapter(Body&& body) const {
    Adapters left = {own[0], own[1]};
#pragma unroll 1
    for (RowAdapter adapter = left.next(); adapter.slot >= 0; adapter = left.next()) body(adapter);
  }
  __device__ __forceinline__ int items() const { return update.ranges * sixteens * parts; }

  // Calls body(slot, first row of A, first slice of k, end) for the items of warp `index` of `warps`.
  template <class Body>
  __device__ __forceinline__ void for_each_item(int index, int warps, Body&& body) const {
    int before = 0;
    for_each_adapter([&](RowAdapter adapter) {
      const int count = update.ranges * adapter.rank / 16 * parts;
      const int skipped = (before + warps - 1 - index) / warps;
#pragma unroll 1
      for (int i = skipped * warps + index - before; i < count; i += warps) {
        const int part = i % parts;
        body(adapter.slot, i / parts * 16, part, slices * part / parts, slices * (part + 1) / parts);
      }
      before += count;
    });
  }
  __device__ __forceinline__ const bf16* a_of(int slot, int row) const {
    return static_cast<const bf16*>(update.a) + (static_cast<int64_t>(slot) * update.ranges * update.rank_max + row) * depth;
  }

  // Brings A of the warp's items into the L2 cache.
  __device__ __forceinline__ void prefetch_items(int index, int warps) const {
    const int lane = threadIdx.x % WARP;
    for_each_item(index, warps, [&](int slot, int first_a, int, int first, int end) {
      const int k = first * kShrinkSlice, bytes = (min(end * kShrinkSlice, depth) - k) * 2;
      if (lane < 16) prefetch(a_of(slot, first_a + lane) + k, bytes);
    });
  }

  // Computes the warp's items, 8 * HALVES rows of x at a time. `list` has room for kRows numbers of the warp.
  template <int HALVES>
  __device__ __forceinline__ void compute(const bf16* x, int64_t x_stride, uint8_t* list, int index, int warps) const {
    const int lane = threadIdx.x % WARP, g = lane >> 2, c = lane & 3;
    const int64_t pitch = static_cast<int64_t>(update.ranges) * update.rank_max;
    for_each_item(index, warps, [&](int slot, int first_a, int part, int first, int end) {
      const unsigned firsts = __ballot_sync(FULL, own[0].slot == slot), seconds = __ballot_sync(FULL, own[1].slot == slot);
      const unsigned before = (1u << lane) - 1;
      __syncwarp();
      if (own[0].slot == slot) list[__popc(firsts & before)] = lane;
      if (own[1].slot == slot) list[__popc(firsts) + __popc(seconds & before)] = WARP + lane;
      __syncwarp();
      const int listed = __popc(firsts) + __popc(seconds);
#pragma unroll 1
      for (int group = 0; group < listed; group += HALVES * 8) {
        int of_lane[HALVES];
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
          const int i = group + half * 8 + g;
          of_lane[half] = i < listed ? list[i] : -1;
        }
        float acc[2][4] = {};
        shrink_group<2, HALVES, 2>(a_of(slot, first_a), x, x_stride, of_lane, depth, 16, first, 1, end, acc);
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
          if (of_lane[half] < 0) continue;
          float* const to = update.shrunk + (static_cast<int64_t>(part) * rows + of_lane[half]) * pitch + first_a + 2 * c;
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            *reinterpret_cast<float2*>(to + t * 8) = make_float2(acc[t][2 * half], acc[t][2 * half + 1]);
          }
        }
      }
      __syncwarp();
      if (lane == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(update.arrivals) : "memory");
    });
  }

  // Returns whether the warps of all CTAs have computed their items.
  __device__ __forceinline__ bool is_complete() const {
    uint32_t found = 0;
    if (threadIdx.x % WARP == 0) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(update.arrivals) : "memory");
    }
    __syncwarp();
    return __shfl_sync(FULL, found, 0) >= static_cast<uint32_t>(items());
  }

  __device__ __forceinline__ Shrunk shrunk() const {
    const int64_t pitch = static_cast<int64_t>(update.ranges) * update.rank_max;
    return {update.shrunk, pitch, rows * pitch, parts};
  }

  // Calls body(row, first sixteenth of the row's adapter, range, place of k in the row's ranges, k) for every fourth k of
  // the rows' ranks in ranges [first_range, first_range + count), shared among `threads`.
  template <class Body>
  __device__ __forceinline__ void for_each_four(int thread, int threads, int first_range, int count, Body&& body) const {
    const int fours = rank_most / 4;
#pragma unroll 1
    for (int first = thread / WARP * WARP; first < rows * count * fours; first += threads) {
      const int item = first + thread % WARP, place = item / fours, row = place % rows, range = first_range + place / rows;
      auto of_row = [&](int low, int high) {
        low = __shfl_sync(FULL, low, row % WARP), high = __shfl_sync(FULL, high, row % WARP);
        return row < WARP ? low : high;
      };
      const int rank = of_row(own[0].rank, own[1].rank), sixteenth = of_row(first_sixteenth[0], first_sixteenth[1]);
      const int k = item % fours * 4;
      if (item < rows * count * fours && k < rank) body(row, sixteenth, range, range * rank + k, k);
    }
  }

  // Counts a warp that has read `shrunk`, of `readers`. The last one resets the count.
  __device__ __forceinline__ void leave(uint32_t readers) const {
    if (threadIdx.x % WARP == 0 && atomicAdd(update.arrivals, 1u) == items() + readers - 1) *update.arrivals = 0;
  }
};

// Adds the updates of 16 rows of x to a warp's accumulators, in the layout of mma.m16n8. acc[j] has eight outputs: the first
// half of j those from at.x on, the second half those from at.y on, at least at.x.
//
// Loads take over a microsecond while a GEMM streams its weights. So `prepare` loads everything that is older than
// `shrunk` before the kernel waits for it, and the loads of B of TOGETHER adapters are in flight at the same time.
template <int EIGHTS, int TOGETHER>
struct UpdateOfRows {
  const baton_low_rank& update;
  int n, m;
  RowAdapter own[2];  // of the two rows of a lane, m and m + 8
  int rank_most;
  int2 at;
  int k;
  Adapters left;
  RowAdapter adapters[TOGETHER];
  uint2 weights[TOGETHER][EIGHTS];

  __device__ __forceinline__ UpdateOfRows(const baton_low_rank& update_, int rows, int n_, int m0)
      : update(update_), n(n_), m(m0 + threadIdx.x % WARP / 4) {
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

  // Loads B of the next adapters.
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      adapters[i] = left.next();
      const auto [slot, rank] = adapters[i];
      const bf16* b = static_cast<const bf16*>(update.b) + static_cast<int64_t>(max(slot, 0)) * n * update.rank_max +
                      (threadIdx.x % WARP / 4) * rank + k;
#pragma unroll
      for (int j = 0; j < EIGHTS; ++j) {
        const bool is_in = k < rank && output(j) < n;
        weights[i][j] = is_in ? *reinterpret_cast<const uint2*>(b + static_cast<int64_t>(output(j)) * rank) : make_uint2(0, 0);
      }
    }
  }
  __device__ __forceinline__ void begin() {
    left = {own[0], own[1]};
    load();
  }

  // Loads B of the first adapters for a tile. May run before the kernel waits for its predecessor.
  __device__ __forceinline__ void prepare(int2 tile_rows) {
    at = tile_rows;
    k = 4 * (threadIdx.x % 4);
    begin();
  }

  __device__ __forceinline__ void add_loaded(const Shrunk& shrunk, float (&acc)[EIGHTS][4]) const {
    int range = -1;
    uint32_t near[2][2], rest[2][2];
#pragma unroll
    for (int j = 0; j < EIGHTS; ++j) {
      const int found = range_of(update, output(j));
      if (found != range) {
        range = found;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const float4 zero = make_float4(0.f, 0.f, 0.f, 0.f);
          split4(k < own[row].rank ? shrunk.four(m + row * 8, range * own[row].rank + k) : zero, near[row], rest[row]);
        }
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const int slot = adapters[i].slot;
        if (slot < 0) continue;
        const uint32_t low = own[0].slot == slot ? ~0u : 0u, high = own[1].slot == slot ? ~0u : 0u;
        const uint2 b = weights[i][j];
        mma(acc[j], near[0][0] & low, near[1][0] & high, near[0][1] & low, near[1][1] & high, b.x, b.y);
        mma(acc[j], rest[0][0] & low, rest[1][0] & high, rest[0][1] & low, rest[1][1] & high, b.x, b.y);
      }
    }
  }

  // Adds the updates for the prepared tile.
  __device__ __forceinline__ void add(const Shrunk& shrunk, float (&acc)[EIGHTS][4]) {
#pragma unroll 1
    while (k < rank_most) {
      add_loaded(shrunk, acc);
      if (left.is_any()) {
        load();
      } else if ((k += 16) < rank_most) {
        begin();
      }
    }
  }
};

}  // namespace
}  // namespace baton
