// Shared by kernels of a GPU group: the arenas, words that are their own flags, and waits with a time-out.
// all_reduce.cu explains the protocol.
#pragma once

#include "collective.h"
#include "device.cuh"

namespace baton::collective {

constexpr uint32_t UNSENT = 0xffffffffu;
constexpr int64_t STATE_BYTES = 512;  // before the two halves
constexpr int GROUP_MAX = BATON_GROUP_RANKS_MAX;

// The beginning of an arena.
struct State {
  uint32_t calls;
  uint32_t arrived;  // CTAs of the running call that have read `calls`
  uint32_t stopped;  // not 0: the host, or a thread whose wait timed out, has stopped the group
  uint32_t reserved;
};

struct Group {
  char* arenas[GROUP_MAX];
  uint32_t* fault;
  int64_t half_bytes;
  int64_t timeout_ns;
  int rank;
};

__device__ __forceinline__ uint4 load_sys(const uint4* from) {
  uint4 x;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}
__device__ __forceinline__ void store_sys(uint4* to, const uint4& x) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}
__device__ __forceinline__ bool is_sent(const uint4& x) {
  return x.x != UNSENT && x.y != UNSENT && x.z != UNSENT && x.w != UNSENT;
}

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// The wait of one thread in one call, with its time-out.
struct Wait {
  uint64_t begin = 0;
  uint32_t polls = 0;

  // Counts a poll that found nothing, and stops the group after the time-out. Returns true when the wait must end.
  __device__ __forceinline__ bool count_poll(const Group& group) {
    if (++polls % 128 != 0) return false;
    const uint64_t now = now_ns();
    if (begin == 0) begin = now;
    volatile State* state = reinterpret_cast<State*>(group.arenas[group.rank]);
    if (state->stopped != 0) return true;
    if (now - begin <= static_cast<uint64_t>(group.timeout_ns)) return false;
    state->stopped = 1;
    *static_cast<volatile uint32_t*>(group.fault) = 1;
    return true;
  }
};

// State of a call, as read by its CTAs.
struct Call {
  int64_t half;  // where the half of this call begins in every arena
  bool is_stopped;
};
__device__ __forceinline__ Call begin_call(const Group& group) {
  const uint4 state = load_sys(reinterpret_cast<const uint4*>(group.arenas[group.rank]));
  return {STATE_BYTES + (state.x & 1 ? group.half_bytes : 0), state.z != 0};
}
// Counts the CTA once all of its threads have read the state; the last CTA counts the call. Returns false when the
// group has stopped.
__device__ __forceinline__ bool count_cta(const Group& group, const Call& call) {
  if (__syncthreads_or(call.is_stopped)) return false;
  if (threadIdx.x == blockDim.x - 1) {
    State* state = reinterpret_cast<State*>(group.arenas[group.rank]);
    const uint32_t last = gridDim.x * gridDim.y - 1;
    if (atomicInc(&state->arrived, last) == last) state->calls += 1;
  }
  return true;
}

__device__ __forceinline__ void mark_unsent(char* at) {
  *reinterpret_cast<uint4*>(at) = make_uint4(UNSENT, UNSENT, UNSENT, UNSENT);
}

// ---- On the host ----

template <class Body>
int32_t with_ranks(int32_t ranks, Body&& body) {
  switch (ranks) {
    case 2: return body(std::integral_constant<int, 2>());
    case 4: return body(std::integral_constant<int, 4>());
    case 8: return body(std::integral_constant<int, 8>());
    default: return fail(BATON_UNSUPPORTED, "a group has %d ranks; expected 2, 4 and 8", ranks);
  }
}

inline int64_t half_bytes(const baton_group& group) { return (group.arena_bytes - STATE_BYTES) / 2; }

inline int32_t check_group(const baton_group& group) {
  BATON_REQUIRE(group.rank >= 0 && group.rank < group.ranks && group.ranks <= GROUP_MAX,
                "rank is %d of %d; expected 0 to %d of at most %d", group.rank, group.ranks, group.ranks - 1, GROUP_MAX);
  BATON_REQUIRE(group.timeout_ns > 0, "timeout_ns is %lld; expected more than 0",
                static_cast<long long>(group.timeout_ns));
  BATON_REQUIRE(group.fault != nullptr, "fault is null; it has a place in host memory");
  for (int rank = 0; rank < group.ranks; ++rank) {
    BATON_REQUIRE(group.arenas[rank] != nullptr, "the arena of rank %d is null", rank);
  }
  BATON_REQUIRE(group.arena_bytes > STATE_BYTES && (group.arena_bytes - STATE_BYTES) % 512 == 0,
                "an arena has %lld bytes; expected what baton_group_arena_bytes returns",
                static_cast<long long>(group.arena_bytes));
  return BATON_OK;
}

inline Group device_group(const baton_group& group) {
  Group to = {};
  for (int rank = 0; rank < group.ranks; ++rank) to.arenas[rank] = static_cast<char*>(group.arenas[rank]);
  to.fault = group.fault;
  to.half_bytes = half_bytes(group);
  to.timeout_ns = group.timeout_ns;
  to.rank = group.rank;
  return to;
}

}  // namespace baton::collective
