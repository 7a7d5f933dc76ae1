// Rows in FP8, the inputs of GEMMs with a weight in FP8. The row-wise operation that produces the rows, a norm or a
// gated activation, is fused: its results stay in registers between the search of the largest magnitude and the
// conversion.
#include "device.cuh"
#include "split.cuh"

namespace baton {
namespace {

constexpr int ROW_MAX = 65536;  // widest row that a CTA holds in registers
constexpr int THREADS_MOST = 1024;

// Returns x * sigmoid(x). Uses e^-|x|, which is at most 1 and cannot overflow.
__device__ inline float silu(float x) {
  const float small = __expf(-fabsf(x));
  return (x < 0.f ? x * small : x) / (1.f + small);
}

// Computes elements `at` to `at` + 7 of the CTA's row, before the scale of the norm.
template <int SOURCE>
__device__ __forceinline__ void load_source(const baton_quantize_args& p, int at, float (&values)[8]) {
  const int64_t row = blockIdx.x;
  const bf16* x = static_cast<const bf16*>(p.x) + row * p.x_stride + at;
  if constexpr (SOURCE == BATON_QUANTIZE_NORM) {
    load8(p.residual + row * p.width + at, values);
    if (p.x) {
      float added[8];
      load8(x, added);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] += added[i];
      store8(p.residual + row * p.width + at, values);
    }
  } else {
    load8(x, values);
  }
  if constexpr (SOURCE == BATON_QUANTIZE_SILU) {
    float ups[8];
    load8(x + p.width, ups);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = silu(values[i]) * ups[i];
  }
}

// One CTA per row; a thread holds ITEMS groups of 8, `blockDim.x` groups apart.
template <int SOURCE, int ITEMS>
__global__ void __launch_bounds__(THREADS_MOST) quantize_kernel(const __grid_constant__ baton_quantize_args p) {
  __shared__ float sums[WARP], mosts[WARP];
  // The successor is a GEMM, which loads only weights before its wait. So it may start before this kernel's
  // predecessor ends.
  pdl_release();
  pdl_wait();
  float values[ITEMS][8];
  float sum = 0.f, most = 0.f;
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    const int at = (item * blockDim.x + threadIdx.x) * 8;
    if (at >= p.width) break;
    load_source<SOURCE>(p, at, values[item]);
    if constexpr (SOURCE == BATON_QUANTIZE_NORM) {
      float weights[8];
      load8(p.norm + at, weights);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sum += values[item][i] * values[item][i];
        values[item][i] *= weights[i];
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(values[item][i]));
  }
  most = warp_max(most);
  if (threadIdx.x % WARP == 0) mosts[threadIdx.x / WARP] = most;
  float norm_scale = 1.f;
  if constexpr (SOURCE == BATON_QUANTIZE_NORM) {
    norm_scale = 1.f / sqrtf(block_sum(sum, sums) / static_cast<float>(p.width) + p.eps);
  } else {
    __syncthreads();
  }
  most = warp_max(threadIdx.x % WARP < blockDim.x / WARP ? mosts[threadIdx.x % WARP] : 0.f) * norm_scale;
  const Fp8Factor factor = p.parts == 2 ? split_factor(most) : whole_factor(most);
  if (threadIdx.x == 0) p.scales[blockIdx.x] = factor.scale;
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    const int at = (item * blockDim.x + threadIdx.x) * 8;
    if (at >= p.width) break;
#pragma unroll
    for (int i = 0; i < 8; ++i) values[item][i] *= norm_scale;
    if (p.mirror) store8(static_cast<bf16*>(p.mirror) + static_cast<int64_t>(blockIdx.x) * p.width + at, values[item]);
    store_parts(p.out, p.parts, blockIdx.x, p.width, at, values[item], factor.inverse);
  }
}

template <class Body>
int32_t with_source(int source, Body&& body) {
  switch (source) {
    case BATON_QUANTIZE_ROWS: return body(std::integral_constant<int, BATON_QUANTIZE_ROWS>());
    case BATON_QUANTIZE_NORM: return body(std::integral_constant<int, BATON_QUANTIZE_NORM>());
    default: return body(std::integral_constant<int, BATON_QUANTIZE_SILU>());
  }
}

int32_t check_args(const baton_quantize_args& p) {
  BATON_REQUIRE(p.source >= BATON_QUANTIZE_ROWS && p.source <= BATON_QUANTIZE_SILU, "source is %d; expected 0 to 2",
                p.source);
  const bool is_norm = p.source == BATON_QUANTIZE_NORM;
  BATON_REQUIRE(p.rows >= 0, "rows is %d; expected 0 or more", p.rows);
  BATON_REQUIRE(p.width > 0 && p.width % 8 == 0 && p.width <= ROW_MAX, "width is %d; expected multiples of 8 up to %d",
                p.width, ROW_MAX);
  BATON_REQUIRE(p.parts == 1 || p.parts == 2, "parts is %d; expected 1 or 2", p.parts);
  BATON_REQUIRE((p.x || is_norm) && p.out && p.scales, "x, out or scales is null");
  BATON_REQUIRE(!is_norm || (p.residual && p.norm), "residual or norm is null");
  const int64_t least = p.source == BATON_QUANTIZE_SILU ? 2 * static_cast<int64_t>(p.width) : p.width;
  BATON_REQUIRE(!p.x || (p.x_stride >= least && p.x_stride % 8 == 0),
                "x_stride is %lld; expected multiples of 8 from %lld on", static_cast<long long>(p.x_stride),
                static_cast<long long>(least));
  return BATON_OK;
}

}  // namespace

int32_t load_quantize() {
  for (int source = BATON_QUANTIZE_ROWS; source <= BATON_QUANTIZE_SILU; ++source) {
    BATON_TRY(with_source(source, [](auto of) {
      BATON_TRY(load(quantize_kernel<decltype(of)::value, 1>));
      BATON_TRY(load(quantize_kernel<decltype(of)::value, 2>));
      BATON_TRY(load(quantize_kernel<decltype(of)::value, 4>));
      return load(quantize_kernel<decltype(of)::value, 8>);
    }));
  }
  return BATON_OK;
}

}  // namespace baton

using namespace baton;

BATON_API int32_t baton_quantize(const baton_quantize_args* args, void* stream) {
  return guarded([&]() -> int32_t {
    BATON_REQUIRE(args, "args is null");
    const baton_quantize_args& p = *args;
    BATON_TRY(check_args(p));
    if (p.rows == 0) return BATON_OK;
    const int groups = p.width / 8;
    int items = 1;
    while (groups > items * THREADS_MOST) items *= 2;
    const int threads = divide_up(divide_up(groups, items), WARP) * WARP;
    return with_source(p.source, [&](auto of) {
      auto run = [&](auto kernel) {
        return launch("quantize", kernel, dim3(p.rows), dim3(threads), 0, as_stream(stream), p);
      };
      if (items == 1) return run(quantize_kernel<decltype(of)::value, 1>);
      if (items == 2) return run(quantize_kernel<decltype(of)::value, 2>);
      if (items == 4) return run(quantize_kernel<decltype(of)::value, 4>);
      return run(quantize_kernel<decltype(of)::value, 8>);
    });
  });
}
