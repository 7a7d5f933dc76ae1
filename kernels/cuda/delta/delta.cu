// Linear attention with a recurrent state (Gated DeltaNet).
//
// Three kernels. The first computes the convolutions and the L2 norms, and the decay and update rate of each value head.
// In the second, a CTA holds a slice of columns of the state of one value head in registers and processes the rows of
// its sequence in order, so decode rows and prompts share one kernel. It replaces the past inputs of the convolution,
// which the first kernel has read. The third normalizes and gates the outputs.
//
// With the state S before a row, decay g, key k, query q and update u = rate (v - g k S), the state after the row is
// g S + k u, and the output q (g S + k u) = g (q S) + (q k) u. So one pass over S gives both sums.
#include "delta.h"

#include <utility>

#include "device.cuh"

namespace baton {
namespace {

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
constexpr int DIM_MAX = 256;
constexpr int KEY_LANES = 8;  // lanes that share the keys of a column
constexpr int COLUMNS = 2;    // columns of a lane
constexpr int SLICE = WARPS * WARP / KEY_LANES * COLUMNS;  // columns of a CTA
constexpr int TILE = 8;  // rows that are fetched together
constexpr int DECODE_CTAS = 7;  // of an SM, as a step that decodes waits for states
constexpr float L2_EPS = 1e-6f;
constexpr int CONV_TAPS = 3;  // of every published model
constexpr int CONV_ROWS = 8;  // rows of a warp that loads the weights of its channels once
constexpr int CONV_ROWS_MANY = 512;  // rows from which on a warp computes several
static_assert(DIM_MAX == 2 * 4 * WARP);

__device__ inline float sigmoid(float x) {
  const float small = expf(-fabsf(x));
  return (x < 0.f ? small : 1.f) / (1.f + small);
}

// Loads four adjacent elements as f32.
__device__ inline float4 load4(const float* from) { return *reinterpret_cast<const float4*>(from); }
__device__ inline float4 load4(const bf16* from) {
  const uint2 raw = *reinterpret_cast<const uint2*>(from);
  return make_float4(__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u), __uint_as_float(raw.y << 16),
                     __uint_as_float(raw.y & 0xffff0000u));
}
__device__ inline void store4(float* to, float4 from) { *reinterpret_cast<float4*>(to) = from; }
__device__ inline void store4(bf16* to, float4 from) {
  const __nv_bfloat162 low = __floats2bfloat162_rn(from.x, from.y), high = __floats2bfloat162_rn(from.z, from.w);
  *reinterpret_cast<uint2*>(to) =
      make_uint2(*reinterpret_cast<const unsigned*>(&low), *reinterpret_cast<const unsigned*>(&high));
}
__device__ inline float square_of(float4 x) { return x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w; }

// Arguments of the kernels, and sizes that follow from them.
struct Delta {
  baton_delta_args args;
  int key_width;
  int channels;
  int lane_keys;    // key heads of a lane
  int lane_values;  // value heads of a lane
  int row_elements;
};

// Returns a row of a lane of a slot's state.
__device__ inline float* state_row(const Delta& delta, const int32_t* table, int lane, int row) {
  const baton_delta_args& args = delta.args;
  const int piece = row / args.piece_rows, block = piece / args.pieces;
  char* const of_block = static_cast<char*>(args.blocks) + table[block] * args.block_bytes;
  char* const of_piece = of_block + (int64_t{piece - block * args.pieces} * args.lanes + lane) * args.head_bytes;
  return reinterpret_cast<float*>(of_piece) + (row - piece * args.piece_rows) * delta.row_elements;
}

// A head of queries, keys or values that goes through the convolution.
struct ConvHead {
  int lane;
  int row;      // first of the rows with past inputs in the lane
  int channel;  // first channel
  int dim;
};

// Returns a head; heads are those of queries, then keys, then values.
__device__ inline ConvHead conv_head(const Delta& delta, int head) {
  const baton_delta_args& args = delta.args;
  const int past = args.layer_row + delta.lane_values * args.key_dim;
  if (head < 2 * args.key_heads) {
    const int is_key = head >= args.key_heads, number = head - is_key * args.key_heads;
    const int index = is_key * delta.lane_keys + number % delta.lane_keys;
    return {number / delta.lane_keys, past + index * args.taps, head * args.key_dim, args.key_dim};
  }
  const int number = head - 2 * args.key_heads;
  const int index = 2 * delta.lane_keys + number % delta.lane_values;
  return {number / delta.lane_values, past + index * args.taps, 2 * delta.key_width + number * args.value_dim,
          args.value_dim};
}

// One warp per head and `each` rows. The warp after the last head computes the rates of the rows. A lane holds ITEMS
// groups of four adjacent elements. TAPS: the past inputs, so that weights stay in registers; 0: weights are loaded.
template <class T, int ITEMS, int TAPS>
__global__ void __launch_bounds__(THREADS)
    conv_kernel(const __grid_constant__ Delta delta, const baton_step step, int each) {
  pdl_wait_and_release();
  const baton_delta_args& args = delta.args;
  const int head = blockIdx.y * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int heads = 2 * args.key_heads + args.value_heads;
  const int begin = blockIdx.x * each, end = min(begin + each, args.rows);
  if (head > heads) return;
  if (head == heads) {
    for (int at = lane; at < (end - begin) * args.value_heads; at += WARP) {
      const int row = begin + at / args.value_heads, i = at % args.value_heads;
      const T* const rates = static_cast<const T*>(args.rates) + row * args.rates_stride;
      float* const to = args.mixed + row * args.mixed_stride + delta.channels + 2 * i;
      const float a = widen(rates[args.value_heads + i]) + args.time_bias[i];
      const float time = a > 20.f ? a : log1pf(expf(a));
      to[0] = expf(-expf(args.decay_log[i]) * time);
      to[1] = sigmoid(widen(rates[i]));
    }
    return;
  }
  const ConvHead of = conv_head(delta, head);
  const int taps = TAPS > 0 ? TAPS : args.taps;
  // [4][taps + 1] of each group.
  float kept[ITEMS][4 * (TAPS + 1)];
  if constexpr (TAPS > 0) {
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const int at = (item * WARP + lane) * 4;
      if (at >= of.dim) break;
#pragma unroll
      for (int i = 0; i < 4 * (TAPS + 1); i += 4) {
        const float4 weights = load4(args.conv + int64_t{of.channel + at} * (TAPS + 1) + i);
        kept[item][i] = weights.x, kept[item][i + 1] = weights.y;
        kept[item][i + 2] = weights.z, kept[item][i + 3] = weights.w;
      }
    }
  }
  for (int row = begin; row < end; ++row) {
    float* const mixed = args.mixed + row * args.mixed_stride + of.channel;
    const int sequence = step.row_sequences[row], slot = sequence < 0 ? -1 : step.sequence_slots[sequence];
    const bool is_padding = slot < 0;
    const int first = is_padding ? row : step.row_indptr[sequence];
    const bool is_start = is_padding || step.row_positions[first] == 0;
    const int32_t* const table = args.tables + int64_t{max(slot, 0)} * args.table_width;
    float4 values[ITEMS];
    float sum = 0.f;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      float4 out = make_float4(0.f, 0.f, 0.f, 0.f);
      values[item] = out;
      const int at = (item * WARP + lane) * 4;
      if (at >= of.dim || is_padding) continue;
      const float* const stored = args.conv + int64_t{of.channel + at} * (taps + 1);
      const auto weight = [&](int i) {
        if constexpr (TAPS > 0) return kept[item][i];
        return stored[i];
      };
#pragma unroll
      for (int tap = 0; tap <= taps; ++tap) {
        const int from = row - taps + tap;
        float4 input = make_float4(0.f, 0.f, 0.f, 0.f);
        if (from >= first) {
          input = load4(static_cast<const T*>(args.projected) + from * args.projected_stride + of.channel + at);
        } else if (!is_start) {
          input = load4(state_row(delta, table, of.lane, of.row + taps + from - first) + at);
        }
        out.x += weight(tap) * input.x;
        out.y += weight(taps + 1 + tap) * input.y;
        out.z += weight(2 * (taps + 1) + tap) * input.z;
        out.w += weight(3 * (taps + 1) + tap) * input.w;
      }
      values[item] =
          make_float4(out.x * sigmoid(out.x), out.y * sigmoid(out.y), out.z * sigmoid(out.z), out.w * sigmoid(out.w));
      sum += square_of(values[item]);
    }
    float scale = 1.f;
    if (head < 2 * args.key_heads) {
      const float factor = head < args.key_heads ? rsqrtf(static_cast<float>(args.key_dim)) : 1.f;
      scale = factor / sqrtf(warp_sum(sum) + L2_EPS);
    }
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const int at = (item * WARP + lane) * 4;
      const float4 value = values[item];
      if (at >= of.dim) break;
      store4(mixed + at, make_float4(value.x * scale, value.y * scale, value.z * scale, value.w * scale));
    }
  }
}

template <int BYTES>
__device__ inline void copy_async(void* to, const void* from) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(BYTES) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all copies but those of the last group.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

// Returns the sum over the lanes that share a column.
__device__ inline float sum_of_keys(float x) {
#pragma unroll
  for (int distance = KEY_LANES / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(FULL, x, distance);
  return x;
}

// Replaces the past inputs of a channel by those after `rows` rows of its sequence.
template <class T>
__device__ void keep_inputs(const Delta& delta, const int32_t* table, const ConvHead& of, int at, int first, int rows,
                            bool is_start) {
  const baton_delta_args& args = delta.args;
  for (int tap = 0; tap < args.taps; ++tap) {
    const int from = rows - args.taps + tap;
    float input = 0.f;
    if (from >= 0) {
      const T* const projected = static_cast<const T*>(args.projected) + (first + from) * args.projected_stride;
      input = widen(projected[of.channel + at]);
    } else if (!is_start) {
      input = state_row(delta, table, of.lane, of.row + args.taps + from)[at];
    }
    state_row(delta, table, of.lane, of.row + tap)[at] = input;
  }
}

// Rows of a sequence in shared memory.
template <int DIM>
struct Tile {
  float queries[TILE][DIM];
  float keys[TILE][DIM];
  float values[TILE][SLICE];
  float2 rates[TILE];  // decay, update rate
};

// blockIdx: slice, value head, sequence. DIM is at least key_dim; the remaining keys are 0. CTAS: of an SM, at least.
template <class T, int DIM, int CTAS>
__global__ void __launch_bounds__(THREADS, CTAS)
    recurrence_kernel(const __grid_constant__ Delta delta, const baton_step step) {
  constexpr int KEYS = DIM / KEY_LANES;  // keys of a lane, in groups of 4
  __shared__ alignas(16) Tile<DIM> tiles[2];
  __shared__ float* state_rows[DIM];
  const baton_delta_args& args = delta.args;
  const int head = blockIdx.y, sequence = blockIdx.z, ratio = args.value_heads / args.key_heads;
  const int group = threadIdx.x % KEY_LANES, first_key = 4 * group;
  const int slice = blockIdx.x * SLICE, in_slice = threadIdx.x / KEY_LANES * COLUMNS, column = slice + in_slice;
  const bool has_column = column < args.value_dim;
  // Slots, tables and states were written before the preceding kernel.
  const int slot = step.sequence_slots[sequence];
  if (slot < 0) {
    pdl_wait_and_release();
    return;
  }
  const int first = step.row_indptr[sequence], end = step.row_indptr[sequence + 1];
  const bool is_start = step.row_positions[first] == 0;
  const int32_t* const table = args.tables + int64_t{slot} * args.table_width;
  for (int key = threadIdx.x; key < args.key_dim; key += THREADS) {
    const int row = args.layer_row + head % delta.lane_values * args.key_dim + key;
    state_rows[key] = state_row(delta, table, head / delta.lane_values, row);
  }
  if (args.key_dim < DIM) {
    for (int i = threadIdx.x; i < static_cast<int>(2 * sizeof(Tile<DIM>) / 4); i += THREADS) {
      reinterpret_cast<float*>(tiles)[i] = 0.f;
    }
  }
  __syncthreads();
  float2 state[KEYS];
#pragma unroll
  for (int i = 0; i < KEYS; ++i) {
    const int key = first_key + i / 4 * 4 * KEY_LANES + i % 4;
    const bool is_kept = has_column && key < args.key_dim && !is_start;
    state[i] = is_kept ? *reinterpret_cast<const float2*>(state_rows[key] + column) : make_float2(0.f, 0.f);
  }
  pdl_wait_and_release();

  float* const outputs = args.mixed + 2 * delta.key_width + head * args.value_dim;
  const auto fetch = [&](int from, Tile<DIM>& tile) {
    const int count = min(end - from, TILE);
    const float* const mixed = args.mixed + from * args.mixed_stride;
    const float* const queries = mixed + head / ratio * args.key_dim;
    for (int i = threadIdx.x; i < count * DIM / 4; i += THREADS) {
      const int row = i / (DIM / 4), at = i % (DIM / 4) * 4;
      if (at >= args.key_dim) continue;
      copy_async<16>(&tile.queries[row][at], queries + row * args.mixed_stride + at);
      copy_async<16>(&tile.keys[row][at], queries + row * args.mixed_stride + delta.key_width + at);
    }
    for (int i = threadIdx.x; i < count * SLICE / 4; i += THREADS) {
      const int row = i / (SLICE / 4), at = i % (SLICE / 4) * 4;
      if (slice + at >= args.value_dim) continue;
      copy_async<16>(&tile.values[row][at], outputs + (from + row) * args.mixed_stride + slice + at);
    }
    if (threadIdx.x < count) {
      copy_async<8>(&tile.rates[threadIdx.x], mixed + threadIdx.x * args.mixed_stride + delta.channels + 2 * head);
    }
  };
  fetch(first, tiles[0]);
  commit_copies();
  for (int from = first, turn = 0; from < end; from += TILE, turn ^= 1) {
    if (from + TILE < end) fetch(from + TILE, tiles[turn ^ 1]);
    commit_copies();
    wait_for_copies();
    __syncthreads();
    const Tile<DIM>& tile = tiles[turn];
    for (int row = 0; row < min(end - from, TILE); ++row) {
      float keys[KEYS];
      float known[COLUMNS] = {}, read[COLUMNS] = {}, agreement = 0.f;
#pragma unroll
      for (int i = 0; i < KEYS; i += 4) {
        const float4 key = load4(&tile.keys[row][first_key + i * KEY_LANES]);
        const float4 query = load4(&tile.queries[row][first_key + i * KEY_LANES]);
        keys[i] = key.x, keys[i + 1] = key.y, keys[i + 2] = key.z, keys[i + 3] = key.w;
        const float queries[4] = {query.x, query.y, query.z, query.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          known[0] += state[i + j].x * keys[i + j];
          known[1] += state[i + j].y * keys[i + j];
          read[0] += state[i + j].x * queries[j];
          read[1] += state[i + j].y * queries[j];
          agreement += keys[i + j] * queries[j];
        }
      }
      agreement = sum_of_keys(agreement);
      const float2 value = *reinterpret_cast<const float2*>(&tile.values[row][in_slice]);
      const float decay = tile.rates[row].x, rate = tile.rates[row].y;
      float2 update, out;
      update.x = (value.x - decay * sum_of_keys(known[0])) * rate;
      update.y = (value.y - decay * sum_of_keys(known[1])) * rate;
      out.x = decay * sum_of_keys(read[0]) + agreement * update.x;
      out.y = decay * sum_of_keys(read[1]) + agreement * update.y;
#pragma unroll
      for (int i = 0; i < KEYS; ++i) {
        state[i].x = decay * state[i].x + keys[i] * update.x;
        state[i].y = decay * state[i].y + keys[i] * update.y;
      }
      // No CTA reads the values of this row and slice again, so the outputs replace them.
      if (has_column && group == 0) {
        *reinterpret_cast<float2*>(outputs + (from + row) * args.mixed_stride + column) = out;
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < KEYS; ++i) {
    const int key = first_key + i / 4 * 4 * KEY_LANES + i % 4;
    if (has_column && key < args.key_dim) *reinterpret_cast<float2*>(state_rows[key] + column) = state[i];
  }
  // The first value head of a key head keeps the inputs of its queries and keys too.
  const int part = threadIdx.x / SLICE, at = slice + threadIdx.x % SLICE;
  const int key_head = head / ratio;
  if (part > 2 || (part > 0 && head % ratio > 0)) return;
  const int conv = part == 0 ? 2 * args.key_heads + head : key_head + (part - 1) * args.key_heads;
  const ConvHead of = conv_head(delta, conv);
  if (at < of.dim) keep_inputs<T>(delta, table, of, at, first, end - first, is_start);
}

// One warp per row and value head.
template <class T>
__global__ void __launch_bounds__(THREADS) gated_norm_kernel(const __grid_constant__ Delta delta) {
  pdl_wait_and_release();
  const baton_delta_args& args = delta.args;
  const int row = blockIdx.x, head = blockIdx.y * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
  if (head >= args.value_heads) return;
  const float* const x = args.mixed + row * args.mixed_stride + 2 * delta.key_width + head * args.value_dim;
  const T* const gates =
      static_cast<const T*>(args.projected) + row * args.projected_stride + delta.channels + head * args.value_dim;
  T* const out = static_cast<T*>(args.out) + row * args.out_stride + head * args.value_dim;
  constexpr int ITEMS = DIM_MAX / (4 * WARP);
  float4 values[ITEMS];
  float sum = 0.f;
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    const int at = (item * WARP + lane) * 4;
    if (at >= args.value_dim) break;
    values[item] = load4(x + at);
    sum += square_of(values[item]);
  }
  const float scale = 1.f / sqrtf(warp_sum(sum) / static_cast<float>(args.value_dim) + args.eps);
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    const int at = (item * WARP + lane) * 4;
    if (at >= args.value_dim) break;
    const float4 gate = load4(gates + at), norm = load4(args.norm + at), value = values[item];
    store4(out + at, make_float4(value.x * scale * norm.x * (gate.x * sigmoid(gate.x)),
                                 value.y * scale * norm.y * (gate.y * sigmoid(gate.y)),
                                 value.z * scale * norm.z * (gate.z * sigmoid(gate.z)),
                                 value.w * scale * norm.w * (gate.w * sigmoid(gate.w))));
  }
}

constexpr int FLAT = 256;  // threads of a flat kernel's CTA

template <class T>
__global__ void __launch_bounds__(FLAT) gate_kernel(const T* gate, T* x, int64_t vectors) {
  pdl_wait_and_release();
  const int64_t at = (int64_t{blockIdx.x} * FLAT + threadIdx.x) * 8;
  if (at >= vectors * 8) return;
  float gates[8], values[8];
  load8(gate + at, gates);
  load8(x + at, values);
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] *= sigmoid(gates[i]);
  store8(x + at, values);
}

// Pairs are passed in the launch arguments, so no list in device memory must outlive the launch.
constexpr int PAIRS_MAX = 448;
constexpr int COPY_VECTORS = 4;  // of 16 bytes a thread

struct BlockCopy {
  uint4* blocks;
  int64_t block;  // vectors of a block
  int32_t pairs[2 * PAIRS_MAX];
};

// Each CTA copies a part of one block.
__global__ void __launch_bounds__(FLAT) copy_kernel(const __grid_constant__ BlockCopy copy) {
  const uint4* const from = copy.blocks + copy.pairs[2 * blockIdx.y] * copy.block;
  uint4* const to = copy.blocks + copy.pairs[2 * blockIdx.y + 1] * copy.block;
  const int64_t begin = int64_t{blockIdx.x} * COPY_VECTORS * FLAT + threadIdx.x;
  uint4 values[COPY_VECTORS];
#pragma unroll
  for (int i = 0; i < COPY_VECTORS; ++i) {
    if (begin + i * FLAT < copy.block) values[i] = __ldcs(from + begin + i * FLAT);
  }
#pragma unroll
  for (int i = 0; i < COPY_VECTORS; ++i) {
    if (begin + i * FLAT < copy.block) __stcs(to + begin + i * FLAT, values[i]);
  }
}

int32_t check_args(const baton_delta_args& args) {
  for (const int dim : {args.key_dim, args.value_dim}) {
    if (dim <= 0 || dim > DIM_MAX || dim % 4 != 0) {
      return fail(BATON_UNSUPPORTED, "key_dim is %d, value_dim %d; expected multiples of 4 up to %d", args.key_dim,
                  args.value_dim, DIM_MAX);
    }
  }
  BATON_REQUIRE(args.lanes > 0 && args.key_heads > 0 && args.key_heads % args.lanes == 0 &&
                    args.value_heads > 0 && args.value_heads % args.key_heads == 0,
                "%d key heads and %d value heads of %d lanes; expected multiples", args.key_heads, args.value_heads,
                args.lanes);
  BATON_REQUIRE(args.taps >= 0 && args.pieces > 0 && args.piece_rows > 0 && args.layer_row >= 0 && args.table_width > 0,
                "taps is %d, pieces %d, piece_rows %d, layer_row %d, table_width %d; expected more", args.taps,
                args.pieces, args.piece_rows, args.layer_row, args.table_width);
  BATON_REQUIRE(args.block_bytes % 16 == 0 && args.head_bytes % 16 == 0 && args.mixed_stride % 4 == 0 &&
                    args.projected_stride % 8 == 0 && args.out_stride % 8 == 0,
                "block_bytes is %lld, head_bytes %lld; expected multiples of 16", static_cast<long long>(args.block_bytes),
                static_cast<long long>(args.head_bytes));
  BATON_REQUIRE(args.rows >= 0 && args.sequences >= 0 && args.sequences <= 65535, "rows is %d, sequences %d", args.rows,
                args.sequences);
  return BATON_OK;
}

}  // namespace

int32_t load_delta() {
  auto all = [](auto element) {
    using T = decltype(element);
    BATON_TRY((load(conv_kernel<T, 1, CONV_TAPS>)));
    BATON_TRY((load(conv_kernel<T, 1, 0>)));
    BATON_TRY((load(conv_kernel<T, 2, CONV_TAPS>)));
    BATON_TRY((load(conv_kernel<T, 2, 0>)));
    BATON_TRY((load(recurrence_kernel<T, 32, 1>)));
    BATON_TRY((load(recurrence_kernel<T, 64, 1>)));
    BATON_TRY((load(recurrence_kernel<T, 128, 1>)));
    BATON_TRY((load(recurrence_kernel<T, 128, DECODE_CTAS>)));
    BATON_TRY((load(recurrence_kernel<T, 256, 1>)));
    BATON_TRY(load(gated_norm_kernel<T>));
    return load(gate_kernel<T>);
  };
  BATON_TRY(all(float()));
  BATON_TRY(all(bf16()));
  return load(copy_kernel);
}

}  // namespace baton

using namespace baton;

BATON_API int32_t baton_gated_delta(const baton_delta_args* args, const baton_step* step, void* stream) {
  return guarded([&]() -> int32_t {
    BATON_REQUIRE(args && step, "args or step is null");
    BATON_TRY(check_args(*args));
    if (args->rows == 0) return BATON_OK;
    Delta delta;
    delta.args = *args;
    delta.key_width = args->key_heads * args->key_dim;
    delta.channels = 2 * delta.key_width + args->value_heads * args->value_dim;
    delta.lane_keys = args->key_heads / args->lanes;
    delta.lane_values = args->value_heads / args->lanes;
    delta.row_elements = args->key_dim > args->value_dim ? args->key_dim : args->value_dim;
    BATON_REQUIRE(args->mixed_stride >= delta.channels + 2 * args->value_heads, "mixed_stride is %lld; expected %d",
                  static_cast<long long>(args->mixed_stride), delta.channels + 2 * args->value_heads);
    const int heads = 2 * args->key_heads + args->value_heads;
    return with_dtype(args->dtype, [&](auto element) -> int32_t {
      using T = decltype(element);
      const int each = args->rows >= CONV_ROWS_MANY ? CONV_ROWS : 1;
      const auto convolve = [&](auto kernel) {
        const dim3 grid(divide_up(args->rows, each), divide_up(heads + 1, WARPS));
        return launch("convolution", kernel, grid, dim3(THREADS), 0, as_stream(stream), delta, *step, each);
      };
      const bool is_wide = delta.row_elements > 4 * WARP;
      if (args->taps == CONV_TAPS) {
        BATON_TRY(is_wide ? convolve(conv_kernel<T, 2, CONV_TAPS>) : convolve(conv_kernel<T, 1, CONV_TAPS>));
      } else {
        BATON_TRY(is_wide ? convolve(conv_kernel<T, 2, 0>) : convolve(conv_kernel<T, 1, 0>));
      }
      const dim3 grid(divide_up(delta.row_elements, SLICE), args->value_heads, args->sequences);
      const auto recur = [&](auto kernel) {
        return launch("delta rule", kernel, grid, dim3(THREADS), 0, as_stream(stream), delta, *step);
      };
      const int dim = args->key_dim;
      const bool is_decode = args->rows == args->sequences;
      BATON_TRY(dim <= 32                 ? recur(recurrence_kernel<T, 32, 1>)
                : dim <= 64               ? recur(recurrence_kernel<T, 64, 1>)
                : dim <= 128 && is_decode ? recur(recurrence_kernel<T, 128, DECODE_CTAS>)
                : dim <= 128              ? recur(recurrence_kernel<T, 128, 1>)
                                          : recur(recurrence_kernel<T, 256, 1>));
      return launch("gated norm", gated_norm_kernel<T>, dim3(args->rows, divide_up(args->value_heads, WARPS)),
                    dim3(THREADS), 0, as_stream(stream), delta);
    });
  });
}

BATON_API int32_t baton_apply_gate(int32_t dtype, const void* gate, void* x, int32_t rows, int32_t width,
                                   void* stream) {
  return guarded([&]() -> int32_t {
    BATON_REQUIRE(gate && x, "gate or x is null");
    BATON_REQUIRE(rows >= 0 && width > 0 && width % 8 == 0, "rows is %d, width %d; expected multiples of 8", rows, width);
    if (rows == 0) return BATON_OK;
    const int64_t vectors = int64_t{rows} * width / 8;
    return with_dtype(dtype, [&](auto element) {
      using T = decltype(element);
      return launch("output gate", gate_kernel<T>, dim3(divide_up(vectors, FLAT)), dim3(FLAT), 0, as_stream(stream),
                    static_cast<const T*>(gate), static_cast<T*>(x), vectors);
    });
  });
}

BATON_API int32_t baton_copy_blocks(void* blocks, int64_t block_bytes, const int32_t* pairs, int32_t count,
                                    void* stream) {
  return guarded([&]() -> int32_t {
    BATON_REQUIRE(blocks && pairs, "blocks or pairs is null");
    BATON_REQUIRE(block_bytes > 0 && block_bytes % 16 == 0, "block_bytes is %lld; expected multiples of 16",
                  static_cast<long long>(block_bytes));
    BATON_REQUIRE(count >= 0, "count is %d; expected 0 or more", count);
    for (int32_t begin = 0; begin < count; begin += PAIRS_MAX) {
      const int32_t share = count - begin < PAIRS_MAX ? count - begin : PAIRS_MAX;
      BlockCopy copy;
      copy.blocks = static_cast<uint4*>(blocks);
      copy.block = block_bytes / 16;
      for (int32_t i = 0; i < 2 * share; ++i) copy.pairs[i] = pairs[2 * begin + i];
      // No PDL: the kernel does not wait for its predecessor, which may write the blocks.
      BATON_TRY(launch_as(false, "block copy", copy_kernel, dim3(divide_up(copy.block, COPY_VECTORS * FLAT), share),
                          dim3(FLAT), 0, as_stream(stream), copy));
    }
    return BATON_OK;
  });
}
