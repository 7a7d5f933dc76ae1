// Whole KV blocks: from block to block, and to and from a staging range.
#include <utility>

#include "device.cuh"

namespace baton {

int32_t check_kv(const baton_kv& kv);

namespace {

constexpr int THREADS = 256;
constexpr int64_t PIECE = 64 * 1024;  // bytes that one thread block moves

// Where the copy of one block begins and ends.
struct BlockMove {
  enum Kind { PAIRS, GATHER, SCATTER } kind;
  const int32_t* blocks;
  char* arena;
  char* staging;
  int64_t block_bytes;
};

__global__ void __launch_bounds__(THREADS) move_kernel(const BlockMove move) {
  follow_predecessor();
  const int64_t index = blockIdx.y;
  const char* from;
  char* to;
  if (move.kind == BlockMove::PAIRS) {
    from = move.arena + move.blocks[2 * index] * move.block_bytes;
    to = move.arena + move.blocks[2 * index + 1] * move.block_bytes;
  } else {
    char* block = move.arena + move.blocks[index] * move.block_bytes;
    char* place = move.staging + index * move.block_bytes;
    from = move.kind == BlockMove::GATHER ? block : place;
    to = move.kind == BlockMove::GATHER ? place : block;
  }
  const int64_t begin = blockIdx.x * PIECE;
  const int64_t end = min(begin + PIECE, move.block_bytes);
  constexpr int UNROLL = 4;
  for (int64_t at = begin + threadIdx.x * 16; at < end; at += UNROLL * THREADS * 16) {
    uint4 values[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int64_t here = at + i * THREADS * 16;
      if (here < end) values[i] = *reinterpret_cast<const uint4*>(from + here);
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int64_t here = at + i * THREADS * 16;
      if (here < end) *reinterpret_cast<uint4*>(to + here) = values[i];
    }
  }
}

int32_t move_blocks(BlockMove::Kind kind, const baton_kv* kv, const int32_t* blocks, int32_t count,
                    void* staging, void* stream) {
  BATON_REQUIRE(kv, "kv is null");
  BATON_TRY(check_kv(*kv));
  BATON_REQUIRE(count >= 0, "count is %d; allowed is 0 or more", count);
  BATON_REQUIRE(count == 0 || kind == BlockMove::PAIRS || staging, "staging is null");
  const int64_t bytes = kv->block_elements * (kv->dtype == BATON_F32 ? 4 : 2);
  // A grid has at most 65,535 rows.
  constexpr int32_t SHARE = 32768;
  for (int32_t first = 0; first < count; first += SHARE) {
    BlockMove move = {kind, blocks + (kind == BlockMove::PAIRS ? 2 : 1) * first, static_cast<char*>(kv->base),
                      static_cast<char*>(staging) + first * bytes, bytes};
    const int32_t share = count - first < SHARE ? count - first : SHARE;
    BATON_TRY(launch("block copy", move_kernel, dim3(divide_up(bytes, PIECE), share), dim3(THREADS), 0,
                     as_stream(stream), move));
  }
  return BATON_OK;
}

}  // namespace

int32_t load_blocks() { return load(move_kernel); }

}  // namespace baton

using namespace baton;

BATON_API int32_t baton_copy_blocks(const baton_kv* kv, const int32_t* pairs, int32_t count, void* stream) {
  return guarded([&] { return move_blocks(BlockMove::PAIRS, kv, pairs, count, nullptr, stream); });
}

BATON_API int32_t baton_gather_blocks(const baton_kv* kv, const int32_t* blocks, int32_t count, void* staging,
                                      void* stream) {
  return guarded([&] { return move_blocks(BlockMove::GATHER, kv, blocks, count, staging, stream); });
}

BATON_API int32_t baton_scatter_blocks(const baton_kv* kv, const int32_t* blocks, int32_t count,
                                       const void* staging, void* stream) {
  return guarded([&] {
    return move_blocks(BlockMove::SCATTER, kv, blocks, count, const_cast<void*>(staging), stream);
  });
}
