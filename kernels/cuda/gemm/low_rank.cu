// Low-rank updates (LoRA) beside GEMMs that do not compute them: the kernels add (x A^T) B^T to the output of a GEMM.
//
// Shrink: an item is 8 or 32 rows of one adapter's A for a tile of 64 rows of x. The CTAs take turns with the items of a
// tile. A CTA multiplies 16 rows of x with this adapter at a time on tensor cores, and its warps split k. For few rows of x
// there is an item for each part of k, because one CTA would read 8 rows of A too slowly. The reader of `shrunk` adds the
// parts. Before the kernel waits for x, it brings A and B into the L2 cache.
#include "low_rank.h"

namespace baton {
namespace {

constexpr int kWarps = 8;
constexpr int kTileRows = 64;   // rows of x that share items
constexpr int kGroupRows = 16;  // rows of an mma
constexpr int kPartsMost = 4;   // parts of k
constexpr int kFewRows = 256;   // up to these rows of x an item has 8 rows of A, above 32

// blockIdx.y: tile of rows.
template <int NT>
__global__ void __launch_bounds__(kWarps * WARP)
    shrink_kernel(const __grid_constant__ baton_low_rank p, const bf16* x, int64_t x_stride, int rows, int n, int depth) {
  constexpr int OUTPUTS = kGroupRows * NT * 8;
  __shared__ float sums[kWarps - 1][OUTPUTS];
  __shared__ uint8_t lists[kWarps][kTileRows];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane >> 2, c = lane & 3;
  uint8_t* const list = lists[warp];
  const int tile = blockIdx.y * kTileRows, slices = (depth + kShrinkSlice - 1) / kShrinkSlice;
  const Adapters own = {RowAdapter::of(p, tile + lane, rows), RowAdapter::of(p, tile + WARP + lane, rows)};
  auto for_each = [&](auto&& body) {
    for_each_item<NT * 8>(p, own, p.parts, blockIdx.x, [&](int at) { return at + gridDim.x; }, body);
  };
  auto slice_of = [&](int part) { return slices * part / p.parts; };
  pdl_release();
  if (warp == 0 && blockIdx.y == 0) {
    for_each([&](const Item& item) {
      const int first = slice_of(item.part) * kShrinkSlice, end = min(slice_of(item.part + 1) * kShrinkSlice, depth);
      const auto [slot, rank] = item.adapter;
      for (int row = lane; row < min(NT * 8, p.ranges * rank - item.first_a); row += WARP) {
        prefetch(a_of(p, slot, item.first_a + row, depth) + first, (end - first) * 2);
      }
      const int64_t each = (static_cast<int64_t>(n) * rank * 2 / item.count / WARP + 16) / 16 * 16;
      const int64_t at = (static_cast<int64_t>(item.index) * WARP + lane) * each;
      const auto* b = static_cast<const bf16*>(p.b) + static_cast<int64_t>(slot) * n * p.rank_max;
      prefetch(reinterpret_cast<const char*>(b) + at, min(each, static_cast<int64_t>(n) * rank * 2 - at));
    });
  }
  pdl_wait();
  for_each([&](const Item& item) {
    const int listed = list_rows(own, item.adapter.slot, list);
    const int rows_of_a = p.ranges * item.adapter.rank - item.first_a;
    auto row_of = [&](int i) { return i < listed ? tile + list[i] : -1; };
    for (int group = 0; group < listed; group += kGroupRows) {
      float acc[NT][4] = {};
      const int of_lane[2] = {row_of(group + g), row_of(group + g + 8)};
      shrink_group<NT, 2, 1>(a_of(p, item.adapter.slot, item.first_a, depth), x, x_stride, of_lane, depth, rows_of_a,
                             slice_of(item.part) + warp, kWarps, slice_of(item.part + 1), acc);
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
  UpdateOfRows<kExpandEights, 1> update(p, rows, n, m0);
  update.prepare(make_int2(first, first + kExpandEights * 4));
  pdl_wait_and_release();
  const int64_t pitch = static_cast<int64_t>(p.ranges) * p.rank_max;
  update.add(Shrunk<kPartsMost>{p.shrunk, pitch, rows * pitch, p.parts}, acc);
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

int32_t check_kernel_update(const baton_low_rank& p, int32_t rows, int32_t n) {
  BATON_TRY(check_update(p, rows, n));
  BATON_REQUIRE(p.parts >= 1 && p.parts <= kPartsMost, "parts is %d; expected 1 to %d", p.parts, kPartsMost);
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
  const int parts = depth / (kWarps * kShrinkSlice);
  return parts < 1 ? 1 : parts < kPartsMost ? parts : kPartsMost;
}

BATON_API int32_t baton_shrink(const baton_low_rank* update, const void* x, int64_t x_stride, int32_t rows, int32_t n,
                               int32_t depth, void* stream) {
  return guarded([&]() -> int32_t {
    BATON_REQUIRE(update && x, "update or x is null");
    BATON_TRY(check_kernel_update(*update, rows, n));
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
    BATON_TRY(check_kernel_update(*update, rows, n));
    BATON_REQUIRE(out_stride >= n && out_stride % 2 == 0, "out_stride is %lld; expected even numbers from n, %d, on",
                  static_cast<long long>(out_stride), n);
    if (rows == 0) return BATON_OK;
    return launch("low-rank expand", expand_kernel, dim3(divide_up(n, kExpandEights * 8), divide_up(rows, kTileRows)),
                  dim3(kTileRows / kGroupRows * WARP), 0, as_stream(stream), *update, static_cast<bf16*>(out), out_stride,
                  rows, n);
  });
}
