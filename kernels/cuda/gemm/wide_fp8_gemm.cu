// y[rows][n] = x[rows][k] W[n][k]^T in FP8 for up to 128 rows (sm_90a), where x has been quantized. skinny_gemm.cu
// selects it. See wide_kernel.h for the kernel.
#include "wide_kernel.h"

namespace baton {
namespace {

constexpr int kSplitRowsMost = 32;  // maximum rows of x whose two parts fit into the 64 rows of a warpgroup

// Weight rows per tile, warpgroups, chunks per stage, CTAs that split k, epilogue.
#define SPLIT_SHAPES(X)                                                                                          \
  X(64, 1, 2, 2, BATON_SKINNY_RESIDUAL) X(96, 1, 2, 2, BATON_SKINNY_RESIDUAL)                                    \
  X(128, 1, 1, 2, BATON_SKINNY_RESIDUAL) X(64, 1, 2, 1, BATON_SKINNY_QKV) X(64, 1, 2, 1, BATON_SKINNY_PLAIN)     \
  X(32, 1, 4, 1, BATON_SKINNY_PLAIN) X(112, 1, 2, 1, BATON_SKINNY_SILU) X(32, 1, 4, 1, BATON_SKINNY_SILU)
#define WHOLE_SHAPES(X)                                                                                          \
  SPLIT_SHAPES(X) X(64, 2, 2, 2, BATON_SKINNY_RESIDUAL) X(96, 2, 2, 2, BATON_SKINNY_RESIDUAL)                    \
  X(64, 2, 2, 1, BATON_SKINNY_QKV) X(64, 2, 2, 1, BATON_SKINNY_PLAIN) X(64, 2, 2, 1, BATON_SKINNY_SILU)          \
  X(112, 2, 2, 1, BATON_SKINNY_SILU) X(224, 2, 1, 1, BATON_SKINNY_SILU)

int groups_of(const baton_skinny_gemm_args& p) { return divide_up(p.rows * p.parts, 64); }

// A shape as numbers.
struct Choice {
  int rows, split;
};

// Returns the shape whose busiest CTA has the least cost, or zeros. A tile costs its weight rows, a fixed amount, and
// the loads of x from the L2 cache.
Choice choose(const baton_skinny_gemm_args& p, const Device& device) {
  const int grid = ctas_max(p, device), groups = groups_of(p);
  Choice best = {0, 0};
  int least = 1 << 30;
  auto see = [&](int rows, int of_groups, int split, int epilogue) {
    if (epilogue != p.epilogue || groups != of_groups) return;
    if (epilogue == BATON_SKINNY_QKV && p.head_dim % rows != 0) return;
    const int ctas = divide_up(p.n, rows) * split;
    if (split > 1 && (ctas > grid / split * split || p.depth < kSplitDepthMin)) return;
    const int cost = divide_up(ctas, grid) * (rows + 8 + groups * 16) / split;
    if (cost < least) least = cost, best = {rows, split};
  };
#define SEE(rows, groups, chunks, split, epilogue) see(rows, groups, split, epilogue);
  if (p.parts == 2) {
    SPLIT_SHAPES(SEE)
  } else {
    WHOLE_SHAPES(SEE)
  }
#undef SEE
  return best;
}

}  // namespace

int32_t load_wide_fp8_gemm() {
  const Device* device;
  BATON_TRY(any_device(device));
  if (device->major != 9 || device->minor != 0) return BATON_OK;
#define LOAD(rows, groups, chunks, split, epilogue) \
  BATON_TRY((Kernel<Shape<rows, groups, chunks, split, kParts>, epilogue>::load()));
  {
    constexpr int kParts = 1;
    WHOLE_SHAPES(LOAD)
  }
  {
    constexpr int kParts = 2;
    SPLIT_SHAPES(LOAD)
  }
#undef LOAD
  return find_encode(encode);
}

int wide_fp8_gemm_tile(const baton_skinny_gemm_args& p, const Device& device) {
  constexpr int kChunk = Shape<64, 1, 2, 1, 1>::kChunk;
  if (encode == nullptr || p.rows == 0 || p.depth % kChunk != 0 || p.n % 16 != 0 || p.weight_block != 0) return 0;
  if (p.parts == 2 && p.rows > kSplitRowsMost) return 0;
  const Choice choice = choose(p, device);
  return choice.rows == 0 ? 0 : choice.rows / choice.split;
}

int32_t wide_fp8_gemm(const baton_skinny_gemm_args& p, const Device& device, cudaStream_t stream) {
  const Choice choice = choose(p, device);
  const int blocks = ctas_max(p, device), groups = groups_of(p);
#define RUN(rows_, groups_, chunks, split_, epilogue_)                                                              \
  if (choice.rows == rows_ && choice.split == split_ && groups == groups_ && p.epilogue == epilogue_) {            \
    return Kernel<Shape<rows_, groups_, chunks, split_, kParts>, epilogue_>::run(p, blocks / split_ * split_, stream); \
  }
  if (p.parts == 2) {
    constexpr int kParts = 2;
    SPLIT_SHAPES(RUN)
  } else {
    constexpr int kParts = 1;
    WHOLE_SHAPES(RUN)
  }
#undef RUN
  return fail(BATON_UNSUPPORTED, "no GEMM in FP8 for a weight of %d x %d and epilogue %d", p.n, p.depth, p.epilogue);
}

}  // namespace baton
