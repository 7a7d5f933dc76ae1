// Attention: dispatch by shape, and the plain kernel that supports all shapes.
#include <utility>

#include "device.cuh"
#include "flash.h"

namespace baton {

int32_t check_kv(const baton_kv& kv);

namespace {

constexpr int WARPS = 4;      // per CTA of the plain kernel; a CTA computes one query head of one row
constexpr int TILE = WARP;    // tokens that a warp processes at a time, one per lane
constexpr int TOKENS = BATON_BLOCK_TOKENS;
constexpr int TOGETHER = 8;   // tokens whose values a warp loads at once

struct PlainParameters {
  const int32_t* row_sequences;
  const int32_t* row_positions;
  const int32_t* page_indptr;
  const int32_t* page_indices;
  const float* sinks;  // null: none
  int64_t block_elements;
  int64_t layer_offset;
  int64_t value_offset;
  int64_t query_stride;
  float scale;
  int window;
  int group;
  int dim;
};

// Tiles are counted from position 0, and tile i belongs to warp i % WARPS. The order of every accumulation depends only
// on the row's position (and the window), so results do not depend on the batch or on prefill chunks.
template <class T, int EACH>  // dimensions that a lane holds; dim <= 32 * EACH
__global__ void __launch_bounds__(WARPS* WARP)
    plain_kernel(const T* queries, const T* arena, T* out, const PlainParameters in) {
  __shared__ float query[256];
  __shared__ float maxima[WARPS], sums[WARPS], weighted[WARPS][EACH * WARP];
  pdl_wait_and_release();
  const int64_t row = blockIdx.x;
  const int head = blockIdx.y, heads = gridDim.y;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  T* to = out + (row * heads + head) * in.dim;
  const int sequence = in.row_sequences[row];
  if (sequence < 0) {
    for (int i = threadIdx.x; i < in.dim; i += blockDim.x) to[i] = narrow<T>(0.f);
    return;
  }
  for (int i = threadIdx.x; i < in.dim; i += blockDim.x) {
    query[i] = widen(queries[row * in.query_stride + head * in.dim + i]) * in.scale;
  }
  __syncthreads();

  const int end = in.row_positions[row] + 1;
  const int begin = in.window > 0 ? max(end - in.window, 0) : 0;
  const int32_t* pages = in.page_indices + in.page_indptr[sequence];
  const int64_t head_offset = in.layer_offset + static_cast<int64_t>(head / in.group) * TOKENS * in.dim;

  float maximum = -INFINITY, sum = 0.f, values[EACH] = {};
  const int first = begin / TILE;
  for (int tile = first + (warp - first % WARPS + WARPS) % WARPS; tile * TILE < end; tile += WARPS) {
    const int token = tile * TILE + lane;
    const bool is_seen = token >= begin && token < end;
    float score = -INFINITY;
    if (is_seen) {
      const T* key = arena + pages[token / TOKENS] * in.block_elements + head_offset + (token % TOKENS) * in.dim;
      score = 0.f;
#pragma unroll 4
      for (int i = 0; i < in.dim; i += 8) {
        float keys[8];
        load8(key + i, keys);
#pragma unroll
        for (int j = 0; j < 8; ++j) score = fmaf(query[i + j], keys[j], score);
      }
    }
    const float new_maximum = fmaxf(maximum, warp_max(score));
    const float correction = expf(maximum - new_maximum);
    const float weight = is_seen ? expf(score - new_maximum) : 0.f;
    maximum = new_maximum;
    sum = sum * correction + warp_sum(weight);
#pragma unroll
    for (int i = 0; i < EACH; ++i) values[i] *= correction;
    // Eight loads of values are in flight. Tokens that the row does not attend to are not read: their values may be
    // NaN.
    const int from = max(begin - tile * TILE, 0), until = min(end - tile * TILE, TILE);
    for (int half = 0; half < TILE / TOKENS; ++half) {
      if (half * TOKENS >= until) break;
      const T* block = arena + pages[tile * (TILE / TOKENS) + half] * in.block_elements + head_offset + in.value_offset;
      for (int group = 0; group < TOKENS; group += TOGETHER) {
        T loaded[TOGETHER][EACH];
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j) {
          const int place = half * TOKENS + group + j;
#pragma unroll
          for (int i = 0; i < EACH; ++i) {
            const bool is_read = place >= from && place < until && lane + i * WARP < in.dim;
            loaded[j][i] = is_read ? block[(group + j) * in.dim + lane + i * WARP] : narrow<T>(0.f);
          }
        }
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j) {
          const float share = __shfl_sync(FULL, weight, half * TOKENS + group + j);
#pragma unroll
          for (int i = 0; i < EACH; ++i) values[i] = fmaf(share, widen(loaded[j][i]), values[i]);
        }
      }
    }
  }
  if (lane == 0) maxima[warp] = maximum, sums[warp] = sum;
#pragma unroll
  for (int i = 0; i < EACH; ++i) weighted[warp][lane + i * WARP] = values[i];
  __syncthreads();

  float whole_maximum = maxima[0], whole_sum = 0.f;
  for (int w = 1; w < WARPS; ++w) whole_maximum = fmaxf(whole_maximum, maxima[w]);
  if (in.sinks) {
    whole_maximum = fmaxf(whole_maximum, in.sinks[head]);
    whole_sum = expf(in.sinks[head] - whole_maximum);
  }
  float factors[WARPS];
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    factors[w] = expf(maxima[w] - whole_maximum);  // 0 for a warp without a tile
    whole_sum += sums[w] * factors[w];
  }
  for (int i = threadIdx.x; i < in.dim; i += blockDim.x) {
    float value = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) value += weighted[w][i] * factors[w];
    to[i] = narrow<T>(value / whole_sum);
  }
}

constexpr int SINK_THREADS = 256;

// Adds the sinks to the denominators of finished rows: multiplies each head's output by the share of its tokens in the
// sum with the sink. `sums` are base-2 logarithms of the sums without sinks, [rows][heads]. A thread multiplies eight
// elements.
__global__ void __launch_bounds__(SINK_THREADS)
    sink_kernel(bf16* out, const float* sums, const float* sinks, int heads, int dim, int64_t vectors) {
  pdl_wait_and_release();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * SINK_THREADS + threadIdx.x;
  if (i >= vectors) return;
  const int64_t row_head = i / (dim / 8);
  constexpr float LOG2_E = 1.4426950408889634f;
  const float share = 1.f / (1.f + exp2f(sinks[row_head % heads] * LOG2_E - sums[row_head]));
  float values[8];
  load8(out + i * 8, values);
#pragma unroll
  for (int j = 0; j < 8; ++j) values[j] *= share;
  store8(out + i * 8, values);
}

// Bytes of FlashInfer's sums of a step, which are at the front of the float workspace.
uint64_t sum_bytes(const baton_attention_shape& shape, int rows) {
  constexpr uint64_t ALIGNMENT = 128;
  const uint64_t bytes = sizeof(float) * static_cast<uint64_t>(rows) * shape.query_heads;
  return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

// Returns the workspace behind the sums.
baton_attention_workspace behind_sums(const baton_attention_workspace& whole, uint64_t bytes) {
  baton_attention_workspace rest = whole;
  rest.floats = static_cast<char*>(whole.floats) + bytes;
  rest.float_bytes = whole.float_bytes - bytes;
  return rest;
}

int32_t check_shape(const baton_attention_shape& shape) {
  BATON_REQUIRE(shape.head_dim > 0 && shape.head_dim <= 256 && shape.head_dim % 8 == 0,
                "head_dim is %d; expected multiples of 8 up to 256", shape.head_dim);
  BATON_REQUIRE(shape.kv_heads > 0 && shape.query_heads > 0 && shape.query_heads % shape.kv_heads == 0,
                "query_heads is %d; expected multiples of kv_heads, %d", shape.query_heads, shape.kv_heads);
  BATON_REQUIRE(shape.window >= 0, "window is %d; expected 0 or more", shape.window);
  BATON_REQUIRE(shape.dtype == BATON_F32 || shape.dtype == BATON_BF16, "dtype is %d; expected 0 or 1",
                shape.dtype);
  return BATON_OK;
}

bool has_hopper(const Device& device) {
#ifdef BATON_HAS_HOPPER
  return device.major == 9 && device.minor == 0;
#else
  (void)device;
  return false;
#endif
}

// Average rows per sequence from which FA3 is faster than FA2 (measured in README.md).
constexpr int HOPPER_ROWS = 512;

// FlashInfer's kernels support the shape.
bool has_flash(const baton_attention_shape& shape) {
  return shape.dtype == BATON_BF16 && (shape.head_dim == 64 || shape.head_dim == 128 || shape.head_dim == 256);
}

int32_t choose(const baton_attention_shape& shape, const baton_attention_batch& batch, const Device& device) {
  if (!has_flash(shape) || batch.sequences == 0 || batch.rows == 0) return BATON_ATTENTION_PLAIN;
  // FA3 does not split KV. With head dimension 256, it is slower if less than half of the SMs have a tile of 128 rows.
  const bool fills_sms = shape.head_dim < 256 || int64_t{batch.rows} * shape.query_heads >= int64_t{128} * device.sm_count / 2;
  const bool fills_tiles = fills_sms && batch.rows >= static_cast<int64_t>(HOPPER_ROWS) * batch.sequences;
  if (has_hopper(device) && shape.window == 0 && fills_tiles) return BATON_ATTENTION_FA3;
  return BATON_ATTENTION_FA2;
}

template <template <int> class Kind>
int32_t prepare_by_dim(const FlashPrepare& in) {
  switch (in.shape->head_dim) {
    case 64: return Kind<64>::prepare(in);
    case 128: return Kind<128>::prepare(in);
    default: return Kind<256>::prepare(in);
  }
}
template <template <int> class Kind>
int32_t run_by_dim(const FlashRun& in) {
  switch (in.shape->head_dim) {
    case 64: return Kind<64>::run(in);
    case 128: return Kind<128>::run(in);
    default: return Kind<256>::run(in);
  }
}

template <class T>
int32_t run_plain(const FlashRun& in, const float* sinks) {
  PlainParameters plain;
  plain.row_sequences = in.step->row_sequences;
  plain.row_positions = in.step->row_positions;
  plain.page_indptr = in.step->page_indptr;
  plain.page_indices = in.step->page_indices;
  plain.sinks = sinks;
  plain.block_elements = in.kv->block_elements;
  plain.layer_offset = static_cast<T*>(in.keys) - static_cast<T*>(in.kv->base);
  plain.value_offset = static_cast<T*>(in.values) - static_cast<T*>(in.keys);
  plain.query_stride = in.query_stride;
  plain.scale = in.shape->scale;
  plain.window = in.shape->window;
  plain.group = in.shape->query_heads / in.shape->kv_heads;
  plain.dim = in.shape->head_dim;
  auto run = [&](auto kernel) {
    return launch("plain attention", kernel, dim3(in.rows, in.shape->query_heads), dim3(WARPS * WARP), 0, in.stream,
                  static_cast<const T*>(in.queries), static_cast<const T*>(in.kv->base), static_cast<T*>(in.out),
                  plain);
  };
  if (plain.dim <= 64) return run(plain_kernel<T, 2>);
  if (plain.dim <= 128) return run(plain_kernel<T, 4>);
  return run(plain_kernel<T, 8>);
}

}  // namespace

int32_t load_attention() {
  auto all = [](auto element) {
    using T = decltype(element);
    BATON_TRY(load(plain_kernel<T, 2>));
    BATON_TRY(load(plain_kernel<T, 4>));
    return load(plain_kernel<T, 8>);
  };
  BATON_TRY(all(float()));
  BATON_TRY(load(sink_kernel));
  return all(bf16());
}

}  // namespace baton

using namespace baton;

BATON_API int32_t baton_attention_prepare(int32_t kind, const baton_attention_shape* shape,
                                          const baton_attention_batch* batch,
                                          const baton_attention_workspace* workspace,
                                          baton_attention_plan* plan_host, void* stream) {
  return guarded([&]() -> int32_t {
    BATON_REQUIRE(shape && batch && plan_host, "shape, batch or plan_host is null");
    BATON_TRY(check_shape(*shape));
    BATON_REQUIRE(batch->sequences >= 0 && batch->sequences <= BATON_SEQUENCES_MAX,
                  "batch.sequences is %d; expected 0 to %d", batch->sequences, BATON_SEQUENCES_MAX);
    BATON_REQUIRE(batch->rows >= batch->sequences, "batch.rows is %d; expected at least batch.sequences, %d",
                  batch->rows, batch->sequences);
    Device device;
    BATON_TRY(current_device(device));
    if (kind == BATON_ATTENTION_AUTO) kind = choose(*shape, *batch, device);
    if (kind == BATON_ATTENTION_PLAIN) {
      *plan_host = {};
      plan_host->kind = kind;
      return BATON_OK;
    }
    if (!has_flash(*shape)) {
      return fail(BATON_UNSUPPORTED, "attention kind %d takes bf16 and head_dim 64, 128 or 256; dtype is %d, head_dim %d",
                  kind, shape->dtype, shape->head_dim);
    }
    BATON_REQUIRE(workspace && workspace->floats && workspace->ints && workspace->pinned_host,
                  "attention kind %d needs a workspace", kind);
    BATON_REQUIRE(batch->sequences > 0, "batch.sequences is 0; attention kind %d takes 1 or more", kind);
    BATON_REQUIRE(batch->row_indptr_host && batch->page_indptr_host && batch->kv_lengths_host,
                  "an array of batch is null");
    const uint64_t sums = sum_bytes(*shape, batch->rows);
    if (sums > workspace->float_bytes) {
      return fail(BATON_TOO_SMALL, "float_bytes is %llu; expected more than %llu",
                  static_cast<unsigned long long>(workspace->float_bytes), static_cast<unsigned long long>(sums));
    }
    const baton_attention_workspace rest = behind_sums(*workspace, sums);
    const FlashPrepare in = {shape, batch, &rest, plan_host, as_stream(stream)};
    switch (kind) {
      case BATON_ATTENTION_FA2: return prepare_by_dim<FlashPrefill>(in);
      case BATON_ATTENTION_FA3:
#ifdef BATON_HAS_HOPPER
        if (has_hopper(device) && shape->window == 0) return prepare_by_dim<FlashHopper>(in);
#endif
        return fail(BATON_UNSUPPORTED, "FA3 takes sm_90 (this is sm_%d%d) and no window (%d)", device.major,
                    device.minor, shape->window);
      default: return fail(BATON_INVALID, "kind is %d; expected 0 to 3", kind);
    }
  });
}

BATON_API int32_t baton_attention_run(const baton_attention_plan* plan_host, const baton_attention_shape* shape,
                                      const baton_attention_workspace* workspace, const baton_kv* kv, int32_t layer,
                                      const void* queries, int64_t query_stride, const baton_step* step,
                                      const float* sinks, void* out, int32_t sequences, int32_t rows, void* stream) {
  return guarded([&]() -> int32_t {
    BATON_REQUIRE(plan_host && shape && kv && step, "plan_host, shape, kv or step is null");
    BATON_TRY(check_shape(*shape));
    BATON_TRY(check_kv(*kv));
    BATON_REQUIRE(layer >= 0 && layer < kv->layer_count, "layer is %d; expected 0 to %d", layer,
                  kv->layer_count - 1);
    BATON_REQUIRE(shape->kv_heads == kv->head_count && shape->head_dim == kv->head_dim && shape->dtype == kv->dtype,
                  "shape has %d KV heads of %d, dtype %d; the arena has %d of %d, dtype %d", shape->kv_heads,
                  shape->head_dim, shape->dtype, kv->head_count, kv->head_dim, kv->dtype);
    BATON_REQUIRE(rows >= 0 && rows <= step->rows_max, "rows is %d; expected 0 to %d", rows, step->rows_max);
    if (rows == 0) return BATON_OK;
    const int64_t bytes = shape->dtype == BATON_F32 ? 4 : 2;
    const int64_t half = static_cast<int64_t>(kv->head_count) * TOKENS * kv->head_dim * bytes;
    char* keys = static_cast<char*>(kv->base) + 2 * layer * half;
    FlashRun in = {plan_host, shape, workspace,   kv,        step, queries, query_stride,
                   out,       keys,  keys + half, sequences, rows, nullptr, as_stream(stream)};
    if (plan_host->kind == BATON_ATTENTION_PLAIN) {
      return with_dtype(shape->dtype, [&](auto element) { return run_plain<decltype(element)>(in, sinks); });
    }
    BATON_REQUIRE(workspace && workspace->floats && workspace->ints, "attention kind %d needs a workspace",
                  plan_host->kind);
    const baton_attention_workspace rest = behind_sums(*workspace, sum_bytes(*shape, rows));
    in.workspace = &rest;
    if (sinks) in.sums = static_cast<float*>(workspace->floats);
    switch (plan_host->kind) {
      case BATON_ATTENTION_FA2: BATON_TRY(run_by_dim<FlashPrefill>(in)); break;
#ifdef BATON_HAS_HOPPER
      case BATON_ATTENTION_FA3: BATON_TRY(run_by_dim<FlashHopper>(in)); break;
#endif
      default: return fail(BATON_INVALID, "plan_host.kind is %d; expected 1 to 3", plan_host->kind);
    }
    if (!sinks) return BATON_OK;
    const int64_t vectors = static_cast<int64_t>(rows) * shape->query_heads * shape->head_dim / 8;
    return launch("attention sinks", sink_kernel, dim3((vectors + SINK_THREADS - 1) / SINK_THREADS), dim3(SINK_THREADS),
                  0, in.stream, static_cast<bf16*>(out), static_cast<const float*>(in.sums), sinks,
                  shape->query_heads, shape->head_dim, vectors);
  });
}
