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

// Blocks named in the launch itself: no list has to lie in device memory and outlive it. A few thread blocks take one
// piece after another, so that what else runs keeps its multiprocessors.
constexpr int LIST_MAX = 512;
constexpr int LIST_THREADS = 512;

struct ListedMove {
  char* arena;
  char* staging;
  int64_t block_bytes;
  int32_t pieces;  // of all blocks
  int32_t gathers;
  int32_t blocks[LIST_MAX];
};

__global__ void __launch_bounds__(LIST_THREADS) listed_move_kernel(const __grid_constant__ ListedMove move) {
  constexpr int UNROLL = PIECE / (LIST_THREADS * 16);
  const int32_t block_pieces = static_cast<int32_t>((move.block_bytes + PIECE - 1) / PIECE);
  for (int32_t piece = blockIdx.x; piece < move.pieces; piece += gridDim.x) {
    const int32_t index = piece / block_pieces;
    char* const block = move.arena + move.blocks[index] * move.block_bytes;
    char* const place = move.staging + index * move.block_bytes;
    const char* const from = move.gathers ? block : place;
    char* const to = move.gathers ? place : block;
    const int64_t begin = (piece % block_pieces) * PIECE + threadIdx.x * 16;
    uint4 values[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int64_t here = begin + i * LIST_THREADS * 16;
      if (here < move.block_bytes) values[i] = __ldcs(reinterpret_cast<const uint4*>(from + here));
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int64_t here = begin + i * LIST_THREADS * 16;
      if (here < move.block_bytes) __stcs(reinterpret_cast<uint4*>(to + here), values[i]);
    }
  }
}

}  // namespace

int32_t load_blocks() {
  BATON_TRY(load(move_kernel));
  return load(listed_move_kernel);
}

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

// gathers: staging[i] = block blocks[i]; else the other way round. `blocks` lies in host memory and is read before the
// call returns. `grid`: thread blocks at a time.
BATON_API int32_t baton_move_blocks(void* arena, int64_t block_bytes, const int32_t* blocks, int32_t count, void* staging,
                                    int32_t gathers, int32_t grid, void* stream) {
  return guarded([&] {
    BATON_REQUIRE(arena && staging, "arena or staging is null");
    BATON_REQUIRE(block_bytes > 0 && block_bytes % 16 == 0, "block_bytes is %lld; allowed are multiples of 16",
                  static_cast<long long>(block_bytes));
    BATON_REQUIRE(count >= 0 && grid > 0, "count is %d, grid %d; allowed are 0 or more, and 1 or more", count, grid);
    for (int32_t first = 0; first < count; first += LIST_MAX) {
      const int32_t share = count - first < LIST_MAX ? count - first : LIST_MAX;
      ListedMove move;
      move.arena = static_cast<char*>(arena);
      move.staging = static_cast<char*>(staging) + first * block_bytes;
      move.block_bytes = block_bytes;
      move.pieces = static_cast<int32_t>(share * ((block_bytes + PIECE - 1) / PIECE));
      move.gathers = gathers;
      for (int32_t i = 0; i < share; ++i) move.blocks[i] = blocks[first + i];
      // Never before its predecessor has ended: others write what it reads.
      BATON_TRY(launch_as(false, "listed block copy", listed_move_kernel, dim3(grid < move.pieces ? grid : move.pieces),
                          dim3(LIST_THREADS), 0, as_stream(stream), move));
    }
    return static_cast<int32_t>(BATON_OK);
  });
}
