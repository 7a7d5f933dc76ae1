// Digest of a part of a weight, and the number of its elements that are infinite or NaN: one read of the part.
#include "digest.h"
#include "mix.cuh"

namespace baton {
namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int SM_CTAS = 2;  // CTAs per SM: enough for the memory bandwidth, and few enough for concurrent decode steps

// Sizes in 16-byte words.
struct Part {
  const ulonglong2* data;
  unsigned long long* sums;
  int64_t run_stride;
  int64_t first;
  int32_t run;
  int32_t run_pieces;
  int32_t pieces;  // of all runs
};

// A float is infinite or NaN if all bits of its exponent are set.
template <class T>
__device__ inline uint32_t not_finite(uint64_t word) {
  const uint32_t low = static_cast<uint32_t>(word), high = static_cast<uint32_t>(word >> 32);
  if constexpr (std::is_same_v<T, float>) {
    constexpr uint32_t exponent = 0x7f800000u;
    return ((low & exponent) == exponent) + ((high & exponent) == exponent);
  } else {
    constexpr uint32_t exponents = 0x7f807f80u;
    const int bits = __popc(__vcmpeq2(low & exponents, exponents)) + __popc(__vcmpeq2(high & exponents, exponents));
    return bits / 16;
  }
}

template <class T>
__global__ void __launch_bounds__(THREADS) weight_kernel(const __grid_constant__ Part part) {
  uint64_t sum = 0, bad = 0;
  for (int32_t piece = blockIdx.x * WARPS + threadIdx.x / WARP; piece < part.pieces; piece += gridDim.x * WARPS) {
    const int32_t run = piece / part.run_pieces;
    const int32_t begin = (piece - run * part.run_pieces) * DIGEST_PIECE;
    const int32_t end = min(begin + DIGEST_PIECE, part.run);
    sum += digest_words(part.data + static_cast<int64_t>(run) * part.run, part.first + run * part.run_stride, begin, end,
                        [&](const ulonglong2& words) { bad += not_finite<T>(words.x) + not_finite<T>(words.y); });
  }
  __shared__ uint64_t shared[2][WARPS];
  add_sums<WARPS>(sum, shared[0], part.sums);
  add_sums<WARPS>(bad, shared[1], part.sums + 1);
}

}  // namespace

int32_t load_weights() {
  BATON_TRY(load(weight_kernel<float>));
  return load(weight_kernel<bf16>);
}

}  // namespace baton

using namespace baton;

BATON_API int32_t baton_digest_weight(int32_t dtype, const void* data, int64_t runs, int64_t run_bytes,
                                      int64_t run_stride, int64_t first_bytes, uint64_t* sums, void* stream) {
  return guarded([&] {
    BATON_REQUIRE(data && sums, "data or sums is null");
    BATON_REQUIRE(dtype == BATON_F32 || dtype == BATON_BF16, "dtype is %d; expected f32 or bf16", dtype);
    BATON_REQUIRE(reinterpret_cast<uintptr_t>(data) % 16 == 0, "data is no multiple of 16");
    BATON_REQUIRE(runs >= 0 && runs <= INT32_MAX, "runs is %lld; expected 0 to 2^31 - 1", static_cast<long long>(runs));
    for (const int64_t bytes : {run_bytes, run_stride, first_bytes}) {
      BATON_REQUIRE(bytes >= 0 && bytes % 16 == 0 && bytes / 16 <= INT32_MAX, "%lld bytes; expected multiples of 16",
                    static_cast<long long>(bytes));
    }
    Device device;
    BATON_TRY(current_device(device));
    BATON_TRY(check(cudaMemsetAsync(sums, 0, 2 * sizeof(*sums), as_stream(stream)), "clearing a weight's digest"));
    Part part;
    part.data = static_cast<const ulonglong2*>(data);
    part.sums = reinterpret_cast<unsigned long long*>(sums);
    part.run_stride = run_stride / 16;
    part.first = first_bytes / 16;
    part.run = static_cast<int32_t>(run_bytes / 16);
    part.run_pieces = divide_up(part.run, DIGEST_PIECE);
    const int64_t pieces = runs * part.run_pieces;
    BATON_REQUIRE(pieces <= INT32_MAX, "%lld runs of %lld bytes are too many", static_cast<long long>(runs),
                  static_cast<long long>(run_bytes));
    part.pieces = static_cast<int32_t>(pieces);
    if (pieces == 0) return static_cast<int32_t>(BATON_OK);
    const int32_t grid_max = device.sm_count * SM_CTAS;
    const int32_t grid = divide_up(part.pieces, WARPS);
    const auto kernel = dtype == BATON_F32 ? weight_kernel<float> : weight_kernel<bf16>;
    // Without PDL: the predecessor clears the sums.
    return launch_as(false, "digest of a weight", kernel, dim3(grid < grid_max ? grid : grid_max), dim3(THREADS), 0,
                     as_stream(stream), part);
  });
}
