// Row-wise operations on activations: embedding, norms, gated activation, gather. Large batches are bound by memory
// bandwidth, small ones by latency. Loads have 16 bytes. A reduction has one CTA per row; other kernels are flat.
#include <initializer_list>
#include <utility>

#include "device.cuh"

namespace baton {
namespace {

constexpr int FLAT = 256;       // threads of a flat kernel's CTA
constexpr int ROW_MAX = 32768;  // widest row that a norm holds in registers
constexpr int NORM_THREADS = 1024;

template <class T>
__global__ void embed_kernel(const T* table, int first, int count, float scale, const int32_t* tokens,
                             float* residual, int width) {
  pdl_wait_and_release();
  const int row = tokens[blockIdx.x] - first;
  const bool is_own = row >= 0 && row < count;
  const T* from = table + static_cast<int64_t>(row) * width;
  float* to = residual + static_cast<int64_t>(blockIdx.x) * width;
  for (int i = (blockIdx.y * blockDim.x + threadIdx.x) * 8; i < width; i += gridDim.y * blockDim.x * 8) {
    float values[8] = {};
    if (is_own) load8(from + i, values);
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] *= scale;
    store8(to + i, values);
  }
}

// One CTA per row; a thread holds ITEMS groups of 8, `blockDim.x` groups apart. `out` may be `residual`.
template <class R, class T, int ITEMS, bool ADD>
__global__ void norm_kernel(R* residual, const T* delta, const float* weight, float eps, T* out, int width) {
  __shared__ float shared[WARP];
  pdl_wait_and_release();
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * width;
  residual += begin;
  if constexpr (ADD) delta += begin;
  out += begin;

  float values[ITEMS][8];
  float sum = 0.f;
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    const int at = (item * blockDim.x + threadIdx.x) * 8;
    if (at >= width) break;
    load8(residual + at, values[item]);
    if constexpr (ADD) {
      float added[8];
      load8(delta + at, added);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[item][i] += added[i];
      store8(residual + at, values[item]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += values[item][i] * values[item][i];
  }
  const float scale = 1.f / sqrtf(block_sum(sum, shared) / static_cast<float>(width) + eps);
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    const int at = (item * blockDim.x + threadIdx.x) * 8;
    if (at >= width) break;
    float weights[8];
    load8(weight + at, weights);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[item][i] = values[item][i] * scale * weights[i];
    store8(out + at, values[item]);
  }
}

template <class T>
__global__ void bias_kernel(T* x, const float* bias, int width) {
  pdl_wait_and_release();
  T* row = x + static_cast<int64_t>(blockIdx.x) * width;
  for (int i = (blockIdx.y * blockDim.x + threadIdx.x) * 8; i < width; i += gridDim.y * blockDim.x * 8) {
    float values[8], added[8];
    load8(row + i, values);
    load8(bias + i, added);
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] += added[j];
    store8(row + i, values);
  }
}

// Returns x * sigmoid(x). Uses e^-|x|, which is at most 1 and cannot overflow.
__device__ inline float silu(float x) {
  const float small = expf(-fabsf(x));
  return (x < 0.f ? x * small : x) / (1.f + small);
}

// Returns x / 2 * (1 + tanh(z)), which is x * sigmoid(2z).
__device__ inline float gelu_tanh(float x) {
  const float twice_z = 1.5957691216f * (x + 0.044715f * (x * x * x));
  const float small = expf(-fabsf(twice_z));
  return (x < 0.f ? x * small : x) / (1.f + small);
}

template <class T, bool IS_GELU>
__global__ void activate_kernel(const T* gate_up, T* out, int width) {
  pdl_wait_and_release();
  const T* gate = gate_up + static_cast<int64_t>(blockIdx.x) * 2 * width;
  T* to = out + static_cast<int64_t>(blockIdx.x) * width;
  for (int i = (blockIdx.y * blockDim.x + threadIdx.x) * 8; i < width; i += gridDim.y * blockDim.x * 8) {
    float gates[8], ups[8];
    load8(gate + i, gates);
    load8(gate + width + i, ups);
#pragma unroll
    for (int j = 0; j < 8; ++j) gates[j] = (IS_GELU ? gelu_tanh(gates[j]) : silu(gates[j])) * ups[j];
    store8(to + i, gates);
  }
}

template <class T>
__global__ void gather_kernel(const T* x, const int32_t* indices, T* out, int width) {
  pdl_wait_and_release();
  const T* from = x + static_cast<int64_t>(indices[blockIdx.x]) * width;
  T* to = out + static_cast<int64_t>(blockIdx.x) * width;
  for (int i = (blockIdx.y * blockDim.x + threadIdx.x) * 8; i < width; i += gridDim.y * blockDim.x * 8) {
    float values[8];
    load8(from + i, values);
    store8(to + i, values);
  }
}

int32_t check_rows(int32_t rows, int32_t width) {
  BATON_REQUIRE(rows >= 0, "rows is %d; expected 0 or more", rows);
  BATON_REQUIRE(width > 0 && width % 8 == 0, "width is %d; expected multiples of 8", width);
  return BATON_OK;
}

// One CTA per row and 2,048 elements; with 512 and more rows, per 8,192 elements.
dim3 row_grid(int32_t rows, int32_t width) {
  const int groups = divide_up(width, 8 * FLAT);
  return dim3(rows, rows < 512 ? groups : divide_up(groups, 4));
}

template <class R, class T, bool ADD>
int32_t norm(R* residual, const void* delta, const float* weight, float eps, void* out, int32_t rows,
             int32_t width, cudaStream_t stream) {
  BATON_TRY(check_rows(rows, width));
  BATON_REQUIRE(width <= ROW_MAX, "width is %d; expected at most %d", width, ROW_MAX);
  if (rows == 0) return BATON_OK;
  const int groups = width / 8;
  const int threads = groups >= NORM_THREADS ? NORM_THREADS : divide_up(groups, WARP) * WARP;
  const int items = divide_up(groups, threads);
  auto run = [&](auto kernel) {
    return launch("rms norm", kernel, dim3(rows), dim3(threads), 0, stream, residual,
                  static_cast<const T*>(delta), weight, eps, static_cast<T*>(out), width);
  };
  if (items == 1) return run(norm_kernel<R, T, 1, ADD>);
  if (items == 2) return run(norm_kernel<R, T, 2, ADD>);
  return run(norm_kernel<R, T, 4, ADD>);
}

}  // namespace

template <class R, class T, bool ADD>
int32_t load_norms() {
  BATON_TRY(load(norm_kernel<R, T, 1, ADD>));
  BATON_TRY(load(norm_kernel<R, T, 2, ADD>));
  return load(norm_kernel<R, T, 4, ADD>);
}

int32_t load_rows() {
  auto all = [](auto element) {
    using T = decltype(element);
    BATON_TRY(load(embed_kernel<T>));
    BATON_TRY((load_norms<float, T, false>()));
    BATON_TRY((load_norms<float, T, true>()));
    BATON_TRY((load_norms<T, T, false>()));
    BATON_TRY(load(bias_kernel<T>));
    BATON_TRY((load(activate_kernel<T, false>)));
    BATON_TRY((load(activate_kernel<T, true>)));
    return load(gather_kernel<T>);
  };
  BATON_TRY(all(float()));
  return all(bf16());
}

}  // namespace baton

using namespace baton;

BATON_API int32_t baton_embed(int32_t dtype, const void* table, int32_t first, int32_t count, float scale,
                              const int32_t* tokens, float* residual, int32_t rows, int32_t width,
                              void* stream) {
  return guarded([&] {
    BATON_TRY(check_rows(rows, width));
    BATON_REQUIRE(first >= 0 && count >= 0, "first is %d and count %d; expected 0 or more", first, count);
    if (rows == 0) return static_cast<int32_t>(BATON_OK);
    return with_dtype(dtype, [&](auto element) {
      using T = decltype(element);
      return launch("embed", embed_kernel<T>, row_grid(rows, width), dim3(FLAT), 0, as_stream(stream),
                    static_cast<const T*>(table), first, count, scale, tokens, residual, width);
    });
  });
}

BATON_API int32_t baton_rms_norm(int32_t dtype, const float* residual, const float* weight, float eps,
                                 void* out, int32_t rows, int32_t width, void* stream) {
  return guarded([&] {
    return with_dtype(dtype, [&](auto element) {
      return norm<float, decltype(element), false>(const_cast<float*>(residual), nullptr, weight, eps, out, rows,
                                                   width, as_stream(stream));
    });
  });
}

BATON_API int32_t baton_rms_norm_in_place(int32_t dtype, void* x, const float* weight, float eps, int32_t rows,
                                          int32_t width, void* stream) {
  return guarded([&] {
    return with_dtype(dtype, [&](auto element) {
      using T = decltype(element);
      return norm<T, T, false>(static_cast<T*>(x), nullptr, weight, eps, x, rows, width, as_stream(stream));
    });
  });
}

BATON_API int32_t baton_add_rms_norm(int32_t dtype, float* residual, const void* delta, const float* weight,
                                     float eps, void* out, int32_t rows, int32_t width, void* stream) {
  return guarded([&] {
    return with_dtype(dtype, [&](auto element) {
      return norm<float, decltype(element), true>(residual, delta, weight, eps, out, rows, width, as_stream(stream));
    });
  });
}

BATON_API int32_t baton_add_bias(int32_t dtype, void* x, const float* bias, int32_t rows, int32_t width,
                                 void* stream) {
  return guarded([&] {
    BATON_TRY(check_rows(rows, width));
    if (rows == 0) return static_cast<int32_t>(BATON_OK);
    return with_dtype(dtype, [&](auto element) {
      using T = decltype(element);
      return launch("add bias", bias_kernel<T>, row_grid(rows, width), dim3(FLAT), 0, as_stream(stream),
                    static_cast<T*>(x), bias, width);
    });
  });
}

BATON_API int32_t baton_activate(int32_t dtype, int32_t activation, const void* gate_up, void* out, int32_t rows,
                                 int32_t width, void* stream) {
  return guarded([&] {
    BATON_TRY(check_rows(rows, width));
    BATON_REQUIRE(activation == BATON_SILU || activation == BATON_GELU_TANH, "activation is %d; expected 0 or 1",
                  activation);
    if (rows == 0) return static_cast<int32_t>(BATON_OK);
    return with_dtype(dtype, [&](auto element) {
      using T = decltype(element);
      auto run = [&](auto kernel) {
        return launch("activate", kernel, row_grid(rows, width), dim3(FLAT), 0, as_stream(stream),
                      static_cast<const T*>(gate_up), static_cast<T*>(out), width);
      };
      return activation == BATON_SILU ? run(activate_kernel<T, false>) : run(activate_kernel<T, true>);
    });
  });
}

BATON_API int32_t baton_gather_rows(int32_t dtype, const void* x, const int32_t* indices, void* out,
                                    int32_t rows, int32_t width, void* stream) {
  return guarded([&] {
    BATON_TRY(check_rows(rows, width));
    if (rows == 0) return static_cast<int32_t>(BATON_OK);
    return with_dtype(dtype, [&](auto element) {
      using T = decltype(element);
      return launch("gather rows", gather_kernel<T>, row_grid(rows, width), dim3(FLAT), 0, as_stream(stream),
                    static_cast<const T*>(x), indices, static_cast<T*>(out), width);
    });
  });
}
