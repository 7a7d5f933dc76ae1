// All-gather kernels: each rank sends its words to all other ranks, so that every rank has the words of all ranks.
//
// As in all_reduce.cu, a word in the arena has arrived once it differs from UNSENT. But here a word to send may have
// any value, UNSENT included. The sender replaces UNSENT by another value. An item of 16 bytes has three words of
// payload, and a fourth word that tells which of the three were replaced.
//
// A CTA communicates only with the CTAs of the same index on the other ranks, in rounds. It has a range in the call's
// half of each arena. The range has two parts, used in turn. The CTA writes a part again two rounds later, after it has
// received all ranks' data of the round in between. A rank sends the data of a round only after it has read the part of
// the previous round and restored UNSENT there, with a fence in between. So no unread data is overwritten, and one call
// moves any amount of data. The amount may be determined during the call.
#pragma once

#include <algorithm>

#include "group.cuh"

namespace baton::collective {

constexpr int EXCHANGE_THREADS = 512;
// Maximum CTAs. All CTAs must be resident, and the addresses of data depend on their number. So the maximum is the same
// on all GPUs.
constexpr int EXCHANGE_BLOCKS = 64;
constexpr int ITEM_WORDS = 3;

// Makes an item. A word that is UNSENT is replaced by UNSENT - 1.
__device__ __forceinline__ uint4 pack(const uint32_t (&words)[ITEM_WORDS]) {
  const uint32_t a = words[0] == UNSENT, b = words[1] == UNSENT, c = words[2] == UNSENT;
  return make_uint4(words[0] - a, words[1] - b, words[2] - c, a | b << 1 | c << 2);
}
// Returns the words of an item, UNSENT where it was replaced.
__device__ __forceinline__ void unpack(const uint4& item, uint32_t (&words)[ITEM_WORDS]) {
  words[0] = item.x + (item.w & 1);
  words[1] = item.y + (item.w >> 1 & 1);
  words[2] = item.z + (item.w >> 2 & 1);
}

// A CTA's connection to the CTAs of the same index on the other N - 1 ranks. `capacity`: items sent in a round.
template <int N>
class Channel {
 public:
  __device__ Channel(const Group& group, const Call& call, int capacity) : group_(group), capacity_(capacity) {
    const int block = blockIdx.y * gridDim.x + blockIdx.x;
    base_ = call.half + static_cast<int64_t>(block) * 2 * N * capacity * 16;
  }

  // Sends this rank's items from `begin` up to `end` to all other ranks, and receives the items of the same indices
  // from them. All threads of the CTA call it. Returns false if a wait was stopped in a round before the last. Only
  // `is_stopped` reports a wait that was stopped in the last round. Other threads of the CTA see an item that a thread
  // received only after they synchronize with this thread.
  //   message.read(item, words)          gets an item of this rank
  //   message.take(source, item, words)  stores an item of the rank `source`
  template <class Message>
  __device__ bool exchange(const Message& message, int begin, int end) {
    constexpr int UNROLL = N == 2 ? 4 : N == 4 ? 2 : 1;
    for (int first = begin; first < end; first += capacity_) {
      if (has_begun_) {
        __threadfence_system();
        if (__syncthreads_or(is_stopped_)) return false;
      }
      has_begun_ = true;
      const int count = min(capacity_, end - first);
      const int64_t part = base_ + static_cast<int64_t>(turn_) * N * capacity_ * 16;
      const int64_t own_place = part + static_cast<int64_t>(group_.rank) * capacity_ * 16;
      turn_ ^= 1;
      for (int base = threadIdx.x; base < count; base += blockDim.x * UNROLL) {
        uint32_t words[UNROLL][ITEM_WORDS];
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
          const int i = base + k * blockDim.x;
          if (i < count) message.read(first + i, words[k]);
        }
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
          const int i = base + k * blockDim.x;
          if (i >= count) break;
          const uint4 item = pack(words[k]);
#pragma unroll
          for (int step = 1; step < N; ++step) {
            // The ranks start with different peers.
            const int peer = (group_.rank + step) % N;
            store_sys(reinterpret_cast<uint4*>(group_.arenas[peer] + own_place + static_cast<int64_t>(i) * 16), item);
          }
        }
      }
      char* const places = group_.arenas[group_.rank] + part;
      const int64_t place_bytes = static_cast<int64_t>(capacity_) * 16;
      for (int base = threadIdx.x; base < count && !is_stopped_; base += blockDim.x * UNROLL) {
        uint4 found[UNROLL][N];
        bool is_here;
        do {
          is_here = true;
#pragma unroll
          for (int k = 0; k < UNROLL; ++k) {
            const int i = base + k * blockDim.x;
            if (i >= count) break;
#pragma unroll
            for (int step = 1; step < N; ++step) {
              const int source = (group_.rank + step) % N;
              found[k][step] =
                  load_sys(reinterpret_cast<const uint4*>(places + source * place_bytes + static_cast<int64_t>(i) * 16));
              is_here &= is_sent(found[k][step]);
            }
          }
        } while (!is_here && !wait_.count_poll(group_));
        if (!is_here) {
          is_stopped_ = true;
          break;
        }
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
          const int i = base + k * blockDim.x;
          if (i >= count) break;
#pragma unroll
          for (int step = 1; step < N; ++step) {
            const int source = (group_.rank + step) % N;
            mark_unsent(places + source * place_bytes + static_cast<int64_t>(i) * 16);
            uint32_t words[ITEM_WORDS];
            unpack(found[k][step], words);
            message.take(source, first + i, words);
          }
        }
      }
    }
    return true;
  }

  // Returns whether a wait of this thread timed out or was stopped.
  __device__ bool is_stopped() const { return is_stopped_; }

 private:
  const Group& group_;
  int64_t base_;
  int capacity_;
  int turn_ = 0;
  bool has_begun_ = false;
  bool is_stopped_ = false;
  Wait wait_;
};

// The message of exchange_rows: rows, of which every rank sends the same number of words, at least one. A rank that has
// fewer words pads them. A CTA has a part of a row, or one or several whole rows.
//   rows.read(row, word)                  returns a word of this rank, or any value for padding
//   rows.take(row, source, word, value)   stores a word of the rank `source`, or ignores padding
//   rows.finish(row)                      only if FINISHES: all threads of the row's CTA call it after the whole row
//                                         has arrived
template <class Rows>
struct RowItems {
  const Rows& rows;
  int row_items;  // items of a row that a rank sends

  __device__ int row_of(int item) const { return blockIdx.y + item / row_items * gridDim.y; }
  __device__ void read(int item, uint32_t (&words)[ITEM_WORDS]) const {
    const int row = row_of(item), word = item % row_items * ITEM_WORDS;
#pragma unroll
    for (int i = 0; i < ITEM_WORDS; ++i) words[i] = rows.read(row, word + i);
  }
  __device__ void take(int source, int item, const uint32_t (&words)[ITEM_WORDS]) const {
    const int row = row_of(item), word = item % row_items * ITEM_WORDS;
#pragma unroll
    for (int i = 0; i < ITEM_WORDS; ++i) rows.take(row, source, word + i, words[i]);
  }
};

template <int N, class Rows>
__global__ void __launch_bounds__(EXCHANGE_THREADS, 2)
    exchange_rows_kernel(const __grid_constant__ Group group, const __grid_constant__ Rows rows, int row_count,
                         int row_items, int capacity) {
  pdl_wait_and_release();
  const Call call = begin_call(group);
  if (!count_cta(group, call)) return;
  const RowItems<Rows> message{rows, row_items};
  const int own_rows = (row_count - blockIdx.y + gridDim.y - 1) / gridDim.y;
  const int items = own_rows * row_items;
  const int cta_items = (items + gridDim.x - 1) / gridDim.x;
  const int begin = blockIdx.x * cta_items;
  Channel<N> channel(group, call, capacity);
  const bool is_complete = channel.exchange(message, begin, min(begin + cta_items, items));
  if constexpr (Rows::FINISHES) {
    if (__syncthreads_or(!is_complete || channel.is_stopped())) return;
    for (int row = blockIdx.y; row < row_count; row += gridDim.y) rows.finish(row);
  }
}

struct ExchangeShape {
  dim3 grid;
  int threads;
  int capacity;  // items that a CTA sends in a round
};

inline int32_t exchange_shape(const baton_group& group, int rows, int row_items, ExchangeShape& shape) {
  // `across` CTAs share a row. With more rows than EXCHANGE_BLOCKS, a CTA has several rows.
  const int down = std::min(rows, EXCHANGE_BLOCKS);
  const int across = std::max(1, std::min(divide_up(row_items, EXCHANGE_THREADS), EXCHANGE_BLOCKS / down));
  shape.grid = dim3(across, down);
  const int block_items = divide_up(rows, down) * divide_up(row_items, across);
  shape.threads = std::min(divide_up(block_items, WARP) * WARP, EXCHANGE_THREADS);
  const int64_t fits = half_bytes(group) / (static_cast<int64_t>(across) * down * 2 * group.ranks * 16);
  shape.capacity = static_cast<int>(std::min<int64_t>(fits, 1 << 20));
  if (shape.capacity > 0) return BATON_OK;
  return fail(BATON_TOO_SMALL, "an arena has %lld bytes; an exchange of %d ranks wants %d",
              static_cast<long long>(group.arena_bytes), group.ranks,
              static_cast<int>(STATE_BYTES) + 2 * EXCHANGE_BLOCKS * 2 * group.ranks * 16);
}

// Exchanges rows between all ranks. Each rank sends `row_words` words of a row, at least one.
template <int N, class Rows>
int32_t exchange_rows(const char* name, const baton_group& group, const Rows& rows, int row_count, int row_words,
                      cudaStream_t stream) {
  const int row_items = divide_up(row_words, ITEM_WORDS);
  ExchangeShape shape;
  BATON_TRY(exchange_shape(group, row_count, row_items, shape));
  if (Rows::FINISHES && shape.grid.x > 1) return fail(BATON_INVALID, "%s: rows of %d words", name, row_words);
  return launch(name, exchange_rows_kernel<N, Rows>, shape.grid, dim3(shape.threads), 0, stream, device_group(group),
                rows, row_count, row_items, shape.capacity);
}

}  // namespace baton::collective
