// Speculative decoding: draft tokens by prompt lookup (the rule of services/engine/src/executor/ngram.rs), and their
// acceptance. One CTA per sequence scans the slot's tokens. Each thread has eight loads in flight.
#include <utility>

#include "device.cuh"

namespace baton {
namespace {

constexpr int THREADS = 1024;
constexpr int TOGETHER = 8;
constexpr int NGRAM_MAX = 64;

__device__ inline uint64_t greater(uint64_t a, uint64_t b) { return a > b ? a : b; }

// Returns the greatest key of all threads to the first warp.
__device__ uint64_t block_max(uint64_t own, uint64_t* shared) {
  for (int distance = WARP / 2; distance > 0; distance /= 2) {
    own = greater(own, __shfl_xor_sync(FULL, own, distance));
  }
  if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = own;
  __syncthreads();
  if (threadIdx.x >= WARP) return 0;
  own = shared[threadIdx.x];
  for (int distance = WARP / 2; distance > 0; distance /= 2) {
    own = greater(own, __shfl_xor_sync(FULL, own, distance));
  }
  return own;
}

__global__ void __launch_bounds__(THREADS)
    draft_kernel(const baton_pool pool, const baton_step step, int row_tokens, int shortest, int longest) {
  __shared__ uint64_t shared[THREADS / WARP];
  __shared__ int32_t end[NGRAM_MAX];  // the slot's last tokens in reverse order
  pdl_wait_and_release();
  const int sequence = blockIdx.x;
  const int slot = step.sequence_slots[sequence];
  if (slot < 0) return;
  const int length = pool.slots[slot].length;
  const int most = step.kv_lengths[sequence] - length;
  int32_t* tokens = pool.tokens + static_cast<int64_t>(slot) * pool.token_width;
  int32_t* row = step.row_tokens + sequence * row_tokens + 1;
  if (pool.slots[slot].drafts > 0) {
    // The plan has written the draft tokens.
    for (int i = threadIdx.x; i < pool.slots[slot].drafts; i += THREADS) row[i] = tokens[length + i];
    return;
  }
  // A key has the length of an occurrence, then the position of the token after it. So the greatest key is the longest
  // occurrence, and the latest of equally long ones.
  uint64_t best = 0;
  if (threadIdx.x < min(longest, length)) end[threadIdx.x] = tokens[length - 1 - threadIdx.x];
  __syncthreads();
  const int last = end[0];
  if (most > 0) {
    for (int first = 0; first < length - 1; first += THREADS * TOGETHER) {
      int loaded[TOGETHER];
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const int at = first + i * THREADS + threadIdx.x;
        loaded[i] = at < length - 1 ? tokens[at] : -1;
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        if (loaded[i] != last) continue;
        const int at = first + i * THREADS + threadIdx.x;
        int count = 1;
        while (count < longest && count <= at && tokens[at - count] == end[count]) ++count;
        if (count >= shortest) best = greater(best, static_cast<uint64_t>(count) << 32 | (at + 1));
      }
    }
  }
  best = block_max(best, shared);
  if (threadIdx.x >= WARP) return;
  const int next = static_cast<int>(best & 0xffffffff);
  const int period = length - next;
  const int count = next == 0 ? 0 : most;
  for (int i = threadIdx.x; i < count; i += WARP) {
    // Reads known tokens only: the tokens after the occurrence repeat as often as needed.
    const int token = tokens[next + i % period];
    tokens[length + i] = token;
    row[i] = token;
  }
  if (threadIdx.x == 0) pool.slots[slot].drafts = count;
}

// One thread per sequence.
__global__ void accept_kernel(const baton_pool pool, const baton_step step, int sequences, int row_tokens,
                              baton_sample_result* results) {
  pdl_wait_and_release();
  const int sequence = blockIdx.x * blockDim.x + threadIdx.x;
  if (sequence >= sequences) return;
  const int index = step.sequence_slots[sequence];
  if (index < 0) return;
  baton_slot slot = pool.slots[index];
  int32_t* tokens = pool.tokens + static_cast<int64_t>(index) * pool.token_width + slot.length;
  baton_sample_result* own = results + static_cast<int64_t>(sequence) * row_tokens;
  // A constrained sample without a bitmask is padding.
  const int32_t* sample_slots = step.sample_slots + static_cast<int64_t>(sequence) * row_tokens;
  int count = 0;
  while (count <= slot.drafts && sample_slots[count] >= 0 && own[count].status == BATON_SAMPLE_OK) {
    const int token = own[count].token, draft = count < slot.drafts ? tokens[count] : -1;
    tokens[count++] = token;
    if (token != draft) break;
  }
  if (sample_slots[0] >= 0 && count == 0) {
    // A failed sequence continues with token 0 until the host stops it, since the next step needs a valid id.
    if (slot.failed == 0) slot.failed = own[0].status;
    tokens[0] = 0;
    count = 1;
  }
  for (int i = count; i < row_tokens; ++i) {
    own[i].status = i <= slot.drafts ? BATON_SAMPLE_REJECTED : BATON_SAMPLE_NOT_DRAFTED;
  }
  slot.position = slot.length - 1 + count;
  slot.length += count;
  slot.drafts = 0;
  pool.slots[index] = slot;
}

int32_t check(const baton_pool* pool, const baton_step* step, int32_t sequences, int32_t tokens) {
  BATON_REQUIRE(pool && step, "pool or step is null");
  BATON_REQUIRE(sequences >= 0 && sequences <= step->sequences_max, "sequences is %d; expected 0 to %d", sequences,
                step->sequences_max);
  BATON_REQUIRE(tokens > 0, "tokens is %d; expected 1 or more", tokens);
  return BATON_OK;
}

}  // namespace

int32_t load_drafts() {
  BATON_TRY(load(draft_kernel));
  return load(accept_kernel);
}

}  // namespace baton

using namespace baton;

BATON_API int32_t baton_draft(const baton_pool* pool, const baton_step* step, int32_t sequences, int32_t tokens,
                              int32_t ngram_min, int32_t ngram_max, void* stream) {
  return guarded([&]() -> int32_t {
    BATON_TRY(check(pool, step, sequences, tokens));
    BATON_REQUIRE(ngram_min > 0 && ngram_max > 0 && ngram_max <= NGRAM_MAX,
                  "ngram_min is %d and ngram_max %d; expected 1 to %d", ngram_min, ngram_max, NGRAM_MAX);
    if (sequences == 0) return BATON_OK;
    return launch("draft", draft_kernel, dim3(sequences), dim3(THREADS), 0, as_stream(stream), *pool, *step, tokens,
                  ngram_min, ngram_max);
  });
}

BATON_API int32_t baton_accept(const baton_pool* pool, const baton_step* step, int32_t sequences, int32_t tokens,
                               baton_sample_result* results, void* stream) {
  return guarded([&]() -> int32_t {
    BATON_TRY(check(pool, step, sequences, tokens));
    BATON_REQUIRE(results, "results is null");
    if (sequences == 0) return BATON_OK;
    return launch("accept", accept_kernel, dim3(divide_up(sequences, 128)), dim3(128), 0, as_stream(stream), *pool, *step,
                  sequences, tokens, results);
  });
}
