// Between the QKV GEMM and attention, in one pass: bias, head norms, RoPE, KV store.
//
// One warp processes several heads of a row, one after another, because their angles are equal. A lane holds adjacent
// dimensions and their rotary partners, so RoPE needs no shuffles and loads are wide. Dimensions without
// rotation are held as pairs, too. The angles are computed before the preceding kernel has completed.
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

// PAIRS: pairs a lane holds; dim <= 64 * PAIRS and a multiple of 2 * PAIRS.
template <class T, int PAIRS>
__global__ void __launch_bounds__(HEADS* WARP)
    rope_store_kernel(const T* qkv, T* queries, T* arena, const float* bias, const float* query_norm,
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
    if (!has_any) continue;

    if (turns && (is_query || is_key)) {
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        const float x = low[pair], y = high[pair];
        low[pair] = x * cosine[pair] - y * sine[pair];
        high[pair] = y * cosine[pair] + x * sine[pair];
      }
    }

    T* to;
    if (is_query) {
      to = queries + row * shape.query_stride + head * dim;
    } else {
      const int kv_head = head - shape.query_heads - (is_key ? 0 : shape.kv_heads);
      to = arena + block * shape.block_elements + shape.layer_offset + (is_key ? 0 : shape.value_offset) +
           (kv_head * BATON_BLOCK_TOKENS + token) * dim;
    }
    Pack lower, upper;
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      lower.values[pair] = narrow<T>(low[pair]);
      upper.values[pair] = narrow<T>(high[pair]);
    }
    *reinterpret_cast<Pack*>(to + first) = lower;
    *reinterpret_cast<Pack*>(to + partner) = upper;
  }
}

}  // namespace

int32_t load_rope() {
  auto all = [](auto element) {
    using T = decltype(element);
    BATON_TRY(load(rope_store_kernel<T, 1>));
    BATON_TRY(load(rope_store_kernel<T, 2>));
    return load(rope_store_kernel<T, 4>);
  };
  BATON_TRY(all(float()));
  return all(bf16());
}

int32_t check_kv(const baton_kv& kv) {
  BATON_REQUIRE(kv.head_dim > 0 && kv.head_dim <= 256 && kv.head_dim % 8 == 0,
                "kv.head_dim is %d; expected multiples of 8 up to 256", kv.head_dim);
  BATON_REQUIRE(kv.head_count > 0, "kv.head_count is %d; expected 1 or more", kv.head_count);
  BATON_REQUIRE(kv.layer_count > 0, "kv.layer_count is %d; expected 1 or more", kv.layer_count);
  // Destinations are block * 16 + token in an int32.
  BATON_REQUIRE(kv.block_count > 0 && kv.block_count <= (1 << 27),
                "kv.block_count is %d; expected 1 to 2^27", kv.block_count);
  const int64_t elements =
      int64_t{2} * kv.layer_count * kv.head_count * BATON_BLOCK_TOKENS * kv.head_dim;
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
    shape.value_offset = static_cast<int64_t>(kv->head_count) * BATON_BLOCK_TOKENS * dim;
    shape.layer_offset = 2 * args->layer * shape.value_offset;
    shape.norm_eps = args->norm_eps;
    // Few rows need many CTAs; many rows save angle computations with fewer CTAs.
    const int heads = shape.query_heads + 2 * shape.kv_heads;
    // One CTA per row, so that the norm over all heads is computed before any query is overwritten.
    const bool is_split = args->rows < ROWS_MANY && !shape.norms_all_heads;
    const dim3 grid(args->rows, is_split ? divide_up(heads, HEADS) : 1);
    return with_dtype(kv->dtype, [&](auto element) {
      using T = decltype(element);
      auto run = [&](auto kernel) {
        return launch("rope and KV store", kernel, grid, dim3(HEADS * WARP), 0, as_stream(stream),
                      static_cast<const T*>(args->qkv), static_cast<T*>(args->queries),
                      static_cast<T*>(kv->base), args->bias, args->query_norm, args->key_norm,
                      args->frequencies, args->positions, args->destinations, dim, shape);
      };
      if (dim <= 64) return run(rope_store_kernel<T, 1>);
      if (dim <= 128) return run(rope_store_kernel<T, 2>);
      return run(rope_store_kernel<T, 4>);
    });
  });
}
