// All-reduce between GPUs with peer access, for messages whose latency matters.
//
// Ranks push: each rank writes its data into the other ranks' arenas and waits for their data in its own arena. An
// all-reduce takes one hop, and no rank reads remotely. Data words are their own flags, as in TensorRT-LLM's "Lamport"
// all-reduce: an arena is filled with a word that is never sent (UNSENT, a NaN), and a word has arrived when it differs
// from UNSENT. The reader of a word restores UNSENT. There are no barriers, no fences and no reliance on store order,
// and 16 bytes on the link are 16 bytes of payload.
//
// An arena has two halves, used in turn. A rank writes a half again two calls later, after it has received every rank's
// data of the call in between. A rank sends that data only after it has read and restored the half of the previous
// call. The call number is in the arena, and the last CTA to read it increments it: graphs replay without a changing
// argument.
//
// No wait is endless. A thread that times out, or sees that the host or another thread has stopped, returns; from then
// on every call returns at once. The arena is dirty then, and all ranks reset their arenas.
#include <algorithm>

#include "group.cuh"

namespace baton {

int32_t load_all_reduce();

namespace {

using namespace collective;

constexpr int THREADS_MAX = 512;

// Replaces UNSENT by another NaN.
__device__ __forceinline__ uint4 sendable(uint4 x) {
  x.x = x.x == UNSENT ? UNSENT - 1 : x.x;
  x.y = x.y == UNSENT ? UNSENT - 1 : x.y;
  x.z = x.z == UNSENT ? UNSENT - 1 : x.z;
  x.w = x.w == UNSENT ? UNSENT - 1 : x.w;
  return x;
}

// 16 bytes, the unit of a thread's stores.
template <class T>
struct Item {
  static constexpr int WIDTH = 16 / sizeof(T);
  uint4 raw;

  __device__ __forceinline__ static Item load(const T* from) {
    return {sendable(*reinterpret_cast<const uint4*>(from))};
  }
  __device__ __forceinline__ void add_to(float (&sum)[WIDTH]) const {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (WIDTH == 4) {
        sum[i] += __uint_as_float(words[i]);
      } else {
        sum[2 * i] += __uint_as_float(words[i] << 16);
        sum[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
      }
    }
  }
  __device__ __forceinline__ static Item of(const float (&values)[WIDTH]) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (WIDTH == 4) {
        words[i] = __float_as_uint(values[i]);
      } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
        words[i] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
    return {make_uint4(words[0], words[1], words[2], words[3])};
  }
  __device__ __forceinline__ void store(T* to) const { *reinterpret_cast<uint4*>(to) = raw; }
};

template <int WIDTH>
__device__ __forceinline__ void load_floats(const float* from, float (&to)[WIDTH]) {
#pragma unroll
  for (int i = 0; i < WIDTH; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
  }
}
template <int WIDTH>
__device__ __forceinline__ void store_floats(float* to, const float (&from)[WIDTH]) {
#pragma unroll
  for (int i = 0; i < WIDTH; i += 4) {
    *reinterpret_cast<float4*>(to + i) = make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
  }
}

// Writes the sum of this item over all ranks to `sum`, and restores UNSENT. `own` is this rank's item. Returns false
// after a stop.
template <class T, int N>
__device__ __forceinline__ bool collect(const Group& group, char* places, int64_t place_bytes, const Item<T>& own,
                                        Wait& wait, float (&sum)[Item<T>::WIDTH]) {
  Item<T> items[N];
  bool is_here;
  do {
    is_here = true;
#pragma unroll
    for (int source = 0; source < N; ++source) {
      if (source == group.rank) continue;
      items[source].raw = load_sys(reinterpret_cast<const uint4*>(places + source * place_bytes));
      is_here &= is_sent(items[source].raw);
    }
  } while (!is_here && !wait.count_poll(group));
    // Accumulates in rank order.
#pragma unroll
  for (int i = 0; i < Item<T>::WIDTH; ++i) sum[i] = 0.f;
#pragma unroll
  for (int source = 0; source < N; ++source) {
    if (source == group.rank) {
      own.add_to(sum);
    } else {
      mark_unsent(places + source * place_bytes);
      items[source].add_to(sum);
    }
  }
  return is_here;
}

template <class T, int N>
__device__ __forceinline__ void send_to_all(const Group& group, int64_t at, const Item<T>& item) {
#pragma unroll
  for (int peer = 0; peer < N; ++peer) {
    if (peer != group.rank) store_sys(reinterpret_cast<uint4*>(group.arenas[peer] + at), item.raw);
  }
}

// An item has 16 bytes. A thread has UNROLL items in flight.
template <class T, int N, int UNROLL>
__global__ void __launch_bounds__(THREADS_MAX)
    one_shot_kernel(const __grid_constant__ Group group, const T* x, T* out, int64_t items) {
  constexpr int WIDTH = Item<T>::WIDTH;
  pdl_wait_and_release();
  const Call call = begin_call(group);
  const int64_t place_bytes = items * 16;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  Item<T> own[UNROLL];
  for (int64_t base = first; base < items; base += stride * UNROLL) {
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (base + i * stride < items) own[i] = Item<T>::load(x + (base + i * stride) * WIDTH);
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int64_t item = base + i * stride;
      if (item < items) send_to_all<T, N>(group, call.half + group.rank * place_bytes + item * 16, own[i]);
    }
  }
  if (!count_cta(group, call)) return;
  Wait wait;
  // In a single round the words are still in registers.
  const bool is_kept = stride * UNROLL >= items;
  char* const places = group.arenas[group.rank] + call.half;
  for (int64_t base = first; base < items; base += stride * UNROLL) {
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int64_t item = base + i * stride;
      if (item >= items) break;
      if (!is_kept) own[i] = Item<T>::load(x + item * WIDTH);
      float sum[WIDTH];
      collect<T, N>(group, places + item * 16, place_bytes, own[i], wait, sum);
      Item<T>::of(sum).store(out + item * WIDTH);
    }
  }
}

// A rank reduces its part of the items and sends the results.
template <class T, int N>
__global__ void __launch_bounds__(THREADS_MAX)
    two_shot_kernel(const __grid_constant__ Group group, const T* x, T* out, int64_t items) {
  constexpr int WIDTH = Item<T>::WIDTH;
  pdl_wait_and_release();
  const Call call = begin_call(group);
  const int rank = group.rank;
  const int64_t part = (items + N - 1) / N, part_bytes = part * 16;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t item = first; item < part; item += stride) {
    Item<T> sent[N];
        // Every rank starts with another peer.
#pragma unroll
    for (int step = 1; step < N; ++step) {
      const int64_t at = ((rank + step) % N) * part + item;
      if (at < items) sent[step] = Item<T>::load(x + at * WIDTH);
    }
#pragma unroll
    for (int step = 1; step < N; ++step) {
      const int peer = (rank + step) % N;
      if (peer * part + item < items) {
        store_sys(reinterpret_cast<uint4*>(group.arenas[peer] + call.half + rank * part_bytes + item * 16), sent[step].raw);
      }
    }
  }
  if (!count_cta(group, call)) return;
  Wait wait;
  char* const numbers = group.arenas[rank] + call.half;
  char* const sums = numbers + N * part_bytes;
  for (int64_t item = first; item < part && rank * part + item < items; item += stride) {
    const int64_t at = rank * part + item;
    float sum[WIDTH];
    // Without the data of all ranks there is no result to send. The other ranks then time out.
    if (!collect<T, N>(group, numbers + item * 16, part_bytes, Item<T>::load(x + at * WIDTH), wait, sum)) return;
    const Item<T> result = Item<T>::of(sum);
    send_to_all<T, N>(group, call.half + (N + rank) * part_bytes + item * 16, {sendable(result.raw)});
    result.store(out + at * WIDTH);
  }
  for (int64_t item = first; item < part; item += stride) {
    Item<T> found[N];
    bool is_here;
    do {
      is_here = true;
#pragma unroll
      for (int step = 1; step < N; ++step) {
        const int source = (rank + step) % N;
        if (source * part + item >= items) continue;
        found[step].raw = load_sys(reinterpret_cast<const uint4*>(sums + source * part_bytes + item * 16));
        is_here &= is_sent(found[step].raw);
      }
    } while (!is_here && !wait.count_poll(group));
#pragma unroll
    for (int step = 1; step < N; ++step) {
      const int source = (rank + step) % N;
      if (source * part + item >= items) continue;
      mark_unsent(sums + source * part_bytes + item * 16);
      found[step].store(out + (source * part + item) * WIDTH);
    }
  }
}

// Threads per CTA of the norm kernel: with one item per thread, registers allow more threads for few ranks.
template <int N, int ITEMS>
constexpr int NORM_THREADS = ITEMS == 1 && N <= 4 ? 2 * THREADS_MAX : THREADS_MAX;

// One CTA per row; a thread holds ITEMS items, `blockDim.x` apart.
template <class T, int N, int ITEMS>
__global__ void __launch_bounds__((NORM_THREADS<N, ITEMS>))
    one_shot_norm_kernel(const __grid_constant__ Group group, const T* x, float* residual, const float* weight, float eps,
                         T* out, int rows, int width) {
  constexpr int WIDTH = Item<T>::WIDTH;
  // Few items stay in registers; many are read again.
  constexpr bool KEEPS = ITEMS <= 2;
  __shared__ float shared[2][WARP];
  pdl_wait_and_release();
  const Call call = begin_call(group);
  const int64_t place_bytes = static_cast<int64_t>(rows) * width * sizeof(T);
  const int64_t own_place = call.half + group.rank * place_bytes;
  Item<T> own[ITEMS];
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t begin = static_cast<int64_t>(row) * width;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const int at = (item * blockDim.x + threadIdx.x) * WIDTH;
      if (at < width) own[item] = Item<T>::load(x + begin + at);
    }
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const int at = (item * blockDim.x + threadIdx.x) * WIDTH;
      if (at < width) send_to_all<T, N>(group, own_place + (begin + at) * sizeof(T), own[item]);
    }
  }
  if (!count_cta(group, call)) return;
  Wait wait;
  const bool is_kept = KEEPS && gridDim.x >= rows;
  char* const places = group.arenas[group.rank] + call.half;
  int turn = 0;
  for (int row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    const int64_t begin = static_cast<int64_t>(row) * width;
    float values[ITEMS][WIDTH], weights[KEEPS ? ITEMS : 1][WIDTH];
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const int at = (item * blockDim.x + threadIdx.x) * WIDTH;
      if (at >= width) break;
      load_floats(residual + begin + at, values[item]);
      if constexpr (KEEPS) load_floats(weight + at, weights[item]);
    }
    float squares = 0.f;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const int at = (item * blockDim.x + threadIdx.x) * WIDTH;
      if (at >= width) break;
      const Item<T> mine = is_kept ? own[item] : Item<T>::load(x + begin + at);
      float sum[WIDTH];
      collect<T, N>(group, places + (begin + at) * sizeof(T), place_bytes, mine, wait, sum);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        values[item][i] += sum[i];
        squares += values[item][i] * values[item][i];
      }
      store_floats(residual + begin + at, values[item]);
    }
    // Two sets of partial sums are used in turn: a thread in the next row must not overwrite sums that others still
    // read.
    const float scale = 1.f / sqrtf(block_sum(squares, shared[turn]) / static_cast<float>(width) + eps);
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const int at = (item * blockDim.x + threadIdx.x) * WIDTH;
      if (at >= width) break;
      float late[WIDTH];
      if constexpr (!KEEPS) load_floats(weight + at, late);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        values[item][i] = values[item][i] * scale * (KEEPS ? weights[KEEPS ? item : 0][i] : late[i]);
      }
      Item<T>::of(values[item]).store(out + begin + at);
    }
  }
}

template <class T, int N>
int32_t all_reduce(const baton_group& group, const baton_all_reduce_args& args, cudaStream_t stream) {
  const Device* device;
  BATON_TRY(any_device(device));
  const Group to = device_group(group);
  const int64_t elements = static_cast<int64_t>(args.rows) * args.width;
  constexpr int WIDTH = Item<T>::WIDTH;
  const int64_t items = elements / WIDTH, bytes = elements * sizeof(T);
  const bool one_fits = bytes * N <= half_bytes(group);
  const bool two_fits = 2 * N * ((items + N - 1) / N) * 16 <= half_bytes(group);
  const T* x = static_cast<const T*>(args.x);
  T* out = static_cast<T*>(args.out);
  const auto too_small = [&] {
    return fail(BATON_TOO_SMALL, "a message has %lld bytes; the arenas of %lld bytes take less",
                static_cast<long long>(bytes), static_cast<long long>(group.arena_bytes));
  };
  // CTAs that wait for CTAs of the peers must all be resident: at most one per SM.
  const int most = device->sm_count;
  if (args.residual) {
    BATON_REQUIRE(args.width <= 8 * THREADS_MAX * WIDTH, "width is %d; expected at most %d", args.width,
                  8 * THREADS_MAX * WIDTH);
    BATON_REQUIRE(args.weight != nullptr, "weight is null; a norm has one");
    if (args.algorithm == BATON_ALL_REDUCE_TWO_SHOT) return fail(BATON_UNSUPPORTED, "a norm requires one-shot");
    if (!one_fits) return too_small();
    const int groups = args.width / WIDTH;
    const int blocks = std::min(args.rows, most);
    const auto run = [&](auto count) {
      constexpr int ITEMS = decltype(count)::value;
      const int threads = divide_up(divide_up(groups, ITEMS), WARP) * WARP;
      return launch_as(args.pdl, "all reduce and norm", one_shot_norm_kernel<T, N, ITEMS>, dim3(blocks), dim3(threads), 0,
                       stream, to, x, args.residual, args.weight, args.eps, out, args.rows, args.width);
    };
    // Measured: few CTAs are faster with more work per thread, many CTAs with more threads.
    const int widest = args.rows < 16 ? THREADS_MAX : NORM_THREADS<N, 1>;
    if (groups <= widest) return run(std::integral_constant<int, 1>());
    if (groups <= 2 * THREADS_MAX) return run(std::integral_constant<int, 2>());
    if (groups <= 4 * THREADS_MAX) return run(std::integral_constant<int, 4>());
    return run(std::integral_constant<int, 8>());
  }
  // Measured for 2 and 4 ranks.
  constexpr int64_t ONE_SHOT_MOST = N == 2 ? 1536 << 10 : N == 4 ? 128 << 10 : 32 << 10;
  const bool is_two = args.algorithm == BATON_ALL_REDUCE_TWO_SHOT ||
                      (args.algorithm == BATON_ALL_REDUCE_AUTO && (!one_fits || bytes > ONE_SHOT_MOST));
  if (is_two ? !two_fits : !one_fits) return too_small();
  const int64_t work = is_two ? divide_up(items, N) : items;
  const int threads = work <= 64 * 128 ? 128 : work <= 128 * 256 ? 256 : 512;
  const int blocks = std::min(divide_up(work, threads), std::min(128, most));
  if (is_two) {
    return launch_as(args.pdl, "all reduce in two shots", two_shot_kernel<T, N>, dim3(blocks), dim3(threads), 0, stream,
                     to, x, out, items);
  }
  if (work <= static_cast<int64_t>(blocks) * threads) {
    return launch_as(args.pdl, "all reduce", one_shot_kernel<T, N, 1>, dim3(blocks), dim3(threads), 0, stream, to, x, out,
                     items);
  }
  return launch_as(args.pdl, "all reduce", one_shot_kernel<T, N, 4>, dim3(blocks), dim3(threads), 0, stream, to, x, out,
                   items);
}

template <class T, int N>
int32_t load_all() {
  BATON_TRY(load(one_shot_kernel<T, N, 1>));
  BATON_TRY(load(one_shot_kernel<T, N, 4>));
  BATON_TRY(load(two_shot_kernel<T, N>));
  BATON_TRY(load(one_shot_norm_kernel<T, N, 1>));
  BATON_TRY(load(one_shot_norm_kernel<T, N, 2>));
  BATON_TRY(load(one_shot_norm_kernel<T, N, 4>));
  return load(one_shot_norm_kernel<T, N, 8>);
}

}  // namespace

int32_t load_all_reduce() {
  for (const int ranks : {2, 4, 8}) {
    BATON_TRY(with_ranks(ranks, [](auto count) {
      BATON_TRY((load_all<float, decltype(count)::value>()));
      return load_all<bf16, decltype(count)::value>();
    }));
  }
  return BATON_OK;
}

}  // namespace baton

using namespace baton;
using namespace baton::collective;

BATON_API int64_t baton_group_arena_bytes(int32_t ranks, int64_t message_bytes) {
  if (ranks < 2 || ranks > GROUP_MAX || message_bytes < 0) return 0;
  // Two-shot sends every part once as data and once as results, with parts rounded up to whole items.
  const int64_t half = 2 * (message_bytes + 32 * ranks);
  return STATE_BYTES + 2 * ((half + 511) / 512 * 512);
}

BATON_API int32_t baton_group_reset(const baton_group* group, void* stream) {
  return guarded([&] {
    BATON_TRY(check_group(*group));
    char* arena = static_cast<char*>(group->arenas[group->rank]);
    BATON_TRY(check(cudaMemsetAsync(arena, 0, STATE_BYTES, as_stream(stream)), "resetting an arena"));
    return check(cudaMemsetAsync(arena + STATE_BYTES, 0xff, group->arena_bytes - STATE_BYTES, as_stream(stream)),
                 "resetting an arena");
  });
}

BATON_API int32_t baton_group_stop(const baton_group* group, void* stream) {
  return guarded([&] {
    BATON_TRY(check_group(*group));
    State* state = static_cast<State*>(group->arenas[group->rank]);
    return check(cudaMemsetAsync(&state->stopped, 1, sizeof(state->stopped), as_stream(stream)), "stopping a group");
  });
}

BATON_API int32_t baton_all_reduce(const baton_group* group, const baton_all_reduce_args* args, void* stream) {
  return guarded([&] {
    BATON_TRY(check_group(*group));
    BATON_REQUIRE(args->rows >= 0 && args->width > 0 && args->width % 8 == 0,
                  "rows are %d of width %d; expected widths that are multiples of 8", args->rows, args->width);
    BATON_REQUIRE(args->algorithm >= 0 && args->algorithm <= 2, "algorithm is %d; expected 0 to 2", args->algorithm);
    if (args->rows == 0) return static_cast<int32_t>(BATON_OK);
    return with_ranks(group->ranks, [&](auto count) {
      return with_dtype(args->dtype, [&](auto element) {
        return all_reduce<decltype(element), decltype(count)::value>(*group, *args, as_stream(stream));
      });
    });
  });
}
