// Low-rank updates (LoRA): y[row] += (x[row] A^T) B^T with the adapter of each row. The idea is that of Punica's SGMV and
// S-LoRA.
//
// Shrink: an item is 8 or 32 rows of one adapter's A for a tile of 64 rows of x. The CTAs take turns with the items of a
// tile. A CTA multiplies 16 rows of x with this adapter at a time on tensor cores, and its warps split k. For few rows of x
// there is an item for each part of k, because one CTA would read 8 rows of A too slowly. The reader of `shrunk` adds the
// parts. Before the kernel waits for x, it brings A, and B for the GEMM, into the L2 cache, and lets the GEMM start to load
// its weights.
//
// Expand: GEMMs in bf16 of up to 64 rows expand in their own kernel (low_rank.h). The kernel here expands into the output
// of other GEMMs.
#include "low_rank.h"

namespace baton {
namespace {

constexpr int kWarps = 8;
constexpr int kTileRows = 64;   // rows of x that share items
constexpr int kGroupRows = 16;  // rows of an mma
constexpr int kSlice = 128;     // k of a step of a warp
constexpr int kFewRows = 256;  // up to these rows of x an item has 8 rows of A, above 32

__device__ __forceinline__ void prefetch(const void* from, int64_t bytes) {
#if __CUDA_ARCH__ >= 900
  if (bytes > 0) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(static_cast<uint32_t>(bytes)) : "memory");
  }
#endif
}

// Adds x A^T for two rows of x per lane (`low` and `high`; -1: no row) and NT * 8 rows of A, over slices of k.
template <int NT>
__device__ __forceinline__ void shrink_group(const bf16* a, const bf16* x, int64_t x_stride, int low, int high, int depth,
                                             int rows_of_a, int first_slice, int slices, float (&acc)[NT][4]) {
  const int lane = threadIdx.x % WARP, g = lane >> 2, c = lane & 3;
  const uint4 zero = make_uint4(0, 0, 0, 0);
  for (int slice = first_slice; slice < slices; slice += kWarps) {
    uint4 rows[2][4], weights[NT][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = slice * kSlice + i * 32 + c * 8;
      auto load = [&](const bf16* row, bool is_in) {
        return is_in && k < depth ? *reinterpret_cast<const uint4*>(row + k) : zero;
      };
      rows[0][i] = load(x + low * x_stride, low >= 0);
      rows[1][i] = load(x + high * x_stride, high >= 0);
#pragma unroll
      for (int t = 0; t < NT; ++t) weights[t][i] = load(a + static_cast<int64_t>(t * 8 + g) * depth, t * 8 < rows_of_a);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int t = 0; t < NT; ++t) {
        mma(acc[t], rows[0][i].x, rows[1][i].x, rows[0][i].y, rows[1][i].y, weights[t][i].x, weights[t][i].y);
        mma(acc[t], rows[0][i].z, rows[1][i].z, rows[0][i].w, rows[1][i].w, weights[t][i].z, weights[t][i].w);
      }
    }
  }
}

// Work of a CTA: NT * 8 rows of the A of the adapter in `slot`, from `first_a` on, over part `part` of k.
struct Item {
  int slot, rank, first_a, part;
};

// blockIdx.y: tile of rows.
template <int NT>
__global__ void __launch_bounds__(kWarps * WARP)
    shrink_kernel(const __grid_constant__ baton_low_rank p, const bf16* x, int64_t x_stride, int rows, int n, int depth) {
  constexpr int OUTPUTS = kGroupRows * NT * 8;
  __shared__ float sums[kWarps - 1][OUTPUTS];
  __shared__ uint8_t list[kTileRows];  // the tile's rows with the item's adapter
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane >> 2, c = lane & 3;
  const int tile = blockIdx.y * kTileRows, slices = (depth + kSlice - 1) / kSlice;
  const RowAdapter own[2] = {RowAdapter::of(p, tile + lane, rows), RowAdapter::of(p, tile + WARP + lane, rows)};
  // Calls body(item, items of the item's adapter) for each item of this CTA.
  auto for_each_item = [&](auto&& body) {
    Adapters adapters = {own[0], own[1]};
    int before = 0;
    for (RowAdapter adapter = adapters.next(); adapter.slot >= 0; adapter = adapters.next()) {
      const auto [slot, rank] = adapter;
      const int count = (p.ranges * rank + NT * 8 - 1) / (NT * 8) * p.parts;
      const int skipped = (before + gridDim.x - 1 - blockIdx.x) / gridDim.x;
      for (int i = skipped * gridDim.x + blockIdx.x - before; i < count; i += gridDim.x) {
        body(Item{slot, rank, i / p.parts * NT * 8, i % p.parts}, i, count);
      }
      before += count;
    }
  };
  auto a_of = [&](const Item& item) {
    return static_cast<const bf16*>(p.a) + (static_cast<int64_t>(item.slot) * p.ranges * p.rank_max + item.first_a) * depth;
  };
  auto slice_of = [&](int part) { return slices * part / p.parts; };
  pdl_release();
  if (warp == 0 && blockIdx.y == 0) {
    for_each_item([&](const Item& item, int index, int count) {
      const int first = slice_of(item.part) * kSlice, end = min(slice_of(item.part + 1) * kSlice, depth);
      for (int row = lane; row < min(NT * 8, p.ranges * item.rank - item.first_a); row += WARP) {
        prefetch(a_of(item) + static_cast<int64_t>(row) * depth + first, (end - first) * 2);
      }
      const int64_t each = (static_cast<int64_t>(n) * item.rank * 2 / count / WARP + 16) / 16 * 16;
      const int64_t at = (static_cast<int64_t>(index) * WARP + lane) * each;
      const auto* b = static_cast<const bf16*>(p.b) + static_cast<int64_t>(item.slot) * n * p.rank_max;
      prefetch(reinterpret_cast<const char*>(b) + at, min(each, static_cast<int64_t>(n) * item.rank * 2 - at));
    });
  }
  pdl_wait();
  for_each_item([&](const Item& item, int, int) {
    const unsigned firsts = __ballot_sync(FULL, own[0].slot == item.slot), seconds = __ballot_sync(FULL, own[1].slot == item.slot);
    const int listed = __popc(firsts) + __popc(seconds);
    __syncthreads();
    if (warp == 0) {
      const unsigned before = (1u << lane) - 1;
      if (own[0].slot == item.slot) list[__popc(firsts & before)] = lane;
      if (own[1].slot == item.slot) list[__popc(firsts) + __popc(seconds & before)] = WARP + lane;
    }
    __syncthreads();
    const int rows_of_a = p.ranges * item.rank - item.first_a;
    auto row_of = [&](int i) { return i < listed ? tile + list[i] : -1; };
    for (int group = 0; group < listed; group += kGroupRows) {
      float acc[NT][4] = {};
      shrink_group<NT>(a_of(item), x, x_stride, row_of(group + g), row_of(group + g + 8), depth, rows_of_a,
                       slice_of(item.part) + warp, slice_of(item.part + 1), acc);
      // The first warp adds the sums of the others.
      if (warp > 0) {
#pragma unroll
        for (int t = 0; t < NT; ++t) {
          *reinterpret_cast<float4*>(sums[warp - 1] + (t * WARP + lane) * 4) = make_float4(acc[t][0], acc[t][1], acc[t][2], acc[t][3]);
        }
      }
      __syncthreads();
      if (warp == 0) {
        float* const shrunk = p.shrunk + static_cast<int64_t>(item.part) * rows * p.ranges * p.rank_max + item.first_a;
#pragma unroll
        for (int t = 0; t < NT; ++t) {
#pragma unroll
          for (int other = 0; other < kWarps - 1; ++other) {
            const float4 more = *reinterpret_cast<const float4*>(sums[other] + (t * WARP + lane) * 4);
            acc[t][0] += more.x, acc[t][1] += more.y, acc[t][2] += more.z, acc[t][3] += more.w;
          }
          if (t * 8 >= rows_of_a) continue;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int row = row_of(group + g + half * 8);
            if (row < 0) continue;
            *reinterpret_cast<float2*>(shrunk + static_cast<int64_t>(row) * p.ranges * p.rank_max + t * 8 + 2 * c) =
                make_float2(acc[t][2 * half], acc[t][2 * half + 1]);
          }
        }
      }
      __syncthreads();
    }
  });
}

constexpr int kExpandEights = 8;  // outputs of a CTA, divided by eight

// A warp adds the updates of 16 rows. blockIdx.x: tile of outputs; blockIdx.y: tile of 64 rows.
__global__ void __launch_bounds__(kTileRows / kGroupRows * WARP)
    expand_kernel(const __grid_constant__ baton_low_rank p, bf16* out, int64_t out_stride, int rows, int n) {
  const int lane = threadIdx.x % WARP, m0 = blockIdx.y * kTileRows + threadIdx.x / WARP * kGroupRows;
  const int first = blockIdx.x * kExpandEights * 8;
  float acc[kExpandEights][4] = {};
  UpdateOfRows<kExpandEights, 1> update(p, rows, n, m0, 0, 1);
  update.prepare(make_int2(first, first + kExpandEights * 4));
  pdl_wait_and_release();
  update.add(acc);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = m0 + (lane >> 2) + half * 8;
    if (RowAdapter::of(p, row, rows).slot < 0) continue;
#pragma unroll
    for (int j = 0; j < kExpandEights; ++j) {
      const int output = first + j * 8 + 2 * (lane & 3);
      if (output >= n) continue;
      auto* to = reinterpret_cast<__nv_bfloat162*>(out + row * out_stride + output);
      const float2 old = __bfloat1622float2(*to);
      *to = __floats2bfloat162_rn(old.x + acc[j][2 * half], old.y + acc[j][2 * half + 1]);
    }
  }
}

int32_t check_update(const baton_low_rank& p, int32_t rows, int32_t n) {
  BATON_REQUIRE(p.a && p.b && p.ranks && p.row_adapters && p.shrunk, "an address of the low-rank update is null");
  BATON_REQUIRE(rows >= 0, "rows is %d; expected 0 or more", rows);
  BATON_REQUIRE(n > 0 && n % 8 == 0, "n is %d; expected multiples of 8", n);
  BATON_REQUIRE(p.ranges >= 1 && p.ranges <= 3, "ranges is %d; expected 1 to 3", p.ranges);
  BATON_REQUIRE(p.rank_max > 0 && p.rank_max % 16 == 0, "rank_max is %d; expected multiples of 16", p.rank_max);
  BATON_REQUIRE(p.slots > 0 && p.slots <= BATON_ADAPTER_SLOTS_MAX, "slots is %d; expected 1 to %d", p.slots,
                BATON_ADAPTER_SLOTS_MAX);
  BATON_REQUIRE(p.parts >= 1 && p.parts <= kPartsMost, "parts is %d; expected 1 to %d", p.parts, kPartsMost);
  for (int first : p.firsts) BATON_REQUIRE(first % 8 == 0, "the first output of a range is %d; expected multiples of 8", first);
  return BATON_OK;
}

}  // namespace

int32_t load_low_rank() {
  BATON_TRY(load(shrink_kernel<1>));
  BATON_TRY(load(shrink_kernel<4>));
  return load(expand_kernel);
}

}  // namespace baton

using namespace baton;

BATON_API int32_t baton_shrink_parts(int32_t rows, int32_t depth) {
  if (rows > kTileRows) return 1;
  const int parts = depth / (kWarps * kSlice);
  return parts < 1 ? 1 : parts < kPartsMost ? parts : kPartsMost;
}

BATON_API int32_t baton_shrink(const baton_low_rank* update, const void* x, int64_t x_stride, int32_t rows, int32_t n,
                               int32_t depth, void* stream) {
  return guarded([&]() -> int32_t {
    BATON_REQUIRE(update && x, "update or x is null");
    BATON_TRY(check_update(*update, rows, n));
    BATON_REQUIRE(depth > 0 && depth % 8 == 0, "depth is %d; expected multiples of 8", depth);
    BATON_REQUIRE(x_stride >= depth && x_stride % 8 == 0, "x_stride is %lld; expected multiples of 8 from the depth, %d, on",
                  static_cast<long long>(x_stride), depth);
    if (rows == 0) return BATON_OK;
    const Device* device;
    BATON_TRY(any_device(device));
    const bool is_few = rows <= kFewRows;
    const int adapters = min(min(rows, kTileRows), update->slots);
    const int items = divide_up(update->ranges * update->rank_max, is_few ? 8 : 32) * update->parts * adapters;
    const int tiles = divide_up(rows, kTileRows);
    const int ctas = min(items, tiles == 1 ? device->sm_count : 16);
    return launch("low-rank shrink", is_few ? shrink_kernel<1> : shrink_kernel<4>, dim3(ctas, tiles), dim3(kWarps * WARP), 0,
                  as_stream(stream), *update, static_cast<const bf16*>(x), x_stride, rows, n, depth);
  });
}

BATON_API int32_t baton_expand(const baton_low_rank* update, void* out, int64_t out_stride, int32_t rows, int32_t n,
                               void* stream) {
  return guarded([&]() -> int32_t {
    BATON_REQUIRE(update && out, "update or out is null");
    BATON_TRY(check_update(*update, rows, n));
    BATON_REQUIRE(out_stride >= n && out_stride % 2 == 0, "out_stride is %lld; expected even numbers from n, %d, on",
                  static_cast<long long>(out_stride), n);
    if (rows == 0) return BATON_OK;
    return launch("low-rank expand", expand_kernel, dim3(divide_up(n, kExpandEights * 8), divide_up(rows, kTileRows)),
                  dim3(kTileRows / kGroupRows * WARP), 0, as_stream(stream), *update, static_cast<bf16*>(out), out_stride,
                  rows, n);
  });
}
