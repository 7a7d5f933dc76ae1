// y[rows][n] = x[rows][k] W[n][k]^T in bf16 for up to 128 rows (sm_90a). skinny_gemm.cu selects it above 16 rows, and
// for some shapes above 8 rows. See wide_kernel.h for the kernel.
#include "wide_kernel.h"

namespace baton {
namespace {

// Tile, warpgroups, chunks per stage: one kernel per tile and number of warpgroups.
#define SHAPES(X) X(16, 1, 4) X(32, 1, 4) X(64, 1, 2) X(112, 1, 2) X(128, 1, 1)
#define SILU_SHAPES(X) X(64, 2, 2) X(112, 2, 1) X(128, 2, 1) X(224, 2, 1)
using WideHeads = Shape<64, 2, 2>;
// RESIDUAL above 64 rows: two CTAs split k, and each finishes 32 weight rows of the tile.
using SplitResidual = Shape<64, 2, 2, 2>;

int groups_of(int rows) { return divide_up(rows, 64); }

// With a low-rank update there are kernels of one warpgroup only.
template <class Body>
int32_t with_kernel(int tile, int rows, int epilogue, bool has_update, Body&& body) {
  const int groups = groups_of(rows);
#define CASE(bn, count, kc)                                                                 \
  if (tile == bn && groups == count) {                                                      \
    using S = Shape<bn, count, kc>;                                                         \
    if (epilogue == BATON_SKINNY_PLAIN) return body(Kernel<S, BATON_SKINNY_PLAIN>());       \
    if (epilogue == BATON_SKINNY_RESIDUAL) return body(Kernel<S, BATON_SKINNY_RESIDUAL>()); \
    if (epilogue == BATON_SKINNY_SILU) return body(Kernel<S, BATON_SKINNY_SILU>());         \
    if (epilogue == BATON_SKINNY_F32) return body(Kernel<S, BATON_SKINNY_F32>());           \
    if (epilogue == BATON_SKINNY_QKV) return body(Kernel<S, BATON_SKINNY_QKV>());           \
  }
#define SILU_CASE(bn, count, kc)                                        \
  if (tile == bn && groups == count && epilogue == BATON_SKINNY_SILU) { \
    return body(Kernel<Shape<bn, count, kc>, BATON_SKINNY_SILU>());     \
  }
#define UPDATE_CASE(bn, count, kc)                                                                \
  if (tile == bn && groups == count) {                                                            \
    using S = Shape<bn, count, kc>;                                                               \
    if (epilogue == BATON_SKINNY_PLAIN) return body(Kernel<S, BATON_SKINNY_PLAIN, true>());       \
    if (epilogue == BATON_SKINNY_RESIDUAL) return body(Kernel<S, BATON_SKINNY_RESIDUAL, true>()); \
    if (epilogue == BATON_SKINNY_SILU) return body(Kernel<S, BATON_SKINNY_SILU, true>());         \
    if (epilogue == BATON_SKINNY_QKV) return body(Kernel<S, BATON_SKINNY_QKV, true>());           \
  }
  if (has_update) {
    SHAPES(UPDATE_CASE)
    return fail(BATON_UNSUPPORTED, "no wide GEMM with an update for tile %d, %d rows and epilogue %d", tile, rows, epilogue);
  }
  SHAPES(CASE)
  SILU_SHAPES(SILU_CASE)
  if (groups == 2 && epilogue == BATON_SKINNY_QKV && tile == WideHeads::kOwn) {
    return body(Kernel<WideHeads, BATON_SKINNY_QKV>());
  }
  if (groups == 2 && epilogue == BATON_SKINNY_RESIDUAL && tile == SplitResidual::kOwn) {
    return body(Kernel<SplitResidual, BATON_SKINNY_RESIDUAL>());
  }
#undef UPDATE_CASE
#undef SILU_CASE
#undef CASE
  return fail(BATON_UNSUPPORTED,
              "invalid tile: %d for %d rows and epilogue %d; expected 0 or what baton_skinny_gemm_tile returns",
              tile, rows, epilogue);
}

}  // namespace

int32_t load_wide_gemm() {
  const Device* device;
  BATON_TRY(any_device(device));
  if (device->major != 9 || device->minor != 0) return BATON_OK;
  auto load_it = [](auto kernel) { return decltype(kernel)::load(); };
#define LOAD(bn, count, kc)                                                           \
  for (int epilogue = BATON_SKINNY_PLAIN; epilogue <= BATON_SKINNY_QKV; ++epilogue) { \
    BATON_TRY(with_kernel(bn, 64 * count, epilogue, false, load_it));                 \
    if (epilogue == BATON_SKINNY_F32) continue;                                       \
    BATON_TRY(with_kernel(bn, 64 * count, epilogue, true, load_it));                  \
  }
#define LOAD_SILU(bn, count, kc) BATON_TRY(with_kernel(bn, 64 * count, BATON_SKINNY_SILU, false, load_it));
  SHAPES(LOAD)
  SILU_SHAPES(LOAD_SILU)
  BATON_TRY(with_kernel(WideHeads::kOwn, 128, BATON_SKINNY_QKV, false, load_it));
  BATON_TRY(with_kernel(SplitResidual::kOwn, 128, BATON_SKINNY_RESIDUAL, false, load_it));
#undef LOAD_SILU
#undef LOAD
  return find_encode(encode);
}

int wide_gemm_tile(const baton_skinny_gemm_args& p, const Device& device) {
  if (encode == nullptr || p.depth % WideHeads::kChunk != 0 || p.n % 16 != 0) return 0;
  const int rows = p.rows, groups = groups_of(rows), grid = ctas_max(p, device);
  if (p.low_rank.shrunk && (groups > 1 || p.epilogue == BATON_SKINNY_F32)) return 0;
  auto is_served = [&](int tile) {
    if (p.epilogue == BATON_SKINNY_QKV && p.head_dim % tile != 0) return false;
    if (groups == 1) return tile <= 128 && (tile >= 32 || rows <= 32);
    switch (p.epilogue) {
      case BATON_SKINNY_SILU: return tile >= 64;
      case BATON_SKINNY_QKV: return tile == WideHeads::kOwn;
      case BATON_SKINNY_RESIDUAL: {
        // The split is used only if all CTAs run at once and fill more than half of the SMs.
        const int ctas = p.n / SplitResidual::kOwn;
        const bool fits = p.n % SplitResidual::BN == 0 && p.depth >= kSplitDepthMin && ctas <= grid && 2 * ctas > grid;
        return fits && tile == SplitResidual::kOwn;
      }
      default: return false;  // cuBLAS is faster
    }
  };
  if (p.tile != 0) return is_served(p.tile) ? p.tile : 0;
  // A CTA has many tiles of logits, so small tiles balance the CTAs best.
  if (p.epilogue == BATON_SKINNY_F32 && is_served(64)) return 64;
  // Cost in weight rows: the rows of the busiest CTA, and per tile a fixed overhead and the loads of x.
  int best = 0, least = 1 << 30;
  for (int tile : {224, 128, 112, 64, 32, 16}) {
    if (!is_served(tile)) continue;
    const int cost = divide_up(divide_up(p.n, tile), grid) * (tile + 8 + rows / 4);
    if (cost < least) least = cost, best = tile;
  }
  return best;
}

int32_t wide_gemm(const baton_skinny_gemm_args& p, int tile, const Device& device, cudaStream_t stream) {
  const int blocks = ctas_max(p, device);
  const bool has_update = p.low_rank.shrunk != nullptr;
  return with_kernel(tile, p.rows, p.epilogue, has_update,
                     [&](auto kernel) { return decltype(kernel)::run(p, blocks, stream); });
}

}  // namespace baton
