// Low-rank updates (LoRA), y[row] += (x[row] A^T) B^T: code of the kernels of low_rank.cu, and of the helper warps of GEMMs of
// few rows. The idea is that of Punica's SGMV and S-LoRA.
#pragma once

#include "device.cuh"

namespace baton {
namespace {

constexpr int kShrinkSlice = 128;  // k of a step of a warp

// Checks an update of `rows` rows of x and n outputs.
inline int32_t check_update(const baton_low_rank& p, int32_t rows, int32_t n) {
  BATON_REQUIRE(p.a && p.b && p.ranks && p.row_adapters && p.shrunk, "an address of the low-rank update is null");
  BATON_REQUIRE(rows >= 0, "rows is %d; expected 0 or more", rows);
  BATON_REQUIRE(n > 0 && n % 8 == 0, "n is %d; expected multiples of 8", n);
  BATON_REQUIRE(p.ranges >= 1 && p.ranges <= 3, "ranges is %d; expected 1 to 3", p.ranges);
  BATON_REQUIRE(p.rank_max > 0 && p.rank_max % 16 == 0, "rank_max is %d; expected multiples of 16", p.rank_max);
  BATON_REQUIRE(p.slots > 0 && p.slots <= BATON_ADAPTER_SLOTS_MAX, "slots is %d; expected 1 to %d", p.slots,
                BATON_ADAPTER_SLOTS_MAX);
  for (int i = 0; i < 2; ++i) {
    const int first = p.firsts[i], lowest = i + 1 < p.ranges ? (i ? p.firsts[0] : 0) : n;
    BATON_REQUIRE(first % 8 == 0 && first >= lowest && first <= n,
                  "the first output of range %d is %d; expected multiples of 8 from %d to n, %d", i + 1, first, lowest, n);
  }
  return BATON_OK;
}

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

// Returns the first rows of A of an adapter, from `row` on.
__device__ __forceinline__ const bf16* a_of(const baton_low_rank& update, int slot, int row, int depth) {
  return static_cast<const bf16*>(update.a) + (static_cast<int64_t>(slot) * update.ranges * update.rank_max + row) * depth;
}

// Work on x A^T: ROWS_OF_A rows of an adapter's A from `first_a` on, over part `part` of k. It is item `index` of `count` of
// this adapter.
struct Item {
  RowAdapter adapter;
  int index, count, first_a, part;
};

// Calls body(item) for the items with numbers `at`, next(at), next(next(at)) and so on. The numbers rise. `next` may claim an
// item, so it is called only after body has returned.
template <int ROWS_OF_A, class Next, class Body>
__device__ __forceinline__ void for_each_item(const baton_low_rank& update, Adapters left, int parts, int at, Next&& next,
                                              Body&& body) {
  int before = 0;
#pragma unroll 1
  for (RowAdapter adapter = left.next(); adapter.slot >= 0; adapter = left.next()) {
    const int count = (update.ranges * adapter.rank + ROWS_OF_A - 1) / ROWS_OF_A * parts;
#pragma unroll 1
    for (; at < before + count; at = next(at)) {
      const int index = at - before;
      body(Item{adapter, index, count, index / parts * ROWS_OF_A, index % parts});
    }
    before += count;
  }
}

// Lists those of 64 rows that have the adapter in `slot`, and returns their number. `own` has rows lane and lane + 32.
__device__ __forceinline__ int list_rows(const Adapters& own, int slot, uint8_t* list) {
  const int lane = threadIdx.x % WARP;
  const bool is_first = own.first.slot == slot, is_second = own.second.slot == slot;
  const unsigned firsts = __ballot_sync(FULL, is_first), seconds = __ballot_sync(FULL, is_second), before = (1u << lane) - 1;
  __syncwarp();
  if (is_first) list[__popc(firsts & before)] = lane;
  if (is_second) list[__popc(firsts) + __popc(seconds & before)] = WARP + lane;
  __syncwarp();
  return __popc(firsts) + __popc(seconds);
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

// Rows of x A^T, as a sum of up to PARTS parts.
template <int PARTS>
struct Shrunk {
  const float* first;
  int64_t pitch, part_stride;
  int parts;

  // Returns four adjacent numbers of a row.
  __device__ __forceinline__ float4 four(int row, int at) const {
    float4 sums[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const auto* from = reinterpret_cast<const float4*>(first + row * pitch + part * part_stride + at);
      sums[part] = part < parts ? *from : make_float4(0.f, 0.f, 0.f, 0.f);
    }
#pragma unroll
    for (int part = 1; part < PARTS; ++part) {
      sums[0].x += sums[part].x, sums[0].y += sums[part].y, sums[0].z += sums[part].z, sums[0].w += sums[part].w;
    }
    return sums[0];
  }
};

// Returns the range of an output.
__device__ __forceinline__ int range_of(const baton_low_rank& update, int output) {
  return (output >= update.firsts[0]) + (output >= update.firsts[1]);
}

// x A^T of up to 64 rows, computed by helper warps of a GEMM's CTAs while other warps multiply. A warp claims an item (16 rows
// of an adapter's A and one part of k), computes it alone and stores its sums to `shrunk`.
//
// `progress` has the claims in its high half. Its low half has the computed items, and then the warps that have read `shrunk`.
// A warp claims until a claim fails, and only then waits until all items are computed. When a claim has failed, all items are
// claimed by warps of running CTAs, which compute them without a wait for another CTA. So no CTA waits for one that is not
// resident, when other kernels hold SMs or the grid has more CTAs than fit: a CTA that starts later finds all items claimed.
//
// The last warp to leave sets `progress` to 0. The next kernel of the stream reads it only after this one has completed, also
// with PDL.
//
// All lanes of a warp call a function together.
struct SharedShrink {
  static constexpr int kRows = 64, kPartsMost = 16, kBlock = 16;  // a block: ranks of an item
  static constexpr unsigned long long kClaim = 1ull << 32, kDone = 1;
  const baton_low_rank& update;
  int rows, depth, slices, parts;
  Adapters own;
  int blocks_before[2];  // blocks of the adapters before those of the lane's rows
  int blocks;            // of all adapters
  int rank_most;
  bool is_complete = false;

  __device__ __forceinline__ SharedShrink(const baton_low_rank& update_, int rows_, int depth_)
      : update(update_), rows(rows_), depth(depth_), slices((depth + kShrinkSlice - 1) / kShrinkSlice) {
    const int lane = threadIdx.x % WARP;
    parts = min(max(slices / 2, 1), kPartsMost);
    own = {RowAdapter::of(update, lane, rows), RowAdapter::of(update, WARP + lane, rows)};
    blocks_before[0] = blocks_before[1] = blocks = rank_most = 0;
    for_each_adapter([&](RowAdapter adapter) {
      if (own.first.slot == adapter.slot) blocks_before[0] = blocks;
      if (own.second.slot == adapter.slot) blocks_before[1] = blocks;
      blocks += adapter.rank / kBlock;
      rank_most = max(rank_most, adapter.rank);
    });
  }

  template <class Body>
  __device__ __forceinline__ void for_each_adapter(Body&& body) const {
    Adapters left = own;
#pragma unroll 1
    for (RowAdapter adapter = left.next(); adapter.slot >= 0; adapter = left.next()) body(adapter);
  }
  __device__ __forceinline__ uint32_t items() const { return update.ranges * blocks * parts; }
  __device__ __forceinline__ int slice_of(int part) const { return slices * part / parts; }

  // Brings 1/`warps` of A into the L2 cache. A warp may later claim other items than those that it fetches here.
  __device__ __forceinline__ void prefetch_a(int index, int warps) const {
    auto next = [&](int at) { return at + warps; };
    for_each_item<kBlock>(update, own, parts, index, next, [&](const Item& item) {
      const int k = slice_of(item.part) * kShrinkSlice, end = min(slice_of(item.part + 1) * kShrinkSlice, depth);
      const int lane = threadIdx.x % WARP;
      if (lane < kBlock) prefetch(a_of(update, item.adapter.slot, item.first_a + lane, depth) + k, (end - k) * 2);
    });
  }

  // Adds to `progress`, and returns it as it was; only for lane 0.
  __device__ __forceinline__ unsigned long long add_progress(unsigned long long added) const {
    // If all lanes add the same number, the compiler adds them up and shares the result by a shuffle, which waits for the
    // result. `lane` is 0 here, which the compiler does not know.
    unsigned lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    if (threadIdx.x % WARP != 0) return 0;
    return atomicAdd(reinterpret_cast<unsigned long long*>(update.progress), added + lane);
  }
  __device__ __forceinline__ int claim(unsigned long long done) const {
    return __shfl_sync(FULL, static_cast<int>(add_progress(kClaim + done) >> 32), 0);
  }

  // Claims and computes items, 8 * HALVES rows of x at a time. `list` has room for kRows numbers of the warp.
  template <int HALVES>
  __device__ __forceinline__ void compute(const bf16* x, int64_t x_stride, uint8_t* list) const {
    const int lane = threadIdx.x % WARP, g = lane >> 2, c = lane & 3;
    const int64_t pitch = static_cast<int64_t>(update.ranges) * update.rank_max;
    auto next = [&](int) {
      __syncwarp();
      asm volatile("fence.acq_rel.gpu;" ::: "memory");
      return claim(kDone);
    };
    for_each_item<kBlock>(update, own, parts, claim(0), next, [&](const Item& item) {
      const auto [adapter, index, count, first_a, part] = item;
      const int listed = list_rows(own, adapter.slot, list);
#pragma unroll 1
      for (int group = 0; group < listed; group += HALVES * 8) {
        int of_lane[HALVES];
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
          const int i = group + half * 8 + g;
          of_lane[half] = i < listed ? list[i] : -1;
        }
        float acc[2][4] = {};
        shrink_group<2, HALVES, 2>(a_of(update, adapter.slot, first_a, depth), x, x_stride, of_lane, depth, kBlock,
                                   slice_of(part), 1, slice_of(part + 1), acc);
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
    });
  }

  // Waits until all items are computed. The warp's last claim has failed.
  __device__ __forceinline__ void wait() {
    while (!is_complete) {
      uint64_t found = 0;
      if (threadIdx.x % WARP == 0) {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(update.progress) : "memory");
      }
      __syncwarp();
      is_complete = __shfl_sync(FULL, static_cast<uint32_t>(found), 0) >= items();
    }
  }

  __device__ __forceinline__ Shrunk<kPartsMost> shrunk() const {
    const int64_t pitch = static_cast<int64_t>(update.ranges) * update.rank_max;
    return {update.shrunk, pitch, rows * pitch, parts};
  }

  // Calls body(row, blocks before those of the row's adapter, range, place of k in the row's ranges, k) for every fourth k of
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
      const int rank = of_row(own.first.rank, own.second.rank), before = of_row(blocks_before[0], blocks_before[1]);
      const int k = item % fours * 4;
      if (item < rows * count * fours && k < rank) body(row, before, range, range * rank + k, k);
    }
  }

  // Counts a warp that has read `shrunk`, of `readers`. The count takes over a microsecond, so the warp goes on with other work
  // before it calls reset_after_last with the result.
  __device__ __forceinline__ unsigned long long leave() const { return add_progress(kDone); }
  __device__ __forceinline__ void reset_after_last(unsigned long long before, uint32_t readers) const {
    const bool is_last = before == (kClaim + kDone) * (items() + readers) - kDone;
    if (threadIdx.x % WARP == 0 && is_last) *update.progress = 0;
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
      const bf16* b = static_cast<const bf16*>(update.b) + static_cast<int64_t>(max(slot, 0)) * n * update.rank_max + k;
#pragma unroll
      for (int j = 0; j < EIGHTS; ++j) {
        const int64_t row = output(j) + threadIdx.x % WARP / 4;
        weights[i][j] = k < rank && row < n ? *reinterpret_cast<const uint2*>(b + row * rank) : make_uint2(0, 0);
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

  template <int PARTS>
  __device__ __forceinline__ void add_loaded(const Shrunk<PARTS>& shrunk, float (&acc)[EIGHTS][4]) const {
    int range = -1;
    uint32_t near[2][2], rest[2][2];
#pragma unroll
    for (int j = 0; j < EIGHTS; ++j) {
      const int found = range_of(update, min(output(j), n - 1));  // a tile's last outputs may exceed n
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
  template <int PARTS>
  __device__ __forceinline__ void add(const Shrunk<PARTS>& shrunk, float (&acc)[EIGHTS][4]) {
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
