// Between the QKV GEMM and attention, in one pass: bias, head norms, RoPE, KV store. Also dequantizes FP8 KV.
//
// One warp processes several heads of a row, one after another, because their angles are equal. A lane holds adjacent
// dimensions and their rotary partners, so RoPE needs no shuffles and loads are wide. Dimensions without
// rotation are held as pairs, too. The angles are computed before the preceding kernel has completed.
#include <cuda_fp8.h>

#include <utility>

#include "device.cuh"

namespace baton {
namespace {

constexpr int HEADS = 8;  // warps of a CTA
constexpr int ROWS_MANY = 512;  // rows from which on a CTA processes all heads of a row

struct RopeParameters {
  int query_heads;
  int kv_heads;
  int64_t query_stride;
  int64_t block_elements;
  int64_t layer_offset;  // of the layer's keys in a block
  int64_t value_offset;  // from keys to values
  int64_t head_stride;
  int rotary_half;
  bool norms_all_heads;
  float norm_eps;
};

// Neighbours of one head, as one load or store.
template <class T, int COUNT>
struct alignas(sizeof(T) * COUNT) Neighbours {
  T values[COUNT];
};

// Returns the factor of the RMS norm over `count` values. All threads of the CTA must call this function.
template <class T>
__device__ float factor_of_all(const T* values, const float* bias, int count, float eps, float* memory) {
  float sum = 0.f;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const float value = widen(values[i]) + (bias ? bias[i] : 0.f);
    sum += value * value;
  }
  return 1.f / sqrtf(block_sum(sum, memory) / static_cast<float>(count) + eps);
}

// An element of FP8 KV, e4m3.
using Code = uint8_t;

// Bounds the magnitude by 1.875 * 2^127, so that a code times its scale is finite, and replaces NaN by 0.
__device__ bf16 bounded(bf16 value) {
  constexpr unsigned short GREATEST = 0x7f70, INFINITE = 0x7f80, SIGN = 0x8000;
  const unsigned short bits = __bfloat16_as_ushort(value), magnitude = bits & ~SIGN;
  if (magnitude <= GREATEST) return value;
  return __ushort_as_bfloat16(magnitude > INFINITE ? 0 : GREATEST | (bits & SIGN));
}

// Returns the scale's exponent E of a vector whose largest magnitude is `amax`: the least with codes of at most 448,
// 1.75 * 2^8.
__device__ int scale_exponent(bf16 amax) {
  const int bits = __bfloat16_as_ushort(amax), mantissa = bits & 0x7f;
  return max((bits >> 7) - (mantissa > 0x60 ? 7 : 8), 1);
}

// Returns 2^exponent.
__device__ float power_of_two(int exponent) { return __uint_as_float((exponent + 127) << 23); }

// PAIRS: pairs a lane holds; dim <= 64 * PAIRS and a multiple of 2 * PAIRS. KV: T, or Code.
template <class T, class KV, int PAIRS>
__global__ void __launch_bounds__(HEADS* WARP)
    rope_store_kernel(const T* qkv, T* queries, KV* arena, const float* bias, const float* query_norm,
                      const float* key_norm, const float* frequencies, const int32_t* positions,
                      const int32_t* destinations, int dim, const RopeParameters shape) {
  using Pack = Neighbours<T, PAIRS>;
  // The successor, attention, reads before its wait only data that were written before the QKV GEMM.
  pdl_release();
  const int row = blockIdx.x;
  const int heads = shape.query_heads + 2 * shape.kv_heads;
  const int half = dim / 2;
  const int pair_first = threadIdx.x % WARP * PAIRS;
  const bool has_any = pair_first < half, turns = frequencies && pair_first < shape.rotary_half;
  // The lane's dimensions and their partners.
  const int first = pair_first < shape.rotary_half ? pair_first : pair_first + shape.rotary_half;
  const int partner = pair_first < shape.rotary_half ? pair_first + shape.rotary_half : pair_first + half;

  float sine[PAIRS], cosine[PAIRS];
  if (turns && has_any) {
    const float position = static_cast<float>(positions[row]);
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      sincosf(__fmul_rn(position, frequencies[pair_first + pair]), &sine[pair], &cosine[pair]);
    }
  }
  const int destination = destinations[row];
  const int64_t block = destination / BATON_BLOCK_TOKENS, token = destination % BATON_BLOCK_TOKENS;
  // Everything read above was written before the preceding kernel, the QKV GEMM.
  pdl_wait();

  float of_queries = 0.f, of_keys = 0.f;
  if (shape.norms_all_heads) {
    __shared__ float sums[2][WARP];
    const T* from = qkv + static_cast<int64_t>(row) * heads * dim;
    const int queries_width = shape.query_heads * dim, keys_width = shape.kv_heads * dim;
    of_queries = factor_of_all(from, bias, queries_width, shape.norm_eps, sums[0]);
    of_keys = factor_of_all(from + queries_width, bias ? bias + queries_width : nullptr, keys_width, shape.norm_eps, sums[1]);
  }

  // Queries, then keys, then values.
  for (int head = blockIdx.y * HEADS + threadIdx.x / WARP; head < heads; head += gridDim.y * HEADS) {
    const T* from = qkv + (static_cast<int64_t>(row) * heads + head) * dim;
    float low[PAIRS] = {}, high[PAIRS] = {};
    if (has_any) {
      const Pack lower = *reinterpret_cast<const Pack*>(from + first);
      const Pack upper = *reinterpret_cast<const Pack*>(from + partner);
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        low[pair] = widen(lower.values[pair]);
        high[pair] = widen(upper.values[pair]);
        if (bias) {
          low[pair] += bias[head * dim + first + pair];
          high[pair] += bias[head * dim + partner + pair];
        }
      }
    }

    const bool is_query = head < shape.query_heads;
    const bool is_key = !is_query && head < shape.query_heads + shape.kv_heads;
    const float* norm = is_query ? query_norm : key_norm;
    if (norm && (is_query || is_key)) {
      float sum = 0.f;
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) sum += low[pair] * low[pair] + high[pair] * high[pair];
      float scale = 1.f / sqrtf(warp_sum(sum) / static_cast<float>(dim) + shape.norm_eps);
      if (shape.norms_all_heads) {
        scale = is_query ? of_queries : of_keys;
        norm += (is_query ? head : head - shape.query_heads) * dim;
      }
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        if (!has_any) break;
        low[pair] = low[pair] * scale * norm[first + pair];
        high[pair] = high[pair] * scale * norm[partner + pair];
      }
    }

    if (turns && has_any && (is_query || is_key)) {
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        const float x = low[pair], y = high[pair];
        low[pair] = x * cosine[pair] - y * sine[pair];
        high[pair] = y * cosine[pair] + x * sine[pair];
      }
    }

    Pack lower, upper;
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      lower.values[pair] = narrow<T>(low[pair]);
      upper.values[pair] = narrow<T>(high[pair]);
    }
    const auto store = [&](auto* to, const auto& lower, const auto& upper) {
      if (!has_any) return;
      using Stored = std::decay_t<decltype(lower)>;
      *reinterpret_cast<Stored*>(to + first) = lower;
      *reinterpret_cast<Stored*>(to + partner) = upper;
    };
    if (is_query) {
      store(queries + row * shape.query_stride + head * dim, lower, upper);
      continue;
    }
    const int kv_head = head - shape.query_heads - (is_key ? 0 : shape.kv_heads);
    KV* const of_head = arena + block * shape.block_elements + shape.layer_offset + (is_key ? 0 : shape.value_offset) +
                        kv_head * shape.head_stride;
    if constexpr (std::is_same_v<KV, T>) {
      store(of_head + token * dim, lower, upper);
    } else {
      unsigned amax = 0;
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        lower.values[pair] = bounded(lower.values[pair]);
        upper.values[pair] = bounded(upper.values[pair]);
        amax = max(amax, __bfloat16_as_ushort(lower.values[pair]) & 0x7fffu);
        amax = max(amax, __bfloat16_as_ushort(upper.values[pair]) & 0x7fffu);
      }
      const int exponent = scale_exponent(__ushort_as_bfloat16(__reduce_max_sync(FULL, amax)));
      const float inverse = power_of_two(127 - exponent);
      Neighbours<Code, PAIRS> lower_codes, upper_codes;
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        lower_codes.values[pair] = __nv_cvt_float_to_fp8(widen(lower.values[pair]) * inverse, __NV_SATFINITE, __NV_E4M3);
        upper_codes.values[pair] = __nv_cvt_float_to_fp8(widen(upper.values[pair]) * inverse, __NV_SATFINITE, __NV_E4M3);
      }
      store(of_head + token * dim, lower_codes, upper_codes);
      if (threadIdx.x % WARP == 0) of_head[BATON_BLOCK_TOKENS * dim + token] = exponent;
    }
  }
}

constexpr int DEQUANTIZE_THREADS = 256;
constexpr int DEQUANTIZE_VECTORS = 4;  // of eight elements a thread

// Each CTA dequantizes a part of one page.
__global__ void __launch_bounds__(DEQUANTIZE_THREADS)
    dequantize_kernel(const Code* layer, const int32_t* pages, bf16* out, int64_t block_bytes, int heads, int dim) {
  pdl_wait_and_release();
  const int head_vectors = BATON_BLOCK_TOKENS * dim / 8, vectors = heads * head_vectors;
  const Code* const page = layer + pages[blockIdx.x] * block_bytes;
  bf16* const to = out + int64_t{8} * vectors * blockIdx.x;
  const int begin = blockIdx.y * DEQUANTIZE_VECTORS * DEQUANTIZE_THREADS + threadIdx.x;
  uint2 codes[DEQUANTIZE_VECTORS];
  Code exponents[DEQUANTIZE_VECTORS];
#pragma unroll
  for (int i = 0; i < DEQUANTIZE_VECTORS; ++i) {
    const int vector = begin + i * DEQUANTIZE_THREADS;
    if (vector >= vectors) break;
    const int head = vector / head_vectors, at = (vector - head * head_vectors) * 8;
    const Code* const of_head = page + int64_t{head} * BATON_BLOCK_TOKENS * (dim + 1);
    codes[i] = *reinterpret_cast<const uint2*>(of_head + at);
    exponents[i] = of_head[BATON_BLOCK_TOKENS * dim + at / dim];
  }
#pragma unroll
  for (int i = 0; i < DEQUANTIZE_VECTORS; ++i) {
    const int vector = begin + i * DEQUANTIZE_THREADS;
    if (vector >= vectors) break;
    const float scale = power_of_two(exponents[i] - 127);
    float values[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const unsigned word = j < 2 ? codes[i].x : codes[i].y;
      const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(word >> (j % 2 * 16), __NV_E4M3);
      const float2 wide = __half22float2(pair);
      values[2 * j] = wide.x * scale;
      values[2 * j + 1] = wide.y * scale;
    }
    store8(to + int64_t{vector} * 8, values);
  }
}

}  // namespace

int32_t load_rope() {
  auto all = [](auto element, auto stored) {
    using T = decltype(element);
    using KV = decltype(stored);
    BATON_TRY(load(rope_store_kernel<T, KV, 1>));
    BATON_TRY(load(rope_store_kernel<T, KV, 2>));
    return load(rope_store_kernel<T, KV, 4>);
  };
  BATON_TRY(all(float(), float()));
  BATON_TRY(all(bf16(), bf16()));
  BATON_TRY(all(bf16(), Code()));
  return load(dequantize_kernel);
}

// Returns the elements of a head's half of a layer in a block; FP8: the bytes.
static int64_t head_stride(const baton_kv& kv) {
  return int64_t{BATON_BLOCK_TOKENS} * (kv.head_dim + (kv.dtype == BATON_FP8));
}

int32_t check_kv(const baton_kv& kv) {
  BATON_REQUIRE(kv.head_dim > 0 && kv.head_dim <= 256 && kv.head_dim % 8 == 0,
                "kv.head_dim is %d; expected multiples of 8 up to 256", kv.head_dim);
  BATON_REQUIRE(kv.head_count > 0, "kv.head_count is %d; expected 1 or more", kv.head_count);
  BATON_REQUIRE(kv.layer_count > 0, "kv.layer_count is %d; expected 1 or more", kv.layer_count);
  // Destinations are block * 16 + token in an int32.
  BATON_REQUIRE(kv.block_count > 0 && kv.block_count <= (1 << 27),
                "kv.block_count is %d; expected 1 to 2^27", kv.block_count);
  const int64_t elements = int64_t{2} * kv.layer_count * kv.head_count * head_stride(kv);
  BATON_REQUIRE(kv.block_elements == elements, "kv.block_elements is %lld; the layout makes it %lld",
                static_cast<long long>(kv.block_elements), static_cast<long long>(elements));
  BATON_REQUIRE(kv.base != nullptr, "kv.base is null");
  return BATON_OK;
}

}  // namespace baton

using namespace baton;

BATON_API int32_t baton_rope_store_kv(const baton_kv* kv, const baton_rope_args* args, void* stream) {
  return guarded([&] {
    BATON_REQUIRE(kv && args, "kv or args is null");
    BATON_TRY(check_kv(*kv));
    const int dim = kv->head_dim;
    BATON_REQUIRE(args->rows >= 0, "rows is %d; expected 0 or more", args->rows);
    BATON_REQUIRE(args->layer >= 0 && args->layer < kv->layer_count, "layer is %d; expected 0 to %d",
                  args->layer, kv->layer_count - 1);
    BATON_REQUIRE(args->query_heads > 0, "query_heads is %d; expected 1 or more", args->query_heads);
    BATON_REQUIRE(args->query_stride >= static_cast<int64_t>(args->query_heads) * dim,
                  "query_stride is %lld; expected at least %d", static_cast<long long>(args->query_stride),
                  args->query_heads * dim);
    BATON_REQUIRE(args->query_stride % 8 == 0, "query_stride is %lld; expected multiples of 8",
                  static_cast<long long>(args->query_stride));
    BATON_REQUIRE((args->query_norm == nullptr) == (args->key_norm == nullptr),
                  "one of query_norm and key_norm is null");
    BATON_REQUIRE(args->rotary_dim > 0 && args->rotary_dim <= dim && args->rotary_dim % 8 == 0,
                  "rotary_dim is %d; expected multiples of 8 up to %d", args->rotary_dim, dim);
    if (args->rows == 0) return static_cast<int32_t>(BATON_OK);
    RopeParameters shape;
    shape.rotary_half = args->rotary_dim / 2;
    shape.norms_all_heads = args->query_norm && args->norms_all_heads;
    shape.query_heads = args->query_heads;
    shape.kv_heads = kv->head_count;
    shape.query_stride = args->query_stride;
    shape.block_elements = kv->block_elements;
    shape.head_stride = head_stride(*kv);
    shape.value_offset = kv->head_count * shape.head_stride;
    shape.layer_offset = 2 * args->layer * shape.value_offset;
    shape.norm_eps = args->norm_eps;
    // Few rows need many CTAs; many rows save angle computations with fewer CTAs.
    const int heads = shape.query_heads + 2 * shape.kv_heads;
    // One CTA per row, so that the norm over all heads is computed before any query is overwritten.
    const bool is_split = args->rows < ROWS_MANY && !shape.norms_all_heads;
    const dim3 grid(args->rows, is_split ? divide_up(heads, HEADS) : 1);
    const auto store = [&](auto element, auto stored) {
      using T = decltype(element);
      using KV = decltype(stored);
      auto run = [&](auto kernel) {
        return launch("rope and KV store", kernel, grid, dim3(HEADS * WARP), 0, as_stream(stream),
                      static_cast<const T*>(args->qkv), static_cast<T*>(args->queries),
                      static_cast<KV*>(kv->base), args->bias, args->query_norm, args->key_norm,
                      args->frequencies, args->positions, args->destinations, dim, shape);
      };
      if (dim <= 64) return run(rope_store_kernel<T, KV, 1>);
      if (dim <= 128) return run(rope_store_kernel<T, KV, 2>);
      return run(rope_store_kernel<T, KV, 4>);
    };
    if (kv->dtype == BATON_FP8) return store(bf16(), Code());
    return with_dtype(kv->dtype, [&](auto element) { return store(element, element); });
  });
}

BATON_API int32_t baton_dequantize_kv(const baton_kv* kv, int32_t layer, const int32_t* pages, int32_t page_count,
                                      void* out, void* stream) {
  return guarded([&] {
    BATON_REQUIRE(kv && pages && out, "kv, pages or out is null");
    BATON_TRY(check_kv(*kv));
    BATON_REQUIRE(kv->dtype == BATON_FP8, "kv.dtype is %d; expected 2 (FP8)", kv->dtype);
    BATON_REQUIRE(layer >= 0 && layer < kv->layer_count, "layer is %d; expected 0 to %d", layer, kv->layer_count - 1);
    BATON_REQUIRE(page_count >= 0, "page_count is %d; expected 0 or more", page_count);
    if (page_count == 0) return static_cast<int32_t>(BATON_OK);
    const int heads = 2 * kv->head_count;
    const int64_t vectors = int64_t{heads} * BATON_BLOCK_TOKENS * kv->head_dim / 8;
    const dim3 grid(page_count, divide_up(vectors, DEQUANTIZE_THREADS * DEQUANTIZE_VECTORS));
    return launch("KV dequantization", dequantize_kernel, grid, dim3(DEQUANTIZE_THREADS), 0, as_stream(stream),
                  static_cast<const Code*>(kv->base) + layer * heads * head_stride(*kv), pages, static_cast<bf16*>(out),
                  kv->block_elements, heads, kv->head_dim);
  });
}
